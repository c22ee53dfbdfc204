"odr: the interface, its edges, and that every number and verdict of a run follows from what it recorded."

import dataclasses
import json
import warnings

import numpy as np
import papers
import pytest
from papers import committed, plain_signature, run_command, run_here, use_command
from recompute import BOUNDS, agrees, made_up as p, mean_again
from scipy import optimize, stats

import icl26.decision.odr as odr
from icl26.decision.envs import MujocoSim, get_params, make_env, set_params
from icl26.decision.odr import dropo, mle
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement
from icl26.stats import bootstrap_ci, loglog_slope, mean_interval, paired_difference, wilson

XI = np.array([0.9, 0.3])


@pytest.fixture(scope="module")
def sim():
    return odr.linear_family()


def wide_family(n=3, d=2, seed=0):
    rng = np.random.default_rng(seed)
    B, R = rng.standard_normal((n, d, n + 1)), rng.standard_normal((n, n))
    return odr.LinearGaussianSimulator(
        lambda s, a: np.einsum("idk,nk->nid", B, np.hstack([s, a])),
        0.02 * R @ R.T + 0.01 * np.eye(n),
        np.tile([-2.0, 2.0], (d, 1)),
        drift=lambda s, a: 0.3 * s,
    )


# -- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, want",
    [
        (odr.Transitions, "(s, a, s_next, done=None)"),
        (odr.LinearGaussianSimulator, "(features, noise_cov, bounds, drift=None)"),
        (odr.LinearGaussianSimulator.mean, "(self, xi, s, a)"),
        (odr.LinearGaussianSimulator.sample, "(self, xi, s, a, seed=0)"),
        (odr.mixture_loglik, "(sim, mu, cov, data, *, method='exact', n_samples=256, seed=0)"),
        (odr.ODR, "(sim, *, method='exact', sd_floor=1e-06, n_samples=256, n_restarts=4, seed=0)"),
        (odr.ODR.sample, "(self, size, seed=0)"),
        (
            odr.dropo_loglik,
            "(sim, mu, std, data, *, horizon=1, n_samples=100, epsilon=0.001, seed=0, standardize=False)",
        ),
        (
            odr.DROPO,
            "(sim, *, horizon=1, n_samples=100, epsilon=0.001, entropy_coef=0.0, budget=1000, seed=0, standardize=False)",
        ),
        (odr.informativeness, "(mu, cov, center, radius, *, n=200000, seed=0)"),
    ],
)
def test_signatures(call, want):
    assert plain_signature(call) == want


def test_transitions_are_frozen_float64_and_checked():
    t = odr.Transitions([[0], [1]], [[1, 2], [3, 4]], [[1], [2]])
    assert len(t) == 2 and t.s.dtype == float and t.done.tolist() == [False, False] and t.done.dtype == bool
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.s = 1
    for bad in (
        ([[0.0]], [[1.0], [2.0]], [[0.0]]),
        ([[0.0]], [[1.0]], [[0.0, 1.0]]),
        (np.zeros((0, 1)),) * 3,
        ([[np.inf]], [[1.0]], [[1.0]]),
        ([0.0], [1.0], [1.0]),
    ):
        with pytest.raises(ValueError):
            odr.Transitions(*bad)
    with pytest.raises(ValueError, match="rows"):
        odr.Transitions([[0.0]], [[1.0]], [[1.0]], [True, False])


def test_simulator_shapes_and_errors(sim):
    s, a, xis = np.random.default_rng(0).standard_normal((5, 1)), np.ones((5, 1)), np.arange(6.0).reshape(3, 2)
    assert (
        sim.mean(XI, s, a).shape == (5, 1)
        and sim.mean(xis, s, a).shape == (3, 5, 1)
        and sim.sample(XI, s, a, 3).shape == (5, 1)
    )
    np.testing.assert_array_equal(sim.mean(xis, np.stack([s] * 3), a), sim.mean(xis, s, a))
    np.testing.assert_array_equal(sim.sample(XI, s, a, 3), sim.sample(XI, s, a, 3))
    draws = np.stack([wide_family().sample(XI, np.zeros((1, 3)), np.zeros((1, 1)), i)[0] for i in range(4000)])
    np.testing.assert_allclose(np.cov(draws.T), wide_family().noise_cov, atol=0.02)
    f = sim.features
    for noise, bounds in (
        ([[1.0, 0.0]], sim.bounds),
        ([[-1.0]], sim.bounds),
        ([[1.0]], [[1.0, 1.0], [0.0, 1.0]]),
        ([[1.0]], [0.0, 1.0]),
    ):
        with pytest.raises(ValueError):
            odr.LinearGaussianSimulator(f, noise, bounds)
    with pytest.raises(ValueError, match="features"):
        odr.LinearGaussianSimulator(lambda s, a: np.zeros((len(s), 1, 3)), [[1.0]], sim.bounds).mean(XI, s, a)


# -- likelihoods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, d", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (4, 4)])
def test_exact_likelihood_is_scipys(n, d):
    family, rng = wide_family(n, d, n + 10 * d), np.random.default_rng(n)
    data = odr.draw_log(family, rng.uniform(-1, 1, d), 15, seed=1, n=n)
    R, mu = rng.standard_normal((d, d)), rng.uniform(-1, 1, d)
    g, F = family.parts(data.s, data.a)
    for cov in (0.1 * R @ R.T, np.zeros((d, d)), np.diag(np.r_[0.3, np.zeros(d - 1)])):
        want = np.mean(
            [
                stats.multivariate_normal(gi + Fi @ mu, Fi @ cov @ Fi.T + family.noise_cov).logpdf(x)
                for gi, Fi, x in zip(g, F, data.s_next)
            ]
        )
        np.testing.assert_allclose(odr.mixture_loglik(family, mu, cov, data), want, rtol=1e-9, atol=1e-9)


def test_monte_carlo_converges_and_is_deterministic(sim):
    data, cov = odr.draw_log(sim, XI, 30, 0), np.diag([0.1, 0.07]) ** 2
    exact = odr.mixture_loglik(sim, XI, cov, data)
    error = {
        M: np.sqrt(
            np.mean(
                [
                    (odr.mixture_loglik(sim, XI, cov, data, method="mc", n_samples=M, seed=s) - exact) ** 2
                    for s in range(15)
                ]
            )
        )
        for M in (16, 256, 4096)
    }
    assert error[256] < error[16] / 3 and error[4096] < error[256] / 3 and error[4096] < 5e-3
    full = np.array([[0.01, 0.006], [0.006, 0.008]])  # a covariance with correlation
    np.testing.assert_allclose(
        odr.mixture_loglik(sim, XI, full, data, method="mc", n_samples=2**15),
        odr.mixture_loglik(sim, XI, full, data),
        atol=2e-3,
    )


