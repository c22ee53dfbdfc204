"""The vectorised bootstrap beside the loop that one would write first.

    pytest benchmarks/bench_stats.py -s
"""
import time

import numpy as np
import pytest
import scipy.stats

from icl26.stats import bootstrap_ci
from timing import best_of

RESAMPLES = 1999


def loop_bca(values, statistic, level=0.95, groups=None, seed=0):
    "BCa one resample at a time, straight from the textbook; the same random numbers as the vectorised one."
    rng = np.random.default_rng(seed)
    if groups is None: n, gather = len(values), lambda drawn: values[drawn]
    else:
        members = [np.flatnonzero(groups == g) for g in np.unique(groups)]
        n, gather = len(members), lambda drawn: values[np.concatenate([members[u] for u in drawn])]
    estimate = statistic(values)
    star = np.array([statistic(gather(rng.integers(0, n, n))) for _ in range(RESAMPLES)])
    left_out = np.array([statistic(gather(np.delete(np.arange(n), i))) for i in range(n)])
    d = left_out.mean() - left_out
    a = (d**3).sum() / (6 * (d**2).sum() ** 1.5)
    z0 = scipy.stats.norm.ppf(((star < estimate).mean() + (star <= estimate).mean()) / 2)
    z = z0 + scipy.stats.norm.ppf([(1 - level) / 2, (1 + level) / 2])
    return np.quantile(star, scipy.stats.norm.cdf(z0 + z / (1 - a * z)))


CASES = {
    "mean of 200 items": (np.mean, None),
    "median of 200 items": (np.median, None),
    "mean over 40 groups of unequal size": (np.mean, np.sort(np.random.default_rng(2).integers(0, 40, 200))),
}


@pytest.mark.parametrize("name", CASES)
def test_bootstrap(benchmark, name):
    statistic, groups = CASES[name]
    values = np.random.default_rng(1).gamma(2, 1, 200)
    ours = lambda: bootstrap_ci(values, statistic, groups=groups, n_resamples=RESAMPLES)
    naive = lambda: loop_bca(values, statistic, groups=groups)
    np.testing.assert_allclose([ours().low, ours().high], naive(), rtol=1e-10)  # before any clock starts
    benchmark(ours)
    ratio = best_of(naive, 2, time.perf_counter) / best_of(ours, 5, time.perf_counter)
    benchmark.extra_info["times faster than a loop"] = round(ratio, 1)
    print(f"\n{name}: {ratio:.1f} times faster than a loop over resamples")
