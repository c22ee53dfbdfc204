"What the tests of the papers share: a run that is made once, the server that stands in for a model, the comparison of intervals."
import json
import threading
import urllib.error
import urllib.request

import pytest
from papers import chat_server, once, plain_signature, printed
from recompute import agrees, made_up, mean_again, t_by_hand, wilson_by_hand

from icl26.stats import t_interval, wilson


class Base:
    "What `once` asks of pytest's factory."

    def __init__(self, folder):
        self.getbasetemp = lambda: folder


def test_what_is_made_once_is_shared_by_threads_and_workers(tmp_path, monkeypatch):
    calls = []

    def make(folder):
        calls.append(folder)
        (folder / "x").write_text("made")
        return folder / "x"

    found = []
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    workers = [threading.Thread(target=lambda k=k: found.append(once("a", Base(tmp_path / f"popen-gw{k}"), make))) for k in (0, 1, 0, 1)]
    [w.start() for w in workers], [w.join() for w in workers]
    assert len(calls) == 1 and len(set(found)) == 1 and found[0].read_text() == "made" and found[0].is_relative_to(tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert once("a", Base(tmp_path / "alone"), make).is_relative_to(tmp_path / "alone") and len(calls) == 2


def test_what_fails_once_fails_for_all_with_its_output(tmp_path):
    calls = []

    def make(folder):
        calls.append(folder)
        raise AssertionError("exit code 1\nwhat the command printed")

    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match="b: AssertionError: exit code 1\nwhat the command printed"):
            once("b", Base(tmp_path), make)
    assert len(calls) == 1


def test_what_a_killed_worker_left_is_made_again(tmp_path):
    def killed(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once("c", Base(tmp_path), killed)
    assert list(once("c", Base(tmp_path), lambda folder: folder).iterdir()) == []


def ask(chat, **body):
    request = urllib.request.Request(f"{chat.url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def test_the_server_answers_and_keeps_what_it_was_asked():
    answers = {"text": "yes", "choice": {"message": {"content": "no"}, "finish_reason": "length"}, "choices": [{"text": "a"}, {"text": "b"}], "refused": 429}
    with chat_server(lambda body: answers[body["model"]]) as chat:
        assert [c["message"]["content"] for c in ask(chat, model="text", n=3)["choices"]] == ["yes"] * 3
        assert ask(chat, model="choice")["choices"] == [{"index": 0, "finish_reason": "length", "message": {"content": "no"}}]
        assert [(c["index"], c["text"]) for c in ask(chat, model="choices")["choices"]] == [(0, "a"), (1, "b")]
        with pytest.raises(urllib.error.HTTPError, match="429"):
            ask(chat, model="refused")
    assert [b["model"] for b in chat.asked] == ["text", "choice", "choices", "refused"] and chat.asked[0]["n"] == 3
    with pytest.raises(urllib.error.URLError):
        ask(chat, model="text")


def test_intervals_by_hand_and_their_comparison():
    i = wilson(7, 20)
    agrees(dict(measured=7 / 20, ci_low=i.low, ci_high=i.high), (7 / 20, *wilson_by_hand(7, 20)))
    i = t_interval([1.0, 2.0, 4.0])
    agrees(dict(measured=7 / 3, ci_low=i.low, ci_high=i.high), t_by_hand([1.0, 2.0, 4.0]))
    agrees(dict(measured=2.0, ci_low=2.0, ci_high=2.0), mean_again([2.0, 2.0, 2.0]))
    agrees(dict(measured=3.0), (3.0, None, None))
    for part, want in ((made_up("x", 1.0), (1.0, 0.99, 1.02)), (made_up("x", 1.0), (1.0, None, None)), (dict(label="x", measured=1.0), (1.0, 0.9, 1.1))):
        with pytest.raises(AssertionError, match="x"):
            agrees(part, want)


def test_signatures_and_printed_text_are_plain(tmp_path):
    def f(a: int, *, b: str = "c") -> float: ...

    assert plain_signature(f) == "(a, *, b='c')" and printed("print(' x\\n')", tmp_path) == "x"
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        printed("1 / 0", tmp_path)
