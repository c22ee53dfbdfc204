"mornavi: the interface, its edges, and that every number and verdict of a run follows from what it recorded."

import itertools
import json
import math
import sys
import warnings

import numpy as np
import papers
import pytest
from papers import committed, once, plain_signature, run_command, run_here, said, use_command
from recompute import agrees, made_up as p, mean_again
from scipy.optimize import linprog, minimize

import icl26.decision.mornavi as mn
from icl26.decision.mornavi import use
from icl26.decision.mornavi.equilibrium import NoNashFound, best_pure, correlated, gains, stage_policies
from icl26.decision.mornavi.game import always
from icl26.decision.mornavi.mornavi import bernstein_bonus, fail_state_cap
from icl26.decision.mornavi.studies import coverage, learn, regret_ratio, regret_slope
from icl26.decision.mornavi.worst_case import divergence_of, kl_worst, tv_dual
from icl26.decision.tabular import random_game
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement
from icl26.stats import clopper_pearson, wilson


def game(seed=0, S=4, H=3, actions=(2, 2), **kw):
    return mn.MarkovGame(*random_game(S, H, actions, seed, **kw))


def random_policy(g, seed=0, product=False):
    rng, shape = np.random.default_rng(seed), (g.horizon, g.n_states)
    if not product:
        return rng.dirichlet(np.ones(math.prod(g.n_actions)), shape).reshape(*shape, *g.n_actions)
    own = [rng.dirichlet(np.ones(n), shape) for n in g.n_actions]
    out = own[0]
    for x in own[1:]:
        out = out[..., None] * x.reshape(*shape, *[1] * (out.ndim - 2), -1)
    return out


# -- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, want",
    [
        (mn.tv_worst_case, "(p, v, radius)"),
        (mn.kl_worst_case, "(p, v, radius)"),
        (mn.MarkovGame, "(P, r, s0=0)"),
        (mn.MarkovGame.rollout, "(self, policy, seed)"),
        (mn.robust_values, "(game, policy, radii, divergence)"),
        (mn.robust_gaps, "(game, policy, radii, divergence)"),
        (mn.equilibrium, "(payoffs, kind='cce')"),
        (mn.solve_game, "(game, radii, divergence, kind='cce')"),
        (mn.MORNAVI, "(game, radii, divergence='tv', *, kind='cce', bonus='l1', bonus_scale=1.0, delta=0.05, lazy=True, seed=0)"),
        (mn.MORNAVI.run, "(self, n_episodes)"),
    ],
)
def test_signatures(call, want):
    assert plain_signature(call) == want


def test_result_has_the_promised_fields_and_shapes():
    g, K = game(actions=(2, 3)), 40
    r = mn.MORNAVI(g, (0.1, 0.2), bonus_scale=0.1).run(K)
    assert list(vars(r)) == ["policy", "regret", "gaps", "visits", "width", "n_plans"]
    assert r.policy.shape == r.visits.shape == (3, 4, 2, 3) and r.visits.dtype.kind == "i"
    assert r.regret.shape == r.gaps.shape == r.width.shape == (K,) and isinstance(r.n_plans, int)
    assert "K=40" in repr(r) and "MarkovGame(H=3" in repr(g)


# -- worst cases -----------------------------------------------------------------------------------------------------


def tv_program(p, v, s):
    S, I = len(p), np.eye(len(p))
    A = np.block([[I, -I], [-I, -I], [np.zeros((1, S)), np.ones((1, S))]])
    return linprog(np.r_[v, np.zeros(S)], A, np.r_[p, -p, 2 * s], np.r_[np.ones(S), np.zeros(S)][None], [1]).fun


def test_tv_is_a_linear_program_and_its_dual():
    rng = np.random.default_rng(0)
    for S, s in itertools.product((1, 2, 5), (0.0, 0.03, 0.5, 1.0)):
        p, v = rng.dirichlet(np.ones(S)), rng.normal(size=S)
        p[rng.integers(S)] += 1e-300
        got = mn.tv_worst_case(p, v, s)
        assert isinstance(got, float)
        np.testing.assert_allclose(got, tv_program(p, v, s), atol=1e-8)
        np.testing.assert_allclose(got, tv_dual(p, v, s), atol=1e-12)
        np.testing.assert_allclose(
            mn.tv_worst_case(p, v - v.min(), s), tv_dual(p, v - v.min(), s, fail_state=True), atol=1e-12
        )


def test_tv_reaches_states_off_the_support_and_kl_does_not():
    p, v = np.array([0.0, 0.5, 0.5]), np.array([-3.0, 1.0, 2.0])
    np.testing.assert_allclose(mn.tv_worst_case(p, v, 0.2), 0.2 * -3 + 0.5 * 1 + 0.3 * 2)
    assert mn.kl_worst_case(p, v, 50.0) == 1.0 and mn.kl_worst_case(p, v, math.log(2) + 1e-9) == 1.0
    assert mn.kl_worst_case(p, v, math.log(2) - 1e-3) > 1.0


def test_tv_falls_convexly_with_the_radius():
    rng = np.random.default_rng(1)
    p, v, s = rng.dirichlet(np.ones(6), 20), rng.normal(size=6), np.linspace(0, 1, 41)
    curve = np.array([mn.tv_worst_case(p, v, x) for x in s])
    assert (np.diff(curve, axis=0) <= 1e-12).all() and (np.diff(curve, 2, axis=0) >= -1e-12).all()
    np.testing.assert_allclose(curve[0], p @ v)
    np.testing.assert_allclose(curve[-1], v.min())


