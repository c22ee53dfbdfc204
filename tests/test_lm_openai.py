"A model behind a server: a real one on this machine that is busy, broken, slow, or tells secrets."
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from icl26.lm import LM, OpenAILM, ServerError, Usage, choice_logprobs


class Handler(BaseHTTPRequestHandler):
    "Answers by `server.reply(path, body, count)`: a status, a body, and headers."

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.seen.append((self.path, body, time.monotonic(), self.headers.get("authorization")))
            count = len(self.server.seen)
        status, answer, headers = self.server.reply(self.path, body, count)
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        try:
            self.send_response(status)
            for k, v in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
                self.send_header(k, v)
            self.end_headers()
            self.wfile.write(data)
        except BrokenPipeError:  # the client has given up waiting
            pass

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    s = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.seen, s.lock, s.daemon_threads = [], threading.Lock(), True
    s.url = f"http://127.0.0.1:{s.server_port}/v1"
    thread = threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield s
    s.shutdown()
    s.server_close()
    thread.join(5)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-1234567890abcdef")
    return "sk-test-1234567890abcdef"


def said(*texts, sent=7, got=2):
    choices = [{"index": i, "message": {"role": "assistant", "content": t}, "text": t} for i, t in enumerate(texts)]
    usage = {"prompt_tokens": sent, "completion_tokens": got, "total_tokens": sent + got}
    return 200, {"id": "x", "object": "chat.completion", "choices": choices, "usage": usage}, {}


def in_turn(*replies):
    "The n-th request gets the n-th reply; the last one is repeated."
    return lambda path, body, count: replies[min(count, len(replies)) - 1]


BUSY = (429, {"error": {"message": "slow down"}}, {})
CUT = (200, '{"choices": [{"message": {"content": "Par', {})


@pytest.mark.parametrize(
    "fault",
    [BUSY, (500, "Internal error", {}), (503, "<html>gateway</html>", {}), CUT, (200, "<html>", {}),
     (200, '{"a": 1}', {}), (200, '{"choices": []}', {}), (408, "{}", {})],
    ids=["429", "500", "503", "cut", "html", "no-choices", "empty-choices", "408"],
)  # fmt: skip
def test_passing_faults_are_tried_again(server, fault):
    server.reply = in_turn(fault, fault, said("Paris"))
    lm = OpenAILM("m", server.url, backoff=0.01)
    assert lm.generate(["q"]) == [["Paris"]]
    assert len(server.seen) == 3 and lm.retries == 2
    assert lm.usage == Usage(7, 2, 1, 0.0)  # failed attempts cost nothing


def test_pauses_grow_and_retry_after_is_obeyed(server):
    server.reply = in_turn(BUSY, BUSY, BUSY, said("x"))
    OpenAILM("m", server.url, backoff=0.2).generate(["q"])
    t = [s[2] for s in server.seen]
    gaps = [b - a for a, b in zip(t, t[1:])]
    assert 0.15 <= gaps[0] < gaps[1] < gaps[2] and gaps[2] >= 0.6  # 0.2, 0.4, 0.8 less at most a quarter
    server.seen.clear()
    server.reply = in_turn((429, "{}", {"retry-after": "0.7"}), said("x"))
    OpenAILM("m", server.url, backoff=0.01).generate(["q"])
    assert server.seen[1][2] - server.seen[0][2] >= 0.7


def test_silence_is_a_failure(server):
    def reply(path, body, count):
        if count < 3:
            time.sleep(1.2)
        return said("late")

    server.reply = reply
    lm = OpenAILM("m", server.url, timeout=0.4, backoff=0.01)
    assert lm.generate(["q"]) == [["late"]] and lm.retries == 2
    server.seen.clear()
    lm = OpenAILM("m", server.url, timeout=0.3, backoff=0.01, max_retries=1)
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"no answer within 0.3 s \(2 attempts\)"):
        lm.generate(["q"])
    assert time.monotonic() - started < 2


def test_server_that_is_not_there():
    lm = OpenAILM("m", "http://127.0.0.1:9/v1", max_retries=1, backoff=0.01)
    with pytest.raises(ServerError, match=r"cannot connect.*\(2 attempts\)"):
        lm.generate(["q"])


