"""pytest collects the notebooks: one test per nbs/**/*.ipynb, run in a process of its own with a time and a memory limit.

A notebook's test is its code cells, run in order by nbdev's rules (`#| eval: false`, flags such as `#| gpu`, `skip_exec`).
Starting a fresh interpreter for each would import torch, transformers and pandas again and again. Instead one *forker* process
per session (per worker, with `-n`) is split off before any test has run, imports them once on the first notebook, computes
nothing, and forks one child per notebook. A failure shows the cell, with `>` at the line, and the frames inside the package;
an endless loop, a crash in C code and a full memory come out the same way.
"""
import ast
import faulthandler
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

import pytest

for _name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):        # before anything imports numpy or torch
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent
PRELOAD = "IPython execnb.shell nbdev.process nbdev.frontmatter numpy pandas scipy.stats matplotlib.pyplot torch transformers"
SMOKE_CPU_S, SMOKE_MB = 20, 2000                           # what one NN_reproduce notebook may use as written
MACHINERY = r'(?m)^  File "([^"]*/(IPython|execnb|pluggy|_pytest|pytest|xdist|execnet)/[^"]*|[^"]*/conftest.py|<frozen runpy>|<string>)".*\n'
TAIL = 4000                                                # characters of a process's output that a failure shows


def pytest_addoption(parser):
    g = parser.getgroup("notebooks")
    g.addoption("--nb-timeout", type=float, default=120, metavar="S", help="seconds one notebook may run (default: 120)")
    g.addoption("--nb-memory", type=float, default=6, metavar="GB", help="memory one notebook may allocate, 0: any (default: 6)")
    g.addoption("--nb-flags", default="", metavar="FLAGS", help="run cells with these flags too, e.g. 'gpu slow'")
    g.addoption("--nb-no-fork", action="store_true", help="run notebooks in pytest's own process, without limits (for --pdb)")
    g.addoption("--nb-preload", default=PRELOAD, metavar="MODULES", help="modules that are imported once for all notebooks")


# -- collection ------------------------------------------------------------------------------------------------------

def pytest_collect_file(file_path, parent):
    "Notebooks under nbs/, but none in a folder or file whose name begins with a dot or an underscore."
    if file_path.suffix == ".ipynb" and file_path.is_relative_to(ROOT / "nbs"):
        if not any(part[0] in "._" for part in file_path.relative_to(ROOT).parts):
            return NotebookFile.from_parent(parent, path=file_path)


class NotebookFile(pytest.File):
    def collect(self):
        item = NotebookItem.from_parent(self, name=self.path.stem)
        item.add_marker("notebook")
        item.add_marker(pytest.mark.timeout(0))                    # its limit is --nb-timeout, kept by the forker
        yield item


class NotebookFailed(Exception):
    "What the report shows, and nothing around it."


class NotebookItem(pytest.Item):
    def runtest(self):
        opt, flags = self.config.getoption, self.config.getoption("nb_flags")
        if opt("nb_no_fork"):
            status, text = run_notebook(self.path, flags, self.config)
        else:
            status, text, usage = self.config.stash[FORKER].run(self.path, flags, opt("nb_timeout"), opt("nb_memory"))
            self.user_properties += list(usage.items())
            if status == "passed" and re.fullmatch(r"\d+_reproduce", self.name):
                status, text = smoke_budget(usage)
        if status == "skipped":
            pytest.skip(text)
        if status == "failed":
            raise NotebookFailed(f"{self.path.relative_to(ROOT)}: {text}")

    def repr_failure(self, excinfo):
        return str(excinfo.value) if isinstance(excinfo.value, NotebookFailed) else super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, None, str(self.path.relative_to(ROOT))


def smoke_budget(usage):
    "A reproduction as it is written is its smoke profile."
    over = [f"{usage[k]:g} {unit} (budget {most})" for k, most, unit in
            (("cpu_s", SMOKE_CPU_S, "CPU-seconds"), ("peak_rss_mb", SMOKE_MB, "MB")) if usage[k] > most]
    return ("failed", f"over the smoke budget: {', '.join(over)}") if over else ("passed", "")