def test_kl_is_what_a_general_solver_finds():
    rng = np.random.default_rng(2)
    for s in (0.01, 0.1, 1.0):
        p, v = rng.dirichlet(np.ones(4)), rng.uniform(0, 3, 4)
        kl = lambda q: s - np.sum(q * np.log(np.maximum(q, 1e-15) / p))
        fit = minimize(lambda q: q @ v, p, method="SLSQP", bounds=[(1e-12, 1)] * 4, options=dict(ftol=1e-13, maxiter=500),
                       constraints=[dict(type="eq", fun=lambda q: q.sum() - 1), dict(type="ineq", fun=kl)])
        got = mn.kl_worst_case(p, v, s)
        assert got <= fit.fun + 1e-7 * (1 + np.ptp(v))                                     # fit.fun is feasible: an upper bound
        np.testing.assert_allclose(got, fit.fun, atol=2e-5)


def kl_reference(p, v, s):
    "The dual on a fine grid in log λ, refined twice: slow, and no Newton step in it."
    on = p > 0
    f = lambda lam: -lam * np.log((p[on] * np.exp(-(v[on] - v[on].min()) / lam[:, None])).sum(1)) - lam * s + v[on].min()
    low, high = math.log(1e-8), math.log(np.ptp(v[on]) / s + 1e-8)
    for _ in range(5):
        grid = np.linspace(low, high, 4001)
        y = f(np.exp(grid))
        i = int(y.argmax())
        low, high = grid[max(i - 2, 0)], grid[min(i + 2, 4000)]
    return max(y.max(), v[on].min())


def test_kl_against_a_fine_grid_also_at_its_ends():
    rng = np.random.default_rng(3)
    for alpha, s in itertools.product((0.05, 1.0), (1e-8, 1e-4, 0.05, 0.5, 2.0, 6.0)):
        p, v = rng.dirichlet(np.full(5, alpha)), rng.uniform(0, 4, 5)
        p = np.where(p < 1e-9, 0, p) / np.where(p < 1e-9, 0, p).sum()
        np.testing.assert_allclose(mn.kl_worst_case(p, v, s), kl_reference(p, v, s), atol=1e-7 * (1 + np.ptp(v)))


@pytest.mark.parametrize("f, radii", [(mn.tv_worst_case, (0, 0.2, 0.7, 1)), (mn.kl_worst_case, (0, 1e-9, 0.2, 2, 1e3))])
def test_invariants_of_both(f, radii):
    rng = np.random.default_rng(4)
    p, v = rng.dirichlet(np.full(5, 0.4), (4, 3)), np.array([1.0, 0.5, 0.5, 2.0, 2.0])      # ties
    p[0, 0] = [0, 0.5, 0, 0.5, 0]
    for s in radii:
        base = f(p, v, s)
        assert base.shape == (4, 3) and (base >= v.min() - 1e-12).all() and (base <= p @ v + 1e-9).all()
        np.testing.assert_allclose(f(p, v + 5, s), base + 5, atol=2e-7)
        assert (f(p, v + rng.random(5), s) >= base - 2e-7).all()
        assert (f(p, np.full(5, 0.7), s) == 0.7).all()
        np.testing.assert_allclose([[f(row, v, s) for row in rows] for rows in p], base, atol=1e-9)
        assert (np.array([f(p, v, t) for t in (s, s + (1 - s) * 0.1 if f is mn.tv_worst_case else s + 0.1)])[::-1] <= base + 1e-9).all()
    np.testing.assert_allclose(f(p, v, 0), p @ v, atol=1e-12)
    if f is mn.kl_worst_case:
        assert (f(np.eye(5), v, 0.9) == v).all()


@pytest.mark.parametrize("f", [mn.tv_worst_case, mn.kl_worst_case])
def test_worst_cases_reject_bad_input(f):
    p, v = np.array([0.5, 0.5]), np.array([0.0, 1.0])
    for args in (([0.5, 0.51], v, 0.1), ([1.5, -0.5], v, 0.1), (p, v, -0.1), (p, v, np.nan), (p, v, "x"), (p, [0, np.inf], 0.1), (p, [0, 1, 2], 0.1),
                 ([np.nan, 1], v, 0.1), (p, v, np.inf), ([], [], 0.1)):
        with pytest.raises(ValueError):
            f(*args)
    assert np.isfinite(f([0.5, 0.5 + 5e-7], v, 0.1))
    with pytest.raises(ValueError, match="radius"):
        mn.tv_worst_case(p, v, 1.01)


def test_the_worst_kernel_is_in_the_ball_and_attains_the_value():
    rng = np.random.default_rng(5)
    for d, s in itertools.product(("tv", "kl"), (0, 0.01, 0.3, 0.95)):
        p, v = rng.dirichlet(np.full(5, 0.6)), rng.uniform(0, 2, 5)
        q = mn.worst_kernel(p, v, s, d)
        assert q.min() >= 0 and abs(q.sum() - 1) < 1e-12 and divergence_of(q, p, d) <= s + 1e-6
        np.testing.assert_allclose(q @ v, (mn.tv_worst_case if d == "tv" else mn.kl_worst_case)(p, v, s), atol=1e-6)


# -- games -----------------------------------------------------------------------------------------------------------


def test_game_attributes_and_errors():
    P, r = random_game(4, 3, (2, 3), 0)
    g = mn.MarkovGame(P, r, s0=2)
    assert (g.n_agents, g.horizon, g.n_states, g.n_actions, g.s0) == (2, 3, 4, (2, 3), 2)
    np.testing.assert_allclose(g.P, P)
    bad = P.copy()
    bad[0, 0, 0, 0, 0] += 0.01
    for args in ((P[..., :3], r), (bad, r), (-P, r), (P, r[:1]), (P, r + 1), (P, r * np.nan), (P, r, 4), (P, r, -1), (P, r, 0.5), (np.ones((2, 2)), r)):
        with pytest.raises(ValueError):
            mn.MarkovGame(*args)


