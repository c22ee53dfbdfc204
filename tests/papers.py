"""What the tests of a paper do with its reproduction: run it, in this process or by the command, and share one run."""
import contextlib
import inspect
import io
import json
import os
import shutil
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from copies import icl26, python
from filelock import FileLock

from icl26.repro import load_results
from icl26.repro.papers import cells_of, find_paper, results_folder


def plain_signature(call):
    "The signature of a function or class as text, without annotations."
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(call).parameters.values()]
    return str(inspect.Signature(bare))


def printed(code, cwd, **env):
    "What Python code prints in a process of its own, without white space at its ends."
    done = python("-c", code, cwd=cwd, timeout=120, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def use_command(slug, *args, cwd, **env):
    "A finished `icl26 use SLUG` in the folder `cwd`."
    return icl26("use", slug, *args, cwd=cwd, timeout=200, **env)


def said(main, *argv):
    "Exit code, stdout and stderr of a command's main function, run in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return main([str(a) for a in argv]), out.getvalue(), err.getvalue()


# -- runs ------------------------------------------------------------------------------------------------------------

def changed_cells(slug, change):
    "The cells of the reproduction, each code cell's text passed through `change`, which has to change something."
    page = find_paper(slug).reproduction
    cells = [c | {"source": change(c["source"]) if change and c["cell_type"] == "code" else c["source"]} for c in cells_of(page)]
    assert change is None or cells != cells_of(page), f"{page.name}: nothing to change"
    return cells


def run_here(slug, out, change=None, **parameters):
    """Run the reproduction's code cells in this process, without a kernel's start; the record that it leaves in `out`.

    `parameters` replace those of the notebook's cell; `change` is given each cell's text and returns what runs in its place.
    The cell that shows the outcome is left out: a notebook alone can fill it later.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    space = {"display": lambda *shown, **how: None}
    with matplotlib.rc_context(), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        matplotlib.use("Agg")
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
        patch.setattr("IPython.display.display", space["display"])
        for i, cell in enumerate(changed_cells(slug, change)):
            if cell["cell_type"] == "code" and "res.outcome()" not in cell["source"]:
                exec(compile(cell["source"], f"<{slug}, cell {i}>", "exec"), space)
                if "parameters" in cell["metadata"].get("tags", ()):
                    space |= parameters | {"out_dir": str(out)}
        plt.close("all")
    return load_results(Path(out) / "results.json")


def changed_notebooks(slug, folder, change):
    "The paper's page and its reproduction, each code cell's text passed through `change`, as a folder of notebooks of its own."
    paper = find_paper(slug)
    there = folder / paper.area / slug
    there.mkdir(parents=True)
    shutil.copy(paper.folder / "index.ipynb", there)
    page = json.loads(paper.reproduction.read_text(encoding="utf-8"))
    (there / paper.reproduction.name).write_text(json.dumps(page | {"cells": changed_cells(slug, change)}), encoding="utf-8")
    return folder


def run_command(slug, out, *args, change=None, **env):
    """Run one job by `icl26 reproduce`, papermill and all, with an empty cache unless `env` names one; the path of its results.

    With `change` the notebook is a copy, in which each code cell's text has passed through it.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    env = {"ICL26_CACHE": str(out.with_name(f"{out.name}-cache")), **env}
    if change is not None:
        env["ICL26_NBS"] = str(changed_notebooks(slug, out.with_name(f"{out.name}-nbs"), change))
    done = icl26("reproduce", slug, "--jobs", 1, "--out", out, *args, cwd=out.parent, timeout=500, **env)
    assert done.returncode == 0, f"icl26 reproduce {slug}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (path,) = out.glob(f"*/{slug}/*/results.json")
    return path


def once(name, tmp_path_factory, make):
    """The path that `make(folder)` returns, made once in a run of pytest, whichever of pytest-xdist's workers asks first.

    Where it fails, every test that asks fails with the same message. What a killed worker left is made again.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once" / name
    folder.mkdir(parents=True, exist_ok=True)
    marker, work = folder / "made.json", folder / "work"
    with FileLock(folder / "lock"):
        if not marker.is_file():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                made = {"path": str(make(work))}
            except Exception as e:
                made = {"error": f"{type(e).__name__}: {e}"}
            (folder / "being written").write_text(json.dumps(made))
            os.replace(folder / "being written", marker)
    made = json.loads(marker.read_text())
    if "error" in made:
        pytest.fail(f"{name}: {made['error']}", pytrace=False)
    return Path(made["path"])


def smoke(slug, tmp_path_factory):
    "The results of the paper's smoke run by the command, seed 0, made once in a run of pytest."
    return once(f"smoke-{slug}", tmp_path_factory, lambda folder: run_command(slug, folder / "run", "--profile", "smoke", "--seeds", 0))


def committed(slug):
    "The committed results of the paper, None if there are none."
    path = results_folder() / find_paper(slug).area / slug / "results.json"
    return path if path.is_file() else None


# -- a language model behind a server --------------------------------------------------------------------------------

class Chat:
    "An OpenAI-compatible server's address, and the bodies that it was asked."

    def __init__(self, port):
        self.url, self.asked = f"http://127.0.0.1:{port}/v1", []


@contextlib.contextmanager
def chat_server(answer):
    """A server on this machine for as long as the context lasts.

    `answer(body)` returns the text of the choices, one choice as a dict, a list of choices, or an HTTP error's code.
    """
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            chat.asked.append(body)
            said = answer(body)
            if isinstance(said, int):
                return self.reply(said, {"error": {"message": "refused"}})
            if isinstance(said, str):
                said = {"message": {"role": "assistant", "content": said}}
            choices = said if isinstance(said, list) else [said] * (body.get("n") or 1)
            choices = [{"index": i, "finish_reason": "stop", **c} for i, c in enumerate(choices)]
            self.reply(200, {"id": "1", "object": "chat.completion", "created": 0, "model": body.get("model"), "choices": choices,
                             "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})

        def reply(self, status, content):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    chat = Chat(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield chat
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
