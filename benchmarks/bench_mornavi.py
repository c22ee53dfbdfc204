"""Robust games: whole arrays of backups and stage games beside one at a time, in plain Python, cvxpy and nashpy.

    pytest benchmarks/bench_mornavi.py -s

Each pair must give the same answer before the clock starts.
"""

import itertools
import warnings

import numpy as np
from scipy.optimize import linprog, minimize_scalar

from icl26.decision.mornavi import MORNAVI, MarkovGame, combination_lock
from icl26.decision.mornavi.equilibrium import nash, stage_policies
from icl26.decision.mornavi.game import robust_q
from icl26.decision.mornavi.worst_case import kl_worst, tv_worst
from icl26.decision.tabular import random_game
from timing import best_of, ratio


def rows(n, S, seed=0):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(S), n), rng.uniform(0, 3, S)


# -- worst cases -----------------------------------------------------------------------------------------------------


def tv_one(p, v, sigma):
    "Take σ from the top, state by state."
    q, left, low = list(p), sigma, min(range(len(v)), key=v.__getitem__)
    for s in sorted(range(len(v)), key=v.__getitem__, reverse=True):
        moved = min(q[s], left)
        q[s], q[low], left = q[s] - moved, q[low] + moved, left - moved
        if left <= 0:
            break
    return sum(a * b for a, b in zip(q, v))


def kl_one(p, v, sigma):
    "The dual of one row with scipy's scalar search."
    f = lambda lam: lam * (np.log(p @ np.exp(-(v - v.min()) / lam)) + sigma) - v.min()
    return -minimize_scalar(f, bounds=(1e-9, np.ptp(v) / sigma), method="bounded", options=dict(xatol=1e-10)).fun


def test_tv_backup_beside_a_loop_over_pairs():
    p, v = rows(20 * 8, 20)
    ours, theirs = lambda: tv_worst(p, v, np.float64(0.1)), lambda: [tv_one(row, v.tolist(), 0.1) for row in p.tolist()]
    np.testing.assert_allclose(ours(), theirs(), atol=1e-12)
    ratio("TV backup of 160 pairs, 20 states, beside a loop in plain Python", best_of(ours, 50), best_of(theirs, 5), 5)


def test_tv_backup_beside_linear_programs():
    p, v = rows(40, 10)
    I = np.eye(10)
    A = np.block([[I, -I], [-I, -I], [np.zeros((1, 10)), np.ones((1, 10))]])
    one = lambda q: linprog(np.r_[v, np.zeros(10)], A, np.r_[q, -q, 0.2], np.r_[np.ones(10), np.zeros(10)][None], [1]).fun
    ours, theirs = lambda: tv_worst(p, v, np.float64(0.1)), lambda: [one(q) for q in p]
    np.testing.assert_allclose(ours(), theirs(), atol=1e-8)
    ratio("TV backup of 40 pairs, 10 states, beside linear programs", best_of(ours, 50), best_of(theirs, 2), 100)


def test_kl_backup_beside_a_loop_over_pairs():
    p, v = rows(20 * 8, 20)
    ours, theirs = lambda: kl_worst(p, v, np.float64(0.1)), lambda: [kl_one(q, v, 0.1) for q in p]
    np.testing.assert_allclose(ours(), theirs(), atol=1e-6)
    ratio("KL backup of 160 pairs, 20 states, beside scipy's scalar search", best_of(ours, 20), best_of(theirs, 2), 10)