def test_rollout_follows_policy_and_kernel():
    g = game(actions=(2, 3))
    steps = g.rollout(random_policy(g), 0)
    assert [h for h, *_ in steps] == [0, 1, 2] and steps[0][1] == g.s0 and all(a[3] == b[1] for a, b in zip(steps, steps[1:]))
    assert all(len(a) == 2 and 0 <= a[0] < 2 and 0 <= a[1] < 3 for _, _, a, _ in steps) and steps == g.rollout(random_policy(g), 0)
    policy = random_policy(g)
    first = np.zeros((2, 3))
    for seed in range(2000):
        first[g.rollout(policy, seed)[0][2]] += 1
    np.testing.assert_allclose(first / 2000, policy[0, 0], atol=0.05)


def slow_values(g, policy, radii, divergence):
    "Loops over everything, one row at a time."
    f = mn.tv_worst_case if divergence == "tv" else mn.kl_worst_case
    V = np.zeros((g.n_agents, g.horizon + 1, g.n_states))
    for i, h, s in itertools.product(range(g.n_agents), reversed(range(g.horizon)), range(g.n_states)):
        for a in itertools.product(*map(range, g.n_actions)):
            V[i, h, s] += policy[h, s][a] * (g.r[i, h, s][a] + f(g.P[h, s][a], V[i, h + 1], radii[i]))
    return V


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_values_and_gaps(divergence):
    g, radii = game(3, actions=(2, 3)), (0.1, 0.3)
    policy = random_policy(g, 1)
    V = mn.robust_values(g, policy, radii, divergence)
    assert V.shape == (2, 4, 4) and (V[:, -1] == 0).all()
    np.testing.assert_allclose(V, slow_values(g, policy, radii, divergence), atol=1e-9)
    np.testing.assert_array_equal(mn.robust_values(g, policy, 0.1, divergence), mn.robust_values(g, policy, [0.1, 0.1], divergence))
    for seed in range(5):
        assert mn.robust_gaps(g, random_policy(g, seed, product=True), radii, divergence).min() >= -1e-12
    for bad in (dict(radii=(0.1,) * 3), dict(radii=-0.1), dict(divergence="l2"), dict(policy=policy[:1]), dict(policy=policy * 2), dict(policy=-policy)):
        with pytest.raises(ValueError):
            mn.robust_values(**dict(game=g, policy=policy, radii=radii, divergence=divergence) | bad)
        with pytest.raises(ValueError):
            mn.robust_gaps(**dict(game=g, policy=policy, radii=radii, divergence=divergence) | bad)


def test_a_correlated_gap_can_be_negative():
    chicken = np.array([[[6, 2], [7, 0]], [[6, 7], [2, 0]]]) / 7
    g = mn.MarkovGame(np.ones((1, 1, 2, 2, 1)), chicken[:, None, None])
    assert (mn.robust_gaps(g, np.array([[1, 1], [1, 0]])[None, None] / 3, 0.1, "tv") < -0.04).all()


def test_deployments_are_on_the_sphere_and_no_worse_than_the_worst():
    g = game(1, branching=3)
    policy = random_policy(g)
    for d, s in itertools.product(("tv", "kl"), (0.05, 0.3)):
        moved = mn.perturbed(g, s, d, 0)
        np.testing.assert_allclose(divergence_of(moved.P, g.P, d), s, atol=1e-6)
        assert (mn.robust_values(moved, policy, 0, d)[:, 0] >= mn.robust_values(g, policy, s, d)[:, 0] - 1e-7).all()
        assert not np.array_equal(moved.P, mn.perturbed(g, s, d, 1).P)
    one_hot = mn.perturbed(mn.two_step_game(), 0.2, "kl", 0)                                # a certain row has no other row in its ball
    np.testing.assert_array_equal(one_hot.P[1], mn.two_step_game().P[1])


def test_the_support_diagnostic():
    for d, want in (("tv", True), ("kl", False)):
        refuge = mn.hidden_refuge(0.0, 1)
        share, nominal, worst = mn.support_shift(refuge, mn.solve_game(refuge, 0.1, d)[0], 0.1, d)
        assert (share > 0.01) == want and nominal[:, 2].sum() == 0 and np.allclose(worst.sum(1), 1)
    assert mn.fail_state(mn.combination_lock(4)) == 4 and mn.fail_state(mn.hidden_refuge(0.0, 0)) is None
    assert mn.fail_state(mn.hidden_refuge(0.0, 0, refuge=False)) == 2


def test_games_of_the_pages_reject_nonsense():
    for call in (lambda: mn.combination_lock(1), lambda: mn.combination_lock(4, 1.5), lambda: mn.hidden_refuge(-0.1, 0)):
        with pytest.raises(ValueError):
            call()


# -- equilibria ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cce", "ce", "nash"])
def test_nobody_gains(kind):
    rng = np.random.default_rng(0)
    for shape in ((2, 2), (3, 2), (4, 4)):
        for scale in (1e-3, 1.0, 50.0):
            u = rng.normal(size=(2, *shape)) * scale
            pi = mn.equilibrium(u, kind)
            assert pi.shape == shape and pi.min() >= 0 and abs(pi.sum() - 1) < 1e-12
            assert gains(u, pi, "ce" if kind == "ce" else "cce").max() <= 1e-6
            if kind == "nash":
                np.testing.assert_allclose(pi, np.outer(pi.sum(1), pi.sum(0)), atol=1e-9)


def test_zero_sum_value_and_a_constant_sum():
    u = np.array([[3.0, -1], [-2, 1]])                                                      # value 1/7
    for shift in (0.0, 5.0):
        pi = mn.equilibrium(np.stack([u, shift - u]), "nash")
        np.testing.assert_allclose((pi * u).sum(), 1 / 7, atol=1e-8)


def test_three_agents_have_correlated_equilibria_and_no_nash():
    u = np.random.default_rng(0).normal(size=(3, 2, 2, 3))
    assert gains(u, mn.equilibrium(u)).max() <= 1e-6 and gains(u, mn.equilibrium(u, "ce"), "ce").max() <= 1e-6
    for args in ((u, "nash"), (u, "best"), (u[:2],), (u * np.inf,), (np.zeros(3),)):
        with pytest.raises(ValueError):
            mn.equilibrium(*args)


