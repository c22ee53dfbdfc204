"""The tree as a whole: everything generated is current, and nothing in it belongs to one machine."""
import configparser
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from copies import python, run

from icl26 import dev
from icl26.docs import papers_table
from icl26.repro.papers import find_papers

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = dev.notebooks(ROOT)


def tracked():
    "Text files of the tree: those that git knows, or all but the usual leftovers where there is no git."
    listed = dev.git(ROOT, "ls-files")
    names = listed.splitlines() if listed else [
        p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*")
        if p.is_file() and not {".venv", ".git", "runs", "_docs", "__pycache__", "build", "dist"} & set(p.relative_to(ROOT).parts)]
    return [ROOT / n for n in names if (ROOT / n).is_file() and Path(n).suffix not in (".png", ".npz", ".gz")]


def test_the_package_is_what_the_notebooks_export():
    assert list(dev.drift(ROOT)) == []


def test_notebooks_are_clean_and_the_readme_is_current():
    assert [s for s in dev.check(ROOT) if "is not what the notebooks export" not in s] == []


def test_the_check_command_agrees(tmp_path):
    done = python("-m", "icl26.dev", "check", cwd=ROOT)
    assert done.returncode == (1 if dev.check(ROOT) else 0), done.stderr


def test_the_home_page_shows_the_committed_results():
    nb = json.loads((ROOT / "nbs/index.ipynb").read_text())
    shown = next(c["outputs"] for c in nb["cells"] if "".join(c["source"]).endswith("papers_table()"))
    assert "".join(shown[0]["data"]["text/markdown"]) == papers_table().data, "run it again: python -m icl26.dev run index"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_notebook(path):
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    nb = json.loads(text)
    assert len(text.encode()) < 500_000
    first = "".join(nb["cells"][0]["source"])
    assert nb["cells"][0]["cell_type"] == "markdown" and re.match(r"# .+\n\n> .+", first), "title and > description come first"
    if re.search(r"/\d+_reproduce\.ipynb$", name):
        tagged = [c for c in nb["cells"] if "parameters" in c["metadata"].get("tags", [])]
        assert len(tagged) == 1
        values = dict(re.findall(r"^(\w+) = ([^#\n]*?)\s*(?:#.*)?$", "".join(tagged[0]["source"]), re.M))
        assert values.items() >= {"profile": '"smoke"', "seed": "0", "device": '"auto"', "out_dir": "None", "model": "None"}.items()
        assert [c for c in nb["cells"] if c.get("outputs")], "saved outputs: the cpu profile's"
        numbers = [int(m[1]) for p in path.parent.glob("*.ipynb") if (m := re.match(r"(\d+)_", p.name))]
        assert int(path.name.split("_")[0]) == max(numbers)


def test_papers_carry_what_the_site_and_the_command_line_need():
    for p in find_papers():
        for name in (p.title, p.description, p.arxiv):
            assert name, p.slug
        assert p.reproduction and p.reproduction.stem.endswith("_reproduce"), p.slug


def test_nothing_belongs_to_one_machine():
    places = re.compile(r"(?<![\w.~/*:-])/(?:home|root|work|Users|mnt)/\w")
    hosts = re.compile(r"pypi\.org/simple|pythonhosted|download\.pytorch|registry\.npmjs|index-url\s+http|\b10\.\d+\.\d+\.\d+\b|\.internal\b")
    found = []
    for path in tracked():
        if path == Path(__file__):
            continue
        for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if len(line) < 5000 and (m := places.search(line) or hosts.search(line)):
                found.append(f"{path.relative_to(ROOT)}:{i}: {m[0]}")
    assert found == []


def test_settings_pins_and_requirements_fit_together():
    cp = configparser.ConfigParser(delimiters=["="])
    cp.read(ROOT / "settings.ini", encoding="utf-8")
    cfg = cp["DEFAULT"]
    canonical = lambda name: re.sub(r"[-_.]+", "-", re.split(r"[\[=<>~]", name)[0]).lower()
    pinned = {canonical(line): line.split("==")[1] for line in (ROOT / "constraints.txt").read_text().split() if "==" in line}
    for key, value in cfg.items():
        for word in value.split() if key.endswith("requirements") and not key.startswith("quarto") else []:
            assert canonical(word) in pinned, f"{key}: {word} has no pin in constraints.txt"
            if m := re.search(r"==(.*)", word):
                assert pinned[canonical(word)] == m[1], word


