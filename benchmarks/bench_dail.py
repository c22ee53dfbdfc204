"""Adversarial imitation: whole batches beside loops over single steps, transport beside its peer.

pytest benchmarks/bench_dail.py -s

Each pair must give the same answer before the clock starts.
"""

import time

import numpy as np
import torch
from torch import nn

from icl26.decision.dail import AIL, REWARDS, demonstrate, wasserstein
from icl26.decision.dail.ail import Discriminator, DiscriminatorLearner, minatar
from icl26.decision.dail.analysis import gridworlds, tabular_ail
from icl26.decision.onpolicy import PPO, Batch, Config, Envs, gae, mlp, rollout, sample_actions
from timing import best_of, ratio

torch.set_num_threads(1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# -- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_of_a_rollout_beside_step_by_step():
    logits = torch.randn(2048, generator=generator()).mul(3)
    for name in ("dail", "gail"):
        f = REWARDS[name]
        ours, theirs = lambda: f(logits), lambda: torch.stack([f(x) for x in logits])
        torch.testing.assert_close(ours(), theirs())
        ratio(f"{name} of 2048 steps in one call", best_of(ours, 50), best_of(theirs, 3), 50)


def test_a_compiled_function_beside_the_same_in_torch():
    logits = torch.randn(200_000, generator=generator())
    by_hand = lambda: 0.5 * torch.sigmoid(logits) * (torch.tanh(logits) + 1)
    ours = lambda: REWARDS["dail"](logits)
    torch.testing.assert_close(ours(), by_hand())
    ratio("dail through the compiler beside torch by hand, 200,000 logits", best_of(ours, 30), best_of(by_hand, 30), 0.7)


# -- environments and gradients --------------------------------------------------------------------------------------


def policy_and_value(D=400, A=3, seed=0):
    g = generator(seed)
    return mlp((D, 64, 64, A), last_gain=0.01, generator=g), mlp((D, 64, 64, 1), generator=g)


def one_by_one(envs, policy, T, g):
    "A rollout with a forward pass for every environment and step; the draws are those of the batch."
    out = []
    with torch.no_grad():
        for _ in range(T):
            obs = torch.from_numpy(envs.obs.copy())
            logits = torch.cat([policy(o[None]) for o in obs])
            actions = sample_actions(logits, g).tolist()
            r, d, t, last = np.empty(envs.n, np.float32), np.empty(envs.n, bool), np.empty(envs.n, bool), np.empty((envs.n, envs.obs_dim), np.float32)
            envs.step(actions, r, d, t, last)
            out.append((obs, torch.tensor(actions), torch.from_numpy(r)))
    return [torch.stack(x) for x in zip(*out)]


def test_environment_steps_beside_a_loop_over_environments():
    policy, _ = policy_and_value()
    make = minatar("breakout")
    b = rollout(Envs(make, 16), policy, 32, generator=generator())
    obs, actions, rewards = one_by_one(Envs(make, 16), policy, 32, generator())
    torch.testing.assert_close(b.obs, obs), torch.testing.assert_close(b.actions, actions), torch.testing.assert_close(b.rewards, rewards)
    envs = Envs(make, 16)
    ours, theirs = (best_of(f, 5) for f in (lambda: rollout(envs, policy, 64, generator=generator()), lambda: one_by_one(envs, policy, 64, generator())))
    print(f"\nBreakout: {16 * 64 / ours:,.0f} environment steps a second of processor time")
    ratio("rollout of 16 environments beside a forward pass for each", ours, theirs, 1.3)


def test_gradient_steps_beside_a_sample_at_a_time():
    g = generator()
    x = lambda *shape: torch.randn(*shape, generator=g)
    batch = Batch(x(16, 16, 400), torch.randint(3, (16, 16), generator=g), x(16, 16), torch.rand(16, 16, generator=g) < 0.05, torch.zeros(16, 16, dtype=torch.bool), x(16, 16, 400), [])
    learner = PPO(*policy_and_value(), Config(grad_clip=1e9))
    a, target = learner.advantages(batch)
    obs, actions, a, target = (batch.flat(y) for y in (batch.obs, batch.actions, a, target))
    loss = lambda i: -(learner.policy(obs[i]).log_softmax(-1).gather(-1, actions[i][:, None])[:, 0] * a[i]).mean() + 0.5 * (learner.value(obs[i]).squeeze(-1) - target[i]).square().mean()

    def ours():
        return torch.autograd.grad(loss(slice(None)), learner.parameters)

    def theirs():
        total = [torch.zeros_like(p) for p in learner.parameters]
        for i in range(len(a)):
            for t, d in zip(total, torch.autograd.grad(loss(slice(i, i + 1)), learner.parameters)):
                t += d / len(a)
        return total

    for p, q in zip(ours(), theirs()):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-3)
    ratio("gradient of 256 steps beside one step at a time", best_of(ours, 20), best_of(theirs, 2), 10)