def test_a_point_mass_is_the_plain_likelihood_by_every_method(sim):
    data = odr.draw_log(sim, XI, 20, 0)
    plain = stats.norm(sim.mean(XI, data.s, data.a), 0.1).logpdf(data.s_next).mean()
    for method in ("exact", "mc", "linear"):
        np.testing.assert_allclose(odr.mixture_loglik(sim, XI, np.zeros((2, 2)), data, method=method), plain, rtol=1e-12)


def test_pendulum_is_gymnasiums():
    import gymnasium

    env, swing = gymnasium.make("Pendulum-v1").unwrapped, odr.PendulumSimulator()
    env.m, env.l = 0.7, 1.3
    env.reset(seed=0)
    for state, u in zip(np.random.default_rng(0).uniform(-4, 4, (50, 2)), np.linspace(-3, 3, 50)):
        env.state = state
        env.step(np.array([u]))
        np.testing.assert_allclose(swing.mean([0.7, 1.3], state[None], [[u]])[0], env.state, atol=1e-12)


def test_linearised_likelihood_is_exact_for_a_linear_family(sim):
    data, cov = odr.draw_log(sim, XI, 30, 0), np.diag([0.1, 0.07]) ** 2
    np.testing.assert_allclose(
        odr.mixture_loglik(sim, XI, cov, data, method="linear"), odr.mixture_loglik(sim, XI, cov, data), rtol=1e-12
    )


def test_likelihood_rejects_bad_input(sim):
    data = odr.draw_log(sim, XI, 5, 0)
    for cov in (np.diag([1, -1]), [[1, 0.5], [0, 1]], [[1]], np.full((2, 2), np.nan)):
        with pytest.raises(ValueError, match="cov"):
            odr.mixture_loglik(sim, XI, cov, data)
    with pytest.raises(ValueError, match="mu"):
        odr.mixture_loglik(sim, [1.0], np.eye(2), data)
    with pytest.raises(ValueError, match="method"):
        odr.mixture_loglik(sim, XI, np.eye(2), data, method="fast")
    with pytest.raises(TypeError, match="LinearGaussian"):
        odr.mixture_loglik(
            odr.PendulumSimulator(), [1, 1], np.eye(2), odr.Transitions(np.zeros((1, 2)), [[0.0]], np.zeros((1, 2)))
        )


def test_log_likelihoods_are_python_floats(sim):
    data = odr.draw_log(sim, XI, 20, 0)
    for method in ("exact", "mc", "linear"):
        assert type(odr.mixture_loglik(sim, XI, 1e-4 * np.eye(2), data, method=method)) is float
        assert type(odr.ODR(sim, method=method, n_samples=16, n_restarts=1).fit(data).loglik_) is float
    assert type(odr.dropo_loglik(sim, XI, [0.1, 0.1], data)) is float


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_a_covariance_is_checked_at_its_own_scale(sim, scale):
    data = odr.draw_log(sim, XI, 5, 0)
    for cov in (np.diag([1.0, -1.0]), np.array([[1.0, 0.5], [0.0, 1.0]]), np.array([[1.0, 2.0], [2.0, 1.0]])):
        with pytest.raises(ValueError, match="cov must be"):
            odr.mixture_loglik(sim, XI, scale * cov, data)
        with pytest.raises(ValueError, match="cov must be"):
            odr.informativeness([0, 0], scale * cov, [0, 0], 0.1)
    v = np.array([0.3, 0.7])
    assert np.isfinite(odr.mixture_loglik(sim, XI, scale * np.outer(v, v), data))  # singular is allowed


