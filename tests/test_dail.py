"dail: the interface, its edges, and that every number and verdict of a run follows from what it recorded."

import contextlib
import math
import pickle

import numpy as np
import papers
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from papers import committed, once, plain_signature, run_command, run_here, said
from scipy.optimize import linprog

gym = pytest.importorskip("gymnasium")

import icl26.decision.dail as dail
from icl26.decision.dail import studies, use
from icl26.decision.dail.ail import REGULARIZERS, DiscriminatorLearner, Hyper, as_reward, assigned, cartpole, cartpole_expert, gradient_penalty, logit_size
from icl26.decision.dail.analysis import action_values, exact_logits, flipped, log_softmax, occupancies, tabular_learned
from icl26.decision.dail.claims import difference_part, early_end_parts, mean_part, number_part
from icl26.decision.dail.search import SEEDS, as_expression, build_prompt, draw_parents, extract_code
from icl26.decision.dail.studies import at_the_end, is_new
from icl26.decision.tabular import evaluate_policy, occupancy
from icl26.lm import ScriptedLM
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement
from icl26.stats import t_interval

FAST = dict(n_envs=4, n_steps=32, epochs=1, disc_updates=1, hidden=(16,), disc_hidden=(16,), disc_batch=64)
X = torch.linspace(-10, 10, 401, dtype=torch.float64)


class Corridor(gym.Env):
    "Seven places in a row; right pays at the end, where the episode ends if `mortal`; cut after 40 steps."

    observation_space, action_space = gym.spaces.Box(0, 1, (7,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, mortal=True):
        self.mortal = mortal

    def see(self):
        return np.eye(7, dtype=np.float32)[self.place]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.t = int(self.np_random.integers(3)), 0
        return self.see(), {}

    def step(self, action):
        self.place, self.t = min(max(self.place + 2 * int(action) - 1, 0), 6), self.t + 1
        goal = self.place == 6
        return self.see(), float(goal), goal and self.mortal, self.t >= 40 and not (goal and self.mortal), {}


def corridor(seed):
    return Corridor()


@pytest.fixture(scope="module")
def demos():
    return dail.play(corridor, lambda obs: 1, 5)


# -- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, want",
    [
        (dail.compile_reward, "(source, name='candidate')"),
        (dail.RewardFn, "(name, source)"),
        (dail.Discriminator, "(obs_dim, n_actions=None, hidden=(64, 64), *, act_dim=None, spectral=False, generator=None)"),
        (dail.Discriminator.forward, "(self, obs, actions)"),
        (dail.discriminator_loss, "(expert_logits, policy_logits)"),
        (dail.wasserstein, "(x, y, *, max_points=1000, seed=0)"),
        (dail.AIL, "(make_env, demos, *, reward='dail', algo='ppo', regularizer='grad_penalty', seed=0, **hyper)"),
        (dail.AIL.fit, "(self, total_steps)"),
        (dail.AIL.act, "(self, obs, deterministic=False)"),
        (dail.AIL.rollout, "(self, n_episodes, seed)"),
        (dail.RewardSearch, "(fitness, proposer, *, pairs=4, children=2, top_k=8, generations=6, seed=0)"),
        (dail.RewardSearch.run, "(self)"),
        (dail.LMProposer.__call__, "(self, parents, errors)"),
    ],
)
def test_signatures(call, want):
    assert plain_signature(call) == want


# -- reward functions ------------------------------------------------------------------------------------------------


def test_the_seven_by_scipy():
    from scipy.special import expit, log_expit

    x = X.numpy()
    want = {"gail": -log_expit(-x), "airl": x, "fairl": -x * np.exp(x), "gail_heuristic": log_expit(x), "dail": expit(x) * expit(2 * x), "sigmoid": expit(x), "half_tanh": expit(2 * x)}
    assert list(dail.REWARDS) == list(want)
    for name, f in dail.REWARDS.items():
        np.testing.assert_allclose(f(X), want[name], rtol=1e-12, atol=1e-15)
        assert f.name == name and dail.compile_reward(f.source).source == f.source


@pytest.mark.parametrize("name", list(dail.REWARDS))
def test_shape_type_and_gradient(name):
    f = dail.REWARDS[name]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (3,), (2, 0), (2, 3, 4)):
            y = f(torch.randn(shape).clamp(-3, 3).to(dtype))
            assert y.shape == shape and y.dtype == dtype
    x = torch.tensor([-9.0, -1, 0, 2, 9], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    h = 1e-6
    np.testing.assert_allclose(grad, (f(x + h) - f(x - h)).detach() / (2 * h), rtol=1e-5, atol=1e-7)
    assert pickle.loads(pickle.dumps(f)) == f
    for bad in (torch.arange(3), 1.0, np.ones(3)):
        with pytest.raises(TypeError):
            f(bad)


def test_stable_at_the_ends():
    x = torch.tensor([-1e4, 1e4])
    for name in ("gail", "gail_heuristic", "dail", "sigmoid", "half_tanh"):
        assert torch.isfinite(dail.REWARDS[name](x)).all()
    d = dail.REWARDS["dail"](X)
    assert d.min() >= 0 and d.max() <= 1 and (d.diff() > 0).all() and d[X < -1.8].max() < 0.004


@pytest.mark.parametrize("source", ["x.mean()", "x[0]", "import os", "torch.exp(x)", "y", "eval('1')", "lambda x: x", "[x for x in [1]]", "f'{x}'", "clamp(x, lo=0, hi=1)", "x > 0", "exp", "x if x else x",
                                    "x ** 9", "x" + " + x" * 700, "def reward(y): return y", "def other(x): return x", "def reward(x):\n  import os\n  return x", "def reward(x): return (x, x)", "", "x +", "'x'",
                                    "def reward(x):\n  while x: pass\n  return x", "__builtins__", "where(x, 1, 2)", "x @ x", "max(x)", "softplus(x, 2)"])
def test_the_grammar_ends_here(source):
    with pytest.raises(dail.UnsafeReward):
        dail.compile_reward(source)
    assert issubclass(dail.UnsafeReward, ValueError)


@pytest.mark.parametrize("source", ["1 / x", "log1p(x)", "x ** 0.5", "exp(exp(x))", "x ** -1", "2.5", "def reward(x): return 1", "where(1 < 2, 3, 4)", "exp(x ** 2)", "0 * (1 / x)"])
def test_the_probe_refuses(source):
    with pytest.raises(ValueError) as e:
        dail.compile_reward(source)
    assert not isinstance(e.value, dail.UnsafeReward)


def test_numbers_broadcast_in_every_function():
    x = X.numpy()
    for source, want in (("clamp(x, -1, 2)", x.clip(-1, 2)), ("clamp(0, x, 5)", np.minimum(np.maximum(0, x), 5)), ("maximum(1, x)", x.clip(1)), ("minimum(x, 1)", x.clip(None, 1)), ("where(x > 0, 1, x)", np.where(x > 0, 1, x)),
                         ("where(x * x <= 4, 0.5, -1)", np.where(x * x <= 4, 0.5, -1)), ("relu(x) + tanh(1)", x.clip(0) + math.tanh(1)), ("where(1 < 2, x, 0)", x), ("abs(x) ** 3 / 4", abs(x) ** 3 / 4), ("2 ** x", 2**x)):
        for dtype in (torch.float32, torch.float64):
            y = dail.compile_reward(source)(X.to(dtype))
            assert y.dtype == dtype
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


# -- derivations -----------------------------------------------------------------------------------------------------


def test_divergences_with_exact_ratios():
    e, p = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(9), 2))
    ell = (e / p).log()
    kl = lambda a, b: float((a * (a / b).log()).sum())
    np.testing.assert_allclose((p * dail.REWARDS["airl"](ell)).sum(), -kl(p, e))
    np.testing.assert_allclose((p * dail.REWARDS["fairl"](ell)).sum(), -kl(e, p))


