"""How long a user waits before anything happens, beside an interpreter that does nothing.

    pytest benchmarks/bench_startup.py -s
"""
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from icl26.sandbox import isolation_level, run_python

COMMANDS = {
    "import icl26": [sys.executable, "-c", "import icl26"],
    "import icl26.sandbox": [sys.executable, "-c", "import icl26.sandbox"],
    "import icl26.repro": [sys.executable, "-c", "import icl26.repro"],
    "icl26 --version": [str(Path(sys.executable).with_name("icl26")), "--version"],
    "icl26 list": [str(Path(sys.executable).with_name("icl26")), "list"],
}
HEAVY = ("torch", "transformers", "pandas", "papermill", "scipy", "matplotlib")


def seconds(command) -> float:
    "Wall time of one run, in an empty folder, as a user of an installed package would start it."
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=60)
        return time.perf_counter() - start


def best_of(command, times=5) -> float:
    return min(seconds(command) for _ in range(times))


@pytest.mark.parametrize("name", COMMANDS)
def test_start(benchmark, name):
    bare, command = [sys.executable, "-c", "pass"], COMMANDS[name]
    seconds(command)  # once, so that byte code is compiled
    nothing, ours = best_of(bare), best_of(command)
    benchmark.pedantic(seconds, args=(command,), rounds=3)
    benchmark.extra_info["bare interpreters"] = round(ours / nothing, 2)
    print(f"\n{name}: {ours:.3f} s, {ours - nothing:.3f} s over a bare interpreter, {ours / nothing:.1f} times as long")


@pytest.mark.parametrize("module", ["icl26", "icl26.sandbox", "icl26.repro", "icl26.cli"])
def test_light_imports(module):
    "The reason why it is fast: nothing heavy is imported."
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    assert found.strip() == "[]", f"{module} imports {found}"


def test_sandbox_start(benchmark):
    "One sandboxed program beside one bare interpreter."
    assert run_python("print(1)").stdout == "1\n"
    nothing = best_of([sys.executable, "-c", "pass"])
    benchmark.pedantic(run_python, args=("pass",), rounds=5)
    ours = min(run_python("pass").wall_s for _ in range(5))
    benchmark.extra_info["bare interpreters"] = round(ours / nothing, 2)
    print(f"\nrun_python ({isolation_level()}): {ours:.3f} s, {ours / nothing:.1f} times a bare interpreter")
