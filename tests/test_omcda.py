"omcda: the interface, its edges, values known from elsewhere, and that every number and verdict of a run follows from what it recorded."

import itertools
import json
import math
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import papers
import pytest
import torch
from papers import committed, once, plain_signature, run_command, run_here, said
from recompute import agrees, made_up, mean_again, t_by_hand
from scipy.optimize import brentq, minimize_scalar
from scipy.special import logsumexp
from scipy.stats import entropy

import icl26.decision.omcda as om
from icl26 import cli
from icl26.decision.omcda import studies, use
from icl26.decision.omcda.baselines import cem_best, counterfactual_penalty, joint_penalty, omiga_value_loss
from icl26.decision.omcda.budget import matched_equal_alpha, omcda_one_step, output_gradients, strengths_for_budgets, tilt_to_budgets
from icl26.decision.omcda.claims import spent_the_same
from icl26.decision.omcda.data import TeamPolicy, gaussian_kl, play_role_game, squash_log_prob
from icl26.decision.omcda.omcda import OMCDA, gaussian_kl_gradient, influence_error
from icl26.decision.omcda.studies import OneReplaced, held_out_best, matched_run, next_total, rank_correlation, robot_contributions, team_study
from icl26.decision.omcda.values import Mixer, additive_gap, deviation_factors, normaliser_loss, soft_optimum, value_parts
from icl26.decision.tabular import random_mdp
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement

IDS = ["C1", "C2", "C3", "C4", "own-C5", "C6", "own-C7", "own-C8"]
NAMES = ("bc", "omcda", "omiga", "cfcql", "macql", "omar", "omcda_uniform", "omcda_random", "omcda_no_decouple")
SMALL = dict(hidden=8, bc_steps=10, batch_size=32)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def logs():
    return {c: om.log_role_game(om.RoleGame(0, continuous=c), 12, seed=0) for c in (False, True)}


# -- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, want",
    [
        (om.kl_categorical, "(p, q)"),
        (om.tilted_policy, "(q, pi_b, alpha, w=1.0, qc=0.0)"),
        (om.temperature_for_budget, "(q, pi_b, budget, w=1.0, *, alpha_min=0.001, alpha_max=1000000.0)"),
        (om.conservative_value, "(q_r, v_r, q_c, pi_b, alpha, w=1.0)"),
        (om.influence, "(grad_v, grad_kl, eps=1e-06, clip=10.0)"),
        (om.allocate_budget, "(influence, total, temperature=1.0)"),
        (om.TeamDataset, "(obs, actions, rewards, next_obs, done, discrete, n_actions=None)"),
        (om.make_algorithm, "(name, dataset, *, seed=0, **config)"),
        (om.evaluate, "(algorithm, env, n_episodes, seed)"),
        (om.make_algorithm("bc", om.log_role_game(om.RoleGame(0), 2)).fit, "(n_steps)"),
        (om.make_algorithm("bc", om.log_role_game(om.RoleGame(0), 2)).act, "(obs, deterministic=True)"),
    ],
)
def test_signatures(call, want):
    assert plain_signature(call) == want


# -- operators -------------------------------------------------------------------------------------------------------


def test_kl_is_scipys_entropy():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), (3, 4)), rng.dirichlet(np.ones(5), (3, 4))
    p[0, 0] = [0, 1, 0, 0, 0]
    np.testing.assert_allclose(om.kl_categorical(p, q), entropy(p, q, axis=-1), rtol=1e-10)
    assert om.kl_categorical(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])) == math.inf
    assert om.kl_categorical([0.0, 1.0], [0.0, 1.0]) == 0
    assert om.kl_categorical(torch.ones(2, 1, 3) / 3, torch.ones(4, 3) / 3).shape == (2, 4)
    for bad in (([0.5, 0.5], [0.2, 0.3, 0.5]), ([-0.1, 1.1], [0.5, 0.5]), ([math.nan, 1.0], [0.5, 0.5]), (0.5, 0.5)):
        with pytest.raises(ValueError):
            om.kl_categorical(*bad)


def test_the_tilt_against_plain_exponentials_and_its_edges():
    rng = np.random.default_rng(1)
    q, b, qc = rng.normal(size=(6, 4)), rng.dirichlet(np.ones(4), 6), rng.normal(size=(6, 4))
    alpha, w = rng.uniform(0.2, 3, 6), rng.uniform(0, 2, 6)
    plain = b * np.exp(w[:, None] * q / alpha[:, None] + qc)
    np.testing.assert_allclose(om.tilted_policy(q, b, alpha, w, qc), plain / plain.sum(1, keepdims=True), rtol=1e-10)
    np.testing.assert_allclose(om.tilted_policy(q, b, 0.5, w=0.0), b, rtol=1e-12)
    b[:, 0] = 0
    for scale in (1.0, 1e8, 1e300):
        pi = om.tilted_policy(q * scale, b, 1e-3)
        assert (pi[:, 0] == 0).all() and torch.isfinite(pi).all()
        np.testing.assert_allclose(pi.sum(1), 1, atol=1e-9)
    np.testing.assert_allclose(om.tilted_policy([1.0, 1.0, 0.0], [0.1, 0.3, 0.6], 1e-3), [0.25, 0.75, 0], atol=1e-9)   # a tie
    single = om.tilted_policy(torch.tensor([1e4, 0.0]), torch.tensor([0.5, 0.5]), 1e-3)                                # float32
    assert single.dtype == torch.float32 and single.tolist() == [1.0, 0.0]
    for alpha in (0.0, -1.0, math.nan, [1.0, 0.0]):
        with pytest.raises(ValueError, match="alpha"):
            om.tilted_policy(q[:2], b[:2], alpha)
    for bad, text in (((q, b[:, :3], 1.0), "one length"), ((q, -b, 1.0), "pi_b"), ((q, 0 * b, 1.0), "pi_b"), ((q, b, 1.0, -1.0), "w")):
        with pytest.raises(ValueError, match=text):
            om.tilted_policy(*bad)


def test_the_strength_of_a_budget_is_brents():
    rng = np.random.default_rng(2)
    for _ in range(40):
        n = rng.integers(2, 9)
        q, b, w = rng.normal(size=n) * 10 ** rng.uniform(-3, 3), rng.dirichlet(np.full(n, 0.7)), rng.uniform(0.05, 4)
        kl = lambda x: float(om.kl_categorical(om.tilted_policy(q, b, math.exp(x), w), b))
        low, high = kl(math.log(1e6)), kl(math.log(1e-3))
        budget = low + (high - low) * rng.uniform(0.01, 0.97)
        if not budget > 1e-12:                                            # so flat that rounding decides
            continue
        got = om.temperature_for_budget(q, b, budget, w)
        assert isinstance(got, float)
        np.testing.assert_allclose(kl(math.log(got)), budget, rtol=1e-4)
        np.testing.assert_allclose(got, math.exp(brentq(lambda x: kl(x) - budget, math.log(1e-3), math.log(1e6), xtol=1e-14)), rtol=1e-3)
    q, b = np.array([1.0, 0.0]), np.array([0.2, 0.8])
    assert om.temperature_for_budget(q, b, -math.log(0.2) + 1e-6) == 1e-3                      # out of reach
    assert om.temperature_for_budget(q, b, 10.0, alpha_min=0.05) == 0.05
    assert om.temperature_for_budget(np.ones(2), b, 0.1) == 1e-3                               # nothing to prefer
    for budget in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="budget"):
            om.temperature_for_budget(q, b, budget)
    for args in ((q[None], b[None], 0.1), (q, b[:1], 0.1), (q, 2 * b, 0.1), (q * np.nan, b, 0.1), (q, b, 0.1, -1.0), ([], [], 0.1)):
        with pytest.raises(ValueError):
            om.temperature_for_budget(*args)
    many = strengths_for_budgets(np.tile(q, (3, 1)), np.tile(b, (3, 1)), np.array([0.01, 0.1, 0.5]))
    np.testing.assert_allclose(many, [om.temperature_for_budget(q, b, d) for d in (0.01, 0.1, 0.5)], rtol=1e-9)
    assert (np.diff(many) < 0).all()


