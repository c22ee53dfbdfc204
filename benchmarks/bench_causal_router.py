"""Meta-Router's learners beside econml's on the same folds, its growth with rows and folds, its bootstrap beside a plain loop.

    pytest benchmarks/bench_causal_router.py -s

Outputs agree before the clock starts. Without econml (`pip install econml`) that comparison is skipped. Times are of the processor.
"""
import warnings

import numpy as np
import pytest
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression

from icl26.evaluation.causal_router import MetaRouter, efficiency_gain, gain_interval, make_routing_data
from icl26.evaluation.causal_router.evaluation import PMUR
from icl26.evaluation.causal_router.learners import cross_fit, fit_effect, pseudo_outcomes
from timing import best_of


class PerArm(RegressorMixin, BaseEstimator):
    "A regression for each arm behind the interface of econml's DRLearner, which appends the treatment as a column."

    def __init__(self, model=None):
        self.model = model

    def fit(self, X, y, sample_weight=None):
        self.arms_ = [clone(self.model).fit(X[X[:, -1] == a, :-1], y[X[:, -1] == a]) for a in (0, 1)]
        return self

    def predict(self, X):
        return np.where(X[:, -1] == 1, *(self.arms_[a].predict(X[:, :-1]) for a in (1, 0)))


LINEAR = dict(outcome=LinearRegression(), propensity=LogisticRegression(C=0.1), effect=LinearRegression())
FOREST = dict(outcome=RandomForestRegressor(10, max_depth=20, max_features="sqrt", random_state=0), propensity=RandomForestClassifier(10, max_depth=5, random_state=0),
              effect=RandomForestRegressor(20, min_samples_leaf=2, max_features="sqrt", random_state=0))


@pytest.mark.parametrize("learner", ["r", "dr"])
@pytest.mark.parametrize("models", [LINEAR, FOREST], ids=["linear", "forest"])
def test_learners_beside_econml(learner, models):
    "n = 5,000 pooled rows of 50 features."
    econml_dml, econml_dr = pytest.importorskip("econml.dml", reason="econml is not installed"), pytest.importorskip("econml.dr")
    d = make_routing_data(1000, 4000, 500, n_features=50)
    S, t, o = np.vstack([d.X_gold, d.X_pref]), np.r_[np.ones(1000, int), np.zeros(4000, int)], np.r_[d.r, d.y]

    def ours():
        n = cross_fit(S, t, o, learner=learner, outcome_model=models["outcome"], propensity_model=models["propensity"], n_folds=3, clip=0.01, rng=np.random.RandomState(0))
        return n, fit_effect(S, *pseudo_outcomes(t, o, n), models["effect"], np.random.RandomState(0))

    n, effect = ours()
    splits = [(np.flatnonzero(n.fold != k), np.flatnonzero(n.fold == k)) for k in range(3)]

    def theirs():
        if learner == "r":
            fit = econml_dml.NonParamDML(model_y=models["outcome"], model_t=models["propensity"], model_final=models["effect"], discrete_treatment=True, cv=splits)
        else:
            fit = econml_dr.DRLearner(model_propensity=models["propensity"], model_regression=PerArm(models["outcome"]), model_final=models["effect"], min_propensity=0.01, cv=splits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fit.fit(o, t, X=S)

    a, b = effect.predict(d.X_test), theirs().effect(d.X_test)
    if models is LINEAR or learner == "r":
        np.testing.assert_allclose(a, np.ravel(b), atol=1e-6)
    else:  # labels differ in the last bit, and a forest may split another way
        assert np.corrcoef(a, np.ravel(b))[0, 1] > 0.99
    ours_s, theirs_s = best_of(ours, 3), best_of(theirs, 3)
    print(f"\n{learner}-learner, {'linear' if models is LINEAR else 'forests'}, 5,000 x 50: {ours_s:.2f} s beside econml's {theirs_s:.2f} s, {theirs_s / ours_s:.2f} times as fast")
    assert theirs_s / ours_s > 0.8


def small_forests(**kw):
    f = lambda n, **k: RandomForestRegressor(n, max_depth=20, max_features="sqrt", **k)
    return dict(outcome_model=f(8), propensity_model=RandomForestClassifier(8, max_depth=5), effect_model=f(16, min_samples_split=5, min_samples_leaf=2), final_model=f(8), **kw)


def fit_seconds(rows, rounds, **kw):
    d = make_routing_data(rows // 10, rows - rows // 10, 5, n_features=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return best_of(lambda: MetaRouter("dr", **small_forests(**kw)).fit(d.X_gold, d.r, d.X_pref, d.y), rounds)


def test_ten_times_the_rows():
    few, many = fit_seconds(2000, 4), fit_seconds(20_000, 2)
    print(f"\nMetaRouter.fit: {few:.2f} s for 2,000 rows, times {many / few:.1f} for 20,000")
    assert many / few < 15


def test_cost_is_linear_in_folds():
    two, four, eight = (fit_seconds(4000, 2, n_folds=k) for k in (2, 4, 8))
    print(f"\nMetaRouter.fit with 2, 4, 8 folds: {two:.2f}, {four:.2f}, {eight:.2f} s")
    assert eight / two < 8


def test_bootstrap_beside_a_loop():
    rng = np.random.default_rng(0)
    g = rng.normal(size=500)
    p = g + rng.normal(size=500)

    def loop():
        at = np.random.default_rng(0).integers(500, size=(1000, 500))
        return np.quantile([np.mean(efficiency_gain(p[rows], g[rows], PMUR)) for rows in at], [0.025, 0.975])

    ours = lambda: gain_interval(p, g, n_resamples=1000, seed=0)
    np.testing.assert_allclose([ours().low, ours().high], loop(), atol=1e-12)
    ratio = best_of(loop, 3) / best_of(ours, 3)
    print(f"\nbootstrap of the mean efficiency gain, 500 queries, 1,000 resamples: {ratio:.1f} times faster than a loop")
    assert ratio > 1.5