def test_at_the_expert_only_termination_makes_a_difference():
    lab = dail.gridworlds([3], size=3)
    pi = np.exp(log_softmax(np.random.default_rng(0).normal(size=lab.r.shape)))
    rho = occupancies(lab.P, pi, lab.mu0, lab.gamma)
    ends = lab.P * np.array([1, 0.9, 0.9, 0.9, 0.9])[None, None, :, None]
    gain = {}
    for name, f in dail.REWARDS.items():
        r = f(torch.from_numpy(exact_logits(rho, rho))).numpy()
        Q, mortal = (action_values(P, r, pi, lab.gamma) for P in (lab.P, ends))
        assert np.ptp(Q) < 1e-9                                                              # endless: no gradient for any function
        gain[name] = (mortal[..., 0] - (pi * mortal).sum(-1)).mean()
    assert abs(gain["airl"]) < 1e-12 and abs(gain["fairl"]) < 1e-12 and gain["gail"] > 0.01 and gain["gail_heuristic"] < -0.01
    np.testing.assert_allclose(gain["gail"], -gain["gail_heuristic"])


# -- discriminator ---------------------------------------------------------------------------------------------------


def test_discriminator_shapes_and_errors():
    d = dail.Discriminator(4, 3)
    assert d(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)).shape == (5,) and d(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    c = dail.Discriminator(4, n_actions=None, act_dim=2, hidden=(8,))
    assert c(torch.zeros(5, 4), torch.zeros(5, 2)).shape == (5,)
    for bad in (dict(obs_dim=4), dict(obs_dim=4, n_actions=2, act_dim=2), dict(obs_dim=0, n_actions=2), dict(obs_dim=4, n_actions=0)):
        with pytest.raises(ValueError):
            dail.Discriminator(**bad)
    for obs, actions in ((torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)), (torch.zeros(5, 4), torch.zeros(5)), (torch.zeros(5, 4), torch.zeros(5, dtype=torch.bool)), (torch.zeros(5, 4), torch.full((5,), 3)), (torch.zeros(5, 4), torch.full((5,), -1))):
        with pytest.raises(ValueError):
            d(obs, actions)
    for hidden in (8, (0,), (2.5,), (True,), "8"):
        with pytest.raises(ValueError, match="^hidden must be"):
            dail.Discriminator(4, 3, hidden)
    for obs, actions in ((np.zeros((5, 4)), torch.zeros(5, dtype=torch.int64)), (torch.zeros(5, 4), np.zeros(5, int)), (torch.zeros(1, 4), [0])):
        with pytest.raises(TypeError, match="must be a tensor"):
            d(obs, actions)
    with pytest.raises(ValueError, match="N actions"):
        d(torch.zeros(1, 4), torch.tensor(0))
    for dtype in (torch.float64, torch.float16, torch.int64):                                # what is shown comes into the network's type
        torch.testing.assert_close(d(torch.ones(3, 4, dtype=dtype), torch.arange(3)), d(torch.ones(3, 4), torch.arange(3)))
    for bad in (np.zeros(3), [0.0], torch.zeros(3, dtype=torch.int64)):
        for pair, name in (((bad, torch.zeros(2)), "expert_logits"), ((torch.zeros(2), bad), "policy_logits")):
            with pytest.raises(TypeError, match=f"^{name} must be"):
                dail.discriminator_loss(*pair)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        torch.testing.assert_close(d(torch.ones(3, 4), torch.arange(3, dtype=dtype)), d(torch.ones(3, 4), torch.arange(3)))


def test_loss_is_cross_entropy_and_stable():
    e, p = torch.tensor([3.0, -900.0]), torch.tensor([1.0, 2.0, 800.0])
    want = F.binary_cross_entropy_with_logits(e, torch.ones(2)) + F.binary_cross_entropy_with_logits(p, torch.zeros(3))
    torch.testing.assert_close(dail.discriminator_loss(e, p), want)
    for bad in ((e[:0], p), (e, p[:0])):
        with pytest.raises(ValueError, match="at least one"):
            dail.discriminator_loss(*bad)


def test_trained_logits_are_log_ratios():
    "On three cells with known occupancies, without a regulariser."
    rho_e, rho_p = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    g, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    d = dail.Discriminator(3, 1, (16,), generator=g)
    learner, table = DiscriminatorLearner(d, "none", 1e-2, generator=g), d.inputs(torch.eye(3), torch.zeros(3, dtype=torch.int64))
    for _ in range(400):
        learner.step(table[rng.choice(3, 512, p=rho_e)], table[rng.choice(3, 512, p=rho_p)])
    np.testing.assert_allclose(d.net(table).detach()[:, 0], np.log(rho_e / rho_p), atol=0.2)


def test_every_regulariser_does_what_it_says():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 3, generator=g) + 2, torch.randn(64, 3, generator=g) - 2
    size = {}
    for kind in REGULARIZERS:
        g = torch.Generator().manual_seed(1)
        d = dail.Discriminator(2, 1, (16,), spectral=kind == "spectral_norm", generator=g)
        learner = DiscriminatorLearner(d, kind, 1e-2, generator=g)
        for _ in range(150):
            learner.step(x, y)
        size[kind] = float((d.net(x) - d.net(y)).detach().abs().mean())
    assert size["grad_penalty"] < size["none"] and size["spectral_norm"] < size["none"] and size["entropy"] < size["none"] and size["weight_decay"] < size["none"]
    free = logit_size("none", lr=Hyper().disc_lr)                                            # the loop's own rate and length
    for kind in set(REGULARIZERS) - {"none"}:
        assert logit_size(kind, lr=Hyper().disc_lr) <= 0.8 * free, kind
    with pytest.raises(ValueError, match="grad_penalty"):
        DiscriminatorLearner(dail.Discriminator(2, 1), "l2")
    with pytest.raises(ValueError, match="spectral=True"):                                    # or it would be no regulariser at all
        DiscriminatorLearner(dail.Discriminator(2, 1), "spectral_norm")
    for weight in (-1, math.nan, "a"):
        with pytest.raises(ValueError, match="^weight must be"):
            DiscriminatorLearner(dail.Discriminator(2, 1), "grad_penalty", weight=weight)
    square = lambda z: z.square().sum(-1, keepdim=True) / 2                                   # gradient z
    u = torch.zeros(4, 1)
    p = torch.tensor([[3.0, 4.0]]).expand(4, 2)
    torch.testing.assert_close(gradient_penalty(square, torch.ones(4, 2), p, u), torch.tensor(16.0))