def test_the_conservative_value_normalises_also_at_extremes():
    rng = np.random.default_rng(3)
    for size, alpha in itertools.product((1e-3, 1.0, 1e6), (1e-3, 1.0, 1e3)):
        q_r, q_c, b = size * rng.normal(size=(5, 3)), -size * rng.random((5, 3)), rng.dirichlet(np.ones(3), 5)
        b[0] = [0.0, 0.4, 0.6]
        v_r = rng.normal(size=5)
        got = om.conservative_value(q_r, v_r, q_c, b, alpha, w=0.7)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(got, logsumexp(np.log(b) + 0.7 / alpha * (q_r - v_r[:, None]) + q_c, axis=1), rtol=1e-10)
            np.testing.assert_allclose(np.exp(np.log(b) + 0.7 / alpha * (q_r - v_r[:, None]) + q_c - got.numpy()[:, None]).sum(1), 1, atol=1e-5)
    assert om.conservative_value(np.zeros((2, 3, 4)), np.zeros((2, 3)), np.zeros((2, 3, 4)), np.full((2, 3, 4), 0.25), np.ones((2, 3))).abs().max() < 1e-12
    with pytest.raises(ValueError, match="alpha"):
        om.conservative_value(q_r, v_r, q_c, b, 0.0)
    with pytest.raises(ValueError, match="one length"):
        om.conservative_value(q_r, v_r, q_c[:, :2], b, 1.0)


def test_influence_is_a_least_squares_quotient():
    rng = np.random.default_rng(4)
    v, k = rng.normal(size=(3, 50)), rng.normal(size=(3, 50))
    np.testing.assert_allclose(om.influence(v, k), [np.linalg.lstsq(k[i][:, None], v[i], rcond=None)[0][0] for i in range(3)], rtol=1e-5)
    assert (om.influence(v, 0 * k) == 0).all() and om.influence(1e9 * np.abs(k), np.abs(k)).tolist() == [10] * 3
    g = torch.ones(2, 3, requires_grad=True)
    assert not om.influence(g * 2, g).requires_grad
    for bad in ((v[0], k[0]), (v, k[:2]), (v, k[:, :4])):
        with pytest.raises(ValueError):
            om.influence(*bad)
    np.testing.assert_allclose(om.influence(v, k, clip=0.01).abs().max(), 0.01)


def test_shares_are_a_softmax():
    m = np.array([0.3, -1.0, 2.0])
    np.testing.assert_allclose(om.allocate_budget(m, 3.0, 0.5), 3 * np.exp(m / 0.5) / np.exp(m / 0.5).sum(), rtol=1e-9)
    for extreme in ([1e308, 0, -1e308], [10.0] * 4, [0.0]):
        d = om.allocate_budget(extreme, 1.2)
        assert (d > 0).all()
        np.testing.assert_allclose(d.sum(), 1.2, rtol=1e-12)
    for bad in ((m, 0.0), (m, -1), (m, math.inf), (m, 1.0, 0.0), ([math.inf, 0], 1.0), ([[1.0]], 1.0), ([], 1.0)):
        with pytest.raises(ValueError):
            om.allocate_budget(*bad)


def test_at_rest_influence_is_the_strength_and_equal_strengths_are_best():
    teams = om.OneStepTeams(6, (3.0, 0.4), n=2, seed=1)
    run = omcda_one_step(teams.u, teams.pi_b, 0.8)
    free = (run["alpha"] > 1e-3) & (run["alpha"] < 9)                     # spendable budgets, influence below its clip
    np.testing.assert_allclose(run["m"][free], run["alpha"][free], rtol=1e-3)
    one, alpha = matched_equal_alpha(teams.u, teams.pi_b, np.full(6, 0.8))
    for g in range(6):

        def value(share):
            pi = tilt_to_budgets(teams.u[g : g + 1], teams.pi_b[g : g + 1], 0.8 * np.array([[share, 1 - share]]))[0]
            return -((pi - teams.pi_b[g]) * teams.u[g]).sum()

        best = -minimize_scalar(value, bounds=(1e-3, 1 - 1e-3), method="bounded", options=dict(xatol=1e-7)).fun
        np.testing.assert_allclose(teams.gain(one)[g].sum(), best, rtol=1e-3)                  # no split is better
        assert teams.gain(run["pi"])[g].sum() <= best + 1e-6


def test_agents_that_are_alike_get_the_same_and_the_flipped_sign_is_worse():
    alike = team_study("exchangeable", games=5, totals=(0.3, 1.2), exact=True)
    np.testing.assert_allclose(alike["gain influence"], alike["gain uniform"], atol=1e-9)
    drawn = team_study(games=30, totals=(0.3,))
    assert drawn["gain flipped"].mean() < drawn["gain uniform"].mean() < drawn["gain influence"].mean() < drawn["gain equal alpha"].mean()


