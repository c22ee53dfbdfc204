"""Do the intervals cover what they say, do the tests keep their level, do both behave under a change of units?

Seeds are fixed and the bands are several standard errors wide, so a right build never fails. Beside each band stands
a wrong build that must fall outside it.
"""
import itertools
import math
import warnings

import numpy as np
import pytest
import scipy.stats

from icl26 import stats
from icl26.stats import (bootstrap_ci, clopper_pearson, holm, iqm, iqm_interval, loglog_slope, mean_interval,
                         paired_difference, permutation_pvalue, permutation_test, probability_of_improvement,
                         probability_of_improvement_interval, roc_auc, t_interval, wilson)


def coverage(draw, interval, truth, trials, seed=0):
    "Share of `trials` data sets whose interval holds the truth."
    rng = np.random.default_rng(seed)
    inside = 0
    for _ in range(trials):
        i = interval(draw(rng))
        inside += i.low <= truth <= i.high
    return inside / trials


def standard_error(p, trials): return math.sqrt(p * (1 - p) / trials)


# coverage -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_t_covers_exactly(n, level):
    draw = lambda rng: rng.normal(3, 2, n)
    tolerance = 4 * standard_error(level, 3000)
    assert abs(coverage(draw, lambda x: t_interval(x, level=level), 3, 3000) - level) < tolerance
    z = scipy.stats.norm.ppf((1 + level) / 2)
    wrong = lambda x: stats.Interval(x.mean(), *(x.mean() + s * z * x.std(ddof=1) / math.sqrt(n) for s in (-1, 1)))
    assert abs(coverage(draw, wrong, 3, 3000) - level) > tolerance


def test_bca_covers_a_skewed_mean():
    "At n = 40 from an exponential BCa covers nearly 95 %; an 88 % interval, or one from data counted twice, does not."
    draw = lambda rng: rng.exponential(1, 40)
    right = lambda x: bootstrap_ci(x, n_resamples=999)
    assert 0.92 < coverage(draw, right, 1, 1000) < 0.97
    assert coverage(draw, lambda x: bootstrap_ci(x, n_resamples=999, level=0.88), 1, 1000) < 0.92
    assert coverage(draw, lambda x: bootstrap_ci(np.tile(x, 2), n_resamples=999), 1, 1000) < 0.92  # counted twice


def test_bca_beats_percentile_for_a_variance():
    draw = lambda rng: rng.exponential(1, 50)
    share = {m: coverage(draw, lambda x: bootstrap_ci(x, np.var, method=m, n_resamples=999), 1, 600)
             for m in ("bca", "percentile")}
    assert share["bca"] > share["percentile"] + 0.03 and share["bca"] > 0.82


def test_cluster_bootstrap_covers_where_items_do_not():
    "25 users of 1 to 11 answers whose chances differ: resampling answers covers far too little."
    def draw(rng):
        sizes = rng.integers(1, 12, 25)
        return rng.random(sizes.sum()) < np.repeat(rng.beta(1, 1, 25), sizes), np.repeat(np.arange(25), sizes)
    by_user = coverage(draw, lambda d: bootstrap_ci(d[0], groups=d[1], n_resamples=499), 0.5, 500)
    by_answer = coverage(draw, lambda d: bootstrap_ci(d[0], n_resamples=499), 0.5, 500)
    assert by_user > 0.89 and by_answer < 0.8


def test_mean_interval_covers_at_every_size():
    "The rule (t below six, then BCa) never drops far; BCa at three values, which the rule avoids, does."
    for n in 3, 5, 6, 8, 15:
        share = coverage(lambda rng: rng.normal(0, 1, n), mean_interval_quick, 0, 600)
        assert share > 0.84, (n, share)
    assert coverage(lambda rng: rng.normal(0, 1, 3), lambda x: bootstrap_ci(x, n_resamples=499), 0, 600) < 0.8


def mean_interval_quick(x): return t_interval(x) if len(x) < 6 else bootstrap_ci(x, n_resamples=499)