def test_few_effective_samples_warn_and_enough_do_not(sim):
    data = odr.draw_log(sim, XI, 40, 0)
    with pytest.warns(odr.FewEffectiveSamples, match="draws"):
        odr.mixture_loglik(sim, XI, 4 * np.eye(2), data, method="mc", n_samples=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        odr.mixture_loglik(sim, XI, 1e-4 * np.eye(2), data, method="mc", n_samples=256)
    ess = odr.effective_samples(sim, XI, 4 * np.eye(2), data, n_samples=32)
    assert ess.shape == (40,) and (ess >= 1).all() and (ess <= 32).all()


@pytest.mark.parametrize("n, d", [(1, 2), (2, 2), (3, 2), (2, 3)])
def test_gradient_and_information(n, d):
    family, rng = wide_family(n, d, 5), np.random.default_rng(0)
    y, F, _ = mle.whiten(family, odr.draw_log(family, rng.uniform(-1, 1, d), 60, 2, n=n))
    x = np.r_[rng.uniform(-1, 1, d), rng.uniform(0.01, 0.3, d)]
    f = lambda p: mle.objective_terms(p[None, :d], p[None, d:], y[None], F[None])
    _, g_mu, g_tau, info, _ = f(x)
    numeric = optimize.approx_fprime(x, lambda p: f(p)[0][0], 1e-7)
    np.testing.assert_allclose(np.r_[g_mu[0], g_tau[0]], numeric, rtol=1e-4, atol=1e-5)
    hessian = optimize.approx_fprime(x[:d], lambda m: f(np.r_[m, x[d:]])[1][0], 1e-6)
    np.testing.assert_allclose(info[0], -hessian, rtol=1e-4, atol=1e-6)


def sharp_family(sd, n, d, seed=0):
    "Noise of standard deviation sd in a box of ±3."
    B = np.random.default_rng(seed).standard_normal((n, d, n + 1))
    return odr.LinearGaussianSimulator(
        lambda s, a: np.einsum("idk,nk->nid", B, np.hstack([s, a])), sd**2 * np.eye(n), np.tile([-3.0, 3.0], (d, 1))
    )


@pytest.mark.parametrize("sd", 10.0 ** -np.arange(1, 8))
@pytest.mark.parametrize("d", [2, 3])
def test_sharp_sensors_are_scipys_row_by_row(d, sd):
    family, mu = sharp_family(sd, 2, d), np.linspace(-1, 1, d)
    data = odr.draw_log(family, np.full(d, 0.5), 200, seed=1, n=2)
    y, F, constant = mle.whiten(family, data)
    logdet, squares, b, A = mle.row_terms(mu, np.eye(d), y, F)
    rows = constant - 0.5 * (logdet + squares)
    bare = F * sd
    want = [
        stats.multivariate_normal(Fi @ mu, Fi @ Fi.T + sd**2 * np.eye(2)).logpdf(x) for Fi, x in zip(bare, data.s_next)
    ]
    np.testing.assert_allclose(rows, want, rtol=1e-13 / sd + 1e-12)
    np.testing.assert_allclose(odr.mixture_loglik(family, mu, np.eye(d), data), np.mean(want), rtol=1e-13 / sd + 1e-12)


@pytest.mark.parametrize("n, d", [(2, 3), (3, 2), (4, 4)])
def test_the_four_numbers_of_a_row_in_fifty_digits(n, d):
    mp = pytest.importorskip("mpmath")
    rng = np.random.default_rng(0)
    R = rng.standard_normal((d, d))
    F, mu = rng.standard_normal((6, n, d)) * 1e6, rng.standard_normal(d)
    for cov in (np.eye(d), R @ R.T, np.diag(np.r_[1e-12, np.ones(d - 1)])):
        y = F @ mu + np.einsum("nid,nd->ni", F, rng.standard_normal((6, d)) * np.sqrt(np.diag(cov))) + rng.standard_normal((6, n))
        ours = mle.row_terms(mu, cov, y, F)
        with mp.workdps(50):
            for i in range(6):
                Fi = mp.matrix(F[i].tolist())
                V, r = mp.eye(n) + Fi * mp.matrix(cov.tolist()) * Fi.T, mp.matrix(y[i].tolist()) - Fi * mp.matrix(mu.tolist())
                W = V**-1
                for got, want in zip(ours, (mp.matrix([mp.log(mp.det(V))]), r.T * W * r, Fi.T * W * r, Fi.T * W * Fi)):
                    want = np.array(want.tolist(), float)
                    assert np.abs(np.reshape(got[i], want.shape) - want).max() < 1e-6 * np.abs(want).max()


def test_divergence_with_sharp_sensors_is_the_closed_form():
    family, rng = sharp_family(1e-6, 3, 1), np.random.default_rng(0)
    s, a = rng.standard_normal((20, 3)), rng.standard_normal((20, 1))
    f = (family.parts(s, a)[1][..., 0] ** 2).sum(1) * 1e12  # |f|² in units of the noise
    want = 0.5 * np.mean(np.log1p(f * 0.04) + 0.01 * f / (1 + 0.04 * f) + 1 / (1 + 0.04 * f) - 1)
    np.testing.assert_allclose(odr.expected_kl(family, [0.5], [0.6], [[0.04]], s, a), want, rtol=1e-9)


# -- ODR -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, d, sd", [(2, 3, 1e-4), (2, 3, 1e-6), (2, 2, 1e-7), (3, 2, 1e-6)])
def test_fit_with_sharp_sensors_finds_the_truth(n, d, sd):
    family, truth = sharp_family(sd, n, d, seed=2), np.linspace(-2, 1.5, d)
    data = odr.draw_log(family, truth, 200, seed=1, n=n)
    floor = min(1e-6, sd / 100)
    fit = odr.ODR(family, sd_floor=floor, n_restarts=2).fit(data)
    assert np.abs(fit.mu_ - truth).max() < sd and (np.sqrt(np.diag(fit.cov_)) < sd).all()
    assert fit.loglik_ >= odr.mixture_loglik(family, truth, floor**2 * np.eye(d), data)  # the truth, as near as the floor allows


class Saturating:
    "A mean that flattens out: from far away Gauss-Newton overshoots, and its rounds cycle."

    bounds, noise_cov = np.array([[-6.0, 6.0]]), np.eye(1) * 1e-4

    def mean(self, xi, s, a):
        xi = np.asarray(xi)
        return np.arctan(xi[..., None, :] * np.ones((len(s), 1))) if xi.ndim > 1 else np.arctan(xi) * np.ones((len(s), 1))


def test_a_linearised_fit_that_does_not_rest_warns_and_keeps_its_best():
    sim, zeros = Saturating(), np.zeros((30, 1))
    log = odr.Transitions(zeros, zeros, sim.mean(np.zeros(1), zeros, zeros) + 0.01 * np.random.default_rng(0).standard_normal((30, 1)))
    start = np.array([3.0])
    with pytest.warns(mle.NotAtRest, match="no maximum"):
        fit = odr.ODR(sim, method="linear").fit(log, start=start)
    assert not fit.rests_
    assert fit.loglik_ >= odr.mixture_loglik(sim, start, np.eye(1) * 1e-12, log, method="linear")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = odr.ODR(sim, method="linear").fit(log, start=[0.3])
    assert near.rests_ and abs(near.mu_[0]) < 0.01


@pytest.mark.parametrize("n_restarts", [2.5, 0, True, "3"])
def test_numbers_of_starts_are_checked(sim, n_restarts):
    with pytest.raises(ValueError, match="n_restarts must be a whole number"):
        odr.ODR(sim, n_restarts=n_restarts).fit(odr.draw_log(sim, XI, 5, 0))


def test_fit_has_what_it_promises(sim):
    data = odr.draw_log(sim, XI, 400, 3)
    fit = odr.ODR(sim).fit(data)
    assert fit.mu_.shape == (2,) and fit.cov_.shape == (2, 2) and fit.at_floor_.dtype == bool and fit.n_ == 400
    assert fit.loglik_ == odr.mixture_loglik(sim, fit.mu_, fit.cov_, data)
    draws = fit.sample(500, 1)
    assert draws.shape == (500, 2) and (draws >= sim.bounds[:, 0]).all() and (draws <= sim.bounds[:, 1]).all()
    assert np.array_equal(draws, fit.sample(500, 1)) and not np.array_equal(draws, fit.sample(500, 2))


def test_fit_beats_scipy_from_many_starts(sim):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        log = odr.draw_log(sim, XI, 80, seed)
        spread = odr.Transitions(log.s, log.a, log.s_next + 0.3 * rng.standard_normal((80, 1)) * log.s)
        fit = odr.ODR(sim).fit(spread)
        f = lambda p: -odr.mixture_loglik(sim, p[:2], np.diag(np.exp(2 * p[2:])), spread)
        others = [
            optimize.minimize(
                f, np.r_[m, np.log([sd, sd])], method="L-BFGS-B", bounds=[(-2, 2)] * 2 + [(np.log(1e-6), np.log(2))] * 2
            ).fun
            for m in ([0, 0], [1.5, -1.5])
            for sd in (0.01, 0.3)
        ]
        assert -fit.loglik_ <= min(others) + 1e-9
        assert 0.2 < np.sqrt(fit.cov_[0, 0]) < 0.45 and not fit.at_floor_[0]


def test_bounds_hold_and_the_edge_is_a_legitimate_answer():
    tight = odr.LinearGaussianSimulator(odr.linear_family().features, [[0.01]], [[-2.0, 0.5], [-2.0, 2.0]])
    log = odr.draw_log(odr.linear_family(), XI, 300, 0)
    fit = odr.ODR(tight).fit(log)
    assert (
        fit.mu_[0] == 0.5 and np.sqrt(fit.cov_[0, 0]) > 0.2
    )  # the truth, 0.9, lies outside: the spread reaches for it
    assert (fit.sample(100)[:, 0] <= 0.5).all() and (np.sqrt(np.diag(fit.cov_)) <= [1.25, 2.0]).all()


def test_floor_flags():
    one = odr.LinearGaussianSimulator(lambda s, a: s[..., None], [[0.01]], [[-2.0, 2.0]])
    flags, sds = zip(
        *[
            (f.at_floor_[0], np.sqrt(f.cov_[0, 0]))
            for f in (odr.ODR(one).fit(odr.draw_log(one, [0.5], 200, i)) for i in range(40))
        ]
    )
    assert (
        0.3 < np.mean(flags) < 0.8
        and all(sd <= 1e-5 for f, sd in zip(flags, sds) if f)
        and all(sd > 1e-3 for f, sd in zip(flags, sds) if not f)
    )


def test_one_transition_and_a_dead_feature(sim):
    fit = odr.ODR(sim).fit(odr.Transitions([[1.0]], [[0.0]], [[0.7]]))
    np.testing.assert_allclose(fit.mu_[0], 0.7, atol=1e-6)
    assert (
        fit.at_floor_[1]
        and odr.identifiability(sim, fit.mu_, odr.Transitions([[1.0]], [[0.0]], [[0.7]])).status[1] == "not identified"
    )


def test_identifiability_is_minus_the_second_derivative(sim):
    data, cov = odr.draw_log(sim, XI, 50, 0), np.diag([0.02, 0.05]) ** 2
    report = odr.identifiability(sim, XI, data, cov=cov, names=["a", "b"])
    f, h = lambda m: 50 * odr.mixture_loglik(sim, m, cov, data), 1e-4
    e = np.eye(2) * h
    H = [[(f(XI + i + j) - f(XI + i - j) - f(XI - i + j) + f(XI - i - j)) / (4 * h * h) for j in e] for i in e]
    np.testing.assert_allclose(report.information, -np.array(H), rtol=1e-4, atol=0.5)
    assert "a" in report._repr_markdown_() and report.lost == []


# -- DROPO -----------------------------------------------------------------------------------------------------------


def test_dropo_objective_edges(sim):
    log = odr.draw_log(sim, XI, 30, 0)
    done = np.arange(30) % 3 == 2
    short = odr.Transitions(log.s, log.a, log.s_next, done)
    with pytest.raises(ValueError, match="horizon"):
        odr.dropo_loglik(sim, XI, [0.1, 0.1], short, horizon=4)
    assert np.isfinite(odr.dropo_loglik(sim, XI, [0.1, 0.1], short, horizon=3))
    assert len(dropo.windows(done, 3)) == 10 and len(dropo.windows(done, 1)) == 30
    for std in ([-0.1, 0.1], [0.1], [np.nan, 0.1], [np.inf, 0.1]):
        with pytest.raises(ValueError, match="std must be"):
            odr.dropo_loglik(sim, XI, std, log)
    for mu in ([0.9], [np.nan, 0.3], [np.inf, 0.3]):
        with pytest.raises(ValueError, match="mu must be"):
            odr.dropo_loglik(sim, mu, [0.1, 0.1], log)
    two = odr.dropo_loglik(sim, XI, [0.1, 0.1], log[:10]) + odr.dropo_loglik(sim, XI, [0.1, 0.1], log[10:])
    np.testing.assert_allclose(odr.dropo_loglik(sim, XI, [0.1, 0.1], log), two)  # a sum over windows, common draws


def test_dropo_standardises_states_and_records_it():
    swing, rng = odr.PendulumSimulator(), np.random.default_rng(0)
    s, a = rng.uniform(-1, 1, (30, 2)) * [1, 6], rng.uniform(-2, 2, (30, 1))
    log = odr.Transitions(s, a, swing.mean([1.2, 0.9], s, a))
    units = np.array([7.0, 0.1])  # the same log in other units: only the constant changes
    other = type(
        "Other",
        (),
        dict(
            bounds=swing.bounds, noise_cov=np.eye(2), mean=lambda self, xi, s, a: swing.mean(xi, s / units, a) * units
        ),
    )()
    scaled = odr.Transitions(s * units, a, log.s_next * units)
    args = ([1.0, 1.0], [0.1, 0.1])
    np.testing.assert_allclose(
        odr.dropo_loglik(other, *args, scaled, standardize=True), odr.dropo_loglik(swing, *args, log, standardize=True)
    )
    assert abs(odr.dropo_loglik(other, *args, scaled) - odr.dropo_loglik(swing, *args, log)) > 1
    fit = odr.DROPO(swing, n_samples=10, budget=10, standardize=True).fit(log)
    np.testing.assert_allclose(fit.scale_, log.s_next.std(0))
    assert (odr.DROPO(swing, n_samples=10, budget=10).fit(log).scale_ == 1).all()


def test_dropo_budget_bounds_and_seed(sim):
    log = odr.draw_log(sim, XI, 60, 0)
    state = np.random.get_state()[1].copy()
    one, two = (odr.DROPO(sim, n_samples=20, epsilon=0.01, budget=50, seed=4).fit(log) for _ in range(2))
    assert np.array_equal(np.random.get_state()[1], state)  # the global generator is not touched
    assert np.array_equal(one.mu_, two.mu_) and np.array_equal(one.std_, two.std_) and one.objective_ == two.objective_
    assert 50 <= one.n_evals_ <= 50 + 4 + int(3 * np.log(4)) and (one.std_ <= 1.0).all() and (one.std_ >= 9e-6).all()
    assert (
        (one.mu_ >= -2).all()
        and (one.mu_ <= 2).all()
        and (np.abs(one.sample(200) - one.mu_) <= 2 * one.std_ + 1e-12).all()
    )
    mu, std = dropo.unscale(np.array([0.0, 3.0, 4.0, 2.0]), sim.bounds)
    np.testing.assert_allclose(np.r_[mu, std], [-2, 1, 1.0, np.sqrt(1e-5)])


# -- informativeness -------------------------------------------------------------------------------------------------


def test_informativeness_off_centre_is_what_sampling_says():
    x = np.array([0.1, -0.15]) + 0.2 * np.random.default_rng(0).standard_normal((400_000, 2))
    exact = odr.informativeness([0.1, -0.15], np.eye(2) * 0.04, [0, 0], 0.3)
    np.testing.assert_allclose(exact, np.mean((x**2).sum(1) <= 0.09), atol=3e-3)


def test_informativeness_exact_cases():
    np.testing.assert_allclose(
        odr.informativeness([0.2], [[0.09]], [0.0], 0.5), np.diff(stats.norm(0.2, 0.3).cdf([-0.5, 0.5]))[0], rtol=1e-12
    )
    np.testing.assert_allclose(
        odr.informativeness([0, 0], np.eye(2) * 0.04, [0, 0], 0.3), 1 - np.exp(-(0.3**2) / 0.08), rtol=1e-10
    )
    assert (
        odr.informativeness([0.1], [[0.0]], [0], 0.2) == 1.0
        and odr.informativeness([0.3, 0], np.zeros((2, 2)), [0, 0], 0.2) == 0.0
    )
    a, b = (odr.informativeness([0, 0.1], np.diag([0.04, 0.01]), [0, 0], 0.3, seed=s) for s in (0, 0))
    assert a == b and 0 < a < 1
    for r in (0, -1):
        with pytest.raises(ValueError, match="radius"):
            odr.informativeness([0], [[1]], [0], r)
    for cov in ([[-1.0]], [[np.nan]], [[np.inf]], np.eye(2)):
        with pytest.raises(ValueError, match="cov must be"):
            odr.informativeness([0], cov, [0], 1)
    with pytest.raises(ValueError, match="mu must be"):
        odr.informativeness([np.nan], [[1]], [0], 1)
    with pytest.raises(ValueError, match="center must be"):
        odr.informativeness([0], [[1]], [np.nan], 1)


def test_mass_of_a_correlated_normal_rotates():
    c, s = np.cos(0.4), np.sin(0.4)
    Q = np.array([[c, -s], [s, c]])
    turned = odr.informativeness(Q @ [0.1, 0.0], Q @ np.diag([0.04, 0.01]) @ Q.T, [0, 0], 0.25)
    np.testing.assert_allclose(turned, odr.informativeness([0.1, 0.0], np.diag([0.04, 0.01]), [0, 0], 0.25), atol=4e-3)


# -- MuJoCo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env_id, names",
    [
        ("Hopper-v5", ["mass:torso", "friction:foot_geom"]),
        ("Walker2d-v5", ["mass:thigh", "gravity"]),
        ("HalfCheetah-v5", ["gear:bthigh", "armature:ffoot"]),
        ("InvertedPendulum-v5", ["mass:pole"]),
    ],
)
def test_mujoco_sim_is_gymnasiums_step(env_id, names):
    sim = MujocoSim(env_id, names, threads=2)
    xi = sim.nominal * np.linspace(0.8, 1.3, len(names))
    log = odr.robot_log(env_id, names, xi, 40, seed=1)
    np.testing.assert_allclose(sim.mean(xi, log.s, log.a), log.s_next, atol=1e-9)
    assert np.abs(sim.mean(sim.nominal, log.s, log.a) - log.s_next).max() > 1e-6
    env = make_env(env_id, names, xi)
    np.testing.assert_allclose(get_params(env.unwrapped.model, names), xi)