def test_softmax_and_gaussian_gradients_are_autograds():
    g = torch.Generator().manual_seed(0)
    logits, b = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True), torch.softmax(torch.randn(4, 3, generator=g, dtype=torch.float64), -1)
    q = torch.randn(4, 3, generator=g, dtype=torch.float64)
    pi = torch.softmax(logits, -1)
    v, k = output_gradients(torch.log_softmax(logits, -1).detach(), b.log(), q)
    torch.testing.assert_close(v, torch.autograd.grad((pi * q).sum(), logits, retain_graph=True)[0])
    torch.testing.assert_close(k, torch.autograd.grad(om.kl_categorical(pi, b).sum(), logits)[0])
    out, other = (torch.randn(5, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    out.requires_grad_()
    kl = gaussian_kl(*out.chunk(2, -1), *other.chunk(2, -1))
    torch.testing.assert_close(gaussian_kl_gradient(out, other), torch.autograd.grad(kl.sum(), out)[0])
    x = torch.randn(1, 9, 2, generator=g)
    assert influence_error(3 * x, x).abs().max() < 1e-5 and influence_error(x, 0 * x).tolist() == [0]


def test_tanh_gaussian_against_torch_distributions():
    from torch.distributions import Independent, Normal, TransformedDistribution, kl_divergence
    from torch.distributions.transforms import TanhTransform

    g = torch.Generator().manual_seed(1)
    m, s, mb, sb = (torch.randn(6, 3, generator=g, dtype=torch.float64) * 0.5 for _ in range(4))
    a = torch.rand(6, 3, generator=g, dtype=torch.float64) * 1.8 - 0.9
    peer = Independent(TransformedDistribution(Normal(m, s.exp()), TanhTransform()), 1)
    torch.testing.assert_close(squash_log_prob(m, s, a), peer.log_prob(a))
    torch.testing.assert_close(gaussian_kl(m, s, mb, sb), kl_divergence(Normal(m, s.exp()), Normal(mb, sb.exp())).sum(-1))
    edge = squash_log_prob(m, s, torch.ones(6, 3, dtype=torch.float64))
    torch.testing.assert_close(edge, squash_log_prob(m, s, torch.full((6, 3), 1 - 1e-6, dtype=torch.float64)))
    draws = torch.tanh(m[0, :1] + s[0, :1].exp() * torch.randn(200_000, 1, generator=g, dtype=torch.float64))
    monte = (squash_log_prob(m[0, :1], s[0, :1], draws) - squash_log_prob(mb[0, :1], sb[0, :1], draws)).mean()
    assert abs(monte - gaussian_kl(m[:1, :1], s[:1, :1], mb[:1, :1], sb[:1, :1])[0]) < 0.02    # the same before and after tanh


def refuses(error, text, call, /, *args, **kw):
    with warnings.catch_warnings(), pytest.raises(error, match=text):
        warnings.simplefilter("error")
        call(*args, **kw)


def test_operators_refuse_what_has_no_answer_by_name():
    nan, inf = math.nan, math.inf
    q, b = [0.0, 1.0], [0.5, 0.5]
    Q, B = np.zeros((3, 2)), np.full((3, 2), 0.5)
    for text, args in (("q: values must not be NaN", ([nan, 1.0], b, 1.0)), ("qc: values", (q, b, 1.0, 1.0, [nan, 0.0])), ("qc: values", (q, b, 1.0, 1.0, [inf, 0.0])),
                       ("pi_b: probabilities must be finite", (q, [0.5, inf], 1.0)), ("alpha has", (Q, B, [1.0, 2.0])), ("one length", (Q, B, 1.0, 1.0, np.zeros(3)))):
        refuses(ValueError, text, om.tilted_policy, *args)
    assert om.tilted_policy([0.0, -inf, 1.0], b + [0.0], 1.0)[1] == 0 and om.tilted_policy(q, b, 1.0, 1.0, [0.0, -inf]).tolist() == [1.0, 0.0]
    assert om.tilted_policy(q, b, [0.5, 1.0, 2.0]).shape == (3, 2)                              # a strength each
    refuses(ValueError, "p has", om.kl_categorical, B, np.full((4, 2), 0.5))
    refuses(ValueError, "p: probabilities must be finite", om.kl_categorical, [inf, 0.0], b)
    third = torch.full((3,), 1 / 3)
    assert om.kl_categorical(third, third.double().numpy()).abs() < 1e-15                        # the two in one type
    for text, args in (("v_r: a number for each row", (q, [1.0, 2.0], q, b, 1.0)), ("v_r has", (Q, np.zeros(4), Q, B, 1.0)), ("q_r: finite", ([nan, 0.0], 0.0, q, b, 1.0)), ("v_r: finite", (q, nan, q, b, 1.0)),
                       ("q_c: finite", (q, 0.0, [inf, 0.0], b, 1.0)), ("w: finite", (q, 0.0, q, b, 1.0, inf)), ("pi_b: every row", (q, 0.0, q, [0.0, 0.0], 1.0))):
        refuses(ValueError, text, om.conservative_value, *args)
    assert om.conservative_value(Q, 0.0, Q, B, 1.0).shape == (3,) and om.conservative_value(q, [0.0, 0.0], q, b, [1.0, 2.0]).shape == (2,)
    for bad in ([[nan, 1.0]], [[inf, 1.0]], [[1e300, 1.0]]):
        refuses(ValueError, "finite", om.influence, bad, [[1e200, 1.0]])
    for name, args in (("budget", ("a",)), ("budget", (None,)), ("budget", ([0.1, 0.2],)), ("w", (0.1, "a"))):
        refuses(TypeError, f"{name}: one number", om.temperature_for_budget, q, b, *args)
    refuses(ValueError, "their product", om.temperature_for_budget, [0.0, 1e300], b, 0.1, 1e200)
    assert om.temperature_for_budget([0.0, 1e300], b, 0.1) == 1e6
    refuses(TypeError, "total: one number", om.allocate_budget, q, None)
    refuses(TypeError, "eps: one number", om.influence, [q], [q], eps="a")
    half = om.allocate_budget(torch.tensor([10.0, -10.0]).half(), 2.0)
    assert (half > 0).all() and abs(half.sum() - 2) < 1e-6
    for kw in (dict(games=0), dict(games=2, kind=(1.0, 2.0)), dict(games=2, log=1.5)):
        refuses(ValueError, "games|kind|log", om.OneStepTeams, **kw)


# -- values ----------------------------------------------------------------------------------------------------------


def test_the_decomposition_in_a_table():
    P, r = random_mdp(5, 3, seed=1)
    rng, gamma, alpha = np.random.default_rng(0), 0.8, 0.4
    pi, b = rng.dirichlet(np.ones(3), 5), rng.dirichlet(np.ones(3), 5)
    kl = entropy(pi, b, axis=1)
    q_r, v_r, q_c, v_c = value_parts(P, r, pi, kl, gamma)
    V = np.zeros(5)
    for _ in range(300):                                                  # the regularised value by plain iteration
        V = (pi * (r + gamma * P @ V)).sum(1) - alpha * kl
    np.testing.assert_allclose(v_r + alpha * v_c, V, atol=1e-9)
    np.testing.assert_allclose(q_r + alpha * q_c, r + gamma * P @ V, atol=1e-9)
    best, Q, V = soft_optimum(P, r, b, alpha, gamma)
    q_r, v_r, q_c, v_c = value_parts(P, r, best, entropy(best, b, axis=1), gamma)
    np.testing.assert_allclose(om.conservative_value(q_r, v_r, q_c, b, alpha), v_c, atol=1e-8)
    np.testing.assert_allclose(om.tilted_policy(q_r, b, alpha, qc=q_c), best, atol=1e-8)


def test_coupled_rewards_have_a_gap():
    for alpha in (0.3, 1.0):
        none, some = additive_gap(0.0, alpha), additive_gap(1.0, alpha)
        np.testing.assert_allclose(none["additive"], none["joint"], atol=1e-9)
        assert some["additive"] < some["joint"] - 0.05 and some["product"] <= some["joint"] + 1e-12


def test_normalisers_rest_where_weights_average_one():
    x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    at = torch.logsumexp(x, 0) - math.log(500)
    v = at.expand(500, 2).clone().requires_grad_()
    loss, weight = normaliser_loss(v, x)
    torch.testing.assert_close(torch.autograd.grad(loss, v)[0].sum(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(weight.mean(0), torch.ones(2), atol=1e-5, rtol=0)
    assert normaliser_loss(torch.full((1, 1), -99.0), torch.zeros(1, 1))[1].item() == pytest.approx(math.exp(10))     # z is clamped, not the weight
    v = torch.zeros(1, 1, requires_grad=True)
    loss, _ = omiga_value_loss(v, torch.tensor([[2.0]]), torch.tensor([[0.5]]))
    np.testing.assert_allclose(torch.autograd.grad(loss, v)[0], 0.5 * (1 - math.e), rtol=1e-6)                        # rate (1 − e^z)


def test_the_mixer_is_monotone_and_the_general_matrix():
    w, b = Mixer(3, 2, 8, torch.Generator().manual_seed(0))(50 * torch.randn(99, 3, 2))
    assert (w >= 0).all() and b.shape == (99,)
    a = torch.tensor([1.0, 4.0])
    assert deviation_factors(a, torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist() == [1.0, (2 + 4) / 4]
    for bad in (torch.eye(3), -torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 1.0]])):
        with pytest.raises(ValueError, match="conservative_mix"):
            deviation_factors(a, bad)


def test_an_update_of_omcda_against_loops(logs):
    "Losses of one batch, agent by agent and row by row, from the networks' outputs."
    alg = OMCDA(logs[False], seed=1, d_total=0.9, conservative_mix=np.eye(3) + 0.2, **SMALL).fit(5)
    x = {k: v[15:25] for k, v in alg.data.items()}                        # row 4 is an end
    assert (x["live"] == 0).sum() == 1
    alpha = alg.log_alpha.exp()
    factor = deviation_factors(alpha, alg.mix_matrix)
    losses, out, (gv, gk) = alg.discrete_losses(x, alpha, factor)
    f = lambda t: t.detach().double().numpy()
    q_r, q_c, q_r2, q_c2 = (f(t) for t in (*alg.critic(x["obs"]), *alg.target_critic(x["next_obs"])))
    w, off, w2, off2 = (f(t) for t in (*alg.mixer(x["obs"]), *alg.target_mixer(x["next_obs"])))
    b, b2, al, c = f(x["b_out"]), f(x["b_next"]), f(alpha), f(factor)
    td_r = td_c = policy = 0.0
    for t in range(10):
        total, target = off[t], off2[t]
        for i in range(3):
            p2 = np.exp(b2[t, i] + w2[t, i] / al[i] * q_r2[t, i] + c[i] * q_c2[t, i])
            p2 /= p2.sum()
            v_r = (p2 * q_r2[t, i]).sum()
            v_c = logsumexp(b2[t, i] + w2[t, i] / al[i] * (q_r2[t, i] - v_r) + c[i] * q_c2[t, i]) / c[i]
            y_c = 0.99 * float(x["live"][t]) * min(v_c, 0)
            a = int(x["actions"][t, i])
            total, target = total + w[t, i] * q_r[t, i, a], target + w2[t, i] * v_r
            td_c += (q_c[t, i, a] - y_c) ** 2 / 10
            p = np.exp(b[t, i] + w[t, i] / al[i] * q_r[t, i] + c[i] * q_c[t, i])
            policy -= ((p / p.sum()) * f(out)[t, i]).sum() / 10
            pi = np.exp(f(out)[t, i])
            np.testing.assert_allclose(f(gv)[t, i], w[t, i] * pi * (q_r[t, i] - pi @ q_r[t, i]), atol=1e-5)
        td_r += (total - float(x["rewards"][t]) - 0.99 * float(x["live"][t]) * target) ** 2 / 10
    np.testing.assert_allclose([losses["td_reward"].item(), losses["td_deviation"].item(), losses["policy"].item()], [td_r, td_c, policy], rtol=1e-4)


def test_the_dual_step_moves_the_strength_the_right_way(logs):
    alg = OMCDA(logs[False], seed=0, d_total=0.9, allocation="uniform", **SMALL).fit(0)
    zero = torch.zeros(3, 4, 3)
    alg.allocate(torch.tensor([0.1, 0.3, 0.9]), zero, zero)
    np.testing.assert_allclose(np.log(alg.alphas_), [-0.01 * 0.2, 0.0, 0.01 * 0.6], atol=1e-6)  # above its budget an agent is held more
    for _ in range(5000):
        alg.allocate(torch.tensor([0.0, 0.0, 9.0]), zero, zero)
    np.testing.assert_allclose(alg.alphas_, [1e-3, 1e-3, 1e3], rtol=1e-5)


def test_conservative_penalties_against_loops():
    g = torch.Generator().manual_seed(3)
    q, w, kl, a = torch.randn(3, 2, 4, generator=g), torch.rand(3, 2, generator=g), torch.rand(3, 2, generator=g), torch.randint(4, (3, 2), generator=g)
    q_data = q.gather(-1, a[..., None])[..., 0]
    want = 0.0
    for t in range(3):
        joint = lambda x: sum(w[t, i] * q[t, i, x[i]] for i in range(2)).item()
        share = np.exp(5 * kl[t].numpy()) / np.exp(5 * kl[t].numpy()).sum()
        for i in range(2):
            others = [[k if j == i else int(a[t, j]) for j in range(2)] for k in range(4)]
            want += share[i] * (logsumexp([joint(o) for o in others]) - joint(a[t])) / 3
    np.testing.assert_allclose(counterfactual_penalty(q, q_data, w, kl), want, rtol=1e-5)
    samples = torch.randn(3, 7, generator=g)
    np.testing.assert_allclose(joint_penalty(samples, samples[:, 0]), np.mean(logsumexp(samples.numpy(), axis=1) - samples[:, 0].numpy()), rtol=1e-5)
    goal = torch.rand(20, 2, 2, generator=g) - 0.5
    found = cem_best(lambda x: -(x - goal).square().sum(-1), torch.ones(20, 2, 2), g, samples=100, rounds=5, elites=10)
    np.testing.assert_allclose(found, goal, atol=0.1)


# -- data and environments -------------------------------------------------------------------------------------------


def arrays(n=2, N=4, D=3, k=None):
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 3, (N, n)) if k is None else rng.uniform(-1, 1, (N, n, k))
    return dict(obs=rng.normal(size=(N, n, D)), actions=actions, rewards=rng.normal(size=N), next_obs=rng.normal(size=(N, n, D)), done=np.zeros(N, bool), discrete=k is None)


def test_the_record_round_trips_and_rejects(tmp_path):
    for kw in (arrays(), arrays(k=2), arrays() | dict(n_actions=7)):
        d = om.TeamDataset(**kw)
        d.save(tmp_path / "log.npz")
        back = om.TeamDataset.load(tmp_path / "log.npz")
        assert (back.discrete, back.n_actions, len(back)) == (d.discrete, d.n_actions, 4)
        for name in ("obs", "actions", "rewards", "next_obs", "done"):
            np.testing.assert_array_equal(getattr(back, name), getattr(d, name))
    assert om.TeamDataset(**arrays()).actions.dtype == np.int64
    good, smooth = arrays(), arrays(k=2)
    for kw, text in ((good | dict(rewards=np.zeros(3)), "rewards"), (good | dict(done=np.zeros((4, 1))), "done"), (good | dict(next_obs=good["obs"][:, :1]), "next_obs"),
                     (good | dict(actions=smooth["actions"]), "actions"), (smooth | dict(actions=good["actions"]), "actions"), (smooth | dict(actions=2 + smooth["actions"]), "-1, 1"),
                     (good | dict(actions=-1 - good["actions"]), "actions"), (good | dict(n_actions=1), "n_actions"), (good | dict(obs=np.zeros((0, 2, 3))), "obs"),
                     (good | dict(rewards=[1, 2, np.inf, 3]), "finite"), (good | dict(obs=[[1], [1, 2]]), "obs"), (good | dict(done=[0, 1, 2, 0]), "done"),
                     (good | dict(rewards=np.array(["a"] * 4)), "rewards"), (good | dict(discrete=2), "discrete"), (good | dict(obs=1e300 * good["obs"]), "obs")):
        with warnings.catch_warnings(), pytest.raises(ValueError, match=text):
            warnings.simplefilter("ignore", RuntimeWarning)
            om.TeamDataset(**kw)


def test_the_record_takes_tensors_and_refuses_what_float32_cannot_square():
    good = arrays()
    d = om.TeamDataset(**good | dict(obs=torch.as_tensor(good["obs"]).requires_grad_(), next_obs=torch.as_tensor(good["next_obs"]).bfloat16(), actions=torch.as_tensor(good["actions"])))
    np.testing.assert_allclose(d.obs, good["obs"], rtol=1e-6)
    np.testing.assert_allclose(d.next_obs, good["next_obs"], rtol=1e-2)
    for name in ("obs", "next_obs", "rewards"):                             # their standard deviation would be infinite
        refuses(ValueError, f"{name}: values of at most 1e\\+15", om.TeamDataset, **good | {name: good[name] * 1e25})
    game = om.RoleGame(0)
    for bad in ([[-1, 1, 1]], [[3, 1, 1]], [[0.5, 1, 1]]):
        refuses(ValueError, "actions: whole numbers of 0 to 2", game.step, np.zeros((1, 4)), np.array(bad))
    for call, args, text in ((om.log_role_game, (game, 0), "episodes"), (om.log_role_game, (game, 2, -1), "seed"), (om.RoleGame, (-1,), "seed"), (om.RoleGame, ("a",), "seed"),
                             (om.evaluate, (type("A", (), dict(act=None)), game.parallel_env(), 1, -1), "seed")):
        refuses(ValueError, f"{text}: a whole number", call, *args)
    refuses(ValueError, "weights", om.RoleGame, 0, weights="abc")


class Leaving:
    "Two agents; the second ends after two steps, the first after four. One reward a step."

    possible_agents = ["x", "y"]

    def reset(self, seed=None):
        self.agents, self.t, self.sent = ["x", "y"], 0, []
        return {a: np.zeros(3) for a in self.agents}, {}

    def step(self, actions):
        self.t += 1
        self.sent.append(sorted(actions))
        ended = {a: self.t == (2 if a == "y" else 4) for a in self.agents}
        rewards = {a: 1.0 for a in self.agents}
        self.agents = [a for a in self.agents if not ended[a]]
        return {a: np.full(3, self.t) for a in self.agents}, rewards, ended, {a: False for a in ended}, {}


def test_agents_may_end_before_the_others():
    seen, env = [], Leaving()

    class Watch:
        def act(self, obs):
            seen.append(obs[:, 0].tolist())
            return np.zeros(2, int)

    assert om.evaluate(Watch(), env, 1, 0).tolist() == [4.0]
    assert seen == [[0, 0], [1, 1], [2, 1], [3, 1]] and env.sent == [["x", "y"], ["x", "y"], ["x"], ["x"]]
    log = om.log_team(Leaving(), lambda obs: np.zeros((2, 1)), 4, seed=0)    # an end of one is an end of the log's episode
    assert log.done.tolist() == [False, True, False, True] and log.next_obs[1, :, 0].tolist() == [2, 1]
    for policy in (lambda obs: np.zeros((3, 1)), lambda obs: np.zeros(2), lambda obs: np.full((2, 1), np.nan)):
        refuses(ValueError, "policy", om.log_team, Leaving(), policy, 4)
    for kw in (dict(steps=0), dict(steps=2.5), dict(steps=3, noise=-1.0), dict(steps=3, max_steps=0)):
        refuses(ValueError, "steps|noise", om.log_team, Leaving(), lambda obs: np.zeros((2, 1)), **kw)


def test_the_role_game_keeps_pettingzoos_contract_and_both_ways_of_playing_agree():
    from pettingzoo.test import parallel_api_test

    for continuous in (False, True):
        game = om.RoleGame(4, continuous)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallel_api_test(game.parallel_env(), num_cycles=45)
        log = om.log_role_game(game, 15, seed=1)
        alg = om.make_algorithm("bc", log, **SMALL).fit(0)
        slow, fast = om.evaluate(alg, game.parallel_env(), 8, seed=2), play_role_game(alg.act, game, 8, seed=2)
        np.testing.assert_allclose(slow, fast, rtol=1e-5)
        assert slow.shape == (8,) and not np.array_equal(slow, om.evaluate(alg, game.parallel_env(), 8, seed=3))
    for n in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="n_episodes"):
            om.evaluate(alg, game.parallel_env(), n, 0)
    with pytest.raises(TypeError):
        om.evaluate(None, game.parallel_env(), 1, 0)


