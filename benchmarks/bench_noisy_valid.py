"""The grid of 16 judges times 4000 data sets, all six tests: counts beside a loop over items, on the same draws.

    pytest benchmarks/bench_noisy_valid.py -s

The naive way builds the label arrays of each data set (100 human and 10,000 judge labels) and takes means over them. It is far too slow for
the whole grid, so it decides a share of the same trials, its decisions must equal ours there, and the ratio is per trial.
"""
import time

import numpy as np
from scipy.stats import beta, norm

from icl26.evaluation.noisy_valid.power import draw_counts
from icl26.evaluation.noisy_valid.tests import METHODS, decide

ALPHA, ZETA, N_HUMAN, N_JUDGE, TRIALS = 0.25, 0.05, 100, 10_000, 4000
JUDGES = [(t, f) for t in (0.7, 0.8, 0.9, 0.95) for f in (0.05, 0.1, 0.2, 0.3)]


def draw(cell):
    tpr, fpr = JUDGES[cell]
    return draw_counts(np.random.default_rng([0, cell]), failure_rate=ALPHA, tpr=tpr, fpr=fpr, n_human=N_HUMAN, n_judge=N_JUDGE, n_trials=TRIALS)


def ours(trials=TRIALS):
    "(16, 6, trials) decisions, the draws included."
    out = []
    for cell, (tpr, fpr) in enumerate(JUDGES):
        c = draw(cell)
        out.append([decide(m, c, alpha=ALPHA, zeta=ZETA, tpr=tpr, fpr=fpr).certified[:trials] for m in METHODS])
    return np.array(out)


def items(c, i):
    "The label arrays of trial i: human, human_judge, judge_labels, one item each."
    human = np.repeat([True, False], [c.n1[i], c.n0[i]])
    judge = np.concatenate([np.arange(c.n1[i]) < c.k1[i], np.arange(c.n0[i]) < c.k0[i]])
    return human, judge, np.arange(N_JUDGE) < c.kj[i]


def by_items(human, judge, labels, tpr, fpr):
    "What each test decides, from label arrays and textbook formulas."
    z, n, m = norm.ppf(ZETA), len(human), len(labels)
    r_j, h, j = labels.mean(), human.astype(float), judge.astype(float)
    t, f = judge[human].mean(), judge[~human].mean()
    n1, n0 = human.sum(), (~human).sum()

    def noisy(t, f, calibration):
        limit = f + (t - f) * ALPHA
        return bool(t > f and r_j < limit + z * np.sqrt(limit * (1 - limit) / m + calibration))

    def ppi(w):
        rest = h - w * j
        return bool(w * r_j + rest.mean() < ALPHA + z * np.sqrt(w**2 * labels.var(ddof=1) / m + rest.var(ddof=1) / n))

    weight = np.cov(h, j)[0, 1] / ((1 + n / m) * np.concatenate([judge, labels]).var(ddof=1))
    bound = lambda k, n: beta.ppf(ZETA / 3, k, n - k + 1) if k else 0.0
    low_t, low_f, k = bound(judge[human].sum(), n1), bound(judge[~human].sum(), n0), labels.sum()
    high = beta.ppf(1 - ZETA / 3, k + 1, m - k) if k < m else 1.0
    return {"noisy": noisy(t, f, ALPHA**2 * t * (1 - t) / n1 + (1 - ALPHA) ** 2 * f * (1 - f) / n0), "oracle": noisy(tpr, fpr, 0),
            "direct": bool(h.mean() < ALPHA + z * np.sqrt(ALPHA * (1 - ALPHA) / n)), "ppi": ppi(1.0), "ppi++": ppi(min(max(weight, 0), 1)),
            "exact": bool(t > f and low_t > low_f and (high - low_f) / (low_t - low_f) < ALPHA)}


def naive(trials):
    "(16, 6, trials) decisions of the first trials of each judge, item by item."
    out = np.zeros((len(JUDGES), len(METHODS), trials), bool)
    for cell, (tpr, fpr) in enumerate(JUDGES):
        c = draw(cell)
        for i in range(trials):
            said = by_items(*items(c, i), tpr, fpr)
            out[cell, :, i] = [said[m] for m in METHODS]
    return out


def test_grid_of_all_methods(benchmark):
    same = ours()[:, :, :200]
    np.testing.assert_array_equal(same, naive(200))                       # outputs equal before the clock starts
    assert 0 < same.mean() < 1
    benchmark.pedantic(ours, rounds=3, iterations=1, warmup_rounds=1)
    started = time.perf_counter()
    naive(100)
    per_trial = (time.perf_counter() - started) / 100
    ratio = per_trial / (benchmark.stats.stats.min / TRIALS)
    benchmark.extra_info["times faster than a loop over items"] = round(ratio)
    print(f"\n16 judges x {TRIALS} data sets x {len(METHODS)} tests: {benchmark.stats.stats.min:.2f} s, {ratio:.0f} times faster than a loop over items")
    assert ratio > 20
