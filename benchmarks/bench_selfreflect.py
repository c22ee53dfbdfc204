"""SelfReflect's judge calls and seconds beside the naive one-call-a-task way, on peaked answers.

    pytest benchmarks/bench_selfreflect.py -s

The naive way asks the judge for each masked token of each test answer and each summary, the reference each time again, one prompt a call.
Scores must be equal before the clock starts.
"""
import time

import numpy as np

from icl26.evaluation.selfreflect import SelfReflect, SharedPrefix, mask_tasks, tabulate
from icl26.evaluation.selfreflect.metric import judge_prompt, list_answers, word_tokens
from icl26.lm import tiny_lm

TAU, QUESTION = 5.0, "Who was the first prime minister of Australia?"
OPTIONS, SHARES = ("Edmund Barton", "Andrew Fisher", "Deakin", "Billy Hughes"), (0.7, 0.15, 0.1, 0.05)


class Counting:
    "A judge that counts what it is asked."

    def __init__(self, judge):
        self.judge, self.tokenizer, self.calls, self.prompts = judge, judge.tokenizer, 0, 0

    def next_token_logprobs(self, prompts):
        self.calls, self.prompts = self.calls + 1, self.prompts + len(prompts)
        return self.judge.next_token_logprobs(prompts)


def data(n_test=50):
    rng = np.random.default_rng(0)
    conditioning, fresh, test = ([str(a) for a in rng.choice(OPTIONS, n, p=SHARES)] for n in (50, 50, n_test))
    return {"greedy": OPTIONS[0], "table": tabulate(fresh), "two": "Barton or Fisher"}, conditioning, test


def naive(judge, summaries, conditioning, test):
    "The mean distance of each summary, one call a prompt."
    found = {name: [] for name in summaries}
    ask = lambda body, masked, before, n: (judge.next_token_logprobs([judge_prompt(judge.tokenizer, QUESTION, body, masked, n) + before])[0] / TAU).softmax(-1)
    for name, summary in summaries.items():
        for answer in test:
            for masked, word in mask_tasks(answer):
                for before, _ in word_tokens(judge.tokenizer, word):
                    p, r = ask(summary, masked, before, None), ask(list_answers(conditioning), masked, before, len(conditioning))
                    found[name].append(float((p - r).abs().sum() / 2))
    return {name: float(np.mean(x)) for name, x in found.items()}


def test_calls_and_seconds(benchmark):
    lm = tiny_lm(seed=1, max_positions=4096, batch_size=32)                        # bytes: every letter is a token
    summaries, conditioning, test = data(10)
    ours, theirs = Counting(SharedPrefix(lm)), Counting(lm)
    got = SelfReflect(ours, temperature=TAU).score_many(QUESTION, summaries, conditioning, test)
    start = time.perf_counter()
    want = naive(theirs, summaries, conditioning, test)
    seconds = time.perf_counter() - start
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=2e-3)   # outputs equal before the clock starts
    fewer = theirs.prompts / ours.prompts
    plain = Counting(lm)
    start = time.perf_counter()
    SelfReflect(plain, temperature=TAU).score_many(QUESTION, summaries, conditioning, test)
    merged = time.perf_counter() - start
    benchmark.pedantic(SelfReflect(SharedPrefix(lm), temperature=TAU).score_many, (QUESTION, summaries, conditioning, test), rounds=3, warmup_rounds=1)
    best = benchmark.stats.stats.min
    judge = SharedPrefix(lm)
    SelfReflect(judge, temperature=TAU).score_many(QUESTION, summaries, conditioning, test)
    benchmark.extra_info.update({"times fewer prompts": round(fewer, 1), "times faster": round(seconds / best, 1)})
    print(f"\n10 test answers, 3 summaries: {theirs.prompts} prompts one by one, {ours.prompts} merged ({fewer:.1f} times fewer); {seconds:.1f} s, {merged:.1f} s merged, "
          f"{best:.2f} s with the shared text fed once ({seconds / best:.0f} times faster, {judge.asked / best:,.0f} prompt tokens/s, {judge.asked / judge.fed:.1f} times fewer tokens fed)")
    assert fewer >= 3 and seconds / best >= 3


def test_calls_against_duplicates():
    "Prompts as a function of the number of test answers: bounded by the different answers."
    lm, counts = tiny_lm(seed=1, max_positions=4096), {}
    for n in (5, 10, 20):
        summaries, conditioning, test = data(n)
        judge = Counting(SharedPrefix(lm))
        SelfReflect(judge).score_many(QUESTION, {"greedy": summaries["greedy"]}, conditioning, test)
        counts[n] = judge.prompts
    naive_growth = 4.0
    print(f"\nprompts by number of test answers: {counts}")
    assert counts[20] / counts[5] < naive_growth / 1.5
