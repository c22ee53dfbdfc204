"""Logprob tracking: relabellings as one matrix product beside a loop, a series by running sums beside windows.

    pytest benchmarks/bench_logprob_audit.py -s

Each pair must give the same numbers before the clock starts.
"""


import numpy as np

from icl26.evaluation.logprob_audit import logprob_matrix, lt_series, lt_test
from icl26.evaluation.logprob_audit.statistic import permuted_statistics, relabellings
from timing import best_of, ratio

N, TOKENS, B, T, WINDOW = 10, 25, 100_000, 20_000, 24


def answers(n, seed):
    x = -1 - 0.2 * np.arange(TOKENS) + np.random.default_rng(seed).normal(0, 0.02, (n, TOKENS))
    return [dict(enumerate(row)) for row in x.tolist()], x


def permuted_by_loop(x, masks):
    "The statistic of each relabelling, one after the other."
    return np.array([np.abs(x[m].mean(0) - x[~m].mean(0)).mean() for m in masks])


def test_permutation_test_beside_a_loop():
    (s1, x1), (s2, x2) = answers(N, 0), answers(N, 1)
    x = np.vstack([x1, x2])
    masks = np.vstack(
        [
            relabellings(N, N, min(4_000_000 // TOKENS, B - lo), rng)
            for rng in [np.random.default_rng(0)]
            for lo in range(0, B, 4_000_000 // TOKENS)
        ]
    ).astype(bool)  # the same draws
    ours = permuted_statistics(x, N, B, np.random.default_rng(0))
    np.testing.assert_allclose(ours[:2000], permuted_by_loop(x, masks[:2000]), atol=1e-12)
    observed = np.abs(x1.mean(0) - x2.mean(0)).mean()
    assert lt_test(s1, s2, n_permutations=B, seed=0).pvalue == (
        1 + np.sum(permuted_by_loop(x, masks) >= observed - 1e-12)
    ) / (1 + B)
    clock = best_of(lambda: lt_test(s1, s2, n_permutations=B, seed=0), 3)
    ratio(f"lt_test, N = {N}, {TOKENS} tokens, B = {B:,}", clock, best_of(lambda: permuted_by_loop(x, masks), 1), 5)
    assert clock < 2


def series_by_loop(observations):
    "The same from the same observations: the statistic of each split from its two windows."
    x, _, _ = logprob_matrix(observations, observations[:1])
    return np.array(
        [
            np.abs(x[t - WINDOW : t].mean(0) - x[t : t + WINDOW].mean(0)).mean()
            for t in range(WINDOW, len(x) - WINDOW + 1)
        ]
    )


def test_series_beside_a_loop():
    observations, _ = answers(T, 2)
    np.testing.assert_allclose(lt_series(observations, WINDOW), series_by_loop(observations), atol=1e-12)
    ours, theirs = best_of(lambda: lt_series(observations, WINDOW), 3), best_of(lambda: series_by_loop(observations), 2)
    ratio(f"lt_series, T = {T:,}", ours, theirs, 2)
    half = best_of(lambda: lt_series(observations[: T // 2], WINDOW), 3)
    wide = best_of(lambda: lt_series(observations, 10 * WINDOW), 3)
    print(f"half the length: {half / ours:.2f} of the time; windows ten times as long: {wide / ours:.2f}")
    assert half / ours < 0.75 and wide / ours < 1.5  # linear in T, and the window is free