def test_kl_backup_beside_cvxpy():
    import cvxpy as cp

    p, v = rows(10, 10)
    q, centre = cp.Variable(10), cp.Parameter(10, nonneg=True)
    problem = cp.Problem(cp.Minimize(q @ v), [cp.sum(q) == 1, cp.sum(cp.rel_entr(q, centre)) <= 0.1])

    def one(row):
        centre.value = row
        return problem.solve(solver=cp.CLARABEL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = lambda: kl_worst(p, v, np.float64(0.1)), lambda: [one(row) for row in p]
        np.testing.assert_allclose(ours(), theirs(), atol=1e-6)
        ratio("KL backup of 10 pairs, 10 states, beside cvxpy", best_of(ours, 20), best_of(theirs, 2), 20)


# -- stage games -----------------------------------------------------------------------------------------------------


def stage(S=40, actions=(2, 2), seed=0):
    "Robust action values of the first step of a random game: S stage games."
    g = MarkovGame(*random_game(S, 2, actions, seed))
    V = np.random.default_rng(seed).uniform(0, 1, (g.n_agents, S))
    return robust_q(g.flat_P[0], g.flat_r[:, 0], V, np.full(g.n_agents, 0.1), "tv")


def test_robust_stage_games_beside_cvxpy():
    import cvxpy as cp

    Q = stage()

    def one(u):
        pi = cp.Variable((2, 2), nonneg=True)
        value = [cp.sum(cp.multiply(pi, x)) for x in u]
        deviate = [cp.sum(pi, axis=0) @ u[0][a] <= value[0] for a in (0, 1)] + [cp.sum(pi, axis=1) @ u[1][:, a] <= value[1] for a in (0, 1)]
        return cp.Problem(cp.Maximize(sum(value)), [cp.sum(pi) == 1, *deviate]).solve(solver=cp.CLARABEL)

    ours, theirs = lambda: stage_policies(Q, (2, 2), "cce"), lambda: [one(Q[:, s].reshape(2, 2, 2)) for s in range(Q.shape[1])]
    np.testing.assert_allclose((ours() * Q.sum(0)).sum(1), theirs(), atol=1e-6)
    ratio("CCE of 40 robust stage games, 2x2, beside cvxpy", best_of(ours, 20), best_of(theirs, 2), 20)


def test_robust_stage_games_beside_one_program_each():
    Q = stage(60, (2, 3))
    ours, theirs = lambda: stage_policies(Q, (2, 3), "cce"), lambda: stage_policies(Q, (2, 3), "cce", shortcut=False)
    np.testing.assert_allclose((ours() * Q.sum(0)).sum(1), (theirs() * Q.sum(0)).sum(1), atol=1e-7)
    ratio("CCE of 60 robust stage games, 2x3, beside a program for each", best_of(ours, 5), best_of(theirs, 3), 1.3)


def test_nash_of_robust_stage_games_beside_nashpy():
    import nashpy

    Q = stage(60, (3, 3))

    def theirs():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            games = [Q[:, s].reshape(2, 3, 3) for s in range(Q.shape[1])]
            return [max((x @ (u + v) @ y for x, y in nashpy.Game(u, v).support_enumeration(tol=1e-10)), default=np.nan) for u, v in games]

    ours = lambda: stage_policies(Q, (3, 3), "nash")
    known = np.array(theirs())
    np.testing.assert_allclose(((ours() * Q.sum(0)).sum(1))[np.isfinite(known)], known[np.isfinite(known)], atol=1e-6)
    assert np.isfinite(known).mean() > 0.9 and nash(Q[:, 0].reshape(2, 3, 3)).shape == (3, 3)
    ratio("Nash of 60 robust stage games, 3x3, beside nashpy on each", best_of(ours, 3), best_of(theirs, 3), 1.0)


# -- a plan and a run ------------------------------------------------------------------------------------------------


def test_a_plan_beside_loops():
    g = MarkovGame(*random_game(10, 3, (2, 2), 0, rewards="identical"))
    learner = MORNAVI(g, 0.1, bonus_scale=0.0)
    counts = g.flat_P * 1e6

    def theirs():
        V = np.zeros((2, 10))
        for h in reversed(range(3)):
            Q = np.zeros((2, 10, 4))
            for i, s, a in itertools.product(range(2), range(10), range(4)):
                Q[i, s, a] = g.flat_r[i, h, s, a] + tv_one(g.flat_P[h, s, a].tolist(), V[i].tolist(), 0.1)
            best = Q.sum(0).argmax(1)                          # one reward for all: the best joint action is an equilibrium
            V = Q[:, np.arange(10), best]
        return V

    ours = lambda: learner.plan(counts, 1000)
    np.testing.assert_allclose(ours().upper[:, 0], theirs(), atol=1e-5)
    ratio("a plan with both bounds, 10 states, 3 steps, beside loops that take one bound", best_of(ours, 20), best_of(theirs, 5), 2)


def test_lazy_planning_beside_a_plan_before_every_episode():
    lock = combination_lock(5)
    run = lambda lazy: MORNAVI(lock, 0.05, bonus_scale=0.05, lazy=lazy).run(300)
    a, b = run(True), run(False)
    np.testing.assert_allclose(a.gaps[-1], b.gaps[-1], atol=1e-9)
    np.testing.assert_array_equal(a.policy[0, 0], b.policy[0, 0])                          # both open the lock
    ratio(f"300 episodes of a lock, {a.n_plans} plans beside {b.n_plans}", best_of(lambda: run(True), 2), best_of(lambda: run(False), 1), 2)


def test_ten_times_the_pairs_take_about_ten_times_as_long():
    for f, name in ((tv_worst, "TV"), (kl_worst, "KL")):
        data = {n: rows(n, 10) for n in (2000, 20_000)}
        seconds = {n: best_of(lambda: f(*data[n], np.float64(0.1)), 9) for n in data}
        growth = seconds[20_000] / seconds[2000]
        print(f"\n{name} backups: {seconds[2000] * 1e3:.2f} ms for 2000 pairs, times {growth:.1f} for 20 000")
        assert growth < 30