class Spring:
    "A simulator as the interface describes it: states are (N, n), in one call all parameter vectors share them."

    bounds, noise_cov = np.array([[0.5, 2.0], [-1.0, 1.0]]), 0.01 * np.eye(2)

    def mean(self, xi, s, a):
        xi = np.asarray(xi, float)
        assert s.ndim == 2 and a.ndim == 2 and len(s) == len(a)
        one = lambda x: np.stack([s[:, 0] + 0.1 * s[:, 1], s[:, 1] - 0.1 * x[0] * np.sin(s[:, 0]) + x[1] * a[:, 0]], 1)
        return one(xi) if xi.ndim == 1 else np.stack([one(x) for x in xi])


@pytest.mark.parametrize("horizon", [1, 2, 4])
def test_dropo_replays_a_plain_simulator_over_several_steps(horizon):
    sim, rng = Spring(), np.random.default_rng(0)
    log = odr.Transitions(rng.normal(size=(20, 2)), rng.normal(size=(20, 1)), rng.normal(size=(20, 2)), np.arange(20) == 11)
    mu, std, total = np.array([1.2, 0.1]), np.array([0.2, 0.1]), 0.0
    draws = dropo.truncated_draws(mu, std, sim.bounds, dropo.uniforms(8, 2, 0))
    for t in dropo.windows(log.done, horizon):
        ends = []
        for xi in draws:
            s = log.s[t : t + 1]
            for step in range(horizon):
                s = sim.mean(xi, s, log.a[t + step : t + step + 1])
            ends.append(s[0])
        covariance = np.cov(np.array(ends).T) + 1e-3 * np.eye(2)
        total += stats.multivariate_normal(np.mean(ends, 0), covariance).logpdf(log.s_next[t + horizon - 1])
    np.testing.assert_allclose(odr.dropo_loglik(sim, mu, std, log, horizon=horizon, n_samples=8), total, rtol=1e-9)
    fit = odr.DROPO(sim, horizon=horizon, n_samples=8, budget=20).fit(log)
    assert np.isfinite(fit.objective_) and fit.n_evals_ >= 20