def pytest_terminal_summary(terminalreporter, config):
    "With --durations=N: the N notebooks that took most processor time."
    if not (n := config.getoption("durations")):
        return
    props = {r.nodeid: dict(r.user_properties) for rs in terminalreporter.stats.values() for r in rs
             if getattr(r, "when", "") == "call" and r.user_properties}
    rows = sorted(((p["cpu_s"], p["peak_rss_mb"], name) for name, p in props.items() if "cpu_s" in p), reverse=True)[:n]
    if rows:
        terminalreporter.section("notebooks: CPU-seconds, peak MB")
    for cpu, mb, name in rows:
        terminalreporter.write_line(f"{cpu:7.2f}s {mb:6d} MB  {name}")


# -- one notebook, in the process that calls --------------------------------------------------------------------------

class Rewrite(ast.NodeTransformer):
    "pytest's assertion rewriting, so that a plain `assert a == b` in a cell shows both values."
    def __init__(self, config): self.config = config

    def visit_Module(self, node):
        from _pytest.assertion.rewrite import rewrite_asserts
        if any(isinstance(n, ast.Assert) for n in ast.walk(node)):
            rewrite_asserts(node, b"", config=self.config)
            for n in ast.walk(node):                               # IPython would fill the missing ends with line 1
                if hasattr(n, "lineno") and getattr(n, "end_lineno", None) is None:
                    n.end_lineno, n.end_col_offset = n.lineno, n.col_offset
        return node


def run_notebook(path, flags, config, starting=lambda where, source: None):
    "-> (status, text) with status 'passed', 'skipped' or 'failed'. `starting` is told about each cell before it runs."
    from execnb.shell import CaptureShell
    from fastcore.basics import str2bool
    from nbdev.config import get_config
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor
    os.environ["IN_TEST"] = "1"
    os.chdir(path.parent)
    sys.path.insert(0, str(ROOT))
    cfg = get_config(path=ROOT)
    skip = set(cfg.tst_flags.split()) - set(flags.split())
    nb = NBProcessor(path, rm_directives=False).nb
    places = {id(c): f"cell {i} (id {c.get('id')})" for i, c in enumerate(nb.cells)}
    nb = NBProcessor(nb=nb, procs=FrontmatterProc, rm_directives=False, process=True).nb
    if str2bool(str(getattr(nb, "frontmatter_", {}).get("skip_exec", False))):
        return "skipped", "skip_exec: true"
    shell = CaptureShell(path, mpl_format="png")
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **kw: None   # the report below says it
    shell.ast_transformers.append(Rewrite(config))
    for cell in nb.cells:
        d = getattr(cell, "directives_", None) or {}
        if cell.cell_type != "code" or (d.get("eval:") or [""])[0].lower() == "false" or skip & d.keys():
            continue
        if (code := re.sub(r"\A(\s*#\s*\|.*\n)+(?=%%)", "", cell.source)) != cell.source:
            cell.source = code                                     # a %%magic must stand on its cell's first line
        starting(places.get(id(cell), "a cell"), cell.source)
        shell.cell(cell)
        if shell.exc is not None:
            return "failed", failure(cell, places.get(id(cell), "a cell"), shell.exc, ROOT / cfg.lib_path.name)
    return "passed", ""


def marked(source, line):
    "The source with line numbers, and `>` before line `line`."
    return "".join(f"{'>' if i == line else ' '} {i:3} {s}\n" for i, s in enumerate(source.splitlines(), 1))


def failure(cell, place, exc, lib):
    "What a person needs to see of an exception: the cell, the way through the package, the message, what was printed."
    tb = traceback.extract_tb(exc.__traceback__)
    line = next((f.lineno for f in tb if f.filename.startswith("<ipython")), getattr(exc, "lineno", None))
    deep = [f for f in tb if Path(f.filename).is_relative_to(lib)]
    deep += [f for f in tb[-1:] if f not in deep and not f.filename.startswith("<ipython") and "/IPython/" not in f.filename]
    frames = "".join(traceback.format_list(deep)).replace(f"{ROOT}/", "")
    message = "".join(traceback.format_exception_only(exc)).strip()
    out = "".join("".join(o.get("text", [])) for o in cell.get("outputs", []) if o.get("output_type") == "stream")
    return "\n".join([place, "", marked(cell.source, line), *([frames] if frames else []), message,
                      *(["", "--- printed by the cell ---", out[-TAIL:]] if out else [])])


# -- the forker: a process that has the imports and forks a child per notebook ---------------------------------------

FORKER = pytest.StashKey()


def pytest_sessionstart(session):
    "The xdist controller runs no tests, so it gets none."
    config = session.config
    controller = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if not controller and not config.getoption("nb_no_fork") and not config.option.collectonly:
        config.stash[FORKER] = Forker(config)


