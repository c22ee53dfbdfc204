"""The built wheel, in an environment that has never seen the checkout."""
import json
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from copies import copy_checkout, python, run
from filelock import FileLock

from icl26.repro.papers import find_papers

ROOT = Path(__file__).resolve().parents[1]
PAPERS = find_papers()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory, worker_id):
    "A wheel, built from the source distribution, as `python -m build` does."
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent
    with FileLock(base / "wheel.lock"):
        if not list((base / "dist").glob("*.whl")):
            top = copy_checkout(base / "source")
            done = python("-m", "build", "--no-isolation", "--outdir", base / "dist", cwd=top)
            assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return next((base / "dist").glob("*.whl"))


@pytest.fixture(scope="session")
def env(wheel):
    "A virtual environment with the wheel; what it requires comes from this one, through a .pth file, and nothing is downloaded."
    folder = wheel.parent.parent / "env"
    with FileLock(wheel.parent.parent / "env.lock"):
        if not (folder / "ready").exists():
            done = python("-m", "venv", "--without-pip", folder, cwd=wheel.parent)
            assert done.returncode == 0, done
            done = python("-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", "--no-index", "-q", wheel, cwd=wheel.parent)
            assert done.returncode == 0, done
            packages = next(folder.glob("lib/python*/site-packages"))
            (packages / "requirements.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
            (folder / "ready").write_text("")
    return folder


@pytest.fixture
def installed(env, tmp_path):
    "Run a program of the environment in an empty folder."
    def call(name, *args, **how):
        return run(env / "bin" / name, *args, cwd=tmp_path, **how)
    call.folder, call.packages = tmp_path, next(env.glob("lib/python*/site-packages"))
    return call


def test_the_wheel_holds_notebooks_and_results_and_no_more(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    carried = {n.removeprefix("icl26/notebooks/") for n in names if n.startswith("icl26/notebooks/")}
    assert carried == {p.relative_to(ROOT / "nbs").as_posix() for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    results = {n.removeprefix("icl26/results_data/") for n in names if n.startswith("icl26/results_data/")}
    assert results == {p.relative_to(ROOT / "results").as_posix() for p in (ROOT / "results").rglob("*.json")}
    assert "icl26/py.typed" in names and not [n for n in names if n.startswith(("tests/", "nbs/", "benchmarks/")) or "__pycache__" in n]


def test_extras_are_those_of_the_settings(wheel):
    meta = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(meta).decode()
    extras = set(re.findall(r"^Provides-Extra: (.*)$", text, re.M))
    assert {"all", "evaluation", "language", "agentic-rl", "agents", "decision", "vision", "networks", "bundled", "api", "cluster",
            "dev", "docs", "quarto"} == extras
    everything = set(re.findall(r"^Requires-Dist: ([\w.-]+).*extra == \"all\"", text, re.M))
    assert {"openai", "gguf", "dask"} <= everything and not {"quarto-cli", "smalldocs", "pytest"} & everything


def test_it_is_the_wheel_that_is_imported(installed):
    out = installed("python", "-c", "import icl26; print(icl26.__file__)").stdout.strip()
    assert Path(out).is_relative_to(installed.packages)


def test_list_from_an_empty_folder(installed):
    rows = json.loads(installed("icl26", "list", "--json").stdout)
    assert {r["slug"] for r in rows} == {p.slug for p in PAPERS}
    for r in rows:
        committed = ROOT / "results" / r["area"] / r["slug"] / "results.json"
        assert bool(r["claims"]) == committed.exists()
    assert installed("icl26", "list").returncode == 0 and list(installed.folder.iterdir()) == []


@pytest.mark.parametrize("paper", [f"{p.area}.{p.slug}" for p in PAPERS])
def test_every_paper_can_be_imported(installed, paper):
    done = installed("python", "-c", f"import icl26.{paper} as m; print(m.__file__, len(m.__all__))")
    path, count = done.stdout.split() if done.returncode == 0 else pytest.fail(done.stderr)
    assert Path(path).is_relative_to(installed.packages) and int(count) > 0


def test_reproduce_from_an_empty_folder(installed):
    plan = installed("icl26", "reproduce", "--dry-run")
    assert plan.returncode == 0 and all(p.slug in plan.stdout for p in PAPERS if p.reproduction), plan
    assert list(installed.folder.iterdir()) == []
    done = installed("icl26", "reproduce", "noisy_valid", "--out", "runs")
    assert done.returncode == 0, done
    record = json.loads((installed.folder / "runs/evaluation/noisy_valid/smoke-s0/results.json").read_text())
    assert record["parameters"]["profile"] == "smoke" and record["claims"]
    assert (installed.folder / "runs/report.html").exists()


def test_what_needs_the_checkout_says_so(installed):
    for args in (["docs"], ["new", "decision", "walks"]):
        done = installed("icl26", *args)
        assert done.returncode == 2 and "checkout" in done.stderr and done.stderr.count("\n") == 1, done


def test_a_missing_extra_is_named(env, installed):
    "As if an optional package were not there: an importer that refuses it."
    paper = next(p for p in PAPERS if p.use)
    code = ("import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
            "        if name.split('.')[0] == 'scipy': raise ModuleNotFoundError(\"No module named 'scipy'\", name='scipy')\n"
            f"sys.meta_path.insert(0, No())\nfrom icl26.cli import main\nsys.exit(main(['use', '{paper.slug}', '--help']))")
    done = installed("python", "-c", code)
    if done.returncode != 0:                                       # a paper may do without scipy at import
        assert done.returncode == 2 and f'pip install "icl26[{paper.area}' in done.stderr, done