def test_attempts_are_bounded(server):
    server.reply = in_turn(CUT)
    with pytest.raises(ServerError, match=r"malformed answer: not JSON.*\(4 attempts\)"):
        OpenAILM("m", server.url, backoff=0.01, max_retries=3).generate(["q"])
    assert len(server.seen) == 4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_wrong_requests_are_not_repeated(server, status):
    server.reply = in_turn((status, {"error": {"message": "this is why"}}, {}))
    with pytest.raises(ServerError, match="this is why") as e:
        OpenAILM("m", server.url).generate(["q"])
    assert len(server.seen) == 1 and e.value.status == status


def test_exhausted_quota_is_not_waited_for(server):
    server.reply = in_turn((429, {"error": {"message": "pay", "code": "insufficient_quota"}}, {}))
    with pytest.raises(ServerError, match="insufficient_quota"):
        OpenAILM("m", server.url).generate(["q"])
    assert len(server.seen) == 1


def test_order_workers_counts_and_cost(server):
    def reply(path, body, count):
        text = body["messages"][-1]["content"]
        time.sleep(0.05 * (5 - int(text[-1])))  # the first prompt is answered last
        return said(f"answer {text}", sent=100, got=10)

    server.reply = reply
    lm = OpenAILM("m", server.url, workers=6, price=(2.0, 8.0))
    prompts = [f"question {i}" for i in range(6)]
    assert lm.generate(prompts) == [[f"answer question {i}"] for i in range(6)]
    assert lm.usage == Usage(600, 60, 6, pytest.approx(600 * 2e-6 + 60 * 8e-6))
    assert isinstance(lm, LM) and "6 calls, 660 tokens" in repr(lm)


def test_what_is_sent(server):
    server.reply = in_turn(said("a\nb", "c;d", "e"))
    lm = OpenAILM("m", server.url, extra={"max_completion_tokens": 9, "max_tokens": None, "vendor": {"x": 1}})
    chat = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    stops = ["1", "2", "3", "4", "\n", ";"]
    out = lm.generate([chat], n=3, max_new_tokens=5, temperature=0.5, top_p=0.9, stop=stops, seed=3)
    assert out == [["a", "c", "e"]]  # all six stop strings are applied
    path, body, _, auth = server.seen[0]
    assert path == "/v1/chat/completions" and auth == "Bearer sk-test-1234567890abcdef"
    assert body["messages"] == chat and body["stop"] == stops[:4] and (body["temperature"], body["top_p"]) == (0.5, 0.9)
    assert body["max_completion_tokens"] == 9 and "max_tokens" not in body and body["vendor"] == {"x": 1}
    assert body["n"] == 3 and 0 <= body["seed"] < 2**31
    lm.generate(["hi", "hi"], n=3, seed=3)
    assert server.seen[1][1]["seed"] != server.seen[2][1]["seed"]  # equal prompts, different samples
    lm.generate(["hi"], n=3)
    assert "seed" not in server.seen[3][1]


def test_missing_samples_are_asked_for(server):
    server.reply = in_turn(said("1"), said("2"), said("3", "4"))
    lm = OpenAILM("m", server.url)
    assert lm.generate(["q"], n=4, seed=1) == [["1", "2", "3", "4"]]
    assert [s[1]["n"] for s in server.seen] == [4, 3, 2]
    assert len({s[1]["seed"] for s in server.seen}) == 3


def test_answer_without_text_or_usage(server):
    answer = {"choices": [{"message": {"content": None, "refusal": "no"}}]}
    server.reply = in_turn((200, answer, {}))
    lm = OpenAILM("m", server.url)
    assert lm.generate(["q"]) == [[""]] and lm.usage == Usage(0, 0, 1, 0.0)


def top_of(tokens):
    top = [{"token": t, "logprob": v, "bytes": list(t.encode())} for t, v in tokens]
    return {"content": [{"token": "a", "top_logprobs": top}]}


def test_top_logprobs_of_a_chat(server):
    def reply(path, body, count):
        tokens = [(f"t{i}", -0.5 * i - 0.1) for i in range(body["top_logprobs"])]
        return 200, {"choices": [{"message": {"content": "a"}, "logprobs": top_of(tokens)}]}, {}

    server.reply = reply
    out = OpenAILM("m", server.url).top_logprobs(["x", "y"], k=4)
    assert out == [{"t0": -0.1, "t1": -0.6, "t2": -1.1, "t3": -1.6}] * 2
    body = server.seen[0][1]
    assert body["logprobs"] is True and body["top_logprobs"] == 4 and body["max_tokens"] == 1