# -- transport -------------------------------------------------------------------------------------------------------


def test_wasserstein_known_values():
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(40, 4)), np.array([1.0, 2, -2, 4])
    np.testing.assert_allclose(dail.wasserstein(x, x + t), 5)
    for n, m in ((7, 7), (7, 5), (1, 6)):
        a, b = rng.normal(size=(n, 3)), rng.normal(size=(m, 3))
        cost = np.linalg.norm(a[:, None] - b[None], axis=-1)
        fit = linprog(cost.ravel(), A_eq=np.r_[np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))], b_eq=np.r_[np.full(n, 1 / n), np.full(m, 1 / m)])
        np.testing.assert_allclose(dail.wasserstein(a, b), fit.fun, rtol=1e-8)
        np.testing.assert_allclose(dail.wasserstein(a, b), dail.wasserstein(b, a), rtol=1e-12)
        np.testing.assert_allclose(dail.wasserstein(a[:, :1], b[:, :1]), scipy.stats.wasserstein_distance(a[:, 0], b[:, 0]), rtol=1e-9)
    far = np.r_[np.zeros((3, 1)), [[100.0]]]
    np.testing.assert_allclose(dail.wasserstein(np.zeros((2, 1)), far), 25)                   # nothing is dropped
    assert isinstance(dail.wasserstein(x, x), float)


def test_wasserstein_subsamples_with_the_seed():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(300, 2)), rng.normal(size=(250, 2))
    a = dail.wasserstein(x, y, max_points=50, seed=3)
    assert a == dail.wasserstein(x, y, max_points=50, seed=3) != dail.wasserstein(x, y, max_points=50, seed=4)
    assert dail.wasserstein(x, x, max_points=50) == 0
    for bad in ((x[:0], y), (x, y[:, :1]), (x * np.nan, y), (x[:, 0], y)):
        with pytest.raises(ValueError):
            dail.wasserstein(*bad)
    for name, value in (("max_points", 0), ("max_points", 2.5), ("max_points", "a"), ("max_points", None), ("max_points", math.nan), ("seed", -1), ("seed", None), ("seed", "a")):
        with pytest.raises(ValueError, match=f"^{name} must be|^device: "):
            dail.wasserstein(x, y, **{name: value})
    for bad in ("a", None, [[1, 2], [1]], [["a", "b"]], x * 1j, x * 1e200):
        for pair, name in (((bad, y), "x"), ((x, bad), "y")):
            with pytest.raises(ValueError, match=f"^{name} must be|^device: "):
                dail.wasserstein(*pair)
    np.testing.assert_allclose(dail.wasserstein(torch.zeros(2, 2, requires_grad=True), torch.ones(3, 2)), math.sqrt(2))


# -- the loop --------------------------------------------------------------------------------------------------------


def test_fit_history_act_rollout(demos):
    learner = dail.AIL(corridor, demos, seed=1, **FAST)
    assert learner.fit(512) is learner
    assert [h["step"] for h in learner.history_] == [128, 256, 384, 512]
    assert all(list(h) == ["step", "return_mean", "entropy", "logit_policy_mean", "logit_expert_mean", "disc_loss"] and all(isinstance(v, (int, float)) for v in h.values()) for h in learner.history_)
    np.testing.assert_allclose(learner.history_[0]["entropy"], math.log(2), atol=1e-3)
    assert isinstance(learner.act(demos.obs[0]), int) and learner.act(demos.obs[:4]).shape == (4,)
    assert (learner.act(demos.obs, deterministic=True) == learner.act(demos.obs, deterministic=True)).all()
    played = learner.rollout(3, seed=0)
    assert isinstance(played, dail.Demos) and len(played.returns) == 3 and played.lengths.sum() == len(played)
    np.testing.assert_array_equal(played.actions, learner.rollout(3, seed=0).actions)
    with pytest.raises(ValueError, match="shape"):
        learner.act(np.zeros(6))


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_a_seed_is_a_run_and_a_name_is_only_a_name(demos, algo):
    run = lambda reward, seed=0: dail.AIL(corridor, demos, reward=reward, algo=algo, seed=seed, **FAST).fit(384).history_
    torch.manual_seed(0)
    a = run("dail")
    torch.manual_seed(1), np.random.seed(5)
    assert str(run(dail.compile_reward(dail.REWARDS["dail"].source, "other name"))) == str(a) and str(run("dail", 1)) != str(a) and str(run("gail")) != str(a)


def test_imitation_reaches_the_expert_and_a_flipped_sign_does_not(demos):
    how = FAST | dict(epochs=4, lr=0.01, disc_lr=0.01, hidden=(32,))
    good = dail.AIL(corridor, demos, reward="airl", seed=0, **how).fit(4096)
    bad = dail.AIL(corridor, demos, reward=flipped(dail.REWARDS["airl"]), seed=0, **how).fit(4096)
    share = lambda run: run.act(np.eye(7, dtype=np.float32)[[0, 1, 2, 3, 4] * 100]).mean()
    assert share(good) > 0.8 > 0.4 > share(bad)


def test_own_reward_needs_no_demonstrations():
    free = dail.AIL(corridor, None, reward=None, **FAST).fit(256)
    assert math.isnan(free.history_[0]["disc_loss"]) and free.history_[0]["entropy"] > 0
    with pytest.raises(ValueError, match="demos"):
        dail.AIL(corridor, None)


def test_all_regularisers_run(demos):
    for kind in REGULARIZERS:
        assert np.isfinite(dail.AIL(corridor, demos, regularizer=kind, **FAST).fit(128).history_[0]["disc_loss"])


@pytest.mark.parametrize("name, value", [("n_envs", 0), ("n_steps", 0), ("epochs", 0), ("disc_updates", 0), ("disc_batch", 2.5), ("minibatch", 0), ("logit_clip", -1), ("gamma", 2), ("lam", -0.1), ("lr", 0), ("lr", math.nan),
                                         ("entropy", -1), ("disc_weight", -1), ("hidden", (0,)), ("hidden", 8), ("n_envs", True), ("device", "banana"), ("device", None), ("seed", -1), ("seed", 1.5), ("seed", None),
                                         ("seed", "a")])
def test_settings_are_checked(demos, name, value):
    with pytest.raises(ValueError, match=f"^{name} must be|^device: "):
        dail.AIL(corridor, demos, **{name: value})