def test_evaluate_takes_a_gymnasium_environment_with_stacked_observations():
    gym = pytest.importorskip("gymnasium")

    class Count(gym.Env):
        observation_space, action_space = gym.spaces.Box(-9, 9, (2, 3)), gym.spaces.MultiDiscrete([3, 3])

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return np.zeros((2, 3), np.float32), {}

        def step(self, actions):
            self.t += 1
            return np.full((2, 3), self.t, np.float32), float(np.sum(actions)), False, self.t == 5, {}

    class Ones:
        def act(self, obs, deterministic=True):
            return np.ones(2, int)

    assert om.evaluate(Ones(), Count(), 3, 0).tolist() == [10.0] * 3

    class Uneven:
        possible_agents, agents = ["a", "b"], ["a", "b"]

        def reset(self, seed=None):
            return dict(a=np.zeros(2), b=np.zeros(3)), {}

        def step(self, actions):
            raise AssertionError

    with pytest.raises(ValueError, match="one width"):
        om.evaluate(Ones(), Uneven(), 1, 0)


def test_reward_of_the_role_game_by_hand():
    game = om.RoleGame(7)
    state = np.array([[0.3, 0.32, -0.9, 0.1]])
    _, r = game.step(state, [[1, 1, 1]])
    want = sum(w * (1 - abs(p - 0.1)) for w, p in zip(game.weights, (0.3, 0.32, -0.9))) - 0.5
    np.testing.assert_allclose(r, [want])
    assert sorted(game.weights) == [0.2, 1.0, 3.0] and len({tuple(om.RoleGame(s).weights) for s in range(20)}) == 6