def test_informativeness_has_a_value_on_the_edge_of_the_ball():
    sharp = lambda x, d: odr.informativeness([x] + [0.0] * (d - 1), 1e-16 * np.eye(d), np.zeros(d), 0.05)
    for d in (2, 5):
        for z in (-2, 0, 1.5):
            np.testing.assert_allclose(sharp(0.05 - z * 1e-8, d), stats.norm.cdf(z), atol=1e-5)
        assert sharp(0.04, d) == 1 and sharp(0.06, d) == 0


def test_no_log_file_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_env("HalfCheetah-v5")
    assert list(tmp_path.iterdir()) == []


def test_dropo_on_a_robot_is_the_reset_and_step_loop():
    sim = MujocoSim("Hopper-v5", ["mass:torso", "mass:foot"], threads=1)
    log = odr.robot_log("Hopper-v5", sim.names, sim.nominal * [1.3, 0.8], 6, seed=0)
    mu, std, total = sim.nominal, 0.1 * sim.nominal, 0.0
    env, draws = make_env("Hopper-v5"), dropo.truncated_draws(mu, std, sim.bounds, dropo.uniforms(5, 2, 0))
    for s, a, s_next in zip(log.s, log.a, log.s_next):
        ends = []
        for xi in draws:
            env.reset()
            set_params(env.unwrapped.model, sim.names, xi)
            env.unwrapped.set_state(np.r_[0.0, s[:5]], s[5:])
            env.step(a)
            ends.append(env.unwrapped.state_vector()[1:])
        total += stats.multivariate_normal(np.mean(ends, 0), np.cov(np.array(ends).T) + 1e-3 * np.eye(11)).logpdf(
            s_next
        )
    np.testing.assert_allclose(odr.dropo_loglik(sim, mu, std, log, n_samples=5), total, rtol=1e-6)


# -- a run: intervals and verdicts from the recorded numbers ---------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return papers.smoke("odr", tmp_path_factory)