def pytest_sessionfinish(session):
    if FORKER in session.config.stash:
        session.config.stash[FORKER].close()


class Forker:
    "Splits off at once, while this process is still clean; imports the heavy modules when the first notebook comes."

    def __init__(self, config):
        self.pipe, theirs = Pipe()
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = _fork()
        if self.pid == 0:
            self.pipe.close()
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)       # Ctrl-C ends pytest; its end ends this process
                _serve(theirs, config)
            finally:
                os._exit(0)
        theirs.close()

    def run(self, *job):
        self.pipe.send(job)
        try:
            return self.pipe.recv()
        except EOFError:
            return "failed", "the process that forks notebooks has died", {}

    def close(self):
        self.pipe.close()
        os.waitpid(self.pid, 0)


def _fork():
    with warnings.catch_warnings():                                # Python 3.12 warns where another thread lives
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(pipe, config):
    "One notebook after the other, until pytest hangs up."
    ready = False
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if not ready:
            _preload(config.getoption("nb_preload"))
            ready = True
        if (answer := _forked(pipe, config, *job)) is None:
            return
        pipe.send(answer)


def _preload(names):
    "Imports, nothing else: a process that has started threads could not be forked safely."
    for name in names.split():
        try:
            importlib.import_module(name)
        except ImportError:
            pass                                                   # a notebook that needs it will say so itself
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _forked(pytest_pipe, config, path, flags, limit, memory):
    "(status, text, usage) of a notebook run in a child; None if pytest is gone."
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as printed:
        if (pid := _fork()) == 0:
            ours.close(), pytest_pipe.close()
            _child(theirs, config, path, flags, memory, printed)
        theirs.close()
        end, place, source, result, late = time.monotonic() + limit, "before the first cell", "", None, False
        while result is None:
            ready = wait([ours, pytest_pipe], max(0, end - time.monotonic()))
            if pytest_pipe in ready:                               # nothing is ever sent in between: it hung up
                _kill(pid)
                os.waitpid(pid, 0)
                return None
            if not ready:
                late = True
                break
            try:
                kind, *message = ours.recv()
            except EOFError:
                break
            if kind == "cell":
                place, source = message
            else:
                result = message
        if late:
            _quietly(os.kill, pid, signal.SIGUSR1)                 # faulthandler writes where it was
            time.sleep(0.3)
        if result is None and not late:
            _, wait_status, ru = os.wait4(pid, 0)                  # it died: leave it its own signal
            _kill(pid)
        else:
            _kill(pid)                                             # also what the notebook has started and left behind
            _, wait_status, ru = os.wait4(pid, 0)
        usage = {"cpu_s": round(ru.ru_utime + ru.ru_stime, 2), "peak_rss_mb": ru.ru_maxrss // 1024}
        if result is not None:
            return *result, usage
        printed.seek(0)
        out = printed.read().decode(errors="replace")
    why = f"ran longer than {limit:g} s" if late else _death(wait_status)
    out = re.sub(MACHINERY, "", out)
    line = re.findall(r'File "<ipython-input[^"]*", line (\d+)', out)
    parts = [f"{why}, in {place}", "", marked(source, int(line[-1]) if line else None)]
    return "failed", "\n".join(parts + (["--- written by its process ---", out[-TAIL:].replace(f"{ROOT}/", "")] if out else [])), usage


def _child(pipe, config, path, flags, memory, printed):
    "In the child: run the notebook, send what came of it, and never return."
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        devnull = os.open(os.devnull, os.O_RDONLY)
        for src, dst in ((devnull, 0), (printed.fileno(), 1), (printed.fileno(), 2)):
            os.dup2(src, dst)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
        if memory:
            resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30),) * 2)
        try:
            result = run_notebook(path, flags, config, lambda *where: pipe.send(("cell", *where)))
        except BaseException as e:
            result = "failed", "".join(traceback.format_exception(e))
        pipe.send(("done", *result))
        while True:                                                # the parent reads the answer, then ends the whole group
            signal.pause()
    finally:
        os._exit(1)


def _kill(pid):
    "The child's whole process group."
    _quietly(os.killpg, pid, signal.SIGKILL)
    _quietly(os.kill, pid, signal.SIGKILL)                         # the child had not become a group leader yet


def _quietly(f, *args):
    try:
        f(*args)
    except ProcessLookupError:
        pass


def _death(wait_status):
    code = os.waitstatus_to_exitcode(wait_status)
    return f"died: signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"died: its process left with exit code {code}"