# -- algorithms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("continuous", [False, True])
def test_every_algorithm_trains_acts_and_repeats_itself(continuous, logs):
    log, other = logs[continuous], [om.TeamDataset(**arrays()), om.TeamDataset(**arrays(n=1, k=3))][continuous]
    for name in NAMES:
        if name == "omar" and not continuous:
            with pytest.raises(ValueError, match="omar"):
                om.make_algorithm(name, log)
            continue
        a, b = (om.make_algorithm(name, log, seed=2, **SMALL) for _ in range(2))
        assert a.fit(20) is a
        b.fit(9).fit(11)                                                  # going on is not stopping
        for det in (True, False):
            np.testing.assert_array_equal(a.act(log.obs[:30], det), b.act(log.obs[:30], deterministic=det))
        assert a.act(log.obs[0]).shape == log.actions[0].shape and np.abs(a.act(log.obs)).max() <= max(1, log.n_actions or 0)
        rows = a.act(log.obs[:5])
        np.testing.assert_allclose([a.act(o) for o in log.obs[:5]], rows, atol=1e-5)            # one at a time as in a batch
        assert not np.array_equal(a.act(log.obs, False), a.act(log.obs, False))                 # drawn, from a generator that goes on
        if name.startswith("omcda"):
            for x in (a.alphas_, a.budgets_, a.influence_):
                assert x.shape == (3,) and np.isfinite(x).all()
            np.testing.assert_allclose(a.budgets_.sum(), 1.2)
            assert a.history_[-1]["step"] == 20 and a.history_[-1]["budget"].shape == (3,)
        om.make_algorithm(name, other, seed=0, **SMALL).fit(3).act(other.obs)                   # other sizes, one agent


def test_conservative_samples_are_as_many_as_the_setting_says(logs, monkeypatch):
    for name, key in (("macql", "joint_samples"), ("cfcql", "action_samples")):
        alg, seen = om.make_algorithm(name, logs[True], seed=0, **SMALL, **{key: 7}), []
        original = type(alg).sampled_penalty
        monkeypatch.setattr(type(alg), "sampled_penalty", lambda self, x, q, q_data, w, f=original: (seen.append(q.shape[-1]), f(self, x, q, q_data, w))[1])
        alg.fit(1)
        assert seen == [8]                                                  # and the policy's own
        for bad in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match=f"{key}: a whole number of at least 1"):
                om.make_algorithm(name, logs[True], **{key: bad})


def test_unknown_names_settings_and_shapes_are_refused(logs):
    log = logs[False]
    for name, config, text in (("qmix", {}, "name: one of bc"), ("omcda", dict(alpha=1.0), "no setting 'alpha'"), ("omcda", dict(d_total=-1.0), "d_total"), ("bc", dict(lr="x"), "lr"),
                               ("omcda", dict(alpha_init=1e5), "alpha_init"), ("omcda_random", dict(allocation="uniform"), "allocation"), ("omiga", dict(alpha=0.0), "alpha"),
                               ("bc", dict(bc_steps=-1), "bc_steps"), ("bc", dict(batch_size=0), "batch_size"), ("bc", dict(gamma=1.1), "gamma"), ("omcda", dict(allocation="x"), "allocation")):
        with pytest.raises(ValueError, match=text):
            om.make_algorithm(name, log, **config).fit(0)
    with pytest.raises(TypeError, match="dataset"):
        om.make_algorithm("bc", None)
    alg = om.make_algorithm("bc", log, **SMALL)
    with pytest.raises(RuntimeError, match="fit it first"):
        alg.act(log.obs[0])
    alg.fit(0)
    for obs in (log.obs[0, :2], log.obs[0, 0], np.zeros((1, 1, 3, 5))):
        with pytest.raises(ValueError, match="obs"):
            alg.act(obs)
    for steps in (-1, 1.5, True):
        with pytest.raises(ValueError, match="n_steps"):
            alg.fit(steps)


def test_settings_are_checked_before_anything_is_trained(logs):
    for name, config, text in (("omiga", dict(alpha=-1), "alpha"), ("omiga", dict(alpha="a"), "alpha"), ("cfcql", dict(cql_weight=-1), "cql_weight"), ("macql", dict(cql_weight="x"), "cql_weight"),
                               ("omar", dict(omar_weight=5), "omar_weight"), ("omar", dict(cem_elites=50), "cem_elites"), ("omcda", dict(temperature="a"), "temperature"), ("omcda", dict(temperature=0), "temperature"),
                               ("omcda", dict(influence_decay=1.0), "influence_decay"), ("omcda", dict(alpha_min="a"), "alpha_min"), ("omcda", dict(alpha_max=math.inf), "alpha_max"), ("omcda", dict(device="foo"), "device"),
                               ("omcda", dict(conservative_mix=np.full((3, 3), np.inf)), "conservative_mix"), ("omcda_no_decouple", dict(conservative_mix=np.eye(3)), "no setting 'conservative_mix'"),
                               ("bc", dict(seed=2**70), "seed"), (["bc"], {}, "name")):
        refuses(ValueError, text, om.make_algorithm, name, logs[name == "omar"], **config)
    refuses(TypeError, "conservative_mix", om.make_algorithm, "omcda", logs[False], conservative_mix="a")
    if not torch.cuda.is_available():
        refuses(ValueError, "device: 'cuda' cannot be used here", om.make_algorithm, "bc", logs[False], device="cuda")