def test_advantages_beside_a_loop_over_environments():
    g = generator()
    r, v, nv = torch.randn(3, 128, 16, generator=g)
    done, trunc = torch.rand(2, 128, 16, generator=g) < 0.02

    def theirs():
        out = torch.zeros(128, 16)
        for n in range(16):
            carry = 0.0
            for t in reversed(range(128)):
                delta = r[t, n] + 0.99 * nv[t, n] * ~done[t, n] - v[t, n]
                carry = delta + 0.99 * 0.95 * carry * ~(done[t, n] | trunc[t, n])
                out[t, n] = carry
        return out

    ours = lambda: gae(r, v, done, trunc, 0.99, 0.95, nv)
    torch.testing.assert_close(ours(), theirs(), atol=1e-5, rtol=1e-4)
    ratio("advantages of 128 × 16 steps beside a loop over environments", best_of(ours, 20), best_of(theirs, 2), 5)


def test_imitation_end_to_end():
    "The floor is for one free core: processor time, the best of three."
    env, demos = demonstrate("breakout", 2)
    AIL(env, demos, seed=0).fit(2048)                                                        # imports, first calls
    spent = []
    for _ in range(3):
        t = time.process_time()
        AIL(env, demos, seed=0).fit(20_480)
        spent.append(time.process_time() - t)
    rate = 20_480 / min(spent)
    print(f"\nadversarial imitation on Breakout, end to end: {rate:,.0f} environment steps a second of processor time")
    assert rate > 8_000


def test_a_discriminator_step_beside_single_pairs():
    g = generator()
    disc = Discriminator(400, 3, generator=g)
    expert, policy = torch.rand(128, 403, generator=g), torch.rand(128, 403, generator=g)
    softplus = nn.functional.softplus

    def ours():
        le, lp = disc.net(torch.cat([expert, policy])).squeeze(-1).split(128)
        return softplus(-le).mean() + softplus(lp).mean()

    def theirs():
        return sum(softplus(-disc.net(x)[0]) for x in expert) / 128 + sum(softplus(disc.net(x)[0]) for x in policy) / 128

    torch.testing.assert_close(ours(), theirs())
    assert DiscriminatorLearner(disc, "none").step(expert, policy) > 0
    ratio("discriminator loss of 128 + 128 pairs beside single pairs", best_of(ours, 20), best_of(theirs, 3), 5)


# -- transport -------------------------------------------------------------------------------------------------------


def test_transport_beside_pot():
    import ot

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 20)), rng.normal(size=(300, 20)) + 0.3
    uniform = lambda n: np.full(n, 1 / n)
    theirs = lambda: ot.emd2(uniform(300), uniform(300), ot.dist(x, y, metric="euclidean"))
    ours = lambda: wasserstein(x, y)
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    ratio("exact W1 of 300 against 300 points (an assignment) beside POT's network simplex", best_of(ours, 5), best_of(theirs, 5), 0.5)
    short = y[:220]
    theirs = lambda: ot.emd2(uniform(300), uniform(220), ot.dist(x, short, metric="euclidean"), numItermax=10_000_000)
    ours = lambda: wasserstein(x, short)
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    ratio("exact W1 of 300 against 220 points beside POT called directly", best_of(ours, 5), best_of(theirs, 5), 0.5)


def test_transport_beside_a_linear_program():
    from scipy.optimize import linprog
    from scipy.sparse import eye, kron, vstack

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(60, 5)), rng.normal(size=(45, 5))
    cost = np.linalg.norm(x[:, None] - y[None], axis=-1)
    A = vstack([kron(eye(60), np.ones((1, 45))), kron(np.ones((1, 60)), eye(45))]).tocsr()
    theirs = lambda: linprog(cost.ravel(), A_eq=A, b_eq=np.r_[np.full(60, 1 / 60), np.full(45, 1 / 45)], method="highs").fun
    ours = lambda: wasserstein(x, y)
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-7)
    ratio("exact W1 of 60 against 45 points beside HiGHS", best_of(ours, 10), best_of(theirs, 3), 3)


# -- the laboratory --------------------------------------------------------------------------------------------------


def test_all_worlds_at_once_beside_one_after_the_other():
    worlds, singles = gridworlds(range(20)), [gridworlds([s]) for s in range(20)]
    ours = lambda: tabular_ail(worlds, REWARDS["dail"], 20)["returns"][-1]
    theirs = lambda: np.concatenate([tabular_ail(w, REWARDS["dail"], 20)["returns"][-1] for w in singles])
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    ratio("20 gridworlds at once beside one after the other", best_of(ours, 5), best_of(theirs, 3), 1.5)