def test_top_logprobs_of_a_completion(server):
    choice = {"text": "a", "logprobs": {"top_logprobs": [{"b": -2.0, "a": -0.1}]}}
    server.reply = in_turn((200, {"choices": [choice]}, {}))
    lm = OpenAILM("m", server.url, endpoint="completions")
    assert list(lm.top_logprobs(["x"], k=2)[0].items()) == [("a", -0.1), ("b", -2.0)]
    assert server.seen[0][0] == "/v1/completions" and server.seen[0][1]["logprobs"] == 2
    with pytest.raises(ValueError, match="not chats"):
        lm.generate([[{"role": "user", "content": "hi"}]])


def echo(body):
    "A server that cuts text before each space, and likes a token by its length."
    tokens = body["prompt"].replace(" ", "\0 ").split("\0") + ["."]
    places = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    lp = {"tokens": tokens, "token_logprobs": [None] + [-len(t) / 4 for t in tokens[1:]], "text_offset": places}
    return 200, {"choices": [{"text": "".join(tokens), "logprobs": lp}]}, {}


def test_score_by_echo(server):
    server.reply = lambda path, body, count: echo(body)
    lm = OpenAILM("m", server.url, endpoint="completions")
    a, b = lm.score(["I am", "I am"], [" here now", " away"])
    assert a.tokens == [" here", " now"] and a.total == pytest.approx(-9 / 4) and b.total == pytest.approx(-5 / 4)
    assert server.seen[0][1]["echo"] is True
    q = choice_logprobs(lm, ["I am"], [" here now", " away"]).exp()[0]
    assert q[0].item() == pytest.approx(1 / (1 + 2.718281828), abs=1e-5)
    with pytest.raises(ValueError, match="move the space"):
        lm.score(["I a"], ["m here"])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_a_server_cannot_do_is_named(server, endpoint):
    lm = OpenAILM("m", server.url, endpoint=endpoint, max_retries=0)
    for refusal in (said("a"), (400, {"error": {"message": "logprobs are not supported"}}, {})):
        server.reply = in_turn(refusal)
        with pytest.raises(NotImplementedError, match="top_logprobs"):
            lm.top_logprobs(["x"])
        with pytest.raises(NotImplementedError, match="score"):
            lm.score(["x"], ["y"])
    with pytest.raises(NotImplementedError, match="next_token_logprobs"):
        lm.next_token_logprobs(["x"])


def test_kept_answers(server, tmp_path):
    server.reply = lambda path, body, count: said(f"answer {count}")
    make = lambda **kw: OpenAILM(**{"model": "m", "base_url": server.url, "cache": tmp_path / "answers", **kw})
    first = make().generate(["q"], temperature=0)
    again = make()
    assert again.generate(["q"], temperature=0) == first and again.usage.calls == 0 and again.cache_hits == 1
    # any field of the request is part of its name
    assert make().generate(["q"], temperature=0, max_new_tokens=9) != first
    assert make().generate(["q"], temperature=0, stop="x") != first
    assert make(model="other").generate(["q"], temperature=0) != first
    assert make(extra={"vendor": 1}).generate(["q"], temperature=0) != first
    assert make(base_url=server.url.replace("127.0.0.1", "localhost")).generate(["q"], temperature=0) != first
    # samples with a seed are kept, without one they are drawn anew
    assert make().generate(["q"], seed=1) == make().generate(["q"], seed=1) != make().generate(["q"], seed=2)
    assert make().generate(["q"]) != make().generate(["q"])
    # a file cut short is fetched again
    for f in (tmp_path / "answers").rglob("*.json"):
        f.write_text(f.read_text()[:20])
    count = len(server.seen)
    assert make().generate(["q"], temperature=0) != first and len(server.seen) == count + 1
    assert not list(tmp_path.rglob("*.part"))


def test_failures_are_not_kept(server, tmp_path):
    server.reply = in_turn(CUT, said("fine"))
    lm = OpenAILM("m", server.url, cache=tmp_path, max_retries=0)
    with pytest.raises(ServerError):
        lm.generate(["q"], temperature=0)
    assert lm.generate(["q"], temperature=0) == [["fine"]]


def test_first_failure_cancels_the_rest(server):
    server.reply = in_turn((400, {"error": {"message": "no"}}, {}))
    with pytest.raises(ServerError):
        OpenAILM("m", server.url, workers=2).generate(["q"] * 50)
    assert len(server.seen) < 10


def test_no_key_where_one_is_needed(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        OpenAILM("m")
    OpenAILM("m", "http://127.0.0.1:9/v1")  # one's own server needs none
    with pytest.raises(TypeError):
        OpenAILM("m", api_key="sk-123")  # a key is never an argument


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r'pip install "icl26\[api\]"'):
        OpenAILM("m", "http://127.0.0.1:9/v1")


