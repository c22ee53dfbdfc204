"icl26.decision.tabular: exact solutions against linear programmes and brute force, occupancies, random problems."
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import linprog

from icl26.decision.tabular import Optimal, evaluate_policy, occupancy, policy_iteration, random_game, random_mdp


def by_linear_programme(P, r, gamma):
    "Optimal values as the least V with V >= r + gamma P V for every action."
    S, A = r.shape
    rows = (gamma * P - np.eye(S)[:, None]).reshape(S * A, S)
    found = linprog(np.ones(S), A_ub=rows, b_ub=-r.ravel(), bounds=[(None, None)] * S, method="highs")
    assert found.success
    return found.x


@pytest.mark.parametrize("seed", range(4))
def test_policy_iteration_is_the_linear_programme(seed):
    P, r = random_mdp(12, 4, seed, branching=3)
    best = policy_iteration(P, r, 0.95)
    assert isinstance(best, Optimal)
    np.testing.assert_allclose(best.values, by_linear_programme(P, r, 0.95), atol=1e-7)
    np.testing.assert_allclose(evaluate_policy(P, r, best.policy, 0.95), best.values, atol=1e-9)
    np.testing.assert_allclose(best.q.max(1), best.values, atol=1e-9)


def test_sparse_is_dense_and_ties_go_to_the_lowest_action():
    P, r = random_mdp(30, 3, 5, branching=4)
    a, b = policy_iteration(P, r, 0.9), policy_iteration([sp.coo_matrix(P[:, k]) for k in range(3)], r, 0.9)
    np.testing.assert_allclose(a.values, b.values, atol=1e-10)
    assert (policy_iteration(P[:, [0, 0]], r[:, [0, 0]], 0.9).policy == 0).all()
    rho = occupancy([sp.csr_matrix(P[:, k]) for k in range(3)], a.policy, np.full(30, 1 / 30), 0.9)
    np.testing.assert_allclose(rho, occupancy(P, a.policy, np.full(30, 1 / 30), 0.9), atol=1e-12)


def test_occupancy_balances_flows():
    P, r = random_mdp(8, 3, 2)
    mu0, pi = np.eye(8)[3], np.random.default_rng(0).dirichlet(np.ones(3), 8)
    rho = occupancy(P, pi, mu0, 0.7)
    np.testing.assert_allclose(rho.sum(1), 0.3 * mu0 + 0.7 * np.einsum("sa,sat->t", rho, P), atol=1e-12)
    assert rho.shape == (8, 3) and abs(rho.sum() - 1) < 1e-12
    assert (rho * r).sum() / 0.3 == pytest.approx(evaluate_policy(P, r, pi, 0.7)[3])


def test_gamma_zero_and_one_state():
    P, r = random_mdp(1, 3, 0)
    assert policy_iteration(P, r, 0).values[0] == r.max()
    assert policy_iteration(P, r, 0.5).values[0] == pytest.approx(2 * r.max())


@pytest.mark.parametrize("change, message", [
    (dict(gamma=1.0), "gamma"), (dict(gamma=-0.1), "gamma"), (dict(r=np.zeros((3, 2))), "P must have the shape"),
    (dict(P=np.zeros((4, 2, 4))), "distribution"), (dict(r=np.full((4, 2), np.nan)), "finite"), (dict(r=np.zeros(4)), "r must"),
    (dict(r=np.full((4, 2), -np.inf)), "no action"), (dict(P=[sp.identity(4)]), "P must have the shape"),
])
def test_bad_processes(change, message):
    P, r = random_mdp(4, 2, 0)
    with pytest.raises(ValueError, match=message):
        policy_iteration(**{**dict(P=P, r=r, gamma=0.9), **change})


def test_bad_policies_and_starts():
    P, r = random_mdp(4, 2, 0)
    for pi in ([0, 1, 2, 0], [-1, 0, 0, 0], np.full((4, 2), 0.4), [0.0, 0.0, 0.0, 0.0]):
        with pytest.raises(ValueError, match="pi must be"):
            evaluate_policy(P, r, pi, 0.9)
    r[2, 1] = -np.inf
    with pytest.raises(ValueError, match="state 2"):
        evaluate_policy(P, r, [1, 1, 1, 1], 0.9)
    for mu0 in (np.ones(4), np.ones((4, 1)), [1.5, -0.5, 0, 0]):
        with pytest.raises(ValueError, match="mu0"):
            occupancy(P, [0, 0, 0, 0], mu0, 0.9)


def test_random_problems_follow_their_seed():
    for make in (lambda s: random_mdp(4, 2, s), lambda s: random_game(4, 3, (2, 3), s)):
        (P, r), (P2, r2), (P3, _) = make(0), make(0), make(1)
        assert (P == P2).all() and (r == r2).all() and (P != P3).any()
        np.testing.assert_allclose(P.sum(-1), 1)
        assert r.min() >= 0 and r.max() <= 1
    P, r = random_game(4, 3, (2, 3), 0, branching=2)
    assert P.shape == (3, 4, 2, 3, 4) and r.shape == (2, 3, 4, 2, 3) and ((P > 0).sum(-1) == 2).all()
    for bad in (dict(n_actions=()), dict(n_actions=(2, 0)), dict(horizon=0), dict(rewards="none"), dict(concentration=0), dict(branching=9)):
        with pytest.raises(ValueError):
            random_game(**{**dict(n_states=4, horizon=3, n_actions=(2, 2), seed=0), **bad})