def test_observations_that_are_no_numbers_get_no_action(logs, tmp_path):
    for log in logs.values():
        alg, report = om.train_team(log, "omcda", 2, **SMALL)
        back, o = om.load_policy(om.save_policy(alg, report, tmp_path / "p")), log.obs[0]
        for team in (alg, back):
            for bad in (o * np.nan, np.full_like(o, np.inf), o.astype(float) + 1e300, o.astype(str), o + 1j, None, [[1], [1, 2]]):
                refuses(ValueError, "obs: ", team.act, bad)
            assert np.array_equal(team.act(torch.as_tensor(o).requires_grad_()), team.act(o)) and team.act(o.tolist()).shape == log.actions[0].shape
        refuses(ValueError, "obs: ", alg.divergence, np.zeros((3, 3)))
        np.testing.assert_allclose(alg.divergence(o), alg.divergence(o[None]))
        with pytest.raises(RuntimeError, match="fit it first"):
            om.make_algorithm("omcda", log, **SMALL).divergence(o)


def test_a_run_that_leaves_float32_is_not_kept_quiet(logs):
    log = logs[False]
    huge = om.TeamDataset(log.obs, log.actions, log.rewards * 1e14, log.next_obs, log.done, True, 3)
    alg = om.make_algorithm("omiga", huge, reward_scale=None, **SMALL).fit(0)
    with torch.no_grad():
        next(alg.critic.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match="omiga: not finite after 3 steps"):
        alg.fit(3)                                                          # fewer than the steps between two records
    alg = om.make_algorithm("omcda", log, **SMALL).fit(0)
    with torch.no_grad():
        next(alg.critic.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match="omcda: influence is not finite"):
        alg.fit(1)


def test_the_unit_of_reward_does_not_matter_with_scaling_and_does_without(logs):
    log = logs[False]
    cents = om.TeamDataset(log.obs, log.actions, 100 * log.rewards, log.next_obs, log.done, True, 3)
    fit = lambda d, **kw: om.make_algorithm("omcda", d, seed=0, **SMALL, **kw).fit(60).influence_
    np.testing.assert_allclose(fit(log), fit(cents), rtol=1e-2, atol=1e-4)
    assert np.abs(fit(log, reward_scale=None) - fit(cents, reward_scale=None)).max() > 10 * np.abs(fit(log) - fit(cents)).max()


def test_constant_rewards_and_actions_that_were_never_logged(logs):
    log = logs[False]
    flat = om.TeamDataset(log.obs, log.actions, np.full(len(log), 3.0), log.next_obs, log.done, True, 3)
    alg = om.make_algorithm("omcda", flat, seed=0, hidden=16, bc_steps=30, lr=2e-3).fit(400)  # until the critic has found that nothing matters
    np.testing.assert_allclose(alg.budgets_, 0.4, atol=0.05)
    pi, b = torch.full((2, 5, 3), 1 / 3), torch.softmax(torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)), -1)
    grads = output_gradients(pi.log(), b.log(), torch.full((2, 5, 3), 7.0))
    assert om.influence(*(x.flatten(1) for x in grads)).abs().max() < 1e-5                    # equal for all
    teams = om.OneStepTeams(20, log=6, seed=0)
    b, u = om.fit_teams(teams)
    pis = om.allocations(u, b, 1.2, np.random.default_rng(0))
    assert (b == 0).any() and all((pi[b == 0] == 0).all() for pi in pis.values())


@pytest.mark.parametrize("name", [n for n in NAMES if n != "omar"])
def test_an_action_that_an_agent_never_logged_is_never_taken(name, logs, tmp_path):
    log = logs[False]
    actions = log.actions.copy()
    actions[:, 0] = np.where(actions[:, 0] == 2, 0, actions[:, 0])          # agent 0 never took 2, nobody 3
    part = om.TeamDataset(log.obs, actions, log.rewards, log.next_obs, log.done, True, 4)
    alg, report = om.train_team(part, name, 40, **SMALL | dict(lr=5e-3))
    assert np.isfinite(report.spent).all() and (report.spent >= -1e-6).all() and report.spent.max() < 50
    back = om.load_policy(om.save_policy(alg, report, tmp_path / "p"))
    with torch.no_grad():
        out = alg.policy_output(alg.normal(torch.as_tensor(log.obs)))
        torch.testing.assert_close(back.output(log.obs), out)
    if name in ("macql", "cfcql"):                                          # held by a penalty only
        assert alg.absent is None and (out.exp() > 0).all()
        return
    pi = out.exp().numpy()
    assert (pi[:, 0, 2:] == 0).all() and (pi[:, 1:, 3] == 0).all() and (pi[:, 1:, :3] > 0).all()
    np.testing.assert_allclose(pi.sum(-1), 1, atol=1e-5)
    for team in (alg, back):
        drawn = team.act(np.tile(log.obs, (5, 1, 1)), deterministic=False)
        assert set(np.unique(drawn[:, 0])) == {0, 1} and drawn.max() == 2
    assert om.make_algorithm(name, log, **SMALL).absent is None              # all actions logged: nothing to hold back
    path = tmp_path / "p" / "policy.safetensors"
    if name == "bc":
        from safetensors.torch import load, save_file

        save_file(load(path.read_bytes()) | dict(absent=torch.ones(2, 4, dtype=torch.bool)), path)
        with pytest.raises(ValueError, match="absent has the shape"):
            om.load_policy(tmp_path / "p")


# -- helpers of the studies ------------------------------------------------------------------------------------------


def test_ranks_and_held_out_choice():
    np.testing.assert_allclose(rank_correlation([[1, 2, 3], [3, 2, 1], [1, 1, 1]], [[1, 5, 9]] * 3), [1, -1, 0])
    returns = np.array([[0.0, 0, 9, 0], [1, 1, 1, 1]])
    got, which = held_out_best(returns, 4)
    assert which.tolist() == [0, 0, 1, 0] and got.tolist() == [0, 0, 1, 0]                     # the outlier is not chosen where it counts
    with pytest.raises(ValueError, match="folds"):
        held_out_best(returns, 5)


@pytest.mark.parametrize("law", [lambda d: 0.4 + 0.9 * d**1.5, lambda d: 1.3 * d, lambda d: 0.9 + 0.0 * d])
def test_the_total_is_corrected_until_what_is_spent_matches(law, monkeypatch):
    told = []

    def fake(d_total, game):
        told.append(d_total)
        return dict(kl=np.array([0.25, 0.75]) * law(d_total), game=game)

    monkeypatch.setitem(studies.STUDIES, "role", fake)
    out = matched_run("role", target=0.8, runs=4, game=3)
    np.testing.assert_allclose(out["tried_total"], told)
    np.testing.assert_allclose(out["tried_spent"], [law(d) for d in told])
    best = np.abs(out["tried_spent"] / 0.8 - 1).min()
    assert told[0] == 0.8 and out["game"] == 3 and abs(out["kl"].sum() / 0.8 - 1) == pytest.approx(best, abs=1e-12)
    assert best <= 0.02 or law(0.1) == law(9.0) and len(told) == 4                               # a total that moves nothing: the tries end
    assert all(0.25 - 1e-9 <= b / a <= 4 + 1e-9 for a, b in zip(told, told[1:]))


