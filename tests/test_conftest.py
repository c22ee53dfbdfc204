"""The conftest at the top: notebooks as tests. Each case is a notebook that really does it, in a project of its own."""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]


class Project:
    "A folder with this repository's conftest, one package and any notebooks."

    def __init__(self, root):
        self.root = root
        for name in ("conftest.py", "settings.ini", "pytest.ini"):
            shutil.copy(ROOT / name, root / name)
        ini = (root / "settings.ini").read_text().replace("lib_path = icl26", "lib_path = toy")
        (root / "settings.ini").write_text(ini)
        (root / "toy").mkdir()
        (root / "toy/__init__.py").write_text("def outer(x):\n    return inner(x) + 1\n\ndef inner(x):\n    return 1 / x\n")
        (root / "tests").mkdir()
        (root / "nbs").mkdir()

    def notebook(self, name, *cells, title="# A title\n\n> What it is"):
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(title), *map(nbformat.v4.new_code_cell, cells)])
        path = self.root / "nbs" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, path)
        return path

    def pytest(self, *args, preload=""):
        cmd = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--nb-preload={preload}", *args]
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}      # this test may run in an xdist worker
        return subprocess.run(cmd, cwd=self.root, capture_output=True, text=True, timeout=300, env=env).stdout


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def running(marker):
    "Processes whose command line or environment holds the marker."
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (p / "environ").read_text(errors="replace") + (p / "cmdline").read_text(errors="replace"):
                found.append(int(p.name))
        except OSError:
            pass
    return found


def test_passes_and_collects_only_notebooks_of_nbs(project):
    project.notebook("00_good", "x = 1", "assert x == 1")
    project.notebook("area/paper/01_deep", "assert True")
    project.notebook("_draft", "1/0")
    project.notebook(".ipynb_checkpoints/00_good", "1/0")
    shutil.copy(project.notebook("00_good", "assert True"), project.root / "tests/stray.ipynb")
    out = project.pytest("-v", "nbs", "tests")
    assert "nbs/00_good.ipynb" in out and "nbs/area/paper/01_deep.ipynb" in out
    assert re.search(r"= 2 passed in [\d.]+s =+$", out.strip()), out


def test_wrong_value_shows_both_sides_and_the_line(project):
    project.notebook("00_bad", "x = 2", "#| echo: true\ny = x + 1\nprint('so far', y)\nassert y == x * 2\nz = 1")
    out = project.pytest()
    assert "nbs/00_bad.ipynb: cell 2 (id " in out
    assert re.search(r"^>   4 assert y == x \* 2$", out, re.M)
    assert "assert 3 == (2 * 2)" in out and "so far 3" in out
    assert "1 failed" in out.strip().splitlines()[-1]


def test_error_deep_in_the_package_shows_its_frames(project):
    project.notebook("00_bad", "from toy import outer", "v = 0\nouter(v)")
    out = project.pytest()
    assert re.search(r"^>   2 outer\(v\)$", out, re.M)
    assert 'File "toy/__init__.py", line 5, in inner' in out and 'File "toy/__init__.py", line 2, in outer' in out
    assert "ZeroDivisionError" in out
    assert "IPython/core" not in out and "execnb" not in out


def test_syntax_error(project):
    project.notebook("00_bad", "x = 1\nif x\n    y = 2")
    out = project.pytest()
    assert re.search(r"^>   2 if x$", out, re.M) and "SyntaxError: expected ':'" in out


def test_endless_loop_is_ended_and_located(project):
    project.notebook("00_bad", "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99.125)'])",
                     "i = 0\nwhile True:\n    i += 1")
    project.notebook("01_good", "assert True")
    start = time.monotonic()
    out = project.pytest("--nb-timeout=3")
    assert time.monotonic() - start < 60
    assert "ran longer than 3 s, in cell 2 (id " in out
    assert re.search(r"^>   [23] (while True:|    i \+= 1)$", out, re.M)
    assert "1 failed, 1 passed" in out
    assert not running("99.125"), "what the notebook had started lives on"


def test_pytests_own_time_limit_does_not_cut_a_notebook_short(project):
    project.notebook("00_long", "import time\ntime.sleep(3)")
    project.notebook("01_good", "assert True")
    assert "2 passed" in project.pytest("--timeout=1", "--nb-timeout=30")


def test_endless_loop_in_c_code(project):
    project.notebook("00_bad", "'a' * 3\nsum(1 for _ in iter(int, 1))")
    out = project.pytest("--nb-timeout=2")
    assert "ran longer than 2 s, in cell 1" in out and re.search(r"^>   2 ", out, re.M)