def test_paired_difference_covers():
    "Pairs share a large seed effect; the interval of the difference does not see it."
    def draw(rng):
        effect = rng.normal(0, 10, 12)
        return effect + rng.normal(1, 1, 12), effect + rng.normal(0, 1, 12)
    share = coverage(draw, lambda d: paired_difference(*d), 1.0, 250)
    assert share > 0.86
    a, b = draw(np.random.default_rng(0))
    paired, unpaired = paired_difference(a, b), mean_interval(a)
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 3


@pytest.mark.parametrize("n", [1, 8, 55])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_rates_cover(n, level):
    "Exactly, by summing binomial probabilities over a grid of true rates."
    k, p = np.arange(n + 1), np.linspace(0.001, 0.999, 501)
    weight = scipy.stats.binom.pmf(k[:, None], n, p)
    share = lambda i: (weight * ((i.low[:, None] <= p) & (p <= i.high[:, None]))).sum(0)
    for side in "two", "lower", "upper":
        assert share(clopper_pearson(k, n, level=level, side=side)).min() >= level - 1e-12
    assert abs(share(wilson(k, n, level=level)).mean() - level) < 0.06 / math.sqrt(n)
    one, two = clopper_pearson(k, n, level=level, side="lower"), clopper_pearson(k, n, level=2 * level - 1)
    np.testing.assert_allclose(one.low, two.low)  # one-sided at 1 - a is one end of two-sided at 1 - 2a


def test_iqm_and_improvement_cover():
    "Ten runs on eight tasks. Normal scores around each task's centre: the truth is known in closed form."
    centres = np.linspace(0, 0.3, 8)
    draw = lambda rng: rng.normal(centres, 1, (10, 8))
    truth = iqm(np.random.default_rng(9).normal(centres, 1, (200_000, 8)))
    assert 0.88 < coverage(draw, lambda s: iqm_interval(s, n_resamples=499), truth, 400) < 0.98
    pair = lambda rng: (draw(rng) + 0.5, draw(rng))
    wins = scipy.stats.norm.cdf(0.5 / math.sqrt(2))
    interval = lambda d: probability_of_improvement_interval(*d, n_resamples=499)
    assert 0.87 < coverage(pair, interval, wins, 400) < 0.98
    assert coverage(pair, interval, wins + 0.2, 400) < 0.1  # it is not simply wide


def test_slope_covers():
    x = np.geomspace(10, 1000, 6)
    curve = lambda rng: 2 * x**-0.5 * np.exp(rng.normal(0, 0.3, 6))
    share = coverage(curve, lambda y: loglog_slope(x, y), -0.5, 3000)
    assert abs(share - 0.95) < 4 * standard_error(0.95, 3000)
    curves = lambda rng: 2 * x**-0.5 * np.exp(rng.normal(0, 0.5, (60, 6)))
    of_median = lambda y: loglog_slope(x, y, n_resamples=499)
    of_mean = lambda y: loglog_slope(x, y, n_resamples=499, statistic=geometric_mean)
    assert 0.92 < coverage(curves, of_median, -0.5, 400)  # a median's bootstrap is a little wide
    assert 0.91 < coverage(curves, of_mean, -0.5, 400) < 0.975
    assert coverage(curves, of_median, -0.4, 400) < 0.5 and coverage(curves, of_mean, -0.4, 400) < 0.2
    shared = lambda rng: curves(rng) * np.exp(rng.normal(0, 2, (60, 1)))  # its own level each: same slope
    assert 0.91 < coverage(shared, of_mean, -0.5, 400) < 0.975


def geometric_mean(y, axis): return np.exp(np.mean(np.log(y), axis=axis))


# levels of tests ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("plus_one", [True, False])
def test_permutation_pvalue_keeps_its_level(plus_one):
    "Under exchangeability P(p <= a) <= a with the two ones; without them 19 shuffles reject at 0 far too often."
    rng = np.random.default_rng(0)
    p = np.array([permutation_pvalue(t[0], t[1:], plus_one=plus_one) for t in rng.normal(size=(20_000, 20))])
    rejected = {a: np.mean(p <= a) for a in (0.01, 0.049, 0.05, 0.2)}
    if plus_one:
        assert rejected[0.01] == rejected[0.049] == 0
        assert abs(rejected[0.05] - 0.05) < 4 * standard_error(0.05, 20_000)
        assert abs(rejected[0.2] - 0.2) < 4 * standard_error(0.2, 20_000)
    else: assert rejected[0.01] > 0.04