def test_a_secant_in_logarithms_by_hand():
    assert next_total([(1.0, 0.5)], 0.6) == pytest.approx(1.2)                                  # in proportion
    assert next_total([(1.0, 1.0), (2.0, 8.0)], 1.0) == pytest.approx(1.0)                      # a power of 3: exact
    assert next_total([(1.0, 1.0), (2.0, 8.0)], 64.0) == pytest.approx(4.0)
    assert next_total([(1.0, 1.0)], 1e-3) == pytest.approx(0.25) and next_total([(1.0, 1.0), (2.0, 0.5)], 0.25) == pytest.approx(1.0)
    assert spent_the_same([1.049, 0.96], [1, 1]) and not spent_the_same([1.0, 1.051], [1, 1]) and not spent_the_same([0.949], [1])


def test_contributions_of_a_robots_agents_by_a_game_that_is_known():
    "Standing still, in a log of walkers: the agent with the largest weight costs most by not walking."
    game = om.RoleGame(1, continuous=True)

    class Still:
        def act(self, obs, deterministic=True):
            return np.zeros((*obs.shape[:-1], 1), np.float32)

    walk = lambda obs: np.clip((obs[:, 1:2] - obs[:, :1]) / 0.2, -1, 1)
    found = robot_contributions(Still(), game.parallel_env(), [walk, walk], 3, 40, seed=0)
    assert (found < 0).all() and (np.argsort(found) == np.argsort(-game.weights)).all()
    one = OneReplaced(Still(), walk, 2, np.random.default_rng(0)).act(game.observe(game.start([0]), 0)[0])
    assert (one[:2] == 0).all() and one[2] != 0 and np.abs(one).max() <= 1


# -- the reproduction ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return papers.smoke("omcda", tmp_path_factory)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "Profile gpu on the CPU at the sizes for tests, by the command: papermill runs every experiment in a kernel of its own."
    return once("omcda-gpu", tmp_path_factory, lambda folder: run_command("omcda", folder / "gpu", "--profile", "gpu", "--device", "cpu", ICL26_TINY="1"))


COMMITTED = committed("omcda")


def expected(part, seed):
    "Estimate and interval of a part from its values."
    x = np.array(part["values"], float)
    if "largest |" in part["label"]:
        return np.abs(x).max(), None, None
    if len(x) == 1:
        return x[0], None, None
    return t_by_hand(x) if len(x) < 6 and np.ptp(x) >= 1e-12 else mean_again(x, seed)


@pytest.mark.parametrize("which", ["smoke", "tiny", "committed"])
def test_every_number_and_verdict_follows_from_what_was_recorded(which, smoke, tiny):
    path = dict(smoke=smoke, tiny=tiny, committed=COMMITTED)[which]
    if path is None:
        pytest.skip("no committed run")
    record, checked = load_results(path), 0
    assert {c["id"] for c in record["claims"]} == set(IDS)
    for c in record["claims"]:
        assert c["verdict"] == recompute(c)[0]
        for part in c["values"] or []:
            agrees(part, expected(part, record["parameters"]["seed"]))
            checked += 1
        labels = {p["label"]: p for p in c["values"] or []}
        for env in ("role game", "HalfCheetah 2x3"):                       # the closest rival is one of the rivals, and the lowest
            rivals = [p for k, p in labels.items() if k.startswith(f"beside: {env}, OMCDA − ")]
            if c["id"] == "C2" and rivals:
                low = [p["ci_low"] if p["ci_low"] is not None else p["measured"] for p in rivals]
                shown = labels[f"{env}: OMCDA − closest rival"]
                assert (shown["ci_low"] if shown["ci_low"] is not None else shown["measured"]) == min(low)
        matching = "spent by equal α over spent by influence, less 1"
        if c["id"] == "own-C5":                                         # read only where the totals match
            ratios = {k.removeprefix("beside: ").removesuffix(f", {matching}"): p["values"] for k, p in labels.items() if k.endswith(matching)}
            assert "role game" in ratios
            for where, off in ratios.items():
                close = max(abs(v) for v in off) <= 0.05
                assert [f"{where}: influence − equal α" in labels, f"beside: {where}, influence − equal α" in labels] == [close, not close]
    assert checked > 20


def test_smoke_measures_what_it_says(smoke):
    record = load_results(smoke)
    measured = {c["id"] for c in record["claims"] if c["verdict"] != "not run"}
    assert measured == {"C1", "C2", "own-C5", "own-C7", "own-C8"}
    assert all("smoke" in c["reason"] for c in record["claims"] if c["id"] not in measured)
    by = {c["id"]: c for c in record["claims"]}
    assert "no interval" in by["C1"]["note"] and "not reproduced" in by["own-C8"]["note"]


def test_gpu_profile_runs_every_path_at_a_tiny_size(tiny):
    record = load_results(tiny)
    assert record["parameters"] == dict(profile="gpu", seed=0, device="cpu", model=None)
    assert all(c["verdict"] != "not run" and "tiny" in c["note"] for c in record["claims"])
    labels = {p["label"] for c in record["claims"] for p in c["values"]}
    assert {"HalfCheetah 2x3: influence − uniform", "HalfCheetah 2x3: OMCDA − closest rival", "role game: best − largest", "HalfCheetah 2x3: influence and contribution"} <= labels
    assert {"HalfCheetah 2x3: influence − equal α", "beside: HalfCheetah 2x3, influence − equal α"} & labels
    assert {"ablation.png", "shares.png", "spent.png"} <= {p.name for p in (tiny.parent / "figures").iterdir()}


def test_gpu_profile_without_a_gpu_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("omcda", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])


def test_same_seed_same_claims_and_another_seed_others(smoke, tmp_path, monkeypatch):
    "The teams again, without the cache: the same numbers to the last bit."
    part = next(p for c in load_results(smoke)["claims"] for p in c["values"] or [] if p["label"] == "teams, d_tot 1.2: influence − uniform")
    for seed, same in ((0, True), (1, False)):
        study = team_study(games=10, seed=seed)
        at = int(np.flatnonzero(np.isclose(study["totals"], 1.2))[0])
        assert ((study["gain influence"][at] - study["gain uniform"][at]).tolist() == part["values"]) == same


# -- claims ----------------------------------------------------------------------------------------------------------


p = partial(made_up, half=0.1)
T, R = "teams, d_tot 1.2", "role game"
AGAINST = {
    "C1": [[p(f"{T}: influence − uniform", a), p(f"{T}: influence − random", b), p(f"{R}: influence − uniform", 1)] for a, b in ((-1, 1), (1, -1), (0, 1), (0.05, 0.05))],
    "C2": [[p(f"{R}: OMCDA − closest rival", a), p("HalfCheetah: OMCDA − closest rival", b)] for a, b in ((0, 0), (-1, -1), (0.05, -9))],
    "C3": [[p("teams: influence and contribution", a), p(f"{R}: influence and contribution", b), p("beside: teams, influence and weight", 1)] for a, b in ((0, 0), (-1, 0.05))],
    "C4": [[p(f"{R}: OMCDA − without decoupling", x)] for x in (0.05, 0, -1)],
    "own-C5": [[p(f"{T}: influence − equal α", a), p(f"{R}: influence − equal α", b)] for a, b in ((0, -1), (-1, 0.05))],
    "C6": [[p("teams: best − smallest", a), p("teams: best − largest", b), p(f"{R}: best − largest", 1)] for a, b in ((0, 1), (1, 0), (1, -1))],
    "own-C7": [[p("alike, exact, d_tot 1.2: x", 1e-6), p("equal weights, d_tot 1.2: influence − uniform", 0)]],
    "own-C8": [[p(f"{T}: flipped − uniform", 1)]],
}


@pytest.mark.parametrize("claim", AGAINST)
def test_numbers_against_the_paper_are_not_reproduced(claim):
    (rule,) = (c for c in om.claims("cpu") if c.id == claim)
    for parts in AGAINST[claim]:
        assert measurement(rule, parts=parts)["verdict"] == "not reproduced"


def test_parts_that_stand_beside_decide_nothing():
    c1 = next(c for c in om.claims() if c.id == "C1")
    good = [p(f"{T}: influence − uniform", 1), p(f"{R}: influence − uniform", 1)]
    assert measurement(c1, parts=good + [p("beside: role game, most likely actions, influence − uniform", -1)])["verdict"] == "reproduced"