def test_the_shortcut_is_a_solution_of_the_program():
    rng = np.random.default_rng(1)
    Q = rng.random((2, 200, 6))
    best, stable = best_pure(Q, (2, 3))
    assert 10 < stable.sum() < 190
    for s in range(60):
        total = Q[:, s].sum(0)
        program = (correlated(Q[:, s].reshape(2, 2, 3), "cce").ravel() * total).sum()
        assert not stable[s] or abs(program - total[best[s]]) < 1e-8
        assert program <= total[best[s]] + 1e-8
    np.testing.assert_allclose(stage_policies(Q, (2, 3), "cce").sum(1), 1)


@pytest.mark.parametrize("kind", ["cce", "ce"])
def test_the_batch_of_two_by_two_games_is_the_program(kind):
    rng = np.random.default_rng(2)
    Q = np.concatenate([rng.normal(size=(2, 40, 4)), rng.integers(0, 2, (2, 40, 4)), np.zeros((2, 1, 4)), 1e-9 * rng.normal(size=(2, 5, 4)), 100 * rng.normal(size=(2, 5, 4))], 1)
    pi = stage_policies(Q, (2, 2), kind, shortcut=False)
    for s, dist in enumerate(pi):
        u = Q[:, s].reshape(2, 2, 2)
        assert gains(u, dist.reshape(2, 2), kind).max() <= 1e-6
        np.testing.assert_allclose(dist @ u.sum(0).ravel(), (correlated(u, kind) * u.sum(0)).sum(), atol=1e-6)


def test_no_nash_is_flagged_and_a_failed_program_is_loud(monkeypatch):
    import nashpy

    from icl26.decision.mornavi import equilibrium as _  # noqa: F401 (the function; the module is in sys.modules)

    module = sys.modules["icl26.decision.mornavi.equilibrium"]
    for name in ("support_enumeration", "vertex_enumeration", "lemke_howson_enumeration"):
        monkeypatch.setattr(nashpy.Game, name, lambda self, **kw: iter(()))
    u = np.array([[[0.0, 1], [1, 0.2]], [[1, 0], [0.1, 1]]])                                # no pure equilibrium, sum not constant
    with pytest.warns(NoNashFound):
        pi = mn.equilibrium(u, "nash")
    assert gains(u, pi).max() <= 1e-6
    monkeypatch.setattr(module, "linprog", lambda *a, **k: type("Fit", (), dict(success=False, status=2, message="infeasible"))())
    with pytest.raises(RuntimeError, match="status 2"):
        correlated(u, "cce")


@pytest.mark.parametrize("kind, divergence", [("cce", "tv"), ("ce", "kl"), ("nash", "tv")])
def test_solved_games_have_no_gap(kind, divergence):
    for seed in range(3):
        g = game(seed, actions=(2, 3))
        policy, V = mn.solve_game(g, (0.1, 0.25), divergence, kind)
        assert mn.robust_gaps(g, policy, (0.1, 0.25), divergence).max() <= g.horizon * 1e-6
        np.testing.assert_array_equal(V, mn.robust_values(g, policy, (0.1, 0.25), divergence))


def test_reductions():
    one = game(0, actions=(4,))
    policy, V = mn.solve_game(one, 0.2, "tv")
    W = np.zeros(one.n_states)
    for h in reversed(range(one.horizon)):                                                  # robust value iteration
        W = (one.flat_r[0, h] + np.array([[mn.tv_worst_case(p, W, 0.2) for p in rows] for rows in one.flat_P[h]])).max(1)
    np.testing.assert_allclose(V[0, 0], W, atol=1e-12)
    np.testing.assert_allclose(mn.robust_gaps(one, policy, 0.2, "tv"), 0, atol=1e-12)
    g = game(1)
    for kind in ("cce", "nash"):
        np.testing.assert_allclose(mn.solve_game(g, 0, "tv", kind)[1], mn.solve_game(g, 0, "kl", kind)[1], atol=1e-9)
    three = game(2, actions=(2, 2, 2))
    assert mn.robust_gaps(three, mn.solve_game(three, 0.1, "kl")[0], 0.1, "kl").max() <= 3e-6


# -- the learner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [dict(), dict(divergence="kl", bonus_scale=0.01), dict(bonus="bernstein", bonus_scale=0.02), dict(kind="nash", bonus_scale=0.1),
                                      dict(kind="ce", lazy=False, bonus_scale=0.1)])
def test_runs_keep_their_invariants_and_repeat(settings):
    g, K = game(5), 60
    learner = mn.MORNAVI(g, (0.1, 0.2), **settings, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoNashFound)
        r, again = learner.run(K), mn.MORNAVI(g, (0.1, 0.2), **settings, seed=3).run(K)
        other = mn.MORNAVI(g, (0.1, 0.2), **settings, seed=4).run(K)
    for a, b in zip(vars(r).values(), vars(again).values()):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(r.visits, other.visits)
    assert r.visits.sum() == K * g.horizon and (r.visits.reshape(3, -1).sum(1) == K).all() and r.visits[0, g.s0].sum() == K
    assert (r.gaps >= 0).all() and np.allclose(np.cumsum(r.gaps), r.regret) and (r.width >= 0).all() and (r.width <= 3).all()
    np.testing.assert_allclose(r.policy.reshape(3, 4, -1).sum(-1), 1)
    t = learner.trace_
    assert len(t["episodes"]) == r.n_plans and t["episodes"].sum() == K and (t["upper"] >= t["lower"] - 1e-9).all()
    assert r.n_plans == K if not learner.lazy else r.n_plans <= 3 * 4 * 4 * (1 + math.log2(K))
    selected = int(np.argmin(np.abs(t["upper"] - t["lower"]).max(1)))
    np.testing.assert_allclose(mn.robust_values(g, r.policy, (0.1, 0.2), learner.divergence)[:, 0, 0], t["value"][selected], atol=1e-9)


