"onpolicy: rollouts, advantages and the two learners against what is known independently."

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from icl26.decision.onpolicy import A2C, PPO, Batch, Config, Envs, gae, mlp, normalize, rollout, sample_actions

gym = pytest.importorskip("gymnasium")


class Counter(gym.Env):
    "Observations (t, episode); ends after `end` steps, cut after `cut`; pays the action."

    observation_space, action_space = gym.spaces.Box(-1, 1e6, (2,), np.float32), gym.spaces.Discrete(3)

    def __init__(self, end=10**9, cut=10**9):
        self.end, self.cut, self.episode = end, cut, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return np.array([self.t, self.episode], np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([self.t, self.episode], np.float32), float(action), self.t >= self.end, self.t >= self.cut and self.t < self.end, {}


def policy(n=2, a=3):
    return mlp((n, 8, a), generator=torch.Generator().manual_seed(0))


def test_signatures():
    assert list(inspect.signature(gae).parameters)[:6] == ["r", "v", "done", "trunc", "gamma", "lam"]
    assert list(inspect.signature(rollout).parameters)[:3] == ["envs", "policy", "T"]
    for kind in (PPO, A2C):
        assert list(inspect.signature(kind).parameters) == ["policy", "value", "cfg"] and callable(kind.update)


def test_rollout_keeps_what_an_episode_ended_with():
    envs = Envs(lambda seed: Counter(end=3) if seed == 0 else Counter(cut=2), 2)
    b = rollout(envs, policy(), 4, generator=torch.Generator().manual_seed(0))
    assert isinstance(b, Batch) and b.obs.shape == b.last_obs.shape == (4, 2, 2) and len(b) == 8
    assert b.obs[:, 0].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1]] and b.last_obs[:, 0].tolist() == [[1, 0], [2, 0], [3, 0], [1, 1]]
    assert b.obs[:, 1].tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]] and b.last_obs[:, 1].tolist() == [[1, 0], [2, 0], [1, 1], [2, 1]]
    assert b.done.T.tolist() == [[False, False, True, False], [False] * 4] and b.trunc.T.tolist() == [[False] * 4, [False, True, False, True]]
    assert (b.rewards == b.actions).all() and [length for _, length in b.episodes] == [2, 3, 2]
    assert [ret for ret, _ in b.episodes] == [b.rewards[:2, 1].sum(), b.rewards[:3, 0].sum(), b.rewards[2:, 1].sum()]
    more = rollout(envs, policy(), 1)
    assert more.obs[0].tolist() == [[1, 1], [0, 2]]                                          # goes on where it stood


def test_actions_have_the_probabilities_of_their_logits():
    logits = torch.tensor([[0.0, 1.0, -1.0]]).expand(20_000, 3)
    share = torch.bincount(sample_actions(logits, torch.Generator().manual_seed(0)), minlength=3) / 20_000
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=0.015, rtol=0)


def test_gae_bootstraps_at_a_limit_and_not_at_an_end():
    r, v = torch.tensor([1.0, 1, 1]), torch.tensor([2.0, 3, 4, 50])
    no, last = torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True])
    for lam in (0.0, 0.7, 1.0):
        assert gae(r, v, last, no, 0.9, lam)[-1] == 1 - 4
        torch.testing.assert_close(gae(r, v, no, last, 0.9, lam)[-1], torch.tensor(1 + 0.9 * 50 - 4))
    middle = torch.tensor([False, True, False])                                              # nothing flows back over either
    for ends in ((middle, no), (no, middle)):
        a = gae(r, v, *ends, 0.9, 1.0)
        b = gae(torch.tensor([1.0, 1, 100]), v, *ends, 0.9, 1.0)
        torch.testing.assert_close(a[:2], b[:2])
    torch.testing.assert_close(gae(r, v, no, no, 0.9, 0.0), r + 0.9 * v[1:] - v[:3])


