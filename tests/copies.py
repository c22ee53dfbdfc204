"""Copies of this checkout for tests that write, and commands run in them."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOP = ("settings.ini", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt", "conftest.py", "pytest.ini", "_quarto.yml")


def copy_checkout(to, folders=("icl26", "nbs", "results")):
    "The checkout without tests, history and environment."
    to = Path(to)
    to.mkdir(parents=True, exist_ok=True)
    for name in TOP:
        shutil.copy(ROOT / name, to / name)
    for name in folders:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    return to


def run(*args, cwd, package=None, timeout=300, **env):
    "A finished command; `package`: a folder whose icl26 is imported instead of the installed one."
    # this process may be a pytest worker that `make test JOBS=2` has started: their marks are not for the command
    ours = re.compile(r"PYTEST_|IN_TEST|ICL26_|MAKE|MFLAGS|(PAPERS|PROFILE|SEEDS|OUT|JOBS|ARGS|NB|DOCS|PYTHON|FORCE|DRY_RUN|COMMIT)$")
    clean = {k: v for k, v in os.environ.items() if not ours.match(k)}
    clean |= {"PYTHONPATH": str(package)} if package else {}
    return subprocess.run([str(a) for a in args], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=timeout)


def icl26(*args, **how):
    "The installed command."
    return run(Path(sys.executable).with_name("icl26"), *args, **how)


def python(*args, **how):
    return run(sys.executable, *args, **how)
