"""Damaged files in every paper's own command: one line on stderr that begins with the file's name, exit code 2."""
import numpy as np
import pytest

from icl26.cli import main

LINES = [b'{"document": "a", "scores": [0.5], "label": true}\n'] * 3
DAMAGED = {
    "latin1": b'judge,human\n1,0\n{"question": "\xe9t\xe9"}\n',
    "utf16": "judge,human\n1,0\n".encode("utf-16"),
    "bytes": bytes(range(128, 256)) * 3 + b"\n",
    "nul": b"\0" * 64 + b"\n",
    "cut": b'judge,human\n1,0\n{"question": "a", "answers"',
    "deep": b"[" * 100_000 + b"\n",
    "second line": b"".join(LINES) + b"\xff\xfe\n",
}
COMMANDS = {
    "noisy_valid certify": ["noisy_valid", "certify", "FILE", "--alpha", "0.1"],
    "noisy_valid plan": ["noisy_valid", "plan", "--alpha", "0.1", "--failure-rate", "0.05", "--pilot", "FILE"],
    "logprob_audit check": ["logprob_audit", "check", "FILE"],
    "logprob_audit series": ["logprob_audit", "series", "FILE"],
    "maci calibrate": ["maci", "calibrate", "FILE", "--out", "OUT"],
    "maci apply": ["maci", "apply", "FILE", "FILE", "--out", "OUT"],
    "selfreflect": ["selfreflect", "FILE", "--judge", "bundled"],
    "odr fit": ["odr", "fit", "FILE", "--env", "Hopper-v5"],
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_file_is_named(command, damage, tmp_path, capsys):
    file, out = tmp_path / "mine", tmp_path / "out"
    file.write_bytes(DAMAGED[damage])
    assert main(["use", *(str({"FILE": file, "OUT": out}.get(word, word)) for word in COMMANDS[command])]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"icl26: error: {file}") and said.count("\n") == 1 and len(said) < 600, said
    assert not out.exists()


def test_a_flipped_byte_in_an_npz_is_named(tmp_path):
    "Wherever it is: the archive is read whole, or the file is named."
    from icl26.decision.odr.use import load_log

    rng, file, refused = np.random.default_rng(0), tmp_path / "log.npz", 0
    np.savez_compressed(file, s=rng.normal(size=(20, 3)), a=np.zeros((20, 1)), s_next=np.zeros((20, 3)), done=np.zeros(20, bool))
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ rng.integers(1, 256)]) + whole[place + 1 :])
        try:
            load_log(file)
        except ValueError as e:
            refused += str(e).startswith(f"{file}: ")
            assert str(e).startswith(f"{file}: "), (place, e)
    assert refused > 0.6 * len(whole)  # names in the archive may be others than ours
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="log.npz: not an .npz file"):
            load_log(file)


def test_a_log_that_no_fit_can_use_is_named(tmp_path, capsys):
    from icl26.decision.odr import robot_log

    log, file = robot_log("Hopper-v5", ["mass:torso"], np.array([3.6]), 30, seed=0), tmp_path / "log.npz"
    same, ten = np.repeat(log.s[:1], 30, 0), log.a[:, :2]
    for arrays, more, said in [
        (dict(s=same, a=log.a, s_next=same), [], "log.npz: the log holds one kind of step only"),
        (dict(s=log.s, a=log.a, s_next=log.s_next * 1e200), [], "log.npz: the log holds values above 1e100"),
        (dict(s=log.s, a=log.a, s_next=log.s_next), ["--method", "dropo", "--budget", "5", "--noise-sd", "1e-30"], "log.npz: the log and its noise leave"),
        (dict(s=log.s[:, :3], a=log.a, s_next=log.s_next[:, :3]), [], "log.npz: s has 3 columns"),
        (dict(s=log.s, a=ten, s_next=log.s_next), [], "log.npz: a has 2 columns"),
        (dict(s=log.s, a=log.a, s_next=log.s_next), ["--noise-sd", "1e-200"], "noise_sd must be positive and finite"),
    ]:
        np.savez(file, **arrays)
        assert main(["use", "odr", "fit", str(file), "--env", "Hopper-v5", "--params", "mass:torso", "--threads", "1", *more]) == 2
        err = capsys.readouterr().err
        assert said in err and err.startswith("icl26: error: ") and err.count("\n") == 1, err


@pytest.mark.parametrize("threads, error", [(0, ValueError), (-1, ValueError), (10**6, ValueError), (True, TypeError), (1.0, TypeError), ("2", TypeError)])
def test_fit_log_guards_its_threads(threads, error):
    from icl26.decision.odr import robot_log
    from icl26.decision.odr.use import fit_log

    log = robot_log("Hopper-v5", ["mass:torso"], np.array([3.6]), 5, seed=0)
    with pytest.raises(error, match="^threads must be"):
        fit_log(log, "Hopper-v5", ["mass:torso"], threads=threads)