def expected(claim, part, record):
    "Measured value and interval of a part, again, from the values it recorded; None where there is none to compute."
    label, values = part["label"], np.array(part.get("values", []), float)
    if not len(values):
        return None
    seed = record["parameters"]["seed"]
    if claim == "C1" and label.startswith("share"):
        return wilson(int((values > 0.02).sum()), len(values))
    if claim in ("C1", "own-C8") and label.startswith("slope"):
        sizes = sorted(
            int(p["label"].rpartition("= ")[2])
            for c in record["claims"]
            if c["id"] == "C1"
            for p in c["values"]
            if p["label"].startswith("share") and "N =" in p["label"]
        )
        sizes.append(10_000 if record["parameters"]["profile"] != "smoke" else 1000)
        statistic = np.median if claim == "C1" else lambda x, axis: np.quantile(x, 0.9, axis=axis)
        return loglog_slope(sizes, values.reshape(-1, len(sizes)), statistic=statistic, n_resamples=2000, seed=seed)
    if label.startswith("fall of"):
        rows = values.reshape(-1, 2)
        ratio = lambda x: np.median(x[:, 0]) / np.median(x[:, 1])
        if len(rows) < 6:
            return ratio(rows), None, None
        rng = np.random.default_rng(seed)
        boot = [ratio(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(2000)]
        return ratio(rows), np.quantile(boot, 0.025), np.quantile(boot, 0.975)
    if "median" in label and len(values) < 6:
        return np.median(values), None, None
    if "median" in label:
        return bootstrap_ci(values, np.median, method="percentile", n_resamples=2000, seed=seed)
    if "mean return" in label:
        return mean_interval(values, seed=seed)
    if claim == "C6":
        return values.mean(), None, None
    if claim in ("C4", "own-C8"):
        return mean_again(values, seed)
    return paired_difference(values, np.zeros(len(values)), seed=seed)


def test_every_interval_and_verdict_follows_from_the_recorded_values(smoke):
    for path in filter(None, (smoke, committed("odr"))):
        record = load_results(path)
        assert {c["id"] for c in record["claims"]} == {"C1", "C2", "C3", "C4", "C5", "C6", "own-C7", "own-C8"}
        for c in record["claims"]:
            assert c["verdict"] == recompute(c)[0]
            if c["id"] == "C2":
                agrees(c, wilson(int((np.array(c["values"]) < 0.03).sum()), len(c["values"])), atol=0)
                continue
            for part in c["values"] or []:
                if (want := expected(c["id"], part, record)) is not None:
                    agrees(part, want)
            if c["id"] == "C6" and c["verdict"] != "not run":
                mean = {p["label"].partition(",")[0]: p["measured"] for p in c["values"]}
                np.testing.assert_allclose(c["measured"], mean["DROPO"] / mean["centre of the box"])
            if c["id"] == "C3":  # the factor to the true parameters, and beside it the one to the set
                fall = {p["label"].rpartition(" ")[2]: p for p in c["values"] if p["label"].startswith("fall")}
                assert [c[k] for k in BOUNDS] == [fall["point"][k] for k in BOUNDS]
                if path == smoke or c["baseline"]:
                    assert c["baseline"]["value"] == fall["set"]["measured"] and "set" in c["baseline"]["label"]


def test_the_smoke_run_stays_in_its_budget_and_draws_its_figures(smoke):
    record = load_results(smoke)
    assert record["peak_rss_mb"] < 2048 and record["parameters"]["profile"] == "smoke"
    assert {"rates.png", "paths.png", "identified_line.png", "informativeness.png", "gaps.png"} <= {
        p.name for p in (smoke.parent / "figures").iterdir()
    }


@pytest.mark.skipif(committed("odr") is None, reason="no committed run")
def test_the_committed_run_has_the_sizes_of_the_cpu_profile():
    c = {c["id"]: c for c in load_results(committed("odr"))["claims"]}
    parts = {p["label"]: p for x in c.values() if x["id"] != "C2" for p in x["values"]}
    assert c["C2"]["n"] == 40 and parts["share above 0.02, largest N"]["n"] == 100 and c["C6"]["n"] == 2
    assert (
        all(p["n"] == 20 for k, p in parts.items() if k.startswith(("fall", "UDR −")))
        and "pendulum (Monte Carlo), median error, N = 3000" in parts
    )
    assert all(p["n"] == 5 for k, p in parts.items() if k.startswith(("DROPO, N", "E-DROPO, N")))


# -- numbers that go against the paper -------------------------------------------------------------------------------


SHARE, SLOPE = "share above 0.02, largest N", "slope of the median μ error"
AGAINST = {
    "C1": [[p(SHARE, 0.2), p(SLOPE, -0.5)], [p(SHARE, 0.06), p(SLOPE, 0.0)]],
    "C3": [
        [p("fall of the distance to the set", 2.0), p("fall of the distance to the point", 1.0)],
        [p("fall of the distance to the set", 30.0), p("fall of the distance to the point", 30.0)],
    ],
    "C4": [
        [p("ODR, N = 30", 0.2), p("ODR, N = 99 (largest)", 0.6)],
        [p("ODR, N = 30", 0.999, 0.0005), p("ODR, N = 99 (largest)", 0.96)],
    ],
    "C5": [[p("UDR − ODR, uniform truths, N = 50", -1.0), p("UDR − ODR, uniform truths, N = 500", 0.005)]],
    "C6": [[p("ratio", 0.9)], [p("ratio", 0.5)]],
    "own-C7": [[p("uniform truths, N = 50", -1.0), p("corner truths, N = 50", 0.0)]],
    "own-C8": [
        [p("slope of the 90 % quantile of σ̂", -0.5), p("share at the floor, largest N", 0.5)],
        [p("slope of the 90 % quantile of σ̂", 0.0), p("share at the floor, largest N", 0.5)],
    ],
}


@pytest.mark.parametrize("claim", AGAINST)
def test_numbers_against_the_paper_are_not_reproduced(claim):
    (rule,) = (c for c in odr.claims("cpu") if c.id == claim)
    for parts in AGAINST[claim]:
        assert measurement(rule, parts=parts)["verdict"] == "not reproduced"


def test_c2_against_the_paper():
    (rule,) = (c for c in odr.claims("cpu") if c.id == "C2")
    assert measurement(rule, measured=0.9, ci=(0.8, 0.97), n=40)["verdict"] == "not reproduced"
    assert measurement(rule, measured=0.95, ci=(0.8, 0.99), n=40)["verdict"] == "reproduced"


def test_the_middle_verdicts():
    rule = {c.id: c for c in odr.claims("cpu")}
    assert measurement(rule["C1"], parts=[p(SHARE, 0.0), p(SLOPE, -0.2)])["verdict"] == "partly"
    assert measurement(rule["C1"], parts=[p(SHARE, 0.05), p(SLOPE, -0.4)])["verdict"] == "reproduced"
    rate, floor = "slope of the 90 % quantile of σ̂", "share at the floor, largest N"
    for share, want in ((0.554, "reproduced"), (0.42, "partly"), (0.69, "partly")):
        assert measurement(rule["own-C8"], parts=[p(rate, -0.25), p(floor, share)])["verdict"] == want
    assert (
        measurement(
            rule["C5"], parts=[p("UDR − ODR, uniform truths, N = 50", -1), p("UDR − ODR, uniform truths, N = 500", 1)]
        )["verdict"]
        == "partly"
    )
    gpu = {c.id: c for c in odr.claims("gpu")}["C5"]
    robots = [
        p("Hopper-v5: return, DROPO − UDR", -5.0),
        p("HalfCheetah-v5: return, DROPO − UDR", -1.0),
        p("UDR − ODR, uniform truths, N = 50", 1),
    ]
    assert measurement(gpu, parts=robots)["verdict"] == "not reproduced"
    assert measurement(gpu, parts=[robots[0] | dict(ci_low=1.0, ci_high=9.0), *robots[1:]])["verdict"] == "partly"


# -- the gpu profile -------------------------------------------------------------------------------------------------


def test_gpu_profile_runs_every_path_at_a_tiny_size(tmp_path):
    record = load_results(run_command("odr", tmp_path / "gpu", "--profile", "gpu", "--device", "cpu"))
    c = {c["id"]: c for c in record["claims"]}
    assert (
        len(c) == 8
        and not any(x["verdict"] == "not run" for x in c.values())
        and all("tiny" in x["note"] for x in c.values())
    )
    labels = {x["label"] for k in ("C4", "C5", "C6") for x in c[k]["values"]}
    assert {
        "Hopper-v5: return, DROPO − UDR",
        "HalfCheetah-v5: return, DROPO − UDR",
        "ODR, N = 40 (largest)",
        "E-DROPO, N = 20",
        "ratio",
    } <= labels
    assert {x["scale"] for x in c.values()} == {"mechanism"}  # on a CPU the profile is a check of the code
    assert "Hopper-v5, DROPO, mean return" in labels and odr.claims("gpu")[4].scale == "small-model"
    assert c["C5"]["measured"] == min(x["measured"] for x in c["C5"]["values"] if "-v5: " in x["label"])


def test_gpu_profile_without_a_gpu_says_so_in_seconds(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("odr", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all(
        "CUDA" in c["reason"] for c in record["claims"]
    )
    assert {c["id"]: c["scale"] for c in record["claims"]} == {c.id: c.scale for c in odr.claims("gpu")}
    assert record["wall_s"] < 15


# -- the command -----------------------------------------------------------------------------------------------------


def use(*args, cwd):
    return use_command("odr", *args, cwd=cwd)


@pytest.fixture
def log_file(tmp_path):
    names = ["mass:torso", "mass:foot"]
    clean = odr.robot_log("Hopper-v5", names, [4.6, 4.4], 80, seed=0)
    noisy = clean.s_next + 0.004 * np.random.default_rng(0).standard_normal(clean.s.shape)
    np.savez(tmp_path / "log.npz", s=clean.s, a=clean.a, s_next=noisy, done=clean.done)
    return tmp_path / "log.npz"


def test_use_fits_a_log(log_file, tmp_path):
    run = use(
        "fit", log_file, "--env", "Hopper-v5", "--params", "mass:torso,mass:foot", "--out", "fit.json", cwd=tmp_path
    )
    assert (
        run.returncode == 0 and "not identified" not in run.stdout and "mass:torso" in run.stdout and run.stderr == ""
    ), run.stderr
    fit = json.loads((tmp_path / "fit.json").read_text())
    assert (
        np.all(np.abs(np.array(fit["mu"]) - [4.6, 4.4]) < 4 * np.array(fit["standard_error"]))
        and max(fit["standard_error"]) < 0.2
    )
    assert fit["units"] == ["kg", "kg"] and fit["transitions"] == 80


def test_use_names_what_a_log_cannot_tell(tmp_path):
    s, a = np.zeros((50, 12)), np.zeros((50, 3))  # full states this time: the position is there
    s[:, 1], s[:, 6:8] = 3.0, np.random.default_rng(0).uniform(-1, 1, (50, 2))
    s_next = MujocoSim("Hopper-v5", ["mass:torso"], skip=0, threads=1).mean([4.0], s, a)
    np.savez(tmp_path / "air.npz", s=s, a=a, s_next=s_next)
    run = use(
        "fit", "air.npz", "--env", "Hopper-v5", "--params", "mass:torso,mass:foot", "--noise-sd", 0.01, cwd=tmp_path
    )
    assert run.returncode == 0 and run.stdout.count("not identified") >= 3, run.stdout + run.stderr


def test_use_with_dropo(log_file, tmp_path):
    run = use(
        "fit",
        log_file,
        "--env",
        "Hopper-v5",
        "--params",
        "mass:torso",
        "--method",
        "dropo",
        "--budget",
        20,
        "--rows",
        6,
        "--noise-sd",
        0.004,
        cwd=tmp_path,
    )
    assert run.returncode == 0 and "DROPO" in run.stdout, run.stderr


@pytest.mark.parametrize(
    "args, says",
    [
        (["nothing.npz", "--env", "Hopper-v5"], "no such file"),
        (["log.npz", "--env", "HalfCheetah-v5"], "columns"),
        (["log.npz", "--env", "Hoper-v5"], "env_id"),
        (["log.npz", "--env", "Pendulum-v1"], "no MuJoCo"),
        (["log.npz", "--env", "Hopper-v5", "--params", "mass:tail"], "torso"),
        (["log.npz", "--env", "Hopper-v5", "--params", "colour"], "known kinds"),
        (["log.npz", "--env", "Hopper-v5", "--noise-sd", "-1"], "--noise-sd"),
        (["log.npz", "--env", "Hopper-v5", "--scale", "2", "1"], "scale"),
        (["log.npz", "--env", "Hopper-v5", "--rows", "0"], "--rows"),
        (["text.npz", "--env", "Hopper-v5"], "not an .npz"),
        (["half.npz", "--env", "Hopper-v5"], "lacks s_next"),
        (["log.npz"], "--env"),
        (["log.npz", "--env", "Hopper-v5", "--seed", "-1"], "--seed"),
        (["log.npz", "--env", "Hopper-v5", "--params", "damping:rootx"], "nominal value 0"),
        (["log.npz", "--env", "Hopper-v5", "--method", "magic"], "invalid choice"),
    ],
)
def test_use_errors_are_one_line(args, says, log_file, tmp_path, monkeypatch, capsys):
    from icl26.decision.odr.use import main

    (tmp_path / "text.npz").write_text("not numbers")
    np.savez(tmp_path / "half.npz", s=np.zeros((2, 11)), a=np.zeros((2, 3)))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *args]) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("icl26: error: ") and err.count("\n") == 1


def test_a_kind_leaves_out_what_is_zero(log_file):
    from icl26.decision.envs import make_env
    from icl26.decision.odr.use import expand_params, load_log, simulator_for

    model = make_env("Hopper-v5").unwrapped.model
    assert expand_params(model, ["damping"]) == ["damping:thigh_joint", "damping:leg_joint", "damping:foot_joint"]
    assert simulator_for(load_log(log_file), "Hopper-v5", ["damping"]).names == expand_params(model, ["damping"])
    with pytest.raises(ValueError, match="every armature of this robot is 0"):
        expand_params(make_env("InvertedPendulum-v5").unwrapped.model, ["armature"])


ROBOTS = (
    "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Pusher Reacher Swimmer Walker2d"
).split()


@pytest.mark.parametrize("robot", ROBOTS)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_on_every_robot(robot):
    from icl26.decision.envs import PARAMETER_KINDS
    from icl26.decision.odr.use import expand_params, is_kind, of_kind

    model, unnamed = make_env(f"{robot}-v5").unwrapped.model, {}
    for kind in PARAMETER_KINDS:
        try:
            names = expand_params(model, [kind])
        except ValueError as e:
            assert f"params: every {kind} of this robot is 0" in str(e)
            continue
        assert names and not any("None" in n for n in names)
        if is_kind(kind):  # gravity is one number, and 0 on the Pusher
            unnamed[kind] = of_kind(model, kind)[1]
            assert (get_params(model, names) > 0).all()
    want = {"Ant": dict(mass=4), "Swimmer": dict(friction=3), "Pusher": dict(friction=5)}.get(robot, {})
    assert {k: v for k, v in unnamed.items() if v} == want


def test_a_kind_without_any_name_is_an_error():
    import mujoco

    from icl26.decision.odr.use import expand_params

    model = mujoco.MjModel.from_xml_string('<mujoco><worldbody><geom size="1"/></worldbody></mujoco>')
    with pytest.raises(ValueError, match="no geom of this robot has a name"):
        expand_params(model, ["friction"])


def noisy_log(robot, params, steps, sd):
    "A log of the nominal robot."
    from icl26.decision.odr.use import expand_params

    model = make_env(robot).unwrapped.model
    names = expand_params(model, params)
    clean = odr.robot_log(robot, names, get_params(model, names), steps, seed=0)
    noise = sd * np.random.default_rng(0).standard_normal(clean.s.shape)
    return odr.Transitions(clean.s, clean.a, clean.s_next + noise, clean.done), get_params(model, names)


def test_the_estimated_noise_is_what_the_fit_leaves():
    log, truth = noisy_log("HalfCheetah-v5", ["mass"], 60, 0.005)
    report = odr.fit_log(log, "HalfCheetah-v5", ["mass"], threads=1)
    assert ((report.noise_sd > 0.0035) & (report.noise_sd < 0.0065)).all() and abs(report.rmse[1] - 1) < 0.05
    assert np.abs(report.mu / truth - 1).max() < 0.01 and report.remarks == ()


def test_a_log_without_noise_keeps_the_truth():
    log, truth = noisy_log("Walker2d-v5", ["damping", "gear"], 20, 0.0)
    report = odr.fit_log(log, "Walker2d-v5", ["damping", "gear"], noise_sd=1e-6, threads=1)
    assert report.rmse[1] < 1e-3 and np.abs(report.mu / truth - 1).max() < 1e-6 and report.remarks == ()


def test_remarks_of_a_report():
    from icl26.decision.odr.use import remarks_on

    model = make_env("Ant-v5").unwrapped.model
    assert remarks_on(model, ["gear", "gravity", "mass:torso"], (3.0, 1.0), True, True) == ()
    (unnamed,) = remarks_on(model, ["mass"], (3.0, 1.0), True, True)
    assert "mass: left out 4" in unnamed
    (worse,) = remarks_on(model, ["gear"], (1.0, 1.2), True, False)
    assert "worse than the nominal parameters" in worse
    (moving,) = remarks_on(model, ["gear"], (3.0, 1.0), False, True)
    assert "did not come to rest" in moving
    for left, so in ((0.5, "too wide"), (1.5, "too narrow")):
        (noise,) = remarks_on(model, ["gear"], (3.0, left), True, True)
        assert so in noise and remarks_on(model, ["gear"], (3.0, left), True, False) == ()


def test_the_missing_subcommand_is_named(capsys):
    from icl26.decision.odr.use import main

    assert main([]) == 2
    err = capsys.readouterr().err
    assert "fit" in err and "command" not in err and err.count("\n") == 1


@pytest.mark.parametrize("n", [0, 3.5])
def test_numbers_of_draws_are_checked(n):
    sim = odr.LinearGaussianSimulator(lambda s, a: np.ones((len(s), 1, 1)), np.eye(1), [[-1.0, 1.0]])
    log = odr.Transitions(np.zeros((3, 1)), np.zeros((3, 1)), np.zeros((3, 1)))
    with pytest.raises(ValueError, match="n_samples"):
        odr.mixture_loglik(sim, [0.0], np.eye(1), log, method="mc", n_samples=n)
    with pytest.raises(ValueError, match="n_samples"):
        odr.ODR(sim, method="mc", n_samples=n).fit(log)
    with pytest.raises(ValueError, match="n_samples"):
        odr.dropo_loglik(sim, [0.0], [0.1], log, n_samples=n)


def test_shapes_of_drift_and_pendulum_log_are_checked():
    from icl26.decision.odr.simulators import PendulumSimulator

    sim = odr.LinearGaussianSimulator(lambda s, a: np.ones((len(s), 1, 1)), np.eye(1), [[-1.0, 1.0]], drift=lambda s, a: np.zeros(3))
    with pytest.raises(ValueError, match="drift must return"):
        sim.mean(np.zeros(1), np.zeros((4, 1)), np.zeros((4, 1)))
    with pytest.raises(ValueError, match="2 columns"):
        PendulumSimulator().mean(np.ones(2), np.zeros((4, 1)), np.zeros((4, 1)))


def test_use_drops_clipped_velocities(log_file):
    from icl26.decision.odr.use import load_log

    log = load_log(log_file)
    s = log.s.copy()
    s[3, -1] = 10.0
    report = odr.fit_log(
        odr.Transitions(s, log.a, log.s_next, log.done), "Hopper-v5", ["mass:torso"], noise_sd=0.01, threads=1
    )
    assert report.dropped == 1 and report.used == 79
    s[:, -1] = -10.0
    with pytest.raises(ValueError, match="clip"):
        odr.fit_log(odr.Transitions(s, log.a, log.s_next, log.done), "Hopper-v5", ["mass:torso"], threads=1)