def test_the_plan_sees_counts_and_rewards_only():
    a = game(0)
    b = mn.MarkovGame(game(9).P, a.r)
    counts = np.random.default_rng(0).integers(0, 5, a.flat_P.shape)
    for d in ("tv", "kl"):
        x, y = (mn.MORNAVI(g, 0.1, d).plan(counts, 100) for g in (a, b))
        np.testing.assert_array_equal(x.policy, y.policy)
        np.testing.assert_array_equal(x.upper, y.upper)


def test_unvisited_pairs_are_at_the_cap_and_the_last_step_has_no_bonus():
    g = game(0)
    plan = mn.MORNAVI(g, 0.1).plan(np.zeros(g.flat_P.shape), 10)
    np.testing.assert_array_equal(plan.upper[0, :, 0], [3, 2, 1, 0])
    assert (plan.lower == 0).all()
    once = mn.MORNAVI(g, 0.1, bonus_scale=9.0).plan(np.ones(g.flat_P.shape), 10)
    np.testing.assert_allclose(once.upper[:, 2], once.lower[:, 2])                          # rewards are known


def test_bonuses_by_hand():
    g, K, delta = game(0), 500, 0.1
    n, p = np.full((4, 4), 7), g.flat_P[0]
    ours = mn.MORNAVI(g, (0.0, 0.2), "kl", bonus_scale=0.5, delta=delta)
    beta = ours.bonus_term(0, n, p, None, None, K)
    flat = 0.5 * (2 / 2) * math.sqrt(2 * (4 * math.log(2) + math.log(3 * 4 * 4 * K / delta)) / 7)
    np.testing.assert_allclose(beta[0], flat)                                               # radius 0: the TV form
    np.testing.assert_allclose(beta[1], 0.5 * 2 / 0.2 * np.sqrt(2 * math.log(3 * 4**2 * 4 * K / delta) / (7 * p.min(-1))))
    tv = mn.MORNAVI(g, 0.2, bonus_scale=0.5, delta=delta)
    np.testing.assert_allclose(tv.bonus_term(0, n, p, None, None, K), flat)
    assert (tv.bonus_term(2, n, p, None, None, K) == 0).all()
    up, low = np.array([[2.0, 1, 1, 2]]), np.array([[1.0, 1, 0, 1]])
    iota, mid = math.log(4**3 * 4 * 3**2 * K**1.5 / delta), (up + low)[0] / 2
    var = p @ mid**2 - (p @ mid) ** 2
    want = np.sqrt(iota * var / 7) + 2 * p @ (up - low)[0] / 3 + 9 * 4 * iota / 7 + K**-0.5
    np.testing.assert_allclose(bernstein_bonus(3, n, p, up, low, K, delta)[0], want)
    np.testing.assert_allclose(fail_state_cap(3, np.array([0.0, 0.5, 1.0])), [3, 1.75, 1])
    assert mn.MORNAVI(mn.combination_lock(4), 0.1, bonus="bernstein").grounded and not mn.MORNAVI(g, 0.1, bonus="bernstein").grounded


def test_the_derived_tv_bounds_hold_and_broken_ones_do_not():
    g = game(7)
    for learner, at_least, at_most in ((mn.MORNAVI, 1.0, 1.0), (mn.WrongSign, 0.0, 0.5)):
        x = learner(g, 0.1)
        x.run(300)
        t = x.trace_
        right = (t["upper"] >= t["best"] - 1e-9) & (t["lower"] <= t["value"] + 1e-9)
        assert at_least <= right.mean() <= at_most


def test_the_regret_falls_behind_linear_and_baselines_are_what_they_say():
    g = game(11, S=3, H=2)
    assert regret_ratio(mn.MORNAVI(g, 0.1, bonus_scale=0.1).run(1500).regret) < 0.6
    uniform = mn.UniformExplorer(g, 0.1).run(1500)
    np.testing.assert_allclose(uniform.gaps, uniform.gaps[0])
    np.testing.assert_allclose(uniform.visits[0, 0] / 1500, 0.25, atol=0.05)
    greedy = mn.GreedyRobust(g, 0.1, bonus_scale=5.0).run(300)
    np.testing.assert_array_equal(greedy.regret, mn.GreedyRobust(g, 0.1, bonus_scale=0.0).run(300).regret)
    assert (greedy.width == 0).all()


def test_optimism_opens_the_lock_and_radius_zero_is_nash_value_iteration():
    lock = mn.combination_lock(6)
    team = {c: mn.robust_values(lock, c(lock, 0.05, bonus_scale=0.05).run(900).policy, 0.05, "tv")[:, 0, 0].sum() for c in (mn.MORNAVI, mn.GreedyRobust, mn.WrongSign)}
    np.testing.assert_allclose(team[mn.MORNAVI], 2 * 0.9**5)
    assert team[mn.GreedyRobust] < 0.21 and team[mn.WrongSign] < 0.21
    two = mn.two_step_game()
    plays_safe = {s: mn.MORNAVI(two, s, bonus_scale=0.3, seed=1).run(1200).policy[0, 0, 1, 1] for s in (0.0, 0.2)}
    assert plays_safe == {0.0: 0.0, 0.2: 1.0} and mn.BestCase(two, 0.2, bonus_scale=0.3, seed=1).run(1200).policy[0, 0, 0, 0] == 1


def test_an_unseen_successor_breaks_the_kl_bonus():
    from icl26.decision.mornavi.mornavi import kl_bonus

    error = 1 - mn.kl_worst_case([3e-4, 1 - 3e-4], [0, 1], 1.0)
    bonus = kl_bonus(1, np.array([[10_000]]), np.array([[[0.0, 1.0]]]), np.array([1.0]), math.log(2 * 2 * 10_000 / 0.05)).item()
    assert error > 2 * bonus