def test_gae_is_the_loop_for_any_shape():
    g = torch.Generator().manual_seed(1)
    r, v, nv = torch.randn(3, 12, 3, generator=g, dtype=torch.float64)
    done, trunc = torch.rand(2, 12, 3, generator=g) < 0.15
    for n in range(3):
        want, carry = np.zeros(12), 0.0
        for t in reversed(range(12)):
            delta = r[t, n] + (0.97 * nv[t, n] if not done[t, n] else 0) - v[t, n]
            carry = want[t] = float(delta + (0.97 * 0.9 * carry if not (done[t, n] or trunc[t, n]) else 0))
        np.testing.assert_allclose(gae(r, v, done, trunc, 0.97, 0.9, nv)[:, n], want)
        np.testing.assert_allclose(gae(r[:, n], v[:, n], done[:, n], trunc[:, n], 0.97, 0.9, nv[:, n]), want)
    for bad in ((r[:5], v, done, trunc), (r, v[:5], done, trunc), (r, v, done[:, :2], trunc), (r, v, done, trunc)):
        with pytest.raises(ValueError):
            gae(*bad, 0.9, 0.9)
    with pytest.raises(ValueError, match="next_v"):
        gae(r, v, done, trunc, 0.9, 0.9, nv[:3])


def test_advantages_of_a_batch_value_the_state_that_was_cut():
    envs = Envs(lambda seed: Counter(cut=2), 1)
    b = rollout(envs, policy(), 3, generator=torch.Generator().manual_seed(0))
    value = nn.Linear(2, 1, bias=False)
    value.weight.data = torch.tensor([[10.0, 1000.0]])                                       # value of (t, episode): 10 t + 1000 episode
    a, target = PPO(policy(), value, Config(gamma=0.5, lam=0.0)).advantages(b)
    torch.testing.assert_close(target[:, 0], b.rewards[:, 0] + 0.5 * torch.tensor([10.0, 20.0, 1010.0]))
    torch.testing.assert_close(a[:, 0], target[:, 0] - torch.tensor([0.0, 10.0, 1000.0]))


def test_equal_advantages_are_zero_not_nan():
    assert (normalize(torch.full((4, 2), 7.7)) == 0).all() and torch.isfinite(normalize(torch.zeros(1))).all()
    envs = Envs(lambda seed: Counter(end=3), 2)
    b = rollout(envs, policy(), 6, generator=torch.Generator().manual_seed(0))
    b.rewards = torch.zeros_like(b.rewards)
    zero = nn.Linear(2, 1)
    nn.init.zeros_(zero.weight), nn.init.zeros_(zero.bias)
    pi = policy()
    before = [p.clone() for p in pi.parameters()]
    stats = PPO(pi, zero, Config(entropy=0.0)).update(b)
    assert all(np.isfinite(v) for v in stats.values())
    for p, q in zip(pi.parameters(), before):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)                                  # nothing to learn, nothing changed


def test_the_clip_stops_paying():
    ppo = PPO(policy(), mlp((2, 1)), Config(clip=0.2))
    old, ratio = torch.zeros(4), torch.tensor([1.5, 0.5, 1.5, 0.5])
    logp = ratio.log().requires_grad_()
    a = torch.tensor([1.0, 1.0, -1.0, -1.0])
    gain = ppo.surrogate(logp, old, a)
    torch.testing.assert_close(gain, torch.tensor([1.2, 0.5, -1.5, -0.8]).mean())
    (grad,) = torch.autograd.grad(gain, logp)
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.5, -1.5, 0.0]) / 4)


@pytest.mark.parametrize("kind", [PPO, A2C])
def test_both_learn_to_take_the_action_that_pays(kind):
    envs, g = Envs(lambda seed: Counter(end=8), 4), torch.Generator().manual_seed(0)
    pi = policy()
    learner = kind(pi, mlp((2, 8, 1), generator=g), Config(lr=0.02, seed=0))
    for _ in range(25 if kind is PPO else 60):
        batch = rollout(envs, pi, 16, generator=g)
        learner.update(batch)
    assert batch.rewards.mean() > 1.6                                                        # uniform play: 1


def test_bad_input():
    for bad, error in ((dict(make_env=3, n=1), TypeError), (dict(make_env=lambda s: Counter(), n=0), ValueError), (dict(make_env=lambda s: gym.make("Pendulum-v1"), n=1), ValueError)):
        with pytest.raises(error):
            Envs(**bad)
    with pytest.raises(ValueError, match="T must"):
        rollout(Envs(lambda s: Counter(), 1), policy(), 0)
