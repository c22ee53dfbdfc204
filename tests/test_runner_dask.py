"""The same runner on a real Dask scheduler with two worker processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from paper_tree import Tree, measure, until

pytest.importorskip("distributed")


class Cluster:
    "A scheduler and two workers, each a process."

    def __init__(self, tree: Tree):
        self.env = {**os.environ, "DASK_LOGGING__DISTRIBUTED": "error", "OMP_NUM_THREADS": "1"}
        self.folder, file = tree.root, tree.root / "scheduler.json"
        self.parts = [
            self.start("scheduler", "--port", "0", "--no-dashboard", "--no-show", "--scheduler-file", str(file))
        ]
        until(file.exists)
        self.parts += [
            self.start("worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-nanny", "--no-dashboard")
            for _ in "12"
        ]
        until(lambda: '"address"' in file.read_text())
        self.address = next(line.split('"')[3] for line in file.read_text().splitlines() if '"address"' in line)

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *words],
            env=self.env,
            cwd=self.folder,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kernels(self) -> list[psutil.Process]:
        "Kernels that the workers have started."
        found = [psutil.Process(p.pid).children(recursive=True) for p in self.parts[1:] if p.poll() is None]
        return [k for ks in found for k in ks if "ipykernel" in " ".join(k.cmdline())]

    def close(self) -> None:
        for p in reversed(self.parts):
            p.kill()
            p.wait(20)


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path)
    tree.cluster = Cluster(tree)
    yield tree
    tree.cluster.close()


def test_a_worker_killed_in_mid_run_and_an_interrupted_run(tree):
    slow = f"import time, os\nopen(rf'{tree.root}/pid-{{os.getppid()}}', 'w').close()\n"
    slow += f"while not os.path.exists(r'{tree.root}/go'): time.sleep(.1)"
    tree.paper("coin", measure("coin", before=slow))
    tree.paper("raises", "1 / 0")
    process = tree.start(seeds="0,1,2", scheduler=tree.cluster.address)
    until(lambda: len(list(tree.root.glob("pid-*"))) == 2, 90)  # both workers are in a notebook
    victim = tree.cluster.parts[1]
    victim.kill()
    (tree.root / "go").touch()
    said, errors = process.communicate(timeout=180)
    assert process.returncode == 1, said + errors
    assert all(tree.done("coin", seed) for seed in (0, 1, 2)), said + errors
    assert all("ZeroDivisionError" in tree.failure("raises", seed)["reason"] for seed in (0, 1, 2))
    assert "3 of 6 jobs failed" in said and "Traceback" not in said + errors
    tree.assert_nothing_left()
    until(lambda: not tree.cluster.kernels(), 10)

    # Ctrl-C: the kernel on the worker that is left ends, what was queued is cancelled, the cluster stays
    tree.paper("hangs", f"open(r'{tree.root}/hangs', 'w').close()\nimport time; time.sleep(3600)")
    process = tree.start("hangs", seeds="0,1,2", scheduler=tree.cluster.address)
    until((tree.root / "hangs").exists, 60)
    kernels, start = tree.cluster.kernels(), time.monotonic()
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors and time.monotonic() - start < 40, said + errors
    until(lambda: not tree.cluster.kernels() and not any(k.is_running() for k in kernels), 10)
    tree.assert_nothing_left()
    time.sleep(1)
    assert not tree.cluster.kernels() and tree.cluster.parts[2].poll() is None

    code, said, _ = tree.run("coin", seeds="0,1,2", scheduler=tree.cluster.address)
    assert code == 0 and "3 done and unchanged, 0 to run" in said
