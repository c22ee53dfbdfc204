"""Every fault that the batch runner must survive, made for real; after each, no process of the run is left."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from paper_tree import RECORD, WRITE, Tree, measure, until

from icl26.repro.papers import UsageError
from icl26.repro.runner import reproduce

# a regular expression that backtracks for ages inside C code and holds the interpreter's lock
IN_C = "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')"
SLEEPS = "import time; time.sleep(3600)"


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_notebooks_that_misbehave(tree):
    tree.paper("coin")
    tree.paper("raises", "def level(n):\n    return 1 / n\nlevel(0)")
    tree.paper("leaves", measure("leaves"), "import sys; sys.exit(0)", "1 + 1")
    tree.paper("silent", "1 + 1")
    tree.paper("untagged", tag="params")
    tree.paper("undeclared", parameters="profile = 'smoke'\nseed = 0\ndevice = 'auto'\nout_dir = None")
    tree.paper("other", RECORD % "other" + "record['parameters']['seed'] = 17" + WRITE)
    tree.paper("half", RECORD % "half" + "open(f'{out_dir}/results.json', 'w').write(json.dumps(record)[:200])")
    tree.paper("cut", RECORD % "cut" + "record['incomplete'] = 'the clock ran out'" + WRITE)
    code, said, errors = tree.run(jobs=2)
    failed = {
        slug: tree.failure(slug)
        for slug in ("raises", "leaves", "silent", "untagged", "undeclared", "other", "half", "cut")
    }
    status = {slug: f["status"] for slug, f in failed.items()}
    assert code == 1 and tree.done("coin") and not any(tree.done(slug) for slug in failed), errors
    assert status == {
        "raises": "failed",
        "leaves": "incomplete",
        "silent": "incomplete",
        "untagged": "refused",
        "undeclared": "refused",
        "other": "invalid",
        "half": "invalid",
        "cut": "incomplete",
    }
    says = {
        "raises": "ZeroDivisionError",
        "leaves": "stopped in code cell 4 of 5; did it call sys.exit?",
        "silent": "wrote no results.json",
        "untagged": "no cell is tagged 'parameters'",
        "undeclared": "does not declare the parameter 'model'",
        "other": "parameter seed: 17 → 0",
        "half": "not valid JSON",
        "cut": "the clock ran out",
    }
    for slug, words in says.items():
        assert words in failed[slug]["reason"] and f"{slug} smoke s0: {status[slug].upper()}" in said
    assert "level(0)" in failed["raises"]["traceback"] and (tree.folder("raises") / "notebook.ipynb").exists()
    assert "8 of 9 jobs failed" in said and "Traceback" not in errors


def test_notebooks_that_hang(tree):
    tree.paper("sleeps", SLEEPS)
    tree.paper("inside", IN_C)
    code, said, _ = tree.run(jobs=2, timeout=6)
    assert code == 1 and [tree.failure(s)["status"] for s in ("sleeps", "inside")] == ["timeout", "timeout"]
    assert said.count("TIMEOUT: ran longer than 6 s") == 2 and (tree.folder("inside") / "notebook.ipynb").exists()


def test_kernels_that_die_eat_memory_or_leave_programs(tree):
    tree.paper("coin")
    tree.paper("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    tree.paper("crashes", "import ctypes; ctypes.string_at(0)")
    tree.paper("eats", "x = bytearray(4 * 2**30)")
    tree.paper(
        "leaves",
        measure(
            "leaves", after="import subprocess\nsubprocess.Popen(['sleep', '3611'], start_new_session=True, env={})"
        ),
    )
    code, said, errors = tree.run(jobs=2, memory=2)
    status = {s: tree.failure(s)["status"] for s in ("killed", "crashes", "eats")}
    assert code == 1 and tree.done("coin") and tree.done("leaves"), (said, errors)
    assert status == {"killed": "died", "crashes": "died", "eats": "memory"}, said
    assert "SIGKILL" in tree.failure("killed")["reason"] and "SIGSEGV" in tree.failure("crashes")["reason"]
    assert "Segmentation fault" in tree.failure("crashes")["traceback"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "3611"]]


def test_a_worker_killed_by_its_notebook(tree):
    once = tree.root / "once"
    tree.paper("coin")
    tree.paper(
        "kills-once",
        measure(
            "kills-once",
            before=f"""
import os, pathlib, signal, time
if not pathlib.Path({str(once)!r}).exists():
    pathlib.Path({str(once)!r}).touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
