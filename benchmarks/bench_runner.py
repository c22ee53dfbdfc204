"""What the batch runner adds to a notebook: papermill alone beside ours, each in a fresh process."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from paper_tree import Tree  # noqa: E402

NOTEBOOKS = 4
ALONE = """
import sys, papermill
for i in range(int(sys.argv[3])):
    parameters = {"profile": "smoke", "seed": i, "device": "cpu", "model": None, "out_dir": f"{sys.argv[2]}/{i}"}
    papermill.execute_notebook(sys.argv[1], f"{sys.argv[2]}/{i}.ipynb", progress_bar=False, parameters=parameters)
"""


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path)
    tree.paper("coin")
    return tree


def alone(tree: Tree, times: int) -> float:
    "Seconds of a plain loop over papermill; every run writes its results.json."
    folder = tree.root / f"alone-{time.monotonic_ns()}"
    for i in range(times):
        (folder / str(i)).mkdir(parents=True)
    start = time.perf_counter()
    notebook = tree.nbs / "games/coin/01_reproduce.ipynb"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, str(notebook), str(folder), str(times)],
        env=tree.env,
        check=True,
        capture_output=True,
        timeout=300,
    )
    seconds = time.perf_counter() - start
    tree.claims = [json.loads((folder / f"{i}/results.json").read_text())["claims"] for i in range(times)]
    return seconds


def ours(tree: Tree, times: int) -> float:
    "Seconds of `reproduce` with one job at a time, report included."
    start = time.perf_counter()
    code, said, errors = tree.run(seeds=",".join(map(str, range(times))), jobs=1, device="cpu", force=True)
    seconds = time.perf_counter() - start
    assert code == 0, said + errors
    return seconds


def test_overhead_a_notebook(tree, benchmark):
    "A notebook's time, ours to papermill alone: between one notebook and NOTEBOOKS + 1, so that start-up cancels."
    one = {f.__name__: min(f(tree, 1) for _ in range(2)) for f in (alone, ours)}
    many = {f.__name__: min(f(tree, NOTEBOOKS + 1) for _ in range(2)) for f in (alone, ours)}
    assert tree.claims == [
        json.loads((tree.folder("coin", i) / "results.json").read_text())["claims"] for i in range(NOTEBOOKS + 1)
    ]
    each = {name: (many[name] - one[name]) / NOTEBOOKS for name in one}
    ratio = each["ours"] / each["alone"]
    benchmark.extra_info.update(
        ratio=round(ratio, 2),
        seconds_alone=round(each["alone"], 2),
        seconds_ours=round(each["ours"], 2),
        batch_ratio=round(many["ours"] / many["alone"], 2),
        start_s=round(one["ours"] - one["alone"], 2),
    )
    print(
        f"\na notebook: papermill alone {each['alone']:.2f} s, ours {each['ours']:.2f} s, ratio {ratio:.2f}; "
        f"a batch of {NOTEBOOKS + 1}: {many['ours'] / many['alone']:.2f}"
    )
    benchmark.pedantic(ours, args=(tree, 1), rounds=1)
    assert ratio <= 1.5