def test_segfault_is_reported_not_a_lost_worker(project):
    project.notebook("00_bad", "import ctypes\nctypes.string_at(0)")
    project.notebook("01_good", "assert True")
    for args in ([], ["-n2"]):
        out = project.pytest(*args)
        assert "died: signal 11 (SIGSEGV), in cell 1" in out and re.search(r"^>   2 ctypes\.string_at\(0\)$", out, re.M), out
        assert "1 failed, 1 passed" in out and "worker" not in out.lower().replace("workers", "")


def test_exit_is_a_failure(project):
    project.notebook("00_bad", "import sys\nsys.exit(0)")
    project.notebook("01_worse", "import os\nos._exit(0)")
    out = project.pytest()
    assert "SystemExit" in out and "left with exit code 0" in out and "2 failed" in out


def test_memory_limit(project):
    project.notebook("00_hog", "x = []\nfor i in range(40):\n    x.append(bytearray(2**26))")
    out = project.pytest("--nb-memory=1")
    assert "MemoryError" in out and re.search(r"^>   3     x\.append", out, re.M)
    assert "1 passed" in project.pytest("--nb-memory=0")


def test_smoke_budget_of_reproductions(project):
    conftest = project.root / "conftest.py"
    assert "SMOKE_CPU_S, SMOKE_MB = 20, 2000 " in conftest.read_text()
    conftest.write_text(conftest.read_text().replace("SMOKE_CPU_S, SMOKE_MB = 20, 2000", "SMOKE_CPU_S, SMOKE_MB = 3, 300"))
    hungry = "x = b'a' * (310 * 2**20)"
    project.notebook("area/a/03_reproduce", hungry)
    project.notebook("area/b/03_reproduce", "import time\nwhile time.process_time() < 4: pass")
    project.notebook("area/b/02_other", hungry)
    out = project.pytest("-v")
    assert re.search(r"area/a/03_reproduce.ipynb: over the smoke budget: \d{3} MB \(budget 300\)", out)
    assert re.search(r"area/b/03_reproduce.ipynb: over the smoke budget: \d\.?\d* CPU-seconds \(budget 3\)", out)
    assert "2 failed, 1 passed" in out


def test_skip_rules(project):
    project.notebook("00_skips", "#| eval: false\n1/0", "#| gpu\n1/0", "#| slow\n1/0")
    project.notebook("01_whole", "1/0", title="# A title\n\n> What\n\n- skip_exec: true")
    out = project.pytest()
    assert "1 passed, 1 skipped" in out and "skip_exec: true" in out
    assert "1 failed, 1 skipped" in project.pytest("--nb-flags=gpu")


def test_state_stays_in_its_notebook_and_its_folder(project):
    project.notebook("a/00_one", "import os, toy\ntoy.changed = os.environ['CHANGED'] = '1'\nassert os.environ['IN_TEST'] == '1'")
    project.notebook("a/01_two", "import os, toy\nassert not hasattr(toy, 'changed') and 'CHANGED' not in os.environ",
                     "assert os.path.basename(os.getcwd()) == 'a'")
    assert "2 passed" in project.pytest()


def test_in_process_for_the_debugger(project):
    project.notebook("00_bad", "x = 1\nassert x == 2")
    out = project.pytest("--nb-no-fork")
    assert re.search(r"^>   2 assert x == 2$", out, re.M) and "1 failed" in out


def test_parallel_workers_and_a_multithreaded_library(project):
    for i in range(4):
        project.notebook(f"0{i}_torch", "import torch\ntorch.set_num_threads(2)",
                         "w = torch.ones(400, 400, requires_grad=True)\n((w @ w).sum()).backward()\nassert w.grad[0, 0] == 800")
    out = project.pytest("-n2", "--durations=2", preload="torch")
    assert "4 passed" in out.strip().splitlines()[-1]
    assert "notebooks: CPU-seconds, peak MB" in out and re.search(r"\d MB  nbs/0\d_torch", out)


def test_interrupt_leaves_no_process(project, tmp_path):
    project.notebook("00_long", "import time\ntime.sleep(98.25)")
    marker = f"ICL26_MARK={tmp_path.name}-{os.getpid()}"
    env = {**os.environ, "ICL26_MARK": marker.split("=")[1]}
    p = subprocess.Popen([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nb-preload="], cwd=project.root, env=env,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while len(running(marker)) < 3 and time.monotonic() < end:     # pytest, its forker, the notebook
        time.sleep(0.1)
    assert len(running(marker)) == 3
    p.send_signal(2)
    assert p.wait(30) == 2
    assert not running(marker)
