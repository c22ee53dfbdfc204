"""Offline domain randomization: exact gradients beside finite differences, a batched simulator beside reset and step.

    pytest benchmarks/bench_odr.py -s

Each pair must give the same answer before the clock starts.
"""


import numpy as np
import pytest
from scipy import optimize, stats

from icl26.decision.envs import MujocoSim, make_env, set_params
from icl26.decision.odr import consistency, dropo, mle, simulators
from timing import best_of, ratio

XI = np.array([0.9, 0.3])


# -- the exact fit ---------------------------------------------------------------------------------------------------


def by_differences(y, F, bounds, starts, sds):
    "The same starts with L-BFGS-B in (μ, log σ) and numerical gradients: the best of its climbs."
    f = lambda p: -mle.objective_terms(p[None, :2], np.exp(2 * p[None, 2:]), y[None], F[None])[0][0]
    box = [*bounds, *[(np.log(1e-6), np.log(2.0))] * 2]
    return min(
        (
            optimize.minimize(
                f,
                np.r_[m[0], np.log(np.broadcast_to(s[0], 2))],
                method="L-BFGS-B",
                bounds=box,
                options=dict(ftol=1e-14, gtol=1e-8),
            )
            for m, s in zip(starts, np.maximum(sds, 1e-3))
        ),
        key=lambda r: r.fun,
    )


@pytest.mark.parametrize("N", [300, 10_000])
def test_exact_fit_beside_finite_differences(N):
    sim = simulators.linear_family()
    y, F, _ = mle.whiten(sim, simulators.draw_log(sim, XI, N, seed=0))
    starts, sds = mle.random_starts(sim.bounds, 3, 1, 0)
    ours = lambda: mle.fit_many(y[None], F[None], sim.bounds, starts=starts, start_sd=sds)
    theirs = lambda: by_differences(y, F, sim.bounds, starts, sds)
    a, b = ours(), theirs()
    assert a.loglik[0] >= -b.fun - 1e-12 and abs(a.loglik[0] + b.fun) < 1e-7
    np.testing.assert_allclose(a.mu[0], b.x[:2], atol=2e-4)
    ratio(f"exact fit, N = {N}", best_of(ours, 3), best_of(theirs, 2), 3)


def test_a_hundred_fits_at_once_beside_a_loop():
    sim = simulators.linear_family()
    y, F = consistency.draw_logs(sim, XI, 300, 100)
    starts, sds = mle.random_starts(sim.bounds, 3, 100, 0)
    together = lambda: mle.fit_many(y, F, sim.bounds, starts=starts, start_sd=sds)
    loop = lambda: [
        mle.fit_many(y[i : i + 1], F[i : i + 1], sim.bounds, starts=starts[:, i : i + 1], start_sd=sds)
        for i in range(100)
    ]
    a, b = together(), loop()
    np.testing.assert_allclose(a.loglik, [f.loglik[0] for f in b], atol=1e-12)
    np.testing.assert_allclose(a.mu, np.concatenate([f.mu for f in b]), atol=1e-6)
    ratio("100 fits of 300 transitions", best_of(together, 3), best_of(loop, 2), 2)


@pytest.mark.parametrize("noise_sd", [0.1, 1e-5])
def test_rows_beside_the_matrix_of_each(noise_sd):
    "Likelihood of 5000 rows of three states and two parameters: in a root of V⁻¹, and with V formed and decomposed."
    rng = np.random.default_rng(0)
    F, mu, cov = rng.standard_normal((5000, 3, 2)) / noise_sd, np.zeros(2), np.diag([0.5, 0.1]) ** 2
    y = np.einsum("nid,nd->ni", F, rng.standard_normal((5000, 2)) * [0.5, 0.1]) + rng.standard_normal((5000, 3))
    ours = lambda: mle.row_terms(mu, cov, y, F)

    def theirs():
        w, Q = np.linalg.eigh(np.eye(3) + np.einsum("nid,de,nje->nij", F, cov, F))
        return np.log(w).sum(1), (np.einsum("nij,ni->nj", Q, y) ** 2 / w).sum(1)

    for a, b in zip(ours(), theirs()):  # theirs loses the square of spread over noise: 1e-16 times 2.5e9 at the sharper one
        np.testing.assert_allclose(a, b, rtol=1e-14 / noise_sd**2 + 1e-12)
    ratio(f"5000 rows with all derivatives, noise {noise_sd:g}", best_of(ours, 5), best_of(theirs, 5), 1.5)


def test_ten_times_the_data_takes_about_ten_times_as_long():
    sim, seconds = simulators.linear_family(), {}
    for N in (200_000, 2_000_000):
        y, F, _ = mle.whiten(sim, simulators.draw_log(sim, XI, N, seed=0))
        seconds[N] = best_of(lambda: mle.objective_terms(XI[None], np.full((1, 2), 0.01), y[None], F[None]), 7)
    growth = seconds[2_000_000] / seconds[200_000]
    print(f"\nexact objective and gradient: {seconds[200_000] * 1e3:.1f} ms for 200 000 rows, times {growth:.1f} for 2 000 000")
    assert growth < 25


# -- DROPO's objective -----------------------------------------------------------------------------------------------


def test_dropo_objective_beside_reset_and_step():
    names = ["mass:torso", "mass:thigh", "mass:leg", "mass:foot"]
    sim, env = MujocoSim("Hopper-v5", names, threads=1), make_env("Hopper-v5")
    log = simulators.robot_log("Hopper-v5", names, sim.nominal * 1.2, 20, seed=0)
    mu, std, M = sim.nominal, 0.1 * sim.nominal, 15
    draws = dropo.truncated_draws(mu, std, sim.bounds, dropo.uniforms(M, 4, 0))

    def ours():
        return dropo.dropo_loglik(sim, mu, std, log, n_samples=M)

    def theirs():
        total = 0.0
        for s, a, s_next in zip(log.s, log.a, log.s_next):
            ends = []
            for xi in draws:  # as DROPO's reference code: one reset and step for each draw and row
                env.reset()
                set_params(env.unwrapped.model, names, xi)
                env.unwrapped.set_state(np.r_[0.0, s[:5]], s[5:])
                env.step(a)
                ends.append(env.unwrapped.state_vector()[1:])
            total += stats.multivariate_normal(np.mean(ends, 0), np.cov(np.array(ends).T) + 1e-3 * np.eye(11)).logpdf(
                s_next
            )
        return total

    np.testing.assert_allclose(ours(), theirs(), rtol=1e-6)
    ratio("DROPO's objective on a Hopper, one thread", best_of(ours, 3), best_of(theirs, 2), 1.5)


def test_dropo_objective_beside_a_loop_on_a_cheap_simulator():
    sim = simulators.linear_family()
    log, M, std = simulators.draw_log(sim, XI, 200, seed=0), 50, np.array([0.1, 0.1])
    draws = dropo.truncated_draws(XI, std, sim.bounds, dropo.uniforms(M, 2, 0))

    def theirs():
        total = 0.0
        for i in range(len(log)):
            ends = np.array([sim.mean(xi, log.s[i : i + 1], log.a[i : i + 1])[0] for xi in draws])
            total += stats.norm(ends.mean(), np.sqrt(ends.var(ddof=1) + 1e-3)).logpdf(log.s_next[i, 0])
        return total

    ours = lambda: dropo.dropo_loglik(sim, XI, std, log, n_samples=M)
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    ratio("DROPO's objective on the linear family", best_of(ours, 5), best_of(theirs, 2), 20)