@pytest.mark.parametrize("side", ["two", "greater", "less"])
@pytest.mark.parametrize("paired", [True, False])
def test_permutation_test_equals_enumeration(paired, side):
    rng = np.random.default_rng(1)
    for _ in range(5):
        a, b = rng.normal(0.3, 1, 5).round(1), rng.normal(0, 1, 5 if paired else 4).round(1)  # rounded: ties
        if paired: null = [np.mean(np.array(s) * (a - b)) for s in itertools.product([1, -1], repeat=5)]
        else:
            both = np.concatenate([a, b])
            chosen = [np.isin(range(9), c) for c in itertools.combinations(range(9), 5)]
            null = [both[c].mean() - both[~c].mean() for c in chosen]
        t, null = a.mean() - b.mean(), np.array(null)
        up, down = np.mean(null >= t - 1e-9), np.mean(null <= t + 1e-9)
        truth = {"greater": up, "less": down, "two": min(1, 2 * min(up, down))}[side]
        got = permutation_test(a, b, paired=paired, side=side)
        np.testing.assert_allclose(got, (t, truth), atol=1e-12)
        sampled = permutation_test(a, b, paired=paired, side=side, n_permutations=25, seed=3)[1]
        assert sampled >= 1 / 26 and abs(sampled - truth) < 0.6


def test_permutation_test_keeps_its_level():
    rng = np.random.default_rng(2)
    p = [permutation_test(*rng.exponential(size=(2, 6)), n_permutations=99, seed=rng)[1] for _ in range(1500)]
    for a in 0.05, 0.2: assert np.mean(np.array(p) <= a) < a + 4 * standard_error(a, 1500)
    assert np.mean(np.array(p) <= 0.2) > 0.14


def test_holm_keeps_the_familywise_level():
    "Six tests, four of them true nulls, with dependence. Without adjustment some null is rejected far more often."
    rng = np.random.default_rng(3)
    z = 0.6 * rng.normal(size=(4000, 1)) + 0.8 * rng.normal(size=(4000, 6)) + np.array([0, 0, 0, 0, 3, 4])
    p = scipy.stats.norm.sf(z)
    null_rejected = lambda q: np.mean((q[:, :4] <= 0.05).any(axis=1))
    adjusted = np.array([holm(row) for row in p])
    assert null_rejected(adjusted) < 0.05 + 4 * standard_error(0.05, 4000) and null_rejected(p) > 0.12
    bonferroni = np.minimum(1, 6 * p)
    assert (adjusted <= bonferroni + 1e-15).all() and (adjusted < bonferroni).any()


# properties ---------------------------------------------------------------------------------------------------------

DATA = np.random.default_rng(4).gamma(2, 1, 37)


@pytest.mark.parametrize("method", ["bca", "percentile", "basic"])
@pytest.mark.parametrize("statistic", [np.mean, np.median, np.std])
def test_equivariance(method, statistic):
    "In other units the interval is the same interval; mirrored, it is mirrored."
    def ends(x):
        i = bootstrap_ci(x, statistic, method=method, n_resamples=1999)
        return np.array([i.low, i.estimate, i.high])
    shift = 0 if statistic is np.std else 7
    np.testing.assert_allclose(ends(3 * DATA + shift), 3 * ends(DATA) + shift, rtol=1e-9)
    if statistic is not np.std: np.testing.assert_allclose(ends(-DATA), -ends(DATA)[::-1], rtol=1e-9)


def test_levels_nest_and_seeds_repeat():
    one, two = (bootstrap_ci(DATA, level=level) for level in (0.8, 0.99))
    assert two.low < one.low < one.estimate < one.high < two.high
    assert bootstrap_ci(DATA) == bootstrap_ci(DATA) != bootstrap_ci(DATA, seed=1)
    rng = np.random.default_rng(0)
    assert bootstrap_ci(DATA, seed=rng) == bootstrap_ci(DATA) != bootstrap_ci(DATA, seed=rng)  # a generator moves on