def test_bad_arguments(demos):
    for bad in (dict(reward="best"), dict(algo="dqn"), dict(regularizer="l1"), dict(speed=1)):
        with pytest.raises(ValueError):
            dail.AIL(corridor, demos, **bad)
    for bad, error in ((dail.Demos(demos.obs[:, :5], demos.actions), ValueError), (dail.Demos(demos.obs, demos.actions + 1), ValueError), (dail.Demos(demos.obs, demos.actions.astype(float)), ValueError), ((1, 2), TypeError)):
        with pytest.raises(error, match="demos"):
            dail.AIL(corridor, bad)
    with pytest.raises(TypeError, match="reward"):
        as_reward(3)
    for steps in (0, 3, 2.5, None, math.nan, math.inf, "64", [64]):
        with pytest.raises(ValueError, match="^total_steps must be"):
            dail.AIL(corridor, demos, **FAST).fit(steps)
    for call in (lambda a: a.act(demos.obs[0]), lambda a: a.rollout(1, 0)):
        with pytest.raises(RuntimeError, match="fit"):
            call(dail.AIL(corridor, demos))
    for args in ((demos.obs, demos.actions[:3]), (demos.obs[:0], demos.actions[:0]), (np.full_like(demos.obs, np.nan), demos.actions), (demos.obs[:, 0], demos.actions)):
        with pytest.raises(ValueError):
            dail.Demos(*args)


def test_numpy_numbers_are_numbers(demos):
    how = FAST | dict(n_envs=np.int64(4), n_steps=np.int32(32), hidden=[np.int64(16)])
    a, b = (dail.AIL(corridor, demos, seed=s, **h).fit(n) for s, h, n in ((np.int64(1), how, np.int64(256)), (1, FAST, 256.0)))
    assert str(a.history_) == str(b.history_) and type(a.hyper.n_envs) is int


def test_what_a_policy_is_shown(demos):
    learner = dail.AIL(corridor, demos, **FAST).fit(128)
    x = torch.from_numpy(demos.obs[:3]).requires_grad_()
    np.testing.assert_array_equal(learner.act(x, deterministic=True), learner.act(demos.obs[:3].tolist(), deterministic=True))
    assert learner.act(demos.obs[:0]).shape == (0,)
    for bad in (np.full(7, np.nan), np.full((2, 7), np.inf), ["a"] * 7, None):
        with pytest.raises(ValueError, match="^obs must be"):
            learner.act(bad)
    for seed in (-1, 1.5, "a", None):
        with pytest.raises(ValueError, match="^seed must be"):
            learner.rollout(1, seed)
        with pytest.raises(ValueError, match="^seed must be"):
            dail.play(corridor, lambda obs: 1, 1, seed)
    for args, name in (((corridor, 3, 1), "act"), ((3, lambda obs: 1, 1), "make_env")):
        with pytest.raises(TypeError, match=f"^{name} must be"):
            dail.play(*args)


