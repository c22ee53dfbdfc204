"""What a finished job depends on: each edit runs exactly the jobs again that it concerns, and says why."""

import shutil

import pytest
from paper_tree import PARAMETERS, Tree, measure

import icl26


@pytest.fixture
def tree(tmp_path):
    "A checkout: a copy of the package with two more modules, a distribution that can be edited, and four papers."
    tree = Tree(tmp_path)
    source = icl26.__path__[0]
    shutil.copytree(
        source, tmp_path / "icl26", ignore=shutil.ignore_patterns("__pycache__", "notebooks", "results_data")
    )
    (tmp_path / "settings.ini").write_text("")
    games = tmp_path / "icl26/games"
    games.mkdir()
    (games / "__init__.py").write_text("")
    (games / "tools.py").write_text("def level():\n    return 1  # a comment\n")
    (games / "play.py").write_text("def play():\n    from .tools import level\n    return level()\n")
    (tmp_path / "dicelib.py").write_text("")
    pin(tree, "1.0")
    tree.env["PYTHONPATH"] = str(tmp_path)
    tree.paper("module", "from icl26.games.play import play", measure("module"))
    tree.paper("package", "import dicelib", measure("package"))
    folder = tree.paper(
        "data",
        measure("data", before="import hashlib\nrecord['data_hashes'] = {'rolls.csv': 'as recorded', 'drawn': 'abc'}"),
    )
    (folder / "rolls.csv").write_text("1,2,3")
    tree.paper("weights", parameters=PARAMETERS)
    return tree


def pin(tree: Tree, version: str) -> None:
    "Install `dicelib` in this version: its metadata, as a wheel leaves it."
    for old in tree.root.glob("dicelib-*.dist-info"):
        shutil.rmtree(old)
    info = tree.root / f"dicelib-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dicelib\nVersion: {version}\n")
    (info / "top_level.txt").write_text("dicelib\n")


def planned(tree: Tree, **options: object) -> dict[str, str]:
    "The jobs that would run, with their reasons."
    code, said, errors = tree.run(dry_run=True, **options)
    assert code == 0, errors
    return dict(line.strip().split(" smoke s0: ") for line in said.splitlines() if " smoke s0: " in line)


def test_each_edit_runs_what_depends_on_it(tree):
    code, said, errors = tree.run(jobs=2)
    assert code == 0, said + errors
    assert planned(tree) == {}

    tools = tree.root / "icl26/games/tools.py"
    kept = tools.read_text()
    tools.write_text(
        kept.replace("a comment", "another comment")
    )  # imported inside a function of a module that the notebook imports
    assert planned(tree) == {"module": "module icl26.games.tools changed"}
    tools.write_text(kept)
    assert planned(tree) == {}  # the content counts, not the time

    pin(tree, "1.1")
    assert planned(tree) == {"package": "package dicelib: 1.0 → 1.1"}
    pin(tree, "1.0")

    rolls = tree.nbs / "games/data/rolls.csv"
    rolls.write_text("1,2,4")
    assert planned(tree) == {"data": "data rolls.csv changed"}
    rolls.write_text("1,2,3")

    device = planned(tree, device="cpu")
    assert device == dict.fromkeys(["data", "module", "package", "weights"], "parameter device: 'auto' → 'cpu'")

    tree.paper("weights", measure("weights", after="# a cell's comment"))
    tree.paper(
        "data",
        measure("data", before="import hashlib\nrecord['data_hashes'] = {'rolls.csv': 'as recorded', 'drawn': 'abc'}"),
        front="Prose.",
    )
    assert planned(tree) == {"weights": "notebook changed"}  # prose does not count

    tools.write_text(kept + "# the end\n")
    code, said, _ = tree.run(jobs=2)
    assert code == 0 and "4 jobs: 2 done and unchanged, 2 to run" in said and said.count("1 reproduced") == 2
    assert planned(tree) == {}


def test_the_files_of_a_local_model_are_part_of_the_key(tree):
    model = tree.root / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    slugs = dict(slugs=["weights"], model=str(model))
    assert tree.run(**slugs)[0] == 0 and planned(tree, **slugs) == {}
    (model / "config.json").write_text('{"layers": 2}')
    assert planned(tree, **slugs) == {"weights": "model files changed"}