def test_make_explains_itself_and_hands_on_its_knobs():
    said = run("make", cwd=ROOT).stdout
    for target in ("reproduce", "test", "docs", "lab", "run", "prepare", "check", "bench"):
        assert f"make {target}" in said
    line = run("make", "-n", "reproduce", "PROFILE=cpu", "PAPERS=odr logprob_audit", "SEEDS=0,1,2", "JOBS=2", "DRY_RUN=1", cwd=ROOT).stdout
    words = " ".join(line.splitlines()[-1].split())
    assert words.endswith("icl26 reproduce odr logprob_audit --profile cpu --seeds 0,1,2 --out runs --jobs 2 --dry-run")


class Setup:
    "The Makefile's set-up in a folder of its own, with a pip that notes how it is called."

    PIP = "import sys, pathlib\npathlib.Path('called').open('a').write(' '.join(sys.argv[1:]) + chr(10))\nprint('no such wheel')\nsys.exit({})"

    def __init__(self, top):
        self.top = top
        for name in ("Makefile", "settings.ini", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, top)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", top / ".venv"], check=True)
        self.packages = next(top.glob(".venv/lib/python*/site-packages"))
        (self.packages / "pip").mkdir()
        self.pip(0)

    def pip(self, code):
        (self.packages / "pip/__main__.py").write_text(self.PIP.format(code))

    def make(self, target, **how):
        # no bytecode: a pip that is replaced within a second by one of the same length would run as it was
        return run("make", f".venv/{target}", cwd=self.top, PYTHONDONTWRITEBYTECODE="1", **how)

    @property
    def calls(self):
        return (self.top / "called").read_text().splitlines() if (self.top / "called").exists() else []


def test_set_up_runs_once_and_again_when_pins_change(tmp_path):
    setup = Setup(tmp_path)
    assert setup.make("ready-all").returncode == 0
    assert setup.calls[0].endswith("-c .venv/constraints.txt -e .[all]")
    assert (tmp_path / ".venv/constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
    setup.make("ready-all")
    assert len(setup.calls) == 1
    setup.make("ready-dev")
    assert len(setup.calls) == 2 and setup.calls[1].endswith(".[all,dev,docs]")
    setup.make("ready-all")                                         # the larger set-up holds the smaller one
    assert len(setup.calls) == 2
    os.utime(tmp_path / "constraints.txt", (time.time() + 5,) * 2)
    setup.make("ready-all")
    assert len(setup.calls) == 3 and "torch==" in (tmp_path / ".venv/constraints.txt").read_text()


def test_a_torch_that_is_there_is_kept(tmp_path):
    setup = Setup(tmp_path)
    (setup.packages / "torch").mkdir()
    (setup.packages / "torch/__init__.py").write_text("")
    assert setup.make("ready-all").returncode == 0
    left = (tmp_path / ".venv/constraints.txt").read_text().splitlines()
    whole = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in whole if line not in left] == [line for line in whole if line.startswith("torch==")]


def test_a_failed_set_up_shows_why_and_is_tried_again(tmp_path):
    setup = Setup(tmp_path)
    setup.pip(1)
    done = setup.make("ready-all")
    assert done.returncode == 2 and "no such wheel" in done.stdout and ".venv/install.log" in done.stdout
    setup.pip(0)
    assert setup.make("ready-all").returncode == 0 and len(setup.calls) == 2


def test_an_old_python_is_refused(tmp_path):
    setup = Setup(tmp_path)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run("make", ".venv/ready-all", f"PYTHON={old}", cwd=tmp_path)
    assert done.returncode == 2 and "Python 3.11 or later is needed" in done.stdout and setup.calls == []


def test_ci_and_workflows_can_be_read():
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & stat.S_IXUSR and os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        assert yaml.safe_load(path.read_text())["jobs"]
    assert (ROOT / "nbs/_quarto.yml").resolve() == ROOT / "_quarto.yml"