def test_an_environment_is_closed_whatever_happens():
    closed = []

    class Closing(Corridor):
        def close(self):
            closed.append(1)

    with pytest.raises(ZeroDivisionError):
        dail.play(lambda seed: Closing(), lambda obs: 1 // 0, 1)
    assert closed == [1]


def test_demonstrations_of_every_kind(demos):
    import pandas as pd

    frame = pd.DataFrame({"a": [1, 2], "b": [0.5, True]}, dtype=object)
    for obs, actions in ((torch.from_numpy(demos.obs).requires_grad_(), torch.from_numpy(demos.actions)), (pd.DataFrame(demos.obs), pd.Series(demos.actions)), (demos.obs.tolist(), demos.actions.tolist()),
                         (torch.from_numpy(demos.obs).bfloat16(), demos.actions.astype(np.uint8))):
        np.testing.assert_array_equal(dail.Demos(obs, actions).obs, demos.obs)
        assert dail.Demos(obs, actions).actions.dtype == np.int64
    np.testing.assert_array_equal(dail.Demos(frame, [0, 1]).obs, [[1, 0.5], [2, 1]])
    for obs, actions, text in (([["a", "b"]], [1], "^obs must be"), ([[1, 2], [1]], [1, 0], "^obs must be"), (None, None, "^obs must be"), (demos.obs + 1j, demos.actions, "^obs must be"), (np.zeros((3, 0)), [1, 0, 1], "at least 1"),
                               ([[1e300]], [0], "finite"), ([[1.0]], ["left"], "^actions must be"), ([[1.0]], [True], "^actions must be")):
        with pytest.raises(ValueError, match=text):
            dail.Demos(obs, actions)


def test_both_logits_of_the_history_are_clamped(demos):
    h = dail.AIL(corridor, demos, regularizer="none", **FAST | dict(logit_clip=0.01)).fit(256).history_
    assert all(abs(row[k]) <= 0.01 + 1e-6 for row in h for k in ("logit_policy_mean", "logit_expert_mean"))


def test_logits_are_clamped_before_any_reward_function(demos):
    seen = []

    class Spy(dail.RewardFn):
        def __call__(self, x):
            seen.append(float(x.abs().max()))
            return super().__call__(x)

    dail.AIL(corridor, demos, reward=Spy("fairl", dail.REWARDS["fairl"].source), regularizer="none", **FAST | dict(logit_clip=0.02)).fit(256)
    assert len(seen) == 2 and max(seen) <= 0.02 + 1e-6 and Hyper().logit_clip == 10                # one call a rollout
    with pytest.raises(ValueError, match="not finite"):
        assigned(dail.REWARDS["fairl"], torch.tensor([0.0, 1000.0]))


def test_experts():
    assert dail.play(cartpole, cartpole_expert, 2).returns.tolist() == [500, 500]
    env, d = dail.demonstrate("asterix", 1)
    assert d.obs.shape[1:] == (10, 10, 4) and d.returns[0] > 5
    with pytest.raises(ValueError):
        dail.demonstrate("pong")
    with pytest.raises(RuntimeError, match="longer"):
        dail.play(corridor, lambda obs: 1, 1, longer_than=100)


# -- search ----------------------------------------------------------------------------------------------------------


def lookup(f):
    return float((f(X) - dail.REWARDS["dail"](X)).abs().max())


def test_search_protocol():
    calls, evaluated = [], []
    answers = iter(["tanh(x)", "tanh(x)", "  tanh(x)\n", "1 / x", "1 / x", "x.y", "relu(x)", "sigmoid(x)", "exp(-x)"] + ["sigmoid(x)"] * 9)

    def propose(parents, errors):
        calls.append((parents, list(errors)))
        return next(answers)

    def fitness(f):
        evaluated.append(f.source)
        return lookup(f) if f.source != "relu(x)" else math.inf

    r = dail.RewardSearch(fitness, propose, pairs=3, children=2, top_k=5, generations=3, seed=0).run()
    assert len(calls) == 18 and evaluated.count("tanh(x)") == 1 and "1 / x" not in evaluated and len(evaluated) == len(set(evaluated))
    assert all(len(p) == 2 and all(isinstance(s, str) and isinstance(v, float) for s, v in p) for p, _ in calls)
    assert isinstance(r.best, dail.RewardFn) and r.best_fitness == lookup(r.best) and len(r.population) == 5 and [v for _, v in r.population] == sorted(v for _, v in r.population)
    assert [h["generation"] for h in r.history] == [0, 1, 2, 3] and all(a["best_fitness"] >= b["best_fitness"] for a, b in zip(r.history, r.history[1:]))
    failed = [c for h in r.history for c in h["children"] if c["error"]]
    assert {c["source"] for c in failed} == {"1 / x", "x.y", "relu(x)"} and len(calls[-1][1]) == 3 and not {c["source"] for c in failed} & {s for s, _ in r.population}
    assert calls[4][1] == [failed[0]["error"]]                                               # the error is there for the very next proposal
    assert [c["source"] for c in r.history[0]["children"]] == [dail.REWARDS[n].source for n in SEEDS]


def test_search_edges():
    only_x = lambda f: 1.0 if f.source == "x" else math.nan
    pairs = []
    r = dail.RewardSearch(only_x, lambda p, e: pairs.append(p) or "y", top_k=3, generations=1).run()
    assert r.population == [("x", 1.0)] and all(p == [("x", 1.0)] * 2 for p in pairs) and len(pairs) == 8

    def crashes(f):
        if f.source == "tanh(x)":
            raise ZeroDivisionError("boom")
        return lookup(f)

    r = dail.RewardSearch(crashes, lambda p, e: "tanh(x)", generations=1).run()
    assert any("boom" in (c["error"] or "") for c in r.history[1]["children"])
    with pytest.raises(RuntimeError):
        dail.RewardSearch(lambda f: math.inf, lambda p, e: "x").run()
    with pytest.raises(TypeError):
        dail.RewardSearch(lookup, lambda p, e: None).run()
    for bad in (dict(pairs=0), dict(children=0), dict(top_k=0), dict(generations=-1), dict(pairs=1.5), dict(seed=-1), dict(seed=None), dict(seed="a")):
        with pytest.raises(ValueError, match=next(iter(bad))):
            dail.RewardSearch(lookup, lambda p, e: "x", **bad)
    assert len(dail.RewardSearch(lookup, lambda p, e: "x", top_k=2, generations=0).run().population) == 2


def test_better_parents_are_likelier():
    rng, population = np.random.default_rng(0), [(c, float(i)) for i, c in enumerate("abcd")]
    drawn = [draw_parents(population, rng) for _ in range(3000)]
    share = [np.mean([p[0][0] == c for p in drawn]) for c in "abcd"]
    assert share == sorted(share, reverse=True) and all(a != b for a, b in drawn)


def test_prompt_and_extraction():
    seen = []
    lm = ScriptedLM(lambda prompt: (seen.append(prompt), "```python\ndef reward(x):\n    return tanh(x)\n```\n```\nx\n```")[1])
    source = dail.LMProposer(lm)([("softplus(x)", 0.123456), ("def reward(x):\n    return x", 2.0)], ["first error", "second", "third", "fourth"])
    assert source == "def reward(x):\n    return tanh(x)" and dail.compile_reward(source)(X).shape == (401,)
    prompt = seen[0]
    assert "return softplus(x)" in prompt and "0.1235" in prompt and "2.0000" in prompt and "lower is better" in prompt and "first error" not in prompt and "fourth" in prompt
    assert all(name in prompt for name in ("sigmoid", "log1p", "where", "log density ratio", "def reward(x)"))
    assert build_prompt([("x", 1.0)] * 2).count("```python") == 2 and extract_code("just x") == "just x" and extract_code("a ```py\nb\n```") == "b"
    with pytest.raises(TypeError):
        dail.LMProposer(3)
    for bad in (dict(max_new_tokens=0), dict(temperature=-1), dict(temperature=math.nan), dict(seed=-1)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            dail.LMProposer(lm, **bad)


@pytest.mark.parametrize("text", ["```python3\ndef reward(x): return x\n```", "so:\r\n```python\r\ndef reward(x): return x\r\n```\r\nend", "Use ```def reward(x): return x``` here.\nIt is\ngood", "```python def reward(x): return x```",
                                  "```py title=a.py\ndef reward(x): return x", "```def reward(x): return x\n```", "``` \ndef reward(x): return x\n``` and ```y```", "def reward(x): return x"])
def test_code_blocks_in_every_dress(text):
    assert extract_code(text) == "def reward(x): return x"


def test_mutation_and_random_expressions():
    parents = [(dail.REWARDS["gail"].source, 0.1), ("def reward(x):\n    a = tanh(x)\n    return a * 2", 0.2)]
    for make in (dail.ExpressionMutation, dail.RandomExpressions):
        texts = [make(0)(parents, []) for _ in range(2)]
        assert texts[0] == texts[1] and make(1)(parents, []) != texts[0]
        one = make(3)
        found = [one(parents, []) for _ in range(50)]
        works = 0
        for t in found:
            with contextlib.suppress(ValueError):
                dail.compile_reward(t)
                works += 1
        assert works > 25 and len(set(found)) > 25 and all("x" in t for t in found)
    import ast

    assert ast.unparse(as_expression(parents[1][0])) == "tanh(x) * 2"
    doubling = "def reward(x):\n" + "    x = .5 * (x + x)\n" * 60 + "    return x"               # compiles; 2 ** 60 nodes in one line
    assert dail.compile_reward(doubling)(X).shape == (401,)
    with pytest.raises(ValueError, match="nodes"):
        as_expression(doubling)
    deep = "def reward(x):\n" + " x=-x\n" * 250 + " return x"
    for source in (doubling, deep, " + ".join(["x"] * 400)):
        for pair in ([(source, 0.1), parents[0]], [parents[0], (source, 0.1)]):
            assert 0 < len(dail.ExpressionMutation(0)(pair, [])) < 300
    assert not is_new("softplus( x )") and is_new("softplus(x) * 2") and not is_new("1 / x")


def test_successive_halving_spends_little():
    spent = []
    best, rounds = dail.successive_halving([3, 1, 2, 9], lambda c, b: spent.append(b) or (math.nan if c == 9 else c), (1, 10), keep=0.5)
    assert best == [1, 2] and spent == [1] * 4 + [10] * 2 and rounds[0][-1] == (3, math.inf)
    for bad in (([], (1,)), ([1], ()), ([1], (1,), 1.5)):
        with pytest.raises(ValueError):
            dail.successive_halving(bad[0], lambda c, b: 0.0, *bad[1:])


def test_fitness_of_a_run_has_an_interval(demos):
    fit = dail.AILFitness(corridor, demos, steps=128, seeds=(0, 1), episodes=1, **FAST)
    value = fit(dail.REWARDS["dail"])
    i = fit.interval(dail.REWARDS["dail"])
    np.testing.assert_allclose(i.estimate, value)
    np.testing.assert_allclose([i.low, i.high], [t_interval(fit.values_[dail.REWARDS["dail"].source][:, 0]).low, t_interval(fit.values_[dail.REWARDS["dail"].source][:, 0]).high])
    assert fit("dail") == value and len(fit.values_) == 1                                     # by name, from what is kept
    for bad, text in ((dict(seeds=()), "seeds"), (dict(seeds=3), "seeds"), (dict(seeds=(0, -1)), "seeds"), (dict(seeds=(0, 0)), "twice"), (dict(steps=0), "^steps must be"), (dict(steps=3), "n_envs = 4"), (dict(steps=None), "^steps must be"),
                      (dict(episodes=0), "^episodes must be"), (dict(reward="gail"), "^reward is not"), (dict(algo="dqn"), "ppo"), (dict(speed=1), "n_envs")):
        with pytest.raises(ValueError, match=text):
            dail.AILFitness(corridor, demos, **FAST | dict(steps=128) | bad)
    with pytest.raises(TypeError, match="demos"):
        dail.AILFitness(corridor, None, steps=128)
    with pytest.raises(ValueError, match="two or more"):
        dail.AILFitness(corridor, demos, steps=128, seeds=(0,), **FAST).interval("dail")


def test_what_is_measured_does_not_start_where_the_demonstrations_did(demos):
    "The same player in both records is at a distance, for the episodes are others."
    seen = []

    def watched(seed):
        seen.append(seed)
        return Corridor()

    dail.AILFitness(watched, demos, steps=128, seeds=(0,), episodes=1, **FAST)("dail")
    assert seen[-1] not in (0, 1, 2) and seen[-1] == 1_000_000                                # `demos` are of seed 0


# -- the laboratory --------------------------------------------------------------------------------------------------


def test_batched_worlds_are_the_shared_solver():
    lab = dail.gridworlds([0, 5])
    run = dail.tabular_ail(lab, dail.REWARDS["gail"], 10)
    for w in range(2):
        np.testing.assert_allclose(run["rho"][w], occupancy(lab.P[w], run["policy"][w], lab.mu0[w], lab.gamma), atol=1e-12)
        np.testing.assert_allclose(run["returns"][-1, w], lab.mu0[w] @ evaluate_policy(lab.P[w], lab.r[w], run["policy"][w], lab.gamma))
        np.testing.assert_allclose(exact_logits(lab.rho_e, run["rho"])[w], run["logits"][w])
    np.testing.assert_allclose(dail.gridworlds([5]).P[0], lab.P[1])
    np.testing.assert_allclose(lab.P.sum(-1), 1)
    assert (lab.expert_return > lab.random_return).all() and (run["returns"][-1] > run["returns"][0]).all() and (run["returns"][-1] <= lab.expert_return + 1e-9).all()
    np.testing.assert_allclose(lab.normalized(np.stack([lab.random_return, lab.expert_return])), [[0, 0], [1, 1]], atol=1e-12)


def test_a_mirror_step_by_hand():
    lab = dail.gridworlds([1], size=3)
    one = dail.tabular_ail(lab, dail.REWARDS["dail"], 1, eta=0.3)["policy"][0]
    pi = np.full((9, 5), 0.2)
    rho = occupancy(lab.P[0], pi, lab.mu0[0], 0.95)
    with np.errstate(divide="ignore"):
        ell = np.clip(np.log(lab.rho_e[0] / rho), -10, 10)
    r = dail.REWARDS["dail"](torch.from_numpy(ell)).numpy()
    Q = r + 0.95 * lab.P[0] @ evaluate_policy(lab.P[0], r, pi, 0.95)
    want = np.exp(0.3 * Q)
    np.testing.assert_allclose(one, want / want.sum(-1, keepdims=True))
    double = dail.compile_reward(f"2 * {dail.REWARDS['dail'].source}")
    a, b = (dail.tabular_ail(lab, f, 3, unit_scale=True)["policy"] for f in (dail.REWARDS["dail"], double))
    np.testing.assert_allclose(a, b, atol=1e-12)                                              # scale cannot matter there
    for name, value in (("steps", 0), ("steps", 1.5), ("eta", 0), ("eta", -1), ("eta", math.nan), ("eta", "a")):
        with pytest.raises(ValueError, match=f"^{name} must be|^device: "):
            dail.tabular_ail(lab, double, **{name: value})
        with pytest.raises(ValueError, match=f"^{name} must be|^device: "):
            dail.TabularFitness(lab, **{name: value})
    np.testing.assert_array_equal(dail.tabular_ail(lab, "dail", 3)["returns"], dail.tabular_ail(lab, dail.REWARDS["dail"], 3)["returns"])
    for bad, error in (("best", ValueError), (None, TypeError), (lambda x: x, TypeError)):
        with pytest.raises(error, match="^reward must be"):
            dail.tabular_ail(lab, bad)
    for call in (lambda: dail.tabular_ail(3, double), lambda: dail.TabularFitness(3)):
        with pytest.raises(TypeError, match="^worlds must be"):
            call()
    for name, value in (("size", 1), ("size", 2.5), ("demos", 0), ("horizon", 0), ("slip", 2), ("walls", -1), ("walls", math.nan), ("gamma", 1.5), ("gamma", "a")):
        with pytest.raises(ValueError, match=f"^{name} must be|^device: "):
            dail.gridworlds([0], **{name: value})
    for seeds in ([], 3, [-1], ["a"], "12"):
        with pytest.raises(ValueError, match="seeds"):
            dail.gridworlds(seeds)


def test_the_search_does_not_see_the_worlds_it_is_measured_on():
    parts = [set(studies.lab_seeds(s, p, 200)) for s in (0, 1) for p in ("ablation", "search", "held out", "learned")]
    assert all(not a & b for i, a in enumerate(parts) for b in parts[:i])
    lab = dail.gridworlds(range(2))
    fit = dail.TabularFitness(lab, 5)
    f = dail.compile_reward("tanh(x)")
    np.testing.assert_allclose(fit(f), np.mean(fit.distances(f)))
    assert fit.distances(f).shape == (2,) and fit.between(lab.rho_e[0], lab.rho_e[0]) < 1e-9
    assert 0 < tabular_learned(lab, dail.REWARDS["gail"], "none", 0, steps=20) <= 1


# -- reproduction ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return papers.smoke("dail", tmp_path_factory)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "Profile gpu on the CPU at the sizes for tests, by the command, with a tiny random model of the proposer's class."
    from icl26.lm import tiny_lm

    def make(folder):
        tiny_lm(max_positions=2048).save_pretrained(folder / "model")
        return run_command("dail", folder / "gpu", "--profile", "gpu", "--device", "cpu", "--model", folder / "model", ICL26_TINY="1")

    return once("dail-gpu", tmp_path_factory, make)


COMMITTED = committed("dail")
IDS = ["C1", "C2", "C3", "C4", "C5", "C6", "own-C7", "own-C8", "own-C9"]


@pytest.mark.parametrize("which", ["smoke", "tiny", "committed"])
def test_every_number_and_verdict_follows_from_what_was_recorded(which, smoke, tiny):
    path = dict(smoke=smoke, tiny=tiny, committed=COMMITTED)[which]
    if path is None:
        pytest.skip("no committed run")
    record, checked = load_results(path), 0
    assert [c["id"] for c in sorted(record["claims"], key=lambda c: IDS.index(c["id"]))] == IDS
    for c in record["claims"]:
        assert c["verdict"] == recompute(c)[0]
        labels = {p["label"]: p for p in c["values"] or []}
        for label, p in labels.items():
            if p.get("values") is None or label.startswith(("same text", "other text")):
                continue
            want = mean_part(label, p["values"], record["parameters"]["seed"])
            for key in ("measured", "ci_low", "ci_high", "n"):
                assert (p[key] is None) == (want[key] is None)
                if want[key] is not None:
                    np.testing.assert_allclose(p[key], want[key], rtol=1e-7, atol=1e-12, err_msg=f"{c['id']} {label} {key}")
            checked += 1
        for side in ("", "unbroken, ", "negated, ", "beside: logit flipped, "):
            returns = {k.removeprefix(f"{side}return: "): p["values"] for k, p in labels.items() if k.startswith(f"{side}return: ")}
            if returns:
                for p in early_end_parts(returns, record["parameters"]["seed"]):
                    got = labels[side + p["label"]]["measured"]
                    assert (got is None) == (p["measured"] is None) and (got is None or math.isclose(got, p["measured"], abs_tol=1e-12))
        if c["id"] == "C6" and labels:
            won = sum(p["measured"] > 0 for k, p in labels.items() if k.endswith(": dail − gail"))
            assert labels["regularisers won"]["measured"] == won == c["measured"]
    assert checked > 15


def test_smoke_measures_all_but_c6(smoke):
    verdicts = {c["id"]: c["verdict"] for c in load_results(smoke)["claims"]}
    assert [k for k, v in verdicts.items() if v == "not run"] == ["C6"] and verdicts["own-C8"] == "reproduced"


def test_gpu_profile_runs_every_path_at_a_tiny_size(tiny):
    record = load_results(tiny)
    assert record["parameters"]["profile"] == "gpu" and record["parameters"]["device"] == "cpu"
    assert all(c["verdict"] != "not run" and "tiny" in c["note"] and c["scale"] == "mechanism" for c in record["claims"])
    assert {"curves.png", "logits.png", "search.png", "regularisers.png"} <= {p.name for p in (tiny.parent / "figures").iterdir()}


def test_gpu_profile_without_a_gpu_says_so_in_seconds(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("dail", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"]) and record["wall_s"] < 20


def test_the_committed_run_has_the_sizes_of_the_cpu_profile():
    if COMMITTED is None:
        pytest.skip("no committed run")
    c = {c["id"]: {p["label"]: p for p in c["values"]} for c in load_results(COMMITTED)["claims"]}
    assert c["C1"]["return: gail"]["n"] == 3 and c["C2"]["all"]["n"] == 5 and c["C4"]["dail − half_tanh, raw"]["n"] == 20
    assert c["C5"]["best seed − language model"]["n"] == 20 and c["C6"]["none: dail − gail"]["n"] == 5


def test_the_end_of_a_run():
    run = dict(step=np.arange(1, 21) * 10.0, entropy=np.linspace(1, 0, 20), ends=np.array([[10, 1.0, 5], [190, 4.0, 7], [200, 6.0, 9], [100, 9.0, 1]]), random=0.0, expert=10.0)
    assert at_the_end(run) == {"return": 5.0, "share": 0.5, "normalized": 0.5, "entropy": np.mean(run["entropy"][18:]), "length": 8.0}
    assert at_the_end(run, 100)["return"] == 9.0


# -- numbers that go against the paper -------------------------------------------------------------------------------


def test_numbers_against_the_paper_are_not_reproduced():
    C = {c.id: c for c in dail.claims("cpu")}
    assert list(C) == IDS and [c.id for c in dail.claims("gpu")] == IDS
    verdict = lambda id, *parts: measurement(C[id], parts=list(parts))["verdict"]
    assert measurement(C["C1"], parts=early_end_parts(dict(gail=[1, 1.1, 1.2], airl=[0.9, 1, 1.1], gail_heuristic=[0, 0.1, 0])))["verdict"] == "not reproduced"
    assert measurement(C["C1"], parts=early_end_parts(dict(gail=[1, 1.1, 1.2], airl=[0.1, 0, 0.1], gail_heuristic=[0, 0.1, 0])))["verdict"] == "reproduced"
    down, up, unclear = [-0.3, -0.2, -0.25], [0.3, 0.2, 0.25], [0.3, -0.1, 0.1]
    for id, label, sign in (("C2", "all", 1), ("C3", "all", -1), ("C5", "best seed − language model", 1), ("own-C7", "mutation − language model", 1)):
        for values, want in ((up, "reproduced"), (unclear, "partly"), (down, "not reproduced"), ([0.0, 0.0, 0.0], "not reproduced")):
            assert verdict(id, mean_part(label, sign * np.array(values))) == want, id
    both = lambda a, b: verdict("C4", mean_part("dail − half_tanh, raw", a), mean_part("half_tanh − sigmoid, raw", b), mean_part("beside: dail − half_tanh, unit, 50 updates", down))
    assert both(up, up) == "reproduced" and both(up, unclear) == "partly" and both(up, down) == both(down, up) == "not reproduced"
    for won, want in ((5, "reproduced"), (3, "reproduced"), (2, "not reproduced")):
        assert verdict("C6", number_part("regularisers won", won), difference_part("none: dail − gail", up, down)) == want
    assert verdict("own-C8", number_part("same text: a", 1e-9), number_part("other text: b", 0)) == "not reproduced"
    below = lambda side, x: [number_part(f"{side}, below half: {n}", x) for n in ("airl", "gail_heuristic")]
    broken = lambda x, values: verdict("own-C9", *below("unbroken", 0.3), *below("negated", x), mean_part("flipped: best seed − language model, in the laboratory", values), *below("beside: logit flipped", 0.3))
    assert broken(-0.1, down) == "reproduced" and broken(0.2, down) == broken(-0.1, unclear) == broken(-0.1, up) == "not reproduced"
    with pytest.raises(ValueError, match="profile"):
        dail.claims("big")


def test_a_claim_has_the_scale_of_its_weakest_part():
    scale = {(p, c.id): c.scale for p in ("smoke", "cpu", "gpu") for c in dail.claims(p)}
    for p in ("smoke", "cpu", "gpu"):
        assert {scale[p, i] for i in ("C1", "C2", "C3")} == {"small-model"} and {scale[p, i] for i in ("own-C8", "own-C9")} == {"mechanism"}   # a part of these two is always in gridworlds
        assert {scale[p, i] for i in ("C4", "C5", "C6", "own-C7")} == {"small-model" if p == "gpu" else "mechanism"}
    assert {c.scale for c in dail.claims("gpu", tiny=True)} == {"mechanism"}


# -- the command -----------------------------------------------------------------------------------------------------


def run(*argv):
    return said(use.main, *argv)


def test_command(tmp_path):
    d = dail.play(cartpole, cartpole_expert, 1)
    np.savez(tmp_path / "d.npz", obs=d.obs, actions=d.actions)
    code, out, err = run("train", "CartPole-v1", tmp_path / "d.npz", "--steps", 2048, "--episodes", 1, "--reward", "tanh(x) + 1", "--out", tmp_path / "p.pt")
    assert code == 0 and "2048 steps" in out and out.count("; random play ") == 2 and set(torch.load(tmp_path / "p.pt", weights_only=True)), err
    assert run("--help")[0] == 0 and run("check", "x")[0] == 0
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    for argv, text in ((["train", "CartPole-v1", tmp_path / "bad.npz"], "bad.npz"), (["train", "CartPole-v1", tmp_path / "bad.csv"], "`action`"), (["train", "Nowhere-v3", tmp_path / "d.npz"], "Nowhere-v3"),
                       (["train", "minatar:pong", tmp_path / "d.npz"], "pong"), (["train", "CartPole-v1", tmp_path / "no.npz"], "no.npz"), (["train", "CartPole-v1", tmp_path / "d.npz", "--steps", "3"], "--steps"),
                       (["train", "CartPole-v1", tmp_path / "d.npz", "--reward", "x.y"], "--reward"), (["train", "CartPole-v1", tmp_path / "d.npz", "--regularizer", "x"], "--regularizer"),
                       (["train", "CartPole-v1", tmp_path / "d.npz", "--seed", "-1"], "--seed"), (["check", "1 / x"], "not finite")):
        code, out, err = run(*argv)
        assert code == 2 and out == "" and text in err and err.count("\n") == 1, (argv, err)


def test_formulas_that_begin_with_a_minus():
    want = {name: [f"  r({a:g}) = {b:.6g}" for a, b in zip((-2.0, 1.0), dail.REWARDS[name](torch.tensor([-2.0, 1.0], dtype=torch.float64)).tolist())] for name in ("gail_heuristic", "fairl")}
    for name in want:
        for text in (name, dail.REWARDS[name].source, dail.REWARDS[name].source.replace(" ", "")):
            code, out, err = run("check", text)
            assert code == 0 and all(line in out for line in want[name]), (text, err)
    assert use.formulas(["train", "e", "d", "--reward", "-x", "--steps", "3"]) == ["train", "e", "d", "--reward=-x", "--steps", "3"] and run("check", "--help")[0] == 0
    assert use.formulas(["train", "e", "d", "--reward", "--steps", "3"]) == ["train", "e", "d", "--reward", "--steps", "3"]


@pytest.mark.parametrize("name, text", [("cut.npz", "plain arrays"), ("bytes.npz", "plain arrays"), ("array.npz", "plain arrays"), ("empty.npz", "plain arrays"), ("words.npz", "obs must be"), ("complex.npz", "obs must be"), ("latin.csv", "UTF-8"), ("only.csv", "`action`"),
                                        ("semi.csv", "`action`"), ("short.csv", "line 4 has 2 columns"), ("word.csv", "not a table"), ("file.txt", ".npz or .csv")])
def test_files_that_are_none(tmp_path, name, text):
    d = dail.Demos(np.arange(12.0).reshape(3, 4), [0, 1, 0])
    np.savez_compressed(tmp_path / "good.npz", obs=d.obs, actions=d.actions)
    good = (tmp_path / "good.npz").read_bytes()
    np.save(tmp_path / "a.npy", d.obs)
    {"cut.npz": lambda p: p.write_bytes(good[: len(good) // 2]), "bytes.npz": lambda p: p.write_bytes(good[:60] + bytes(30) + good[90:]), "array.npz": lambda p: p.write_bytes((tmp_path / "a.npy").read_bytes()),
     "empty.npz": lambda p: p.write_bytes(b""), "words.npz": lambda p: np.savez(p, obs=np.array([["a"]]), actions=[0]), "complex.npz": lambda p: np.savez(p, obs=d.obs + 1j, actions=d.actions),
     "latin.csv": lambda p: p.write_bytes("é,action\n1,0\n".encode("latin1")), "only.csv": lambda p: p.write_text("action\n1\n"), "semi.csv": lambda p: p.write_text("a;action\n1;0\n"),
     "short.csv": lambda p: p.write_text("a,b,action\n1,2,0\n\n1,2\n"), "word.csv": lambda p: p.write_text("a,action\n1,left\n"), "file.txt": lambda p: p.write_text("a,action\n1,0\n")}[name](tmp_path / name)
    with pytest.raises(ValueError, match=name) as e:
        dail.load_demos(tmp_path / name)
    assert text in str(e.value)


def test_files_with_the_marks_of_other_programs(tmp_path):
    for name, text in (("bom.csv", "\ufeffa,b,action\n1,2,0\n3,4,1\n"), ("blank.csv", "a,b,action\n1,2,0\n\n3,4,1\n\n\n"), ("CRLF.CSV", "a,b,action\r\n1,2,0\r\n3,4,1\r\n")):
        (tmp_path / name).write_bytes(text.encode())
        d = dail.load_demos(tmp_path / name)
        np.testing.assert_array_equal(d.obs, [[1, 2], [3, 4]])
        assert d.actions.tolist() == [0, 1]


def test_mistakes_are_found_before_training(tmp_path, monkeypatch):
    np.savez(tmp_path / "d.npz", obs=np.zeros((3, 4)), actions=[0, 1, 0])
    (tmp_path / "folder.pt").mkdir()
    monkeypatch.setattr(use.AIL, "fit", lambda *a: pytest.fail("it trained"))
    for argv, text in ((["CartPole-v1", "--episodes", 0], "--episodes"), (["CartPole-v1", "--out", tmp_path / "folder.pt"], "--out"), (["CartPole-v1", "--out", tmp_path / "none" / "p.pt"], "--out"), (["CartPole-v1", "--steps", 15], "--steps"),
                       (["Broken-v0"], "cannot be made"), (["Pendulum-v1"], "discrete actions")):
        if argv[0] == "Broken-v0":
            def make():
                raise gym.error.DependencyNotInstalled("its engine is not installed")

            gym.register("Broken-v0", entry_point=make)
        code, out, err = run("train", argv[0], tmp_path / "d.npz", *argv[1:])
        assert code == 2 and out == "" and text in err and err.count("\n") == 1, (argv, err)
    gym.registry.pop("Broken-v0")