def test_learner_rejects_bad_input():
    g = game()
    for bad in (dict(radii=-1), dict(radii=(0.1, 0.1, 0.1)), dict(divergence="chi2"), dict(divergence="kl", bonus="bernstein"), dict(bonus="none"), dict(kind="x"),
                dict(bonus_scale=-1), dict(bonus_scale=math.nan), dict(delta=1.0)):
        with pytest.raises(ValueError):
            mn.MORNAVI(g, **dict(radii=0.1) | bad)
    for name, values in dict(bonus_scale=(None, "1", True, math.inf), delta=(None, "x", 0, math.nan), seed=(-1, "a", None, 0.5, True)).items():
        for value in values:
            with pytest.raises(ValueError, match=name):                                     # at construction, before a run
                mn.MORNAVI(g, 0.1, **{name: value})
    assert mn.MORNAVI(g, 0.1, bonus_scale=np.float64(0.5), seed=np.int64(3)).run(2).visits.sum() == 6
    for K in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="n_episodes"):
            mn.MORNAVI(g, 0.1).run(K)
    with pytest.raises(TypeError, match="MarkovGame"):
        mn.MORNAVI(g.P, 0.1)
    with pytest.raises(ValueError, match="two agents"):
        mn.MORNAVI(game(actions=(2, 2, 2)), 0.1, kind="nash")


def test_at_radius_zero_the_two_balls_are_one():
    for g, scale in ((mn.two_step_game(), 0.3), (game(2, rewards="identical"), 0.05)):
        run = lambda radius, d: mn.MORNAVI(g, radius, d, bonus_scale=scale, seed=5).run(150)
        tv, kl, wide = run(0.0, "tv"), run(0.0, "kl"), run(0.2, "kl")
        np.testing.assert_allclose(kl.policy, tv.policy, atol=1e-12)
        np.testing.assert_array_equal(kl.visits, tv.visits)
        assert not np.array_equal(wide.visits, tv.visits)                                   # with a radius they differ


def test_three_agents_learn():
    g = game(0, S=3, H=2, actions=(2, 2, 2))
    r = mn.MORNAVI(g, 0.1, bonus_scale=0.05).run(400)
    assert r.policy.shape == (2, 3, 2, 2, 2) and r.gaps[-100:].mean() < r.gaps[:50].mean()


def test_measures():
    k = np.arange(1, 2001)
    np.testing.assert_allclose([regret_slope(k**0.5), regret_slope(3.0 * k)], [0.5, 1], atol=1e-9)
    assert abs(regret_slope(np.zeros(2000))) < 1e-9 and math.isnan(regret_ratio(np.zeros(2000)))
    one = dict(upper=np.array([[1.0]]), lower=np.array([[0.5]]), best=np.array([[1.1]]), value=np.array([[0.9]]), episodes=np.array([7]))
    assert coverage(one, 3) == (7, 0) and coverage(one | dict(best=np.array([[1.0]])), 3) == (7, 7) and coverage(one, 1) == (0, 0)
    assert (kl_worst(np.array([[0.5, 0.5]]), np.array([[0.0, 1.0]]), np.array([9.0])) == 0).all()


# -- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return papers.smoke("mornavi", tmp_path_factory)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "Profile gpu on the CPU at the sizes for tests, by the command: papermill runs every experiment in a kernel of its own."
    return once("mornavi-gpu", tmp_path_factory, lambda folder: run_command("mornavi", folder / "gpu", "--profile", "gpu", "--device", "cpu", ICL26_TINY="1"))


COMMITTED = committed("mornavi")


def expected(claim, part, seed):
    "Estimate and interval of a part from its values or counts; None: nothing to compute it from."
    values, label, n = part.get("values"), part["label"], part["n"]
    if "k" in part and part["k"] is not None:
        return (clopper_pearson if label.startswith("runs without") else wilson)(part["k"], n)
    if values is None or label.startswith(("share", "C6")):
        return None
    x = np.array(values, float)
    if label.startswith("counted"):
        return x.sum(), None, None
    if label.endswith("by game"):
        return np.median(x), None, None
    if label.startswith("C4 at radius 0"):
        return x.max(), None, None
    if len(x) == 1:
        return x[0], None, None
    return mean_again(x, seed)


@pytest.mark.parametrize("which", ["smoke", "tiny", "committed"])
def test_every_number_and_verdict_follows_from_what_was_recorded(which, smoke, tiny):
    path = dict(smoke=smoke, tiny=tiny, committed=COMMITTED)[which]
    if path is None:
        pytest.skip("no committed run")
    record = load_results(path)
    assert {c["id"] for c in record["claims"]} == {"C1", "C2", "C3", "C4", "C5", "C6", "own-C7", "own-C8"}
    checked = 0
    for c in record["claims"]:
        assert c["verdict"] == recompute(c)[0]
        for part in c["values"] or []:
            if (want := expected(c["id"], part, record["parameters"]["seed"])) is not None:
                agrees(part, want)
                checked += 1
        labels = {p["label"]: p for p in c["values"] or []}
        if c["id"] == "C6" and labels:
            for name in (k.removeprefix("share, ") for k in labels if k.startswith("share")):
                right, counted = labels[f"share, {name}"], labels[f"counted, {name}"]
                assert right["n"] == counted["measured"] and (not right["n"] or right["measured"] == sum(right["values"]) / right["n"])
        if c["id"] == "C5" and labels:
            slopes = [p["measured"] for k, p in labels.items() if k.startswith("p = 0, seed")]
            np.testing.assert_allclose(c["measured"], np.median(slopes))
    assert checked > 5


def test_smoke_measures_two_claims(smoke):
    record = load_results(smoke)
    measured = {c["id"] for c in record["claims"] if c["verdict"] != "not run"}
    assert measured == {"C1", "C2"}  # its memory is asserted where it runs in a process of its own: test_reproductions
    assert all("smoke" in c["reason"] for c in record["claims"] if c["id"] not in measured)
    assert all("no interval over games" in c["note"] for c in record["claims"] if c["id"] in measured)


