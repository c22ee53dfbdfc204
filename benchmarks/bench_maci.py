"""MACI at 100,000 documents of ten claims, beside a loop over documents; its conformal quantile beside MAPIE's.

    pytest benchmarks/bench_maci.py -s

Outputs agree before the clock starts. MAPIE belongs to no extra (`pip install mapie`): without it the output says that it was not
compared, and the quantile stands beside a loop of our own.
"""
import time
import warnings

import numpy as np
import pytest

from icl26.evaluation.maci import MACI, conformal_quantile, conformity, retain
from icl26.evaluation.maci.calibrate import FIT_U, PREDICT_U, rng_streams

N, CLAIMS = 100_000, 10


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    p = rng.beta(4, 1, (N, CLAIMS))
    return list(p), list(rng.random(p.shape) < p)


def ours(scores, labels):
    fit = MACI(random_state=0).fit(scores, labels)
    return fit.thresholds_[None], fit.predict(scores)


def loop(scores, labels):
    "The same by one call a document."
    n = len(scores)
    fit_u, new_u = (g.random(n) for g in rng_streams(0, FIT_U, PREDICT_U))
    level = conformal_quantile([conformity(s, y, u) for s, y, u in zip(scores, labels, fit_u)], 0.1)
    return level, [retain(s, level, u) for s, u in zip(scores, new_u)]


def test_fit_and_predict(benchmark, data):
    few = [x[:3000] for x in data]
    (a, masks), (b, by_loop) = ours(*few), loop(*few)
    assert a == b and all((x == y).all() for x, y in zip(masks, by_loop, strict=True))
    benchmark.pedantic(ours, args=data, rounds=3, iterations=1, warmup_rounds=1)
    start = time.perf_counter()
    loop(*few)
    ratio = (time.perf_counter() - start) * N / 3000 / benchmark.stats.stats.min
    benchmark.extra_info["times faster than a loop over documents"] = round(ratio, 1)
    print(f"\n{N:,} documents x {CLAIMS} claims, fit + predict: {benchmark.stats.stats.min:.2f} s, "
          f"{ratio:.0f} times faster than a loop over documents")
    assert benchmark.stats.stats.min < 5 and ratio > 3


class Zero:
    "A fitted regressor that predicts 0, so that MAPIE's interval is its quantile of the absolute values."
    fitted_ = True

    def fit(self, X, y): return self
    def predict(self, X): return np.zeros(len(X))
    def __sklearn_is_fitted__(self): return True


def mapie_quantile(values, alpha):
    from mapie.regression import SplitConformalRegressor

    x = np.zeros((len(values), 1))
    fit = SplitConformalRegressor(Zero(), confidence_level=1 - alpha, prefit=True).conformalize(x, values)
    return float(fit.predict_interval(x[:1])[1][0, 1, 0])


def naive_quantile(values, alpha):
    "The smallest value that covers enough of the others, by trying them in order."
    need = np.ceil((len(values) + 1) * (1 - alpha) - 1e-9)
    return next(v for i, v in enumerate(sorted(values), 1) if i >= need)


def test_conformal_quantile(benchmark):
    values = np.random.default_rng(1).random(N)
    try:
        import mapie  # noqa: F401
        peer, name = mapie_quantile, "MAPIE"
    except ImportError:
        print("\nMAPIE is not installed: not compared")
        peer, name = naive_quantile, "a loop of our own in Python"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (19, 50, 99, 1000, N):
            for alpha in (0.1, 0.25):
                assert conformal_quantile(values[:n], alpha) == pytest.approx(peer(values[:n], alpha), abs=1e-12)
        benchmark(conformal_quantile, values, 0.1)
        start = time.perf_counter()
        for _ in range(5):
            peer(values, 0.1)
        ratio = (time.perf_counter() - start) / 5 / benchmark.stats.stats.mean
    benchmark.extra_info[f"times faster than {name}"] = round(ratio, 1)
    print(f"\nconformal quantile of {N:,} values: {benchmark.stats.stats.mean * 1000:.2f} ms, "
          f"{ratio:.1f} times faster than {name}")
