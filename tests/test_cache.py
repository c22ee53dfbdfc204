"""`cached` when processes compete, are killed, or find damage; the page 02_cache shows the rest."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from icl26.repro.cache import cache_log, cached, entry_name


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


SLOW = """
import os, sys, time
from icl26.repro.cache import cached, cache_log
def build():
    open(os.path.join(sys.argv[1], f"started-{os.getpid()}"), "w").close()
    time.sleep(float(sys.argv[2]))
    return os.getpid()
print(cached({"slow": 1}, build), cache_log()["builds"], cache_log()["hits"])
"""


def start(folder, seconds: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SLOW, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)


def test_four_processes_build_once(tmp_path):
    processes = [start(tmp_path, 1) for _ in range(4)]
    said = [p.communicate(timeout=60)[0].split() for p in processes]
    assert len({pid for pid, _, _ in said}) == 1 and len(list(tmp_path.glob("started-*"))) == 1
    assert sorted((builds, hits) for _, builds, hits in said) == [("0", "1")] * 3 + [("1", "0")]


def test_a_builder_that_is_killed_leaves_nothing_and_no_lock(tmp_path, folder):
    first = start(tmp_path, 60)
    while not list(tmp_path.glob("started-*")):
        time.sleep(0.05)
    second = start(tmp_path, 0)  # waits for the lock
    time.sleep(0.3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert second.communicate(timeout=30)[0].split()[1:] == ["1", "0"]
    assert len(list(folder.rglob("value.json"))) == 1 and not list(folder.rglob("*.part"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda value, entry: value.write_bytes(b""),
        lambda value, entry: value.write_bytes(value.read_bytes()[:-3]),
        lambda value, entry: value.unlink(),
        lambda value, entry: entry.unlink(),
        lambda value, entry: entry.write_text(entry.read_text()[:20]),
        lambda value, entry: entry.write_text("[]"),
    ],
)
def test_damage_is_built_again(folder, damage):
    calls = []
    build = lambda: calls.append(1) or {"x": np.arange(5)}
    cached({"a": 1}, build, kind="npz")
    (value,), (entry,) = folder.rglob("value.npz"), folder.rglob("entry.json")
    damage(value, entry)
    again = cached({"a": 1}, build, kind="npz")
    assert len(calls) == 2 and again["x"].tolist() == [0, 1, 2, 3, 4]
    assert cached({"a": 1}, build, kind="npz")["x"].tolist() == [0, 1, 2, 3, 4] and len(calls) == 2


def test_code_that_changes_is_another_entry(tmp_path, monkeypatch):
    module = tmp_path / "some_code.py"
    module.write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import some_code

    names = {entry_name({"a": 1}, "json", [some_code])}
    module.write_text("def f():\n    return 2\n")
    import linecache

    linecache.checkcache(str(module))
    names |= {entry_name({"a": 1}, "json", [some_code]), entry_name({"a": 1}, "json"), entry_name({"a": 2}, "json")}
    assert len(names) == 4


def test_the_entry_says_what_it_is(folder):
    cached({"model": "tiny", "seed": 3}, lambda: [1.5, None, "ä"])
    entry = json.loads(next(folder.rglob("entry.json")).read_text())
    assert entry["key"] == {"model": "tiny", "seed": 3} and entry["kind"] == "json" and len(entry["sha256"]) == 64
    assert cached({"seed": 3, "model": "tiny"}, lambda: pytest.fail("built again")) == [1.5, None, "ä"]


def test_seconds_of_builds_inside_builds_count_once():
    before = cache_log()

    def inner():
        time.sleep(0.5)
        return 1

    cached({"outer": 1}, lambda: [cached({"inner": 1}, inner), cached({"inner": 2}, inner)])
    now = cache_log()
    assert now["builds"] - before["builds"] == 3 and 1 <= now["build_s"] - before["build_s"] < 1.8


def test_a_pickle_is_never_written_or_read(folder):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "owned"),)

    with pytest.raises(TypeError):
        cached({"a": 1}, lambda: {"x": np.array([Evil()], dtype=object)}, kind="npz")
    with pytest.raises(TypeError):
        cached({"a": 2}, lambda: Evil())
    assert not list(folder.rglob("value.*")) and not (folder / "owned").exists()