@pytest.mark.parametrize("groups", [None, np.arange(37) // 3, np.arange(37) // 5])
def test_batches_do_not_change_the_result(monkeypatch, groups):
    whole = bootstrap_ci(DATA, groups=groups)
    monkeypatch.setattr(stats, "_BATCH", 1000)
    assert bootstrap_ci(DATA, groups=groups) == whole


def test_groups_of_every_shape():
    "Labels may be words and stand in any order; equal groups are rows."
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(20, 4))
    label = np.repeat(np.arange(20), 4)
    grouped = bootstrap_ci(rows.ravel(), groups=label)
    as_rows = bootstrap_ci(rows, lambda x, axis: x.mean((axis, -1)))
    np.testing.assert_allclose([grouped.low, grouped.high], [as_rows.low, as_rows.high], rtol=1e-12)
    order = rng.permutation(80)
    shuffled = bootstrap_ci(rows.ravel()[order], groups=np.array([f"user {g:02d}" for g in label])[order])
    np.testing.assert_allclose([grouped.low, grouped.high], [shuffled.low, shuffled.high], rtol=1e-9)


def test_statistics_of_several_numbers():
    rows = np.random.default_rng(6).normal(size=(40, 3)) + [0, 1, 2]
    rows[:, 1] = 1  # one of the columns is constant
    together = bootstrap_ci(rows, n_resamples=499)
    assert together.estimate.shape == (3,) and together.low[1] == together.high[1] == 1
    for j in 0, 2:
        alone = bootstrap_ci(rows[:, j], n_resamples=499)
        np.testing.assert_allclose([together.low[j], together.high[j]], [alone.low, alone.high], rtol=1e-9)


@pytest.mark.parametrize("call", [
    lambda x: bootstrap_ci(x), lambda x: bootstrap_ci(x, np.median), lambda x: bootstrap_ci(x, np.std), mean_interval,
    lambda x: bootstrap_ci(x, method="basic"), lambda x: bootstrap_ci(x, groups=np.arange(len(x)) // 2), t_interval,
    lambda x: paired_difference(x, x), iqm_interval, lambda x: probability_of_improvement_interval(x, x),
    lambda x: loglog_slope([1, 2, 4], np.outer(x, [1, 1, 1])), lambda x: wilson(0, len(x)),
    lambda x: clopper_pearson(7, 7)])
def test_equal_values_give_a_point_without_warnings(call):
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        i = call(np.full(7, 0.1))
    assert i.low <= i.estimate <= i.high and math.isfinite(i.low) and math.isfinite(i.high)
    if i.method not in ("wilson", "clopper-pearson"): assert i.low == i.high == pytest.approx(i.estimate)


@pytest.mark.parametrize("x", [np.eye(9)[0], [0, 0, 0, 0, 0, 1e-300], [1e150, -1e150, 0, 1, 2, 3], [1e-9] * 5 + [1.0]])
def test_extreme_values_never_give_nan(x):
    for statistic in np.mean, np.median, np.max:
        i = bootstrap_ci(x, statistic)
        assert math.isfinite(i.low) and math.isfinite(i.high) and i.low <= i.high


def test_roc_area_properties():
    rng = np.random.default_rng(7)
    neg, pos = rng.normal(size=30), rng.normal(0.7, 1, 20)
    assert roc_auc(neg, pos) == pytest.approx(1 - roc_auc(pos, neg)) == roc_auc(np.exp(neg), np.exp(pos))
    assert roc_auc([0], [1]) == 1 and roc_auc([1, 1], [1]) == 0.5 and math.isnan(roc_auc([], []))
    assert roc_auc(neg, pos) == pytest.approx(probability_of_improvement(pos, neg))


def test_results_are_plain_numbers():
    "What goes into a JSON file must not be a NumPy scalar."
    for i in (bootstrap_ci(DATA), t_interval(DATA), mean_interval(DATA), wilson(np.int64(3), 9), clopper_pearson(3, 9),
              iqm_interval(DATA), loglog_slope([1, 2, 4], [1, 2, 5]), probability_of_improvement_interval(DATA, DATA)):
        assert all(type(v) is float for v in i.to_dict().values()) and type(i.n) is int, i
    assert type(roc_auc([1], [2])) is type(iqm(DATA)) is type(permutation_pvalue(1, [2])) is float
    assert all(type(v) is float for v in permutation_test(DATA, DATA + 1, n_permutations=9))


@pytest.mark.parametrize("call, name", [
    (lambda: bootstrap_ci([]), "values"), (lambda: bootstrap_ci(np.ones((2, 2, 2))), "values"),
    (lambda: bootstrap_ci(DATA, n_resamples=0), "n_resamples"), (lambda: bootstrap_ci(DATA, level=1), "level"),
    (lambda: bootstrap_ci(DATA, lambda x, axis: x.mean()), "statistic"),
    (lambda: bootstrap_ci(DATA, groups=[1] * 37), "groups"),
    (lambda: t_interval([1]), "values"), (lambda: paired_difference([1, 2, 3], [1, 2]), "a and b"),
    (lambda: wilson(-1, 3), "k must"), (lambda: wilson(1.5, 3), "k must"),
    (lambda: wilson([1, 2], [3, 3, 3]), "k and n"),
    (lambda: clopper_pearson(1, 2.5), "n must"), (lambda: clopper_pearson(1, np.nan), "n must"),
    (lambda: permutation_pvalue(1, [], plus_one=False), "permuted"), (lambda: permutation_test([], [1]), "a must"),
    (lambda: permutation_test([1, 2], [3], n_permutations=1.5), "n_permutations"), (lambda: holm([]), "pvalues"),
    (lambda: iqm([np.inf, 1]), "scores"),
    (lambda: probability_of_improvement(np.ones((2, 3)), np.ones((2, 2))), "x and y"),
    (lambda: loglog_slope([1, 1, 1], [1, 2, 3]), "x must"), (lambda: loglog_slope([1, 2], [1, 2]), "x must"),
    (lambda: roc_auc([[1]], [1]), "negative")])
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=name): call()


# extreme magnitudes -------------------------------------------------------------------------------------------------

FAR = [2.0**1000, 2.0**-1000, 2.0**700, 2.0**-700]  # powers of two: every result has to scale to the last bit


@pytest.mark.parametrize("unit", FAR)
@pytest.mark.parametrize("call", [
    t_interval, mean_interval, bootstrap_ci, iqm_interval, lambda x: bootstrap_ci(x, np.median),
    lambda x: bootstrap_ci(x, method="basic"), lambda x: bootstrap_ci(x, groups=np.arange(len(x)) // 2),
    lambda x: paired_difference(x, x[::-1]), lambda x: mean_interval(x[:4])])
def test_values_at_the_ends_of_float64(call, unit):
    "Squares and cubes of these values leave float64; intervals of means and quantiles do not."
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        near, far = call(DATA), call(DATA * unit)
    assert (far.estimate, far.low, far.high) == (near.estimate * unit, near.low * unit, near.high * unit)
    assert far.method == near.method and far.low < far.high


@pytest.mark.parametrize("unit", FAR + [1e-15])
def test_permutation_tests_of_extreme_values(unit):
    "Tiny differences are no ties where the data are tiny, and huge ones do not overflow."
    a, b = DATA[:6], DATA[6:12] + 1
    for how in dict(), dict(paired=True), dict(n_permutations=99):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (t, p), (t_far, p_far) = permutation_test(a, b, **how), permutation_test(a * unit, b * unit, **how)
        assert p_far == p < 0.5 and t_far == pytest.approx(t * unit, rel=1e-12)
    assert iqm(DATA * unit) == pytest.approx(iqm(DATA) * unit, rel=1e-12)
    assert permutation_test(np.full(5, 0.1 * unit), np.full(5, 0.1 * unit))[1] == 1  # rounding is still a tie
    inf = math.inf
    assert permutation_pvalue(inf, [1, inf]) == 2 / 3 and permutation_pvalue(-inf, [1, -inf], side="less") == 2 / 3


def test_large_counts():
    "At 2**53 trials the exact interval of three events is Poisson's; of half of them, the normal one."
    n = 2**53
    for k, low, high in (3, *scipy.stats.chi2.ppf([0.025, 0.975], [6, 8]) / 2 / n), (n // 2, *(0.5 + s * 0.98 / n**0.5 for s in (-1, 1))):
        i = clopper_pearson(k, n)
        np.testing.assert_allclose([i.low, i.high], [low, high], rtol=1e-9)
        w = wilson(k, n)
        assert w.low < k / n < w.high and w.n == i.n == n
    assert wilson(0, n).low == 0 and wilson(n, n).high == 1 and clopper_pearson(0, n).low == 0


@pytest.mark.parametrize("call, name", [
    (lambda: wilson(10**17, 10**17 + 1), "n must.*2\\*\\*53"), (lambda: clopper_pearson(0, 1e17), "n must.*2\\*\\*53"),
    (lambda: wilson(1, 2**63), "n must"), (lambda: wilson(10**400, 10**401), "k and n"), (lambda: wilson(1, math.inf), "n must"),
    (lambda: t_interval([10**400, 1]), "values"), (lambda: t_interval([1.7e308, -1.7e308, 1e308]), "float64"),
    (lambda: paired_difference([1.7e308] * 3, [-1.7e308] * 3), "float64"),
    (lambda: bootstrap_ci([1e308] * 8, np.sum), "statistic must be finite"),
    (lambda: bootstrap_ci([1, 2, 3, 4], lambda x, axis: np.where(x.std(axis=1) > 0, 1, np.nan)), "statistic must be finite"),
    (lambda: permutation_test([1.7e308] * 3, [-1.7e308] * 3), "statistic must be finite"),
    (lambda: permutation_test([1, 2], [3, 4], lambda a, b, axis: a.sum(axis) * np.nan), "statistic must be finite"),
    (lambda: loglog_slope([1e300, math.nextafter(1e300, 2e300), 1e300], [1, 2, 3]), "x must"),
    (lambda: loglog_slope([1, 2, 4], [[1e300, 1e308, 1.7e308]] * 2, statistic=np.mean), "statistic must be finite"),
    (lambda: bootstrap_ci(DATA, level=1 - 1e-16), "level"), (lambda: wilson(3, 9, level=math.nan), "level"),
    (lambda: bootstrap_ci(DATA, n_resamples=math.inf), "n_resamples"), (lambda: bootstrap_ci(DATA, n_resamples=math.nan), "n_resamples"),
    (lambda: bootstrap_ci(DATA, seed=-1), "seed"), (lambda: permutation_pvalue([1, 2], [1]), "observed")])
def test_what_has_no_value_is_refused(call, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=name): call()


@pytest.mark.parametrize("call, name", [
    (lambda: t_interval(["1", "2"]), "values"), (lambda: t_interval([1j, 2]), "values"), (lambda: roc_auc(["a"], [1]), "negative"),
    (lambda: t_interval(np.array(["2020", "2021"], "datetime64[Y]")), "values"),
    (lambda: wilson(3, 9, level="0.95"), "level"), (lambda: wilson(3, 9, level=True), "level"), (lambda: t_interval(DATA, level=None), "level"),
    (lambda: bootstrap_ci(DATA, n_resamples="99"), "n_resamples"), (lambda: bootstrap_ci(DATA, n_resamples=True), "n_resamples"),
    (lambda: bootstrap_ci(DATA[:4], groups=[None, "a", 1, 2]), "groups"), (lambda: bootstrap_ci(DATA, seed="a"), "seed"),
    (lambda: permutation_pvalue("a", [1]), "observed")])
def test_odd_types_are_named(call, name):
    with pytest.raises(TypeError, match=name): call()


def test_one_resample_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        i = bootstrap_ci(DATA, n_resamples=1)
    assert i.low <= i.high
