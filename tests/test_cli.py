"""The command that a user types."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from copies import copy_checkout, icl26, python

from icl26.repro.papers import find_papers

PAPERS = find_papers()


def test_version_and_help(tmp_path):
    assert re.fullmatch(r"icl26 \d+\.\d+\.\d+\n", icl26("--version", cwd=tmp_path).stdout)
    top = icl26("--help", cwd=tmp_path).stdout
    for command in ("list", "reproduce", "report", "compare", "use", "docs", "new"):
        assert re.search(rf"^ +{command}\b", top, re.M)
        if command != "use":
            one = icl26(command, "--help", cwd=tmp_path)
            assert one.returncode == 0 and "examples:" in one.stdout and one.stderr == ""
    assert icl26(cwd=tmp_path).returncode == 2


def test_list_shows_every_paper_with_its_committed_verdicts(tmp_path):
    done = icl26("list", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert {p.slug for p in PAPERS} == set(re.findall(r"^  (\w+) ", done.stdout, re.M))
    for row in json.loads(icl26("list", "--json", cwd=tmp_path).stdout):
        path = Path(__file__).parents[1] / "results" / row["area"] / row["slug"] / "results.json"
        verdicts = [c["verdict"] for c in json.loads(path.read_text())["claims"]] if path.exists() else []
        assert row["claims"] == {v: verdicts.count(v) for v in row["claims"]} and sum(row["claims"].values()) == len(verdicts)


def test_list_is_quick_and_imports_nothing_heavy(tmp_path):
    code = ("import sys, icl26.cli; icl26.cli.main(['list']);"
            "print([m for m in ('numpy', 'torch', 'pandas', 'scipy', 'papermill', 'nbdev', 'matplotlib') if m in sys.modules])")
    assert python("-c", code, cwd=tmp_path).stdout.endswith("\n[]\n")
    p = subprocess.Popen([Path(sys.executable).with_name("icl26"), "list"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    usage = os.wait4(p.pid, 0)[2]
    assert usage.ru_utime + usage.ru_stime < 1.5


@pytest.mark.parametrize("args, said", [
    (["reproduce", "nosy_valid"], "did you mean 'noisy_valid'?"),
    (["reproduce", "--profile", "fast"], "fast"),
    (["reproduce", "--seeds", "0,one"], "one"),
    (["reproduce", "--jobs", "0"], "jobs"),
    (["reproduce", "--commit"], "cpu"),
    (["report", "nowhere"], "nowhere"),
    (["compare", "nowhere", "there"], "nowhere"),
    (["use", "nosy_valid"], "did you mean 'noisy_valid'?"),
    (["docs", "--renderer", "sphinx"], "auto, quarto, smalldocs"),
    (["new", "decison", "walks"], "did you mean 'decision'?"),
    (["new", "decision", "noisy_valid"], "is taken"),
    (["new", "decision", "Walks!"], "lower-case"),
    (["list", "--area", "decison"], "areas:"),
    (["list", "--area", ""], "areas:"),
    (["report", ""], "folder of runs: the path of a folder is needed"),
    (["compare", "", "x"], "folder of runs: the path of a folder is needed"),
    (["reproduce", "--out", ""], "out: the path of a folder is needed"),
    (["reproduce", "--model", " "], "model: a Hub id or a path"),
    (["docs", "--out", " "], "out: the path of a folder is needed"),
    (["docs", "--jobs", "0"], "jobs: a whole number above 0"),
    (["docs", "--jobs", "-3"], "jobs: a whole number above 0"),
    *((["new", "decision", "walks", option, text], f"{option}: one line of text")
      for option in ("--title", "--arxiv") for text in ("", " ", "a\nb", "a\r- use: os:system", "a\u2028b", 'say "a"')),
    (["new", "decision", "walks", "--arxiv", "[2601"], "cannot stand in the front matter"),
    (["reproduce", "noisy_valid", "--scheduler", "x://y"], "scheduler: an address such as tcp://host:8786 is needed"),
    (["reproduce", "noisy_valid", "--scheduler", ""], "scheduler: an address such as tcp://host:8786 is needed"),
])
def test_a_users_errors_are_one_line(args, said, tmp_path):
    done = icl26(*args, cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stderr.startswith("icl26: error: ") and done.stderr.count("\n") == 1 and said in done.stderr
    assert done.stdout == "" and not list(tmp_path.iterdir())


def test_wrong_commands_and_options(tmp_path):
    for args in (["lst"], ["list", "--aera", "x"], ["compare", "one"]):
        done = icl26(*args, cwd=tmp_path)
        assert done.returncode == 2 and "error:" in done.stderr and "Traceback" not in done.stderr


def test_an_unwritable_site_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("")
    done = icl26("docs", "--out", tmp_path / "full", cwd=tmp_path)
    assert done.returncode == 2 and "does not hold a site" in done.stderr and (tmp_path / "full/mine.txt").exists()


def test_a_missing_index_of_names_says_what_to_run(tmp_path):
    "icl26/_modidx.py is made by the export; no package of that name can be installed."
    for call in ("dev.main(['readme'])", "cli.main(['docs', '--jobs', '1', '--out', 'site'])"):
        code = ("import sys; sys.modules['icl26._modidx'] = None; from icl26 import cli, dev, docs;"
                "docs.process_all = lambda top, work, jobs: docs.processed(top / 'index.ipynb');"
                f"sys.exit({call})")
        done = python("-c", code, cwd=Path(__file__).parents[1] if "dev" in call else tmp_path)
        assert done.returncode == 2 and "run `python -m icl26.dev export`" in done.stderr and "pip" not in done.stderr, done


def test_a_missing_module_of_ours_is_not_to_be_installed(monkeypatch, capsys):
    from icl26 import dev

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name, said in ("icl26.docs", "there is no icl26.docs: run `python -m icl26.dev export`"), ("nbdev", 'pip install "icl26[dev]"'):
        monkeypatch.setattr(dev, "check", lambda top: missing(name))
        assert dev.main(["check"]) == 2 and said in capsys.readouterr().err


def test_a_closed_pipe_is_quiet(tmp_path):
    command = f"{Path(sys.executable).with_name('icl26')} list --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[" and done.stderr == ""


@pytest.mark.parametrize("slug", [p.slug for p in PAPERS if p.use])
def test_each_papers_own_command_has_help(slug, tmp_path):
    done = icl26("use", slug, "--help", cwd=tmp_path)
    assert done.returncode == 0 and slug in done.stdout and "Traceback" not in done.stderr
    assert slug in icl26("use", "--help", cwd=tmp_path).stdout


def test_use_imports_no_other_paper(tmp_path):
    slug = next(p for p in PAPERS if p.use)
    others = [f"icl26.{p.area}.{p.slug}" for p in PAPERS if p.slug != slug.slug]
    code = (f"import sys, icl26.cli; icl26.cli.main(['use', '{slug.slug}', '--help']);"
            f"print([m for m in {others} if m in sys.modules])")
    assert python("-c", code, cwd=tmp_path).stdout.endswith("[]\n")


# -- icl26 new ------------------------------------------------------------------------------------------------------------

MEASURED = '''rng = np.random.default_rng(seed)
x = rng.standard_t(1.2, size=(SIZES["repeats"], 100))
errors = np.abs(median_of_means(x, 10)), np.abs(x.mean(-1))
res.add(CLAIMS["heavy_tails"], measured=errors[0].mean(), n=len(x), difference=paired_difference(*errors, seed=seed))
'''


def test_skeleton_exports_tests_and_its_reproduction_fails_until_a_claim_is_measured(tmp_path):
    top = copy_checkout(tmp_path / "copy")
    how = {"cwd": top, "package": top}
    made = python("-m", "icl26.cli", "new", "vision", "walks", "--title", "Walks that come home", "--arxiv", "2601.00010", **how)
    assert made.returncode == 0 and "nbs/vision/walks/09_reproduce.ipynb" in made.stdout, made
    exported = python("-m", "icl26.dev", "export", **how)
    assert exported.returncode == 0 and "icl26/vision/walks/method.py" in exported.stdout, exported

    def tests():
        return python("-m", "pytest", "-p", "no:cacheprovider", "--nb-preload=numpy", "nbs/vision/walks", **how).stdout

    out = tests()
    assert "1 failed, 4 passed" in out and "walks: no claim was measured" in out, out
    listed = python("-m", "icl26.cli", "list", "--area", "vision", **how).stdout
    assert "Walks that come home" in listed and "no committed run" in listed
    used = python("-m", "icl26.cli", "use", "walks", "nowhere.txt", **how)
    assert used.returncode == 2 and used.stderr.startswith("icl26: error: nowhere.txt")
    run = python("-m", "icl26.cli", "reproduce", "walks", "--out", tmp_path / "runs", **how)
    assert run.returncode == 1 and "no claim was measured" in run.stdout + run.stderr, run

    for area in ("evaluation", "decision"):                         # their pages are not what this is about
        shutil.rmtree(top / "nbs" / area)
    built = python("-m", "icl26.cli", "docs", "--keep-going", "--renderer", "smalldocs", **how)
    assert built.returncode == 0 and "vision/walks" not in built.stdout, built
    page = (top / "_docs/vision/walks/method.html").read_text()
    assert "Median of the means of" in page and 'class="math display"' in page

    path = top / "nbs/vision/walks/09_reproduce.ipynb"
    nb = json.loads(path.read_text())
    cell = {"cell_type": "code", "id": "measured", "metadata": {}, "execution_count": None, "outputs": [], "source": MEASURED}
    nb["cells"].insert(next(i for i, c in enumerate(nb["cells"]) if "## Differences" in "".join(c["source"])), cell)
    path.write_text(json.dumps(nb))
    assert "5 passed" in tests()
    run = python("-m", "icl26.cli", "reproduce", "walks", "--out", tmp_path / "runs", **how)
    assert run.returncode == 0 and "heavy_tails" in run.stdout, run
