"""The sandbox at each of its levels, against programs that misbehave for real."""
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from icl26 import sandbox
from icl26.sandbox import Limits, isolation_level, run_command, run_python

LEVELS = ("bwrap", "namespaces", "rlimits")


@pytest.fixture(params=LEVELS)
def level(request):
    "Each level in turn; one that this machine does not offer is skipped by name."
    if request.param != "rlimits" and not sandbox._works(request.param):
        pytest.skip(f"{request.param} does not work on this machine")
    return request.param


@pytest.fixture
def mark():
    "A word to put on a command line, so that a surviving process can be found."
    return f"mark{uuid.uuid4().hex}"


def alive(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid(): continue
        try: line, state = (entry / "cmdline").read_bytes(), (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError: continue  # ended while we looked
        if mark.encode() in line and state != "Z": found.append(int(entry.name))
    return found


def assert_gone(mark: str, within: float = 2.0):
    end = time.monotonic() + within
    while (left := alive(mark)) and time.monotonic() < end: time.sleep(0.05)
    assert not left, f"processes {left} survived"


def test_strongest_level_is_used():
    strongest = next(name for name in LEVELS if name == "rlimits" or sandbox._works(name))
    assert isolation_level() == strongest == run_python("").isolation


def test_level_is_what_was_asked_for(level):
    assert run_python("print(1)", _isolation=level).isolation == level
    with pytest.raises(ValueError, match="_isolation must be one of"): run_python("", _isolation="chroot")


def test_weaker_level_without_the_tools(monkeypatch):
    "With neither bwrap nor unshare on the path the level is rlimits, and commands without a network are refused."
    monkeypatch.setenv("PATH", "/nonexistent")
    sandbox._works.cache_clear()
    try:
        assert isolation_level() == "rlimits" and run_python("print(7)").stdout == "7\n"
        with pytest.raises(RuntimeError, match="install bubblewrap"): run_command(["true"], workdir=".")
    finally:
        monkeypatch.undo()
        sandbox._works.cache_clear()


# time ---------------------------------------------------------------------------------------------------------------

def test_endless_loop(level, mark):
    done = run_python("print('on it')\nwhile True: pass", args=[mark], limits=Limits(wall_s=0.6), _isolation=level)
    assert done.killed_by == "wall" and done.returncode is None and done.timed_out and done.stdout == "on it\n"
    assert done.wall_s < 5
    assert_gone(mark)


def test_loop_that_ignores_signals(level, mark):
    code = "import signal, time\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
    code += "time.sleep(60)"
    done = run_python(code, args=[mark], limits=Limits(wall_s=0.6), _isolation=level)
    assert done.killed_by == "wall"
    assert_gone(mark)


@pytest.mark.parametrize("ignore", ["", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"])
def test_cpu_limit(level, ignore):
    done = run_python(ignore + "while True: pass", limits=Limits(cpu_s=1, wall_s=30), _isolation=level)
    assert done.killed_by == "cpu" and done.returncode in (-24, -9)


def test_cpu_burn_in_a_child(level, mark):
    code = f"""
        import subprocess, sys
        child = subprocess.run([sys.executable, "-c", "while True: pass", "{mark}"])
        print(child.returncode)
        """
    done = run_python(textwrap.dedent(code), limits=Limits(cpu_s=1, wall_s=30), _isolation=level)
    assert done.stdout == "-24\n" and done.ok  # the child met its own limit; the program saw it and went on
    assert_gone(mark)


# processes ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_no_grandchild_survives(level, mark, own_session, waits):
    "A sleeping grandchild dies with the sandbox: after a normal end, at a limit, and even in a session of its own."
    new = f"start_new_session={own_session}"
    code = f"""
        import subprocess, sys, time
        nested = "import subprocess, sys, time; "
        nested += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', '{mark}'], **dict({new})); "
        nested += "print('up', flush=True); time.sleep({99 if waits else 0})"
        p = subprocess.Popen([sys.executable, "-c", nested], stdout=subprocess.PIPE, {new})
        print(p.stdout.readline().decode().strip())
        if {waits}: time.sleep(99)
        """
    done = run_python(textwrap.dedent(code), limits=Limits(wall_s=3), _isolation=level)
    assert done.stdout == "up\n"
    assert done.killed_by == ("wall" if waits else None), done
    assert_gone(mark)


def test_grandchild_that_holds_the_pipe_does_not_delay(level, mark):
    code = f"import subprocess\nsubprocess.Popen(['sleep', '99', '{mark}'][:2])\nprint('done')"
    done = run_python(code, limits=Limits(wall_s=30), _isolation=level)
    assert done.ok and done.stdout == "done\n" and done.wall_s < 10


@pytest.mark.parametrize("seen", [2, 3])  # the launcher is there, or already the program
def test_caller_killed(level, mark, seen):
    "When the calling process is killed, nobody is left to end the program; it ends by itself soon after its limit."
    code = f"from icl26.sandbox import *; run_python('import time; time.sleep(99)', args=['{mark}'], " \
           f"limits=Limits(wall_s=1), _isolation='{level}')"
    caller = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 20
    while len(alive(mark)) < seen and time.monotonic() < end: time.sleep(0.02)
    assert len(alive(mark)) >= seen
    caller.kill()
    caller.wait()
    assert_gone(mark, within=15)


def test_orphans_do_not_answer_for_the_program(level):
    "An orphan is reaped by the launcher; its exit code is not the program's."
    code = """
        import os, time
        if os.fork() == 0:
            if os.fork() == 0: time.sleep(0.1); os._exit(3)
            os._exit(0)
        os.wait(); time.sleep(0.4); raise SystemExit(7)
        """
    assert run_python(textwrap.dedent(code), _isolation=level).returncode == 7


def test_program_that_kills_its_launcher(level, mark):
    "Then nobody sweeps up any more; the process group still goes."
    code = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(99)"
    done = run_python(code, args=[mark], limits=Limits(wall_s=3), _isolation=level)
    assert not done.ok and done.returncode is None
    assert_gone(mark)


def test_interrupt_ends_the_program(level, mark, monkeypatch):
    def interrupted(*_): raise KeyboardInterrupt
    monkeypatch.setattr(sandbox._Streams, "pump", interrupted)
    with pytest.raises(KeyboardInterrupt): run_python("import time; time.sleep(99)", args=[mark], _isolation=level)
    assert_gone(mark)


def test_many_threads(level):
    "Concurrent runs do not mix up pipes or reports."
    def one(i): return run_python(f"import sys; print({i}); sys.exit({i})", _isolation=level, limits=Limits(wall_s=60))
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(6) as pool: done = list(pool.map(one, range(24)))
    assert [d.returncode for d in done] == list(range(24)) and [d.stdout for d in done] == [f"{i}\n" for i in range(24)]
    assert len(os.listdir("/proc/self/fd")) <= before and threading.active_count() < 6


# memory, files, output ----------------------------------------------------------------------------------------------

def test_allocation_of_4_gb(level):
    done = run_python("x = bytearray(4 << 30)", _isolation=level)
    assert done.killed_by == "memory" and done.returncode == 1 and done.stderr.rstrip().endswith("MemoryError")
    done = run_python("import numpy as np; np.ones((1 << 29,))", _isolation=level)
    assert done.killed_by == "memory" and "MemoryError" in done.stderr
    assert run_python("x = bytearray(1 << 28)", _isolation=level).ok


def test_segfault_is_not_a_success(level):
    done = run_python("import ctypes; ctypes.string_at(0)", _isolation=level)
    assert done.returncode == -11 and done.killed_by == "memory" and not done.ok


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_print(level, stream, mark):
    code = f"import sys\nwhile True: print('x' * 1000, file=sys.{stream})"
    done = run_python(code, args=[mark], limits=Limits(output_kb=16), _isolation=level)
    assert done.killed_by == "output" and done.returncode is None
    assert len(getattr(done, stream)) == 16 << 10
    assert_gone(mark)


def test_output_at_the_limit_is_kept(level):
    done = run_python("print('x' * 4095)", limits=Limits(output_kb=4), _isolation=level)
    assert done.ok and len(done.stdout) == 4096


def test_file_size(level, tmp_path):
    code = "open('big', 'wb').write(b'x' * (3 << 20))"
    done = run_python(code, limits=Limits(file_mb=1), workdir=tmp_path, _isolation=level)
    assert done.returncode == 1 and "File too large" in done.stderr and (tmp_path / "big").stat().st_size <= 1 << 20


def test_bytes_that_are_not_utf8(level):
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\xfeok'); sys.stderr.buffer.write(b'\\x80')"
    done = run_python(code, _isolation=level)
    assert done.stdout == "\ufffd\ufffdok" and done.stderr == "\ufffd"


def test_input_that_nobody_reads(level):
    assert run_python("print(1)", stdin="x" * 5_000_000, _isolation=level).ok
    assert run_python("print(len(input()))", stdin="ä" * 100_000, _isolation=level).stdout == "100000\n"


# what gets in and out -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [0, 1, 2, 77, 127, 137, 139, 255])
def test_exit_code(level, code):
    done = run_python(f"raise SystemExit({code})", _isolation=level)
    assert done.returncode == code and done.killed_by is None and done.ok == (code == 0)


def test_signals(level):
    for number in (6, 15):
        done = run_python(f"import os; os.kill(os.getpid(), {number})", _isolation=level)
        assert done.returncode == -number and done.killed_by is None


def test_secrets_stay_outside(level, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-value")
    monkeypatch.setenv("PYTHONPATH", "/secret-path")
    code = "import os, subprocess; print(dict(os.environ)); subprocess.run(['env'])\nimport sys; print(sys.path)"
    done = run_python(code, _isolation=level)
    assert done.ok and "secret" not in done.stdout and "PYTHONHASHSEED" in done.stdout
    network = Limits(network=True)
    shown = run_command(["env"], workdir=".", limits=network, env={"MINE": "here"}, _isolation=level).stdout
    assert "secret" not in shown and "MINE=here\n" in shown and "LANG=C.UTF-8\n" in shown


def test_nothing_open_but_the_standard_streams(level):
    "The program cannot write into the launcher's report."
    done = run_python("import os\nprint(os.listdir('/proc/self/fd'))", _isolation=level)
    assert done.stdout == "['0', '1', '2', '3']\n"  # 3 is the listing itself


def test_hashes_are_fixed(level):
    assert len({run_python("print(hash('a'))", _isolation=level).stdout for _ in range(3)}) == 1


DIAL = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2)
print("through")
"""


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server: yield str(server.getsockname()[1])


def test_loopback(level, port, tmp_path):
    assert run_python(DIAL, args=[port], limits=Limits(network=True), _isolation=level).stdout == "through\n"
    refused = run_python(DIAL, args=[port], _isolation=level)
    assert refused.returncode == 1 and "through" not in refused.stdout
    (tmp_path / "dial.py").write_text(DIAL)
    command = dict(cmd=[sys.executable, "dial.py", port], workdir=tmp_path, _isolation=level)
    assert run_command(**command, limits=Limits(network=True)).stdout == "through\n"
    if level == "rlimits":
        with pytest.raises(RuntimeError, match="install bubblewrap"): run_command(**command)
    else:
        assert "through" not in run_command(**command).stdout
        nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {DIAL!r}, '{port}'])"
        assert "through" not in run_python(nested, _isolation=level).stdout


@pytest.mark.parametrize("call", [
    "socket.socket().bind(('127.0.0.1', 0))", "socket.socket().connect_ex(('127.0.0.1', 9))",
    "socket.getaddrinfo('localhost', 80)", "socket.gethostbyname('localhost')",
    "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"])
def test_audit_hook_refuses(call):
    code = f"import socket\n{call}"
    done, allowed = (run_python(code, limits=Limits(network=on), _isolation="rlimits") for on in (False, True))
    assert done.returncode == 1 and "\nPermissionError: no network in the sandbox" in done.stderr
    assert "PermissionError" not in allowed.stderr


def test_local_sockets_work(level):
    "Pipes, socket pairs and worker processes are not the network."
    code = """
        import multiprocessing, socket
        def square(x): return x * x
        if __name__ == "__main__":
            a, b = socket.socketpair(); a.sendall(b"hi"); print(b.recv(2))
            for how in ("fork", "spawn"):
                with multiprocessing.get_context(how).Pool(2) as pool: print(pool.map(square, [1, 2, 3]))
        """
    done = run_python(textwrap.dedent(code), limits=Limits(wall_s=60), _isolation=level)
    assert done.ok and done.stdout == "b'hi'\n[1, 4, 9]\n[1, 4, 9]\n", done


# files --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a/../x", "..", ".", "", "a/..", "nul\0x"])
def test_file_names_that_leave(name, tmp_path):
    with pytest.raises(ValueError, match="files must stay inside"):
        run_python("", files={"good": "1", name: "x"}, workdir=tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == [] and [p.name for p in tmp_path.iterdir()] == ["in"]


def test_link_that_leaves(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="files must stay inside"):
        run_python("", files={"link/x": ""}, workdir=tmp_path / "in")


def test_files_and_folders(level, tmp_path):
    files = {"pkg/__init__.py": "", "pkg/part.py": "X = 5", "data.bin": b"\x00\xff"}
    code = "from pkg.part import X\nprint(X, open('data.bin', 'rb').read())\nopen('made', 'w').write('y')"
    done = run_python(code, files=files, workdir=tmp_path, _isolation=level)
    assert done.stdout == "5 b'\\x00\\xff'\n" and (tmp_path / "made").read_text() == "y"
    assert (tmp_path / "main.py").exists()
    with pytest.raises(ValueError, match="must not hold main.py"): run_python("", files={"./main.py": ""})


def test_temporary_folder_is_removed(level, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os\nos.mkdir('a'); open('a/b', 'w').close(); os.chmod('a', 0)\nprint(os.getcwd())"
    done = run_python(code, _isolation=level)
    assert done.stdout.startswith(str(tmp_path)) and list(tmp_path.iterdir()) == []


def test_outside_is_read_only_under_bwrap(tmp_path):
    if not sandbox._works("bwrap"): pytest.skip("bubblewrap does not work on this machine")
    (tmp_path / "kept").write_text("before")
    done = run_python(f"open({str(tmp_path / 'kept')!r}, 'w')", _isolation="bwrap")
    assert done.returncode == 1 and "Read-only file system" in done.stderr
    assert (tmp_path / "kept").read_text() == "before"


def test_traceback_is_the_programs_own(level):
    files = {"helper.py": "def f(): raise KeyError('k')"}
    lines = run_python("import helper\nhelper.f()", files=files, _isolation=level).stderr
    assert "<string>" not in lines and 'File "main.py", line 2' in lines and lines.rstrip().endswith("KeyError: 'k'")


# calls --------------------------------------------------------------------------------------------------------------

def test_bad_calls(tmp_path):
    network = Limits(network=True)
    for cmd, error, text in [("ls", TypeError, "cmd must be a list"), (["ls", 3], TypeError, "cmd must be a list"),
                             (["ls", b"x"], TypeError, "cmd must be a list"), ([], ValueError, "cmd must name")]:
        with pytest.raises(error, match=text): run_command(cmd, workdir=tmp_path, limits=network)
    with pytest.raises(ValueError, match="workdir must be an existing folder"):
        run_command(["ls"], workdir=tmp_path / "no")
    with pytest.raises(TypeError, match="args must be a list"): run_python("", args="abc")
    with pytest.raises(TypeError, match="code must be a string"): run_python(None)
    for field, value in [("wall_s", -1), ("cpu_s", 0), ("memory_mb", 1.5), ("output_kb", float("inf")),
                         ("file_mb", float("nan"))]:
        with pytest.raises(ValueError, match=field): Limits(**{field: value})
    with pytest.raises(TypeError, match="memory_mb"): Limits(memory_mb=True)


def test_commands_that_do_not_start(level, tmp_path):
    (tmp_path / "plain.txt").write_text("no program")
    run = lambda name: run_command([name], workdir=tmp_path, limits=Limits(network=True), _isolation=level)
    assert run("no-such-program").returncode == 127 and "no-such-program" in run("no-such-program").stderr
    assert run(str(tmp_path / "plain.txt")).returncode == 126


def test_sandbox_that_cannot_start(monkeypatch):
    monkeypatch.setattr(sandbox, "_wrapper", lambda *_: ["false"])
    with pytest.raises(RuntimeError, match="could not start"): run_python("print(1)", _isolation="namespaces")


def test_start_up_cost(level, record_property):
    "Printed (pytest -s), not asserted: the target is 150 ms without bubblewrap on an idle machine."
    bare = min(timed(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True)) for _ in range(5))
    ours = min(timed(lambda: run_python("pass", _isolation=level)) for _ in range(5))
    record_property("start_up_ms", round(1000 * ours))
    print(f"{level}: {1000 * ours:.0f} ms, a bare interpreter: {1000 * bare:.0f} ms")
    assert run_python("pass", _isolation=level).wall_s > 0


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_import_is_light():
    heavy = ("numpy", "scipy", "torch", "pandas", "matplotlib")
    code = f"import sys, icl26.sandbox; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


@pytest.mark.parametrize("field, value, error", [
    ("wall_s", "10", TypeError), ("cpu_s", None, TypeError), ("memory_mb", True, TypeError), ("file_mb", [64], TypeError),
    ("output_kb", 1j, TypeError), ("network", "no", TypeError), ("network", 1, TypeError), ("network", None, TypeError),
    ("wall_s", float("nan"), ValueError), ("cpu_s", -1, ValueError), ("memory_mb", 0, ValueError), ("file_mb", 0.5, ValueError),
    ("wall_s", 1e300, ValueError), ("memory_mb", 10**400, ValueError), ("output_kb", float("inf"), ValueError)])
def test_limits_of_odd_types(field, value, error):
    with pytest.raises(error, match=f"^{field} "): Limits(**{field: value})


def test_the_largest_limits_run(level):
    "What Limits accepts the kernel accepts, too."
    most = Limits(wall_s=1e9, cpu_s=10**9, memory_mb=10**9, file_mb=10**9, output_kb=10**9)
    assert run_python("print(1)", limits=most, _isolation=level).stdout == "1\n"


@pytest.mark.parametrize("how, error", [
    (dict(args=[1]), TypeError), (dict(args=[b"x"]), TypeError), (dict(args=[None]), TypeError), (dict(args=3), TypeError),
    (dict(args={"a": 1}), TypeError), (dict(args=["a\0b"]), ValueError), (dict(args=["\ud800"]), ValueError),
    (dict(stdin=b"21"), TypeError), (dict(stdin=None), TypeError), (dict(stdin="\ud800"), ValueError),
    (dict(limits={"wall_s": 1}), TypeError), (dict(limits=None), TypeError), (dict(limits=5), TypeError),
    (dict(files=["a"]), TypeError), (dict(files={3: "x"}), TypeError), (dict(files={"a": 3}), TypeError),
    (dict(workdir=3), TypeError), (dict(workdir=""), ValueError), (dict(workdir=__file__), ValueError), (dict(workdir="a\0b"), ValueError)])
def test_arguments_of_odd_types(how, error):
    "Before anything runs: a TypeError or ValueError that begins with the argument's name."
    (name,) = how
    with pytest.raises(error, match=f"^{name} must"): run_python("print(1)", **how)


@pytest.mark.parametrize("how, error", [
    (dict(cmd=3), TypeError), (dict(cmd={"ls"}), TypeError), (dict(cmd=["ls", "\0"]), ValueError), (dict(env="A=1"), TypeError),
    (dict(env={"A": 1}), TypeError), (dict(env={"A=B": "1"}), ValueError), (dict(env={"": "1"}), ValueError),
    (dict(env={"A": "\0"}), ValueError), (dict(workdir=None), TypeError), (dict(limits="fast"), TypeError), (dict(stdin=1), TypeError)])
def test_arguments_of_commands(tmp_path, how, error):
    (name,) = how
    with pytest.raises(error, match=f"^{name}"): run_command(**dict(cmd=["ls"], workdir=tmp_path, limits=Limits(network=True)) | how)


def test_paths_are_arguments(tmp_path, level):
    "Paths count as strings in cmd and args, in a tuple as in a list."
    done = run_python("import sys; print(sys.argv[1:])", args=(tmp_path, "x"), _isolation=level)
    assert done.stdout == f"{[str(tmp_path), 'x']}\n", done