RUN = """
import logging, sys, traceback
logging.basicConfig(filename="run.log", level=logging.DEBUG)
from icl26.lm import OpenAILM
lm = OpenAILM("m", sys.argv[1], backoff=0.01, max_retries=2, cache="answers")
print(lm, lm.generate(["tell"], temperature=0), lm.top_logprobs(["tell"]))
for prompt in ("deny", "refuse"):
    try:
        lm.generate([prompt], temperature=0)
    except Exception:
        traceback.print_exc()
print(vars(lm).keys(), repr(lm))
"""


def test_the_key_is_in_no_file_and_no_log(server, key, tmp_path):
    "A server that repeats the key in everything it says, asked by a program that logs everything there is to log."

    def reply(path, body, count):
        prompt = body["messages"][-1]["content"]
        if prompt == "deny":
            return 401, {"error": {"message": f"Incorrect API key provided: {key}"}}, {}
        if prompt == "refuse" or count == 1:
            return 500, f"failed for {key}", {}
        return 200, {"choices": [{"message": {"content": f"your key is {key}"}, "logprobs": top_of([(key, -0.1)])}]}, {}

    server.reply = reply
    env = {**os.environ, "OPENAI_API_KEY": key, "OPENAI_LOG": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, server.url], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "your key is [key]" in done.stdout and "401" in done.stderr and "(3 attempts)" in done.stderr
    assert all(s[3] == f"Bearer {key}" for s in server.seen)  # it did reach the server
    files = [p for p in Path(tmp_path).rglob("*") if p.is_file()]
    assert len(files) >= 3 and (tmp_path / "run.log").stat().st_size > 1000  # answers and a talkative log
    for text in [done.stdout, done.stderr, *(p.read_bytes().decode(errors="replace") for p in files)]:
        assert key not in text
        assert key[8:] not in text


TOP = lambda *top: {"choices": [{"message": {"content": "a"}, "logprobs": {"content": [{"top_logprobs": list(top)}]}}]}


@pytest.mark.parametrize("answer, field", [
    ({"choices": [None]}, "choices[0]"), ({"choices": [{"message": 5}]}, "choices[0].message"),
    ({"choices": [{"message": {"content": 5}}]}, "content"), ({"choices": [{"logprobs": "x"}]}, "logprobs"),
    ({"choices": [{"logprobs": {"content": ["x"]}}]}, "logprobs.content[0]"), (TOP(1, 2), "top_logprobs[0]"),
    (TOP({"logprob": -1}), "token"), (TOP({"token": None, "logprob": -1}), "token"), (TOP({"token": "a"}), "logprob"),
    (TOP({"token": "a", "logprob": "x"}), "logprob"), ({"choices": [{"text": "a"}], "usage": [1]}, "usage"),
    ({"choices": [{"text": "a"}], "usage": {"prompt_tokens": "many"}}, "usage.prompt_tokens"),
])  # fmt: skip
def test_an_answer_of_the_wrong_shape_names_the_field(server, answer, field):
    server.reply = in_turn((200, answer, {}))
    with pytest.raises(ServerError) as e:
        OpenAILM("m", server.url, max_retries=0).top_logprobs(["q"])
    assert "malformed answer" in str(e.value) and f"{field}: " in str(e.value)


@pytest.mark.parametrize("logprobs, field", [({"top_logprobs": [3]}, "top_logprobs[0]"), ({"top_logprobs": [{"a": None}]}, "'a'")])
def test_a_completion_of_the_wrong_shape_names_the_field(server, logprobs, field):
    server.reply = in_turn((200, {"choices": [{"text": "a", "logprobs": logprobs}]}, {}))
    with pytest.raises(ServerError) as e:
        OpenAILM("m", server.url, endpoint="completions", max_retries=0).top_logprobs(["q"])
    assert field in str(e.value)


@pytest.mark.parametrize("url", [
    "http://", "http:///v1", "http://:80/v1", "http://h:99999/v1", "http://h:abc/v1", "http://h:0/v1", "http://[::1/v1", "http://[::g]/v1",
    "http://exa mple/v1", " http://h/v1", "http://h\n/v1", "http://h\\x/v1", "http://a..b/v1", "http://999.1.1.1/v1", "http://1.2.3/v1",
    "http://" + "a" * 64 + ".org", "http://h!/v1", "localhost:8000/v1", "ftp://h/v1", "http//h", "", "http://u:p@h/v1", "http://:p@h/v1"])  # fmt: skip