def test_gpu_profile_runs_every_path_at_a_tiny_size(tiny):
    record = load_results(tiny)
    assert record["parameters"] == dict(profile="gpu", seed=0, device="cpu", model=None)
    assert all(c["verdict"] != "not run" and "tiny" in c["note"] for c in record["claims"])
    assert {"regret.png", "width.png", "lock.png", "deployment.png", "refuge.png"} <= {p.name for p in (tiny.parent / "figures").iterdir()}


def test_gpu_profile_without_a_gpu_says_so_in_seconds(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("mornavi", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])
    assert record["wall_s"] < 20


def test_the_committed_run_has_the_sizes_of_the_cpu_profile():
    if COMMITTED is None:
        pytest.skip("no committed run")
    c = {c["id"]: {p["label"]: p for p in c["values"]} for c in load_results(COMMITTED)["claims"]}
    assert c["C1"]["slope"]["n"] == c["C2"]["slope"]["n"] == 5 and c["C1"]["beside: slopes of all runs, by game"]["n"] == 15
    assert c["C3"]["greedy − MORNAVI"]["n"] == 10 and c["C4"]["two-step game, TV at σ"]["n"] == 10 and c["C4"]["random games, KL at σ"]["n"] == 5
    assert sum(k.startswith("p = 0, seed") for k in c["C5"]) == 5 and c["C6"]["counted, TV, bonus_scale 1"]["n"] == 5


def test_a_run_does_not_depend_on_anything_but_its_arguments():
    job = dict(game=dict(name="random", n_states=3, horizon=2, n_actions=(2, 2), seed=4), radius=0.1, divergence="kl", episodes=80, seed=2, bonus_scale=0.01)
    np.random.seed(0)
    a = learn(**job)
    np.random.seed(1)
    b = learn(**job)
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


# -- numbers that go against the paper -------------------------------------------------------------------------------


RATIO, TWO, RANDOM = "average regret, K over K/10", "two-step game, {} at σ", "random games, {} at σ"
AGAINST = {
    "C1": [[p("slope", 1.0), p(RATIO, 1.0)], [p("slope", 0.6, 0.5), p(RATIO, 0.2)]],
    "C2": [[p("slope", 1.2), p(RATIO, 0.4)], [p("slope", 0.995, 0.01), p(RATIO, 0.4)]],
    "C3": [[p("greedy − MORNAVI", 0.0), p("uniform − MORNAVI", 0.5)], [p("greedy − MORNAVI", -0.5), p("uniform − MORNAVI", -0.5)]],
    "C4": [[*(p(TWO.format(d), x) for d, x in (("TV", 1), ("KL", -1))), *(p(RANDOM.format(d), 1) for d in ("TV", "KL"))]],
    "C5": [[p("p = 0, seed 0", 0.5), p("p = 0.05, mean", 0.5)], [p("p = 0, seed 0", 1.0), p("p = 0.05, mean", 1.0)]],
    "C6": [[p("share, TV, bonus_scale 1", 0.9), p("counted, TV, bonus_scale 1", 9000)]],
    "own-C7": [[p("C4 random games", x), p("C4 at radius 0: KL − TV, same seed, same bonus_scale", y), p("C5 under KL", z)]
               for x, y, z in ((0.1, 0, 0), (0, 1e-9, 0), (0, 0, 0.1))],
    "own-C8": [[p("C3 greedy − MORNAVI", 0.5), p("C4 x", -1), p("C6 share", 0)], [p("C3 greedy − MORNAVI", 0), p("C4 x", -1), p("C6 share", 0.99)]],
}


@pytest.mark.parametrize("claim", AGAINST)
def test_numbers_against_the_paper_are_not_reproduced(claim):
    (rule,) = (c for c in mn.claims("cpu") if c.id == claim)
    for parts in AGAINST[claim]:
        assert measurement(rule, parts=parts)["verdict"] == "not reproduced"


def test_claims_are_the_same_for_every_profile_and_reject_others():
    assert [c.id for c in mn.claims("smoke")] == ["C1", "C2", "C3", "C4", "C5", "C6", "own-C7", "own-C8"]
    assert mn.claims("smoke") == mn.claims("gpu") and {c.scale for c in mn.claims()} == {"mechanism"}
    with pytest.raises(ValueError, match="profile"):
        mn.claims("big")


# -- the command -----------------------------------------------------------------------------------------------------


def run(*argv):
    return said(use.main, *argv)


def test_the_command_without_nashpy_says_what_to_install(tmp_path, monkeypatch):
    chicken = np.array([[[6, 2], [7, 0]], [[6, 7], [2, 0]]]) / 7
    mixed = np.array([[[0.0, 1], [1, 0.2]], [[1, 0], [0.1, 1]]])                             # no pure equilibrium, sum not constant
    for name, r in (("chicken", chicken), ("mixed", mixed)):
        (tmp_path / f"{name}.json").write_text(json.dumps(dict(P=np.ones((1, 1, 2, 2, 1)).tolist(), r=r[:, None, None].tolist())))
    monkeypatch.setitem(sys.modules, "nashpy", None)                                        # as if it were not installed
    code, out, err = run("solve", tmp_path / "mixed.json", "--radius", "0.1", "--kind", "nash")
    assert code == 2 and out == "" and err.startswith("icl26: error: ") and "pip install" in err and err.count("\n") == 1
    assert run("solve", tmp_path / "chicken.json", "--radius", "0.1")[0] == 0               # other kinds do not need it