""",
        ),
    )
    tree.paper("kills-always", "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)")
    code, said, errors = tree.run(jobs=1)
    assert code == 1 and tree.done("coin") and tree.done("kills-once"), (said, errors)
    assert tree.failure("kills-always")["status"] == "lost" and "its worker process died 3 times" in said
    assert said.count("coin smoke s0: 1 reproduced") == 1  # finished before, and not run again


def test_an_output_folder_that_cannot_be_written(tree):
    tree.paper("coin")
    tree.paper("dice")
    blocked = tree.root / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="out: cannot write to"):
        reproduce(["coin"], out=blocked / "runs", nbs=tree.nbs)
    (tree.out / "games").mkdir(parents=True)
    (tree.out / "games/coin").write_text("not a folder")  # root, too, cannot write below a file
    code, said, errors = tree.run(jobs=2)
    assert (
        code == 1
        and tree.done("dice")
        and "coin smoke s0: FAILED: cannot write to" in said
        and "Traceback" not in said + errors
    )


FULL = """
mount -t tmpfs -o size={size} tmpfs "$1" || exit 77
shift
exec "$@"
"""


def on_small_disk(tree: Tree, size: str, *slugs: str) -> subprocess.CompletedProcess:
    "A run whose output folder is a small file system of its own; skips where such a thing may not be mounted."
    tree.out.mkdir()
    (tree.root / "driver.py").write_text("import shutil, sys\n" + DRIVER_KEEPS)
    request = json.dumps({"slugs": slugs, "out": str(tree.out), "nbs": str(tree.nbs), "jobs": 1})
    unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
    result = subprocess.run(
        [
            *unshare,
            "sh",
            "-c",
            FULL.format(size=size),
            "sh",
            str(tree.out),
            sys.executable,
            str(tree.root / "driver.py"),
            request,
            str(tree.root / "kept"),
        ],
        env=tree.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip(f"no private mounts here: {result.stderr.strip()}")
    tree.assert_nothing_left()
    return result


DRIVER_KEEPS = """
import json
from icl26.repro.runner import reproduce
if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    code = reproduce(**request)
    shutil.copytree(request["out"], sys.argv[2])  # the small disk ends with this process
    sys.exit(code)
"""


def test_a_disk_that_fills_up(tree):
    tree.paper(
        "big",
        "from pathlib import Path",
        measure("big", before="open(f'{out_dir}/data', 'wb').write(bytes(4 * 2**20))"),
    )
    tree.paper("coin")
    result = on_small_disk(tree, "1m")
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "big smoke s0: FAILED" in result.stdout and "No space left on device" in result.stdout
    assert "coin smoke s0: 1 reproduced" in result.stdout
    assert (tree.root / "kept/games/coin/smoke-s0/results.json").exists()


def test_ctrl_c_a_second_run_and_going_on(tree):
    tree.paper("acoin")
    for slug in ("sleeps", "inside"):
        tree.paper(slug, f"open(r'{tree.root}/{slug}', 'w').close()\n" + {"sleeps": SLEEPS, "inside": IN_C}[slug])
    process = tree.start(jobs=2)
    until(lambda: tree.done("acoin") and any((tree.root / s).exists() for s in ("sleeps", "inside")))

    with pytest.raises(UsageError, match="another run is using this folder .process"):  # the second run refuses
        reproduce(["acoin"], out=tree.out, nbs=tree.nbs)

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: every process of the group
    start = time.monotonic()
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # an impatient user
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in errors, errors
    assert time.monotonic() - start < 40
    tree.assert_nothing_left()
    assert tree.done("acoin") and (tree.out / "report.html").exists()
    assert not tree.folder("sleeps").exists() and not tree.folder("inside").exists()
    assert not list(tree.out.glob(".stop-*")) and not (tree.out / ".run").exists()
    code, said, _ = tree.run("acoin")
    assert code == 0 and "1 done and unchanged, 0 to run" in said


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_runner_that_is_ended(tree, signum, code):
    tree.paper("coin")
    for slug in ("sleeps", "inside"):
        tree.paper(slug, f"open(r'{tree.root}/{slug}', 'w').close()\n" + {"sleeps": SLEEPS, "inside": IN_C}[slug])
    process = tree.start("sleeps", "inside", jobs=2)
    until(lambda: any((tree.root / s).exists() for s in ("sleeps", "inside")))
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == code
    until(lambda: not tree.processes(), 20)
    assert tree.run("coin")[0] == 0  # the lock is free again, and what was half-written is swept away