def test_a_malformed_address_is_refused_at_once(url):
    with pytest.raises(ValueError, match=r"^base_url must be http\(s\)://host"):
        OpenAILM("m", url)
    with pytest.raises(TypeError, match="^base_url must be text"):
        OpenAILM("m", b"http://h/v1")


def test_good_addresses_are_taken(server):
    for url in ("http://localhost", "https://h.example:8000/v1/", "http://[::1]:80/v1", "http://192.0.2.1/v1", "http://my_host-2/v1", "http://bücher.example"):
        assert OpenAILM("m", url).base_url == url


def failing(monkeypatch, error):
    "Every look-up of a host fails like this; how many there were."
    import socket

    asked = []

    def look_up(*args, **kwargs):
        asked.append(args)
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def test_an_unknown_host_is_hopeless(monkeypatch):
    import socket

    asked = failing(monkeypatch, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    with pytest.raises(ServerError, match=r"m at http://nobody\.example/v1: cannot connect: .*not known \(1 attempt\)"):
        OpenAILM("m", "http://nobody.example/v1").generate(["q"])
    assert len(asked) == 1
    asked = failing(monkeypatch, socket.gaierror(socket.EAI_AGAIN, "Temporary failure"))  # may pass: tried again
    with pytest.raises(ServerError, match=r"Temporary failure.*\(3 attempts\)"):
        OpenAILM("m", "http://nobody.example/v1", max_retries=2, backoff=0.01).generate(["q"])
    assert len(asked) == 3


def test_a_refused_connection_is_not_tried_for_ever():
    "However many retries are allowed: `timeout` seconds without a connection are the end."
    lm, started = OpenAILM("m", "http://127.0.0.1:9/v1", max_retries=10**6, backoff=0.1, timeout=1.5), time.monotonic()
    with pytest.raises(ServerError, match=r"m at http://127\.0\.0\.1:9/v1: cannot connect: .*refused \(\d+ attempts in \d s\)"):
        lm.generate(["q"] * 20)
    assert 2 <= lm.retries and time.monotonic() - started < 4


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_damaged_answers_are_asked_for_again(server, tmp_path, endpoint, caplog):
    "Whatever a file in the cache holds that is no answer to its request, it counts as not there and is replaced."
    token = {"token": "a", "logprob": -1.0}
    chat = {"logprobs": {"content": [{**token, "top_logprobs": [token]}]}, "message": {"content": "x"}}
    echo = {"tokens": ["q", "a"], "token_logprobs": [None, -1.0], "text_offset": [0, 1], "top_logprobs": [None, {"a": -1.0}]}
    choice = chat if endpoint == "chat" else {"text": "x", "logprobs": echo}
    server.reply = lambda path, body, count: (200, {"choices": [choice]}, {})
    make = lambda: OpenAILM("m", server.url, endpoint=endpoint, cache=tmp_path)
    ask = (lambda lm: lm.top_logprobs(["q"])) if endpoint == "chat" else (lambda lm: [s.total for s in lm.score(["q"], ["a"])])
    first = ask(make())
    (file,) = tmp_path.rglob("*.json")
    whole, entry = file.read_bytes(), lambda answer: json.dumps({"answer": answer}).encode()
    wrong = {"choices": [choice | {"logprobs": {"content": 3} if endpoint == "chat" else {"tokens": ["q"], "token_logprobs": [1.0, 2.0], "text_offset": [0]}}]}
    damaged = [b"", b"\xff\xfe\x00", b"\0" * 100, whole[:-20], b"[1, 2]", b"7", b'"answer"', b"null", b"{}", b"[" * 100_000,
               entry(None), entry([]), entry("x"), entry({}), entry({"choices": []}), entry({"choices": [3]}),
               entry({"choices": [{"message": {"content": 5}, "text": 5}]}), entry({"choices": [choice], "usage": {"prompt_tokens": "a"}}), entry(wrong)]
    for content in damaged:
        file.write_bytes(content)
        count, lm = len(server.seen), make()
        assert ask(lm) == first and len(server.seen) == count + 1 and lm.cache_hits == 0, content[:60]
        assert json.loads(file.read_bytes()) == json.loads(whole)
    lm = make()
    assert ask(lm) == first and lm.cache_hits == 1 and len(server.seen) == count + 1
    assert "damaged" in caplog.text
