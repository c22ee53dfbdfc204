"""Intervals computed again from what a run recorded, and made-up parts that are fed to the rules."""
import math

import numpy as np
from scipy.stats import norm, sem
from scipy.stats import t as student

from icl26.stats import Interval, mean_interval

BOUNDS = ("measured", "ci_low", "ci_high")


def wilson_by_hand(k, n, z=norm.ppf(0.975)):
    "Wilson's 95 % interval of k in n, by its formula."
    p = k / n
    mid, half = (p + z * z / (2 * n)) / (1 + z * z / n), z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(mid - half, 0), min(mid + half, 1)


def t_by_hand(values):
    "Mean and Student's 95 % interval, by SciPy."
    x = np.asarray(values, float)
    return x.mean(), *student.interval(0.95, len(x) - 1, x.mean(), sem(x))


def mean_again(values, seed=0):
    "Mean and interval of values as `mean_interval` has them; of one value or of equal ones the value itself, thrice."
    x = np.asarray(values, float)
    if np.ptp(x) < 1e-12:
        return (x[0],) * 3
    return triple(mean_interval(x, seed=seed))


def triple(i):
    "Estimate and bounds of an interval; three numbers stay what they are."
    return (i.estimate, i.low, i.high) if isinstance(i, Interval) else tuple(i)


def agrees(part, want, rtol=1e-7, atol=1e-12, scale=1):
    "Assert that a part's or claim's number and bounds are those of `want`, an interval or three numbers, None where there is none."
    got, want, label = [part.get(k) for k in BOUNDS], triple(want), part.get("label") or part.get("id") or ""
    assert [g is None for g in got] == [w is None for w in want], f"{label}: {got}, again: {want}"
    numbers = lambda x: np.array([v for v in x if v is not None], float)
    np.testing.assert_allclose(numbers(got), numbers(want) * scale, rtol=rtol, atol=atol, err_msg=label)


def made_up(label, measured, half=0.01, n=9, **more):
    "A part with this number, give or take `half`."
    return dict(label=label, measured=measured, ci_low=measured - half, ci_high=measured + half, n=n, **more)
