"""Expected information gain of 1,000 questions under 500 hypotheses, beside a loop over questions; likelihood pairs a turn with and without retention.

    pytest benchmarks/bench_bed_llm.py -s

Outputs agree before the clock starts, which counts this process's own time on one thread.
"""
import time

import numpy as np
import pytest
from scipy.stats import entropy

from icl26.evaluation.bed_llm import BEDAgent, LMWorld, TableWorld, eig, eig_jackknife, predictive_entropy, split_score
from icl26.evaluation.bed_llm.beliefs import Evidence
from icl26.evaluation.bed_llm.rivals import TableLM

QUESTIONS, HYPOTHESES = 1000, 500


@pytest.fixture(scope="module")
def table():
    yes = np.random.default_rng(0).beta(0.5, 0.5, (QUESTIONS, HYPOTHESES))
    return np.stack([yes, 1 - yes], -1)


def by_question(table):
    "Eq. 3 with SciPy's entropy, a question at a time."
    return np.array([entropy(t.mean(0)) - entropy(t, axis=1).mean() for t in table])


def by_hypothesis(table):
    "Eq. 3 as it is written, a question and a hypothesis at a time."
    return np.array([entropy(t.mean(0)) - np.mean([entropy(row) for row in t]) for t in table])


def seconds(f, *args):
    start = time.process_time()
    f(*args)
    return time.process_time() - start


@pytest.mark.benchmark(timer=time.process_time)
def test_eig(benchmark, table):
    np.testing.assert_allclose(eig(table), by_question(table), atol=1e-10)
    np.testing.assert_allclose(eig(table[:5]), by_hypothesis(table[:5]), atol=1e-10)
    benchmark.pedantic(eig, args=(table,), rounds=20, warmup_rounds=2)
    best = benchmark.stats.stats.min
    loop, double = min(seconds(by_question, table) for _ in range(3)) / best, seconds(by_hypothesis, table[:5]) * QUESTIONS / 5 / best
    benchmark.extra_info |= {"times faster than a loop over questions": round(loop, 1), "than a loop over both": round(double)}
    print(f"\neig of {QUESTIONS:,} questions x {HYPOTHESES} hypotheses: {best * 1e3:.1f} ms, {loop:.1f} times faster than a loop over questions, "
          f"{double:.0f} times than one over both")
    assert best < 0.05 and loop > 1.5


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("score", [predictive_entropy, split_score, eig_jackknife])
def test_other_scores(benchmark, table, score):
    benchmark.pedantic(score, args=(table,), rounds=5, warmup_rounds=1)
    print(f"\n{score.__name__}: {benchmark.stats.stats.min * 1e3:.1f} ms")


class Forgetful(BEDAgent):
    "Checks every hypothesis on the whole history at each turn."

    def believe(self):
        if self._filled != len(self.history):
            pairs = self._evidence.pairs
            self._evidence = Evidence(self.world.likelihood, self.world.answers)
            self._evidence.pairs = pairs
        super().believe()


def game(kind, world, turns=20):
    "Pairs asked to check beliefs in each turn, and the questions."
    agent, pairs, asked = kind(world, seed=1), [], []
    for _ in range(turns):
        before = agent.pairs
        q = agent.ask()
        pairs.append(agent.pairs - before)
        asked.append(q)
        agent.observe(q, world.answers[int(world.likelihood(["h3"], [q])[0, 0].argmax())])
    return np.array(pairs), asked


def test_retention(benchmark):
    rng = np.random.default_rng(0)
    world = TableWorld([f"h{i}" for i in range(300)], [f"q{j}" for j in range(100)], rng.beta(0.3, 0.3, (300, 100)))
    (kept, asked), (afresh, same) = game(BEDAgent, world), game(Forgetful, world)
    assert asked == same and (kept <= afresh).all()                       # the same game
    benchmark.pedantic(game, args=(BEDAgent, world), rounds=5, warmup_rounds=1)
    ratio = afresh.sum() / kept.sum()
    benchmark.extra_info |= {"pairs a turn, kept": kept.mean(), "pairs a turn, checked afresh": afresh.mean(), "times fewer": round(ratio, 2)}
    print(f"\npairs a turn to check beliefs: {kept.mean():.1f} with retention, {afresh.mean():.1f} without, {ratio:.1f} times fewer; "
          f"a game of 20 turns: {benchmark.stats.stats.min * 1e3:.0f} ms")


def test_a_cache_across_games(benchmark):
    rng = np.random.default_rng(0)
    table = TableWorld([f"h{i}" for i in range(40)], [f"q{j}" for j in range(40)], rng.beta(0.3, 0.3, (40, 40)))
    shared = LMWorld(TableLM(table))
    one = [_prompts(shared, s) for s in range(10)]
    alone = [_prompts(LMWorld(TableLM(table)), s) for s in range(10)]
    benchmark.pedantic(_prompts, args=(shared, 0), rounds=3)
    print(f"\nlikelihood prompts of ten games: {sum(one)} with a cache across games, {sum(alone)} with one a game")
    assert sum(one) < sum(alone)


def _prompts(world, seed):
    "Likelihood prompts that a game sends."
    before = world.usage["likelihood"].calls if "likelihood" in world.usage else 0
    agent = BEDAgent(world, seed=seed)
    for _ in range(8):
        agent.observe(agent.ask(), "Yes" if seed % 2 else "No")
    return world.usage["likelihood"].calls - before