def test_claims_are_the_same_for_every_profile_and_reject_others():
    assert [c.id for c in om.claims("smoke")] == IDS and om.claims("smoke") == om.claims("gpu")
    assert {c.id: c.scale for c in om.claims()} == {i: "small-model" if i == "C2" else "mechanism" for i in IDS}
    with pytest.raises(ValueError, match="profile"):
        om.claims("big")


# -- the command -----------------------------------------------------------------------------------------------------


def run(*argv):
    return said(cli.main, "use", "omcda", *argv)


def test_the_command_trains_saves_and_acts(tmp_path):
    assert run("example", tmp_path / "log.npz", "--continuous")[0] == 0
    small = ("--hidden", 8, "--steps", 20)
    code, out, err = run("train", tmp_path / "log.npz", *small, "--d-total", 0.6, "--out", tmp_path / "policy", "--json")
    assert code == 0, err
    report = json.loads(out)
    np.testing.assert_allclose(sum(report["budgets"]), 0.6)
    log = om.TeamDataset.load(tmp_path / "log.npz")
    np.save(tmp_path / "obs.npy", log.obs[:9])
    code, out, err = run("act", tmp_path / "policy", tmp_path / "obs.npy", "--out", tmp_path / "a.npy")
    assert code == 0, err
    alg = om.make_algorithm("omcda", log, hidden=8, d_total=0.6).fit(20)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), alg.act(log.obs[:9]))
    assert run("train", tmp_path / "log.npz", *small, "--out", tmp_path / "policy")[0] == 0     # a policy may be replaced by one
    np.testing.assert_allclose(report["spent"], alg.divergence(log.obs[:: max(len(log) // 5000, 1)]), rtol=1e-6)
    code, out, _ = run("train", tmp_path / "log.npz", "--algorithm", "omiga", *small)
    assert code == 0 and "omiga" in out and "budget " not in out.splitlines()[3]


DAMAGED = {"text": b"a,b\n1,2\n", "nul": b"\0" * 64, "zip": b"PK\3\4" + b"\0" * 40, "empty": b""}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), FloatingPointError("omcda: not finite")])
def test_what_breaks_a_training_is_one_line(error, tmp_path, monkeypatch):
    def broken(*args, **config):
        raise error

    om.log_role_game(om.RoleGame(0), 2).save(tmp_path / "log.npz")
    monkeypatch.setattr(use, "train_team", broken)
    code, out, err = run("train", tmp_path / "log.npz")
    assert code == 2 and out == "" and err.count("\n") == 1 and ("float32" if isinstance(error, FloatingPointError) else "smaller --hidden or --batch-size") in err
    error.args = ("something else",)
    if isinstance(error, RuntimeError):                                     # no excuse for other errors
        with pytest.raises(RuntimeError, match="something else"):
            run("train", tmp_path / "log.npz")


def test_mistakes_are_one_line_and_exit_code_two(tmp_path):
    (tmp_path / "p").mkdir()
    om.log_role_game(om.RoleGame(0), 2).save(tmp_path / "log.npz")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "shape.npz", **{k: v for k, v in (arrays() | dict(rewards=np.zeros(9))).items()})
    for key in ("discrete", "n_actions"):
        np.savez(tmp_path / f"two_{key}.npz", **arrays() | {key: np.array([1, 1])})
    np.save(tmp_path / "flat.npy", np.zeros(4))
    alg, report = om.train_team(om.TeamDataset.load(tmp_path / "log.npz"), "cfcql", 2, **SMALL)
    om.save_policy(alg, report, tmp_path / "policy")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "policy.json").write_text((tmp_path / "policy" / "policy.json").read_text())
    (tmp_path / "cut" / "policy.safetensors").write_bytes((tmp_path / "policy" / "policy.safetensors").read_bytes()[:99])
    log = tmp_path / "log.npz"
    cases = [(["train", tmp_path / "none.npz"], "no such file"), (["train", tmp_path / "other.npz"], "other.npz: lacks"), (["train", tmp_path / "shape.npz"], "shape.npz: rewards"),
             (["train", tmp_path / "two_discrete.npz"], "two_discrete.npz: discrete: one value"), (["train", tmp_path / "two_n_actions.npz"], "two_n_actions.npz: n_actions: one value"),
             (["train", log, "--algorithm", "omar"], "continuous"), (["train", log, "--steps", "x"], "--steps"), (["train", log, "--gamma", 2], "gamma"), (["train", log, "--hidden", 0], "hidden"),
             (["train", log, "--out", tmp_path / "no" / "p"], "there is no folder"), (["train", log, "--out", tmp_path / "p"], "--out"), (["train", log, "--algorithm", "bc", "--d-total", 1], "--d-total"),
             (["act", tmp_path / "p", tmp_path / "flat.npy", "--out", tmp_path / "a.npy"], "policy.json"), (["act", tmp_path / "cut", tmp_path / "flat.npy", "--out", tmp_path / "a.npy"], "policy.safetensors"),
             (["act", tmp_path / "policy", tmp_path / "flat.npy", "--out", tmp_path / "a.npy"], "flat.npy: obs"), (["act", tmp_path / "policy", log, "--out", tmp_path / "a.npy"], "log.npz"),
             (["act", tmp_path / "policy", tmp_path / "flat.npy", "--out", tmp_path / "flat.npy"], "is an input"), (["example", log], "exists"), ([], "required"),
             *((["act", tmp_path / "policy", tmp_path / "flat.npy", "--out", tmp_path / "policy" / name], "is an input") for name in ("policy.json", "policy.safetensors")),
             (["act", tmp_path / "policy", tmp_path / "flat.npy", "--out", tmp_path / "a.npy", "--seed", -1], "--seed"), (["train", log, "--seed", 10**22], "--seed"), (["train", log, "--steps", -1], "--steps: "),
             (["train", log, "--batch-size", 0], "--batch-size: "), (["train", log, "--hidden", 10**8], "--hidden: at most")]
    cases += [(["train", log, "--steps", 10**9, "--out", "/proc/p"], "--out: /proc/p: nothing can be written"), (["example", "/proc/x.npz"], "nothing can be written")] if Path("/proc/self").exists() else []
    for name, content in DAMAGED.items():
        (tmp_path / name).write_bytes(content)
        cases += [(["train", tmp_path / name], f"{tmp_path / name}: "), (["act", tmp_path / "policy", tmp_path / name, "--out", tmp_path / "a.npy"], f"{tmp_path / name}: ")]
    for argv, text in cases:
        code, out, err = run(*argv)
        assert code == 2 and out == "" and err.startswith("icl26: error: ") and text in err and err.count("\n") == 1, (argv, err)
    assert not (tmp_path / "a.npy").exists() and run("--help")[0] == 0 and use.main(["train", "--help"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_team_acts_as_it_did(name, tmp_path, logs):
    log = logs[name == "omar"]
    alg, report = om.train_team(log, name, 5, **SMALL)
    back = om.load_policy(om.save_policy(alg, report, tmp_path / "p"))
    np.testing.assert_array_equal(back.act(log.obs), alg.act(log.obs))
    assert back.act(log.obs[0], deterministic=False).shape == log.actions[0].shape
    assert "spent" in repr(report) and ("influence" in repr(report)) == name.startswith("omcda") and isinstance(TeamPolicy(2, 3, 4, True), torch.nn.Module)
    with pytest.raises(ValueError, match="seed"):
        om.load_policy(tmp_path / "p", seed=-1)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_team_draws_from_the_same_distribution(name, tmp_path, logs):
    for log in logs.values():
        if name == "omar" and log.discrete:
            continue
        alg, report = om.train_team(log, name, 30, lr=5e-3, **SMALL)
        back = om.load_policy(om.save_policy(alg, report, tmp_path / "p"))
        with torch.no_grad():
            torch.testing.assert_close(back.output(log.obs), alg.policy_output(alg.normal(torch.as_tensor(log.obs))))
        back.rng.manual_seed(3), alg.act_rng.manual_seed(3)
        np.testing.assert_allclose(back.act(log.obs, deterministic=False), alg.act(log.obs, deterministic=False), atol=1e-5)
