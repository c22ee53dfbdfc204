"""How long the package and its command take to start, beside a bare interpreter."""
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "import icl26": [sys.executable, "-c", "import icl26"],
    "icl26 list": [Path(sys.executable).with_name("icl26"), "list"],
    "icl26 --help": [Path(sys.executable).with_name("icl26"), "--help"],
}


def seconds(args, repeats=5):
    "The least wall time of some runs: what the command needs when nothing is in its way."
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(args, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return min(times)


def test_start_up(benchmark):
    for args in COMMANDS.values():                                 # files into memory, bytecode onto disk
        subprocess.run(args, stdout=subprocess.DEVNULL, check=True)
    took = {name: seconds(args) for name, args in COMMANDS.items()}
    benchmark.extra_info |= {f"{name}, times a bare interpreter": round(t / took["python"], 2) for name, t in took.items()}
    benchmark.pedantic(subprocess.run, (COMMANDS["icl26 list"],), {"stdout": subprocess.DEVNULL}, rounds=5)
    for name, t in took.items():
        print(f"{name:<14} {t:6.3f} s  {t / took['python']:5.2f} x")
    assert took["import icl26"] - took["python"] < 0.3
    assert took["icl26 list"] < 1.5