def test_the_command_solves_the_example(tmp_path):
    assert use.main(["example", str(tmp_path / "game.json")]) == 0
    done = use_command("mornavi", "solve", "game.json", "--radius", "0.2", "--plot", "plot.png", "--out", "solution.json", cwd=tmp_path)
    assert done.returncode == 0 and "safe/safe" in done.stdout and "0.6700" in done.stdout, done.stderr
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    found = json.loads((tmp_path / "solution.json").read_text())
    np.testing.assert_allclose(found["worst"]["robust"], [0.67, 0.67])
    np.testing.assert_allclose(found["worst"]["nominal"], [0.6, 0.6])
    g, _ = use.read_game(tmp_path / "game.json")
    np.testing.assert_allclose(mn.robust_values(g, np.array(found["policy"]), 0.2, "tv"), found["values"], atol=1e-12)


def test_the_command_reads_every_form_of_a_game(tmp_path):
    P, r = random_game(3, 1, (2, 2, 2), 0)
    (tmp_path / "g.json").write_text(json.dumps(dict(P=P[0].tolist(), r=r[:, 0].tolist(), horizon=3, start=1)))
    code, out, err = run("solve", tmp_path / "g.json", "--radius", "0.1,0.2,0.3", "--divergence", "kl", "--json")
    assert code == 0, err
    found = json.loads(out)
    want = mn.solve_game(mn.MarkovGame(np.repeat(P, 3, 0), np.repeat(r, 3, 1), 1), (0.1, 0.2, 0.3), "kl")
    np.testing.assert_allclose(found["values"], want[1], atol=1e-9)
    assert max(found["gaps"]) <= 3e-6 and found["radii"] == [0.1, 0.2, 0.3]


def test_a_worst_kernel_wants_one_row_and_its_values():
    for divergence in ("tv", "kl"):
        for row, v, text in (([0.5, 0.5], [1, 2, 3], "v must have one value"), ([0.5, 0.5], [1, np.nan], "finite"), ([0.5, 0.5], [[1, 2]], "v must"), ([[0.5, 0.5]], [1, 2], "p must be one row")):
            with pytest.raises(ValueError, match=text):
                mn.worst_kernel(row, v, 0.1, divergence)


def test_deployments_name_what_is_wrong():
    g = mn.two_step_game()
    policy = mn.solve_game(g, 0.1, "tv")[0]
    for call, text in ((lambda: mn.deployment_curve(g, policy, 0.1, "tv"), "radii"), (lambda: mn.random_deployments(g, [policy], 0.1, "tv", n=0), "n must"),
                       (lambda: mn.random_deployments(g, [policy], 0.1, "tv", n=2.0), "n must"), (lambda: mn.worst_game(g, policy, 0.1, "tv", agent=-1), "agent"),
                       (lambda: mn.support_shift(g, policy, 0.1, "tv", agent=2), "agent")):
        with pytest.raises(ValueError, match=text):
            call()
    for action in ((1,), (0, -1), (0, 0, 0), (0, 2)):
        with pytest.raises(IndexError):
            always(g, action)


def test_the_command_names_keys_that_it_does_not_use(tmp_path):
    (tmp_path / "g.json").write_text(json.dumps({k: v for k, v in use.example().items() if k != "start"} | dict(s0=2)))
    code, out, err = run("solve", tmp_path / "g.json", "--radius", "0.1")
    assert code == 0 and "not used: s0; the keys are P, r, horizon, start" in err and err.count("\n") == 1
    (tmp_path / "g.json").write_text(json.dumps(use.example() | dict(states=["s0", "s0", "a", "b"])))
    code, out, err = run("solve", tmp_path / "g.json", "--radius", "0.1")
    assert code == 2 and "start: 's0' names more than one" in err


def test_mistakes_are_one_line_and_exit_code_two(tmp_path):
    good = use.example()
    write = lambda name, data: (tmp_path / name).write_text(data if isinstance(data, str) else json.dumps(data)) and tmp_path / name
    game_file = write("game.json", good)
    cases = [
        (["solve", tmp_path / "none.json", "--radius", "0.1"], "No such file"),
        (["solve", write("cut.json", "{"), "--radius", "0.1"], "not valid JSON"),
        (["solve", write("list.json", "[1]"), "--radius", "0.1"], "keys P and r"),
        (["solve", write("deep.json", "[" * 100_000), "--radius", "0.1"], "deep.json"),
        (["solve", write("ragged.json", good | dict(P=[[1], [1, 2]])), "--radius", "0.1"], "P: nested lists"),
        (["solve", write("sum.json", good | dict(P=(0.9 * np.array(good["P"])).tolist())), "--radius", "0.1"], "sum to 1"),
        (["solve", write("big.json", good | dict(r=(3 * np.array(good["r"])).tolist())), "--radius", "0.1"], "[0, 1]"),
        (["solve", write("start.json", good | dict(start="moon")), "--radius", "0.1"], "start"),
        (["solve", write("start2.json", good | dict(start=9)), "--radius", "0.1"], "s0 must be a state"),
        (["solve", write("names.json", good | dict(agents=["a"])), "--radius", "0.1"], "agents"),
        (["solve", write("h.json", good | dict(horizon=0)), "--radius", "0.1"], "horizon"),
        (["solve", write("nan.json", json.dumps(good).replace("0.35", "NaN")), "--radius", "0.1"], "finite"),
        (["solve", game_file, "--radius", "1.5"], "radius"),
        (["solve", game_file, "--radius", "a"], "--radius"),
        (["solve", game_file, "--radius", "0.1", "--plot", tmp_path / "no/such.png"], "there is no folder"),
        (["solve", game_file, "--radius", "0.1", "--plot", tmp_path / "x.txt"], "--plot"),
        (["solve", game_file, "--radius", "0.1", "--out", game_file], "is an input file"),
        (["solve", game_file, "--radius", "0.1", "--out", tmp_path], "is a folder"),
        (["example", game_file], "exists"),
        ([], "required"),
    ]
    for argv, text in cases:
        code, out, err = run(*argv)
        assert code == 2 and out == "" and err.startswith("icl26: error: ") and text in err and err.count("\n") == 1, (argv, err)
    assert json.loads(game_file.read_text()) == good and run("--help")[0] == 0
