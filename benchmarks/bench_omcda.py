"""OMCDA: all agents in one batch beside an agent at a time, closed forms beside loops, a search for a strength beside scipy's.

    pytest benchmarks/bench_omcda.py -s

Each pair must give the same answer before the clock starts.
"""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn

from icl26.decision.omcda import RoleGame, conservative_value, log_role_game, make_algorithm, temperature_for_budget, tilted_policy
from icl26.decision.omcda.baselines import counterfactual_penalty
from icl26.decision.omcda.budget import strengths_for_budgets
from icl26.decision.omcda.data import TeamDataset, play_role_game, evaluate
from icl26.decision.omcda.omcda import OMCDA
from timing import best_of, ratio


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- gradient steps --------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    "One agent's copies of the team's networks, as layers of torch."

    def __init__(self, alg, i):
        super().__init__()
        n = alg.n_agents

        def copy_of(net, at):
            layers = []
            for k, (w, b) in enumerate(zip(net.weights, net.biases)):
                layer = nn.Linear(w.shape[1], w.shape[2])
                layer.weight.data, layer.bias.data = w.data[at].T.clone(), b.data[at, 0].clone()
                layers += [layer] + [nn.ReLU()] * (k < 2)
            return nn.Sequential(*layers)

        self.q_r, self.q_c, self.actor = copy_of(alg.critic.net, i), copy_of(alg.critic.net, n + i), copy_of(alg.actor.net, i)
        self.slow_r, self.slow_c = copy_of(alg.target_critic.net, i), copy_of(alg.target_critic.net, n + i)


class AgentByAgent:
    "The update of `OMCDA` with discrete actions as it is often written: a loop over agents, a module and an optimiser each."

    def __init__(self, alg):
        self.alg, self.agents = alg, [Plain(alg, i) for i in range(alg.n_agents)]
        self.mixer, self.slow_mixer = alg.mixer, alg.target_mixer
        self.optimisers = [torch.optim.Adam([*a.q_r.parameters(), *a.q_c.parameters(), *a.actor.parameters()], lr=5e-4) for a in self.agents]
        self.optimisers.append(torch.optim.Adam(self.mixer.parameters(), lr=5e-4))
        self.log_alpha = [0.0] * alg.n_agents

    def losses(self, x):
        w, offset = self.mixer(x["obs"])
        with torch.no_grad():
            w2, offset2 = self.slow_mixer(x["next_obs"])
        total, target, td_c, policy, outs, qs = offset, offset2, 0.0, 0.0, [], []
        for i, agent in enumerate(self.agents):
            alpha, a = math.exp(self.log_alpha[i]), x["actions"][:, i]
            with torch.no_grad():
                q_r2, q_c2, log_b2 = agent.slow_r(x["next_obs"][:, i]), agent.slow_c(x["next_obs"][:, i]), x["b_next"][:, i]
                pi2 = torch.softmax(log_b2 + (w2[:, i : i + 1] / alpha) * q_r2 + q_c2, -1)
                v_r2 = (pi2 * q_r2).sum(-1)
                v_c2 = torch.logsumexp(log_b2 + (w2[:, i : i + 1] / alpha) * (q_r2 - v_r2[:, None]) + q_c2, -1)
                y_c = 0.99 * x["live"] * v_c2.clamp(max=0)
            q_r, q_c = agent.q_r(x["obs"][:, i]), agent.q_c(x["obs"][:, i])
            total, target = total + w[:, i] * q_r.gather(1, a[:, None])[:, 0], target + w2[:, i] * v_r2
            td_c = td_c + (q_c.gather(1, a[:, None])[:, 0] - y_c).square().mean()
            out = torch.log_softmax(agent.actor(x["obs"][:, i]), -1)
            goal = torch.softmax(x["b_out"][:, i] + (w[:, i : i + 1] / alpha) * q_r + q_c, -1).detach()
            policy = policy - (goal * out).sum(-1).mean()
            outs.append(out.detach())
            qs.append((w[:, i : i + 1] * q_r).detach())
        td_r = (total - x["rewards"] - 0.99 * x["live"] * target).square().mean()
        return td_r, td_c, policy, outs, qs

    def step(self, x):
        td_r, td_c, policy, outs, qs = self.losses(x)
        for o in self.optimisers:
            o.zero_grad()
        (td_r + td_c + policy).backward()
        for o in self.optimisers:
            for g in o.param_groups:
                nn.utils.clip_grad_norm_(g["params"], 1.0)
            o.step()
        with torch.no_grad():
            for agent in self.agents:
                for slow, fast in ((agent.slow_r, agent.q_r), (agent.slow_c, agent.q_c)):
                    for p, q in zip(slow.parameters(), fast.parameters()):
                        p.mul_(0.995).add_(q, alpha=0.005)
            for p, q in zip(self.slow_mixer.parameters(), self.mixer.parameters()):
                p.mul_(0.995).add_(q, alpha=0.005)
            m, spent = [], []
            for i, (out, q) in enumerate(zip(outs, qs)):
                pi, gap = out.exp(), out - x["b_out"][:, i]
                gv, gk = pi * (q - (pi * q).sum(-1, keepdim=True)), pi * (gap - (pi * gap).sum(-1, keepdim=True))
                m.append(((gv * gk).sum() / ((gk * gk).sum() + 1e-6)).clamp(-10, 10).item())
                spent.append((pi * gap).sum(-1).mean().item())
            share = np.exp(m) / np.exp(m).sum()
            for i in range(len(m)):
                self.log_alpha[i] -= 0.01 * (1.2 * share[i] - spent[i])


def team(n, transitions=3000, seed=0):
    rng = np.random.default_rng(seed)
    return TeamDataset(rng.normal(size=(transitions, n, 6)), rng.integers(0, 4, (transitions, n)), rng.normal(size=transitions), rng.normal(size=(transitions, n, 6)),
                       rng.random(transitions) < 0.05, True, 4)


def test_gradient_steps_beside_an_agent_at_a_time():
    for n in (3, 8):
        alg = OMCDA(team(n), seed=0, bc_steps=20).fit(0)
        slow = AgentByAgent(OMCDA(team(n), seed=0, bc_steps=20).fit(0))
        x = {k: v[:128] for k, v in alg.data.items()}
        losses, *_ = alg.discrete_losses(x, alg.log_alpha.exp(), torch.ones(n))
        np.testing.assert_allclose([losses[k].item() for k in ("td_reward", "td_deviation", "policy")], [v.item() for v in slow.losses(x)[:3]], rtol=1e-4)
        a, b = best_of(lambda: alg.fit(100), 3) / 100, best_of(lambda: [slow.step(x) for _ in range(100)], 3) / 100
        print(f"\n{n} agents: {1 / a:.0f} gradient steps a second in one batch, {1 / b:.0f} an agent at a time")
        ratio(f"an update of OMCDA, {n} agents, beside a loop over agents", a, b, 1.1)


def test_more_agents_cost_little():
    seconds = {n: best_of(lambda: algs.fit(100), 3) / 100 for n in (2, 8) for algs in [OMCDA(team(n), seed=0, bc_steps=5).fit(5)]}
    print(f"\nan update: {seconds[2] * 1e3:.2f} ms for 2 agents, times {seconds[8] / seconds[2]:.2f} for 8")
    assert seconds[8] / seconds[2] < 4


def test_every_algorithm_in_steps_a_second():
    log = log_role_game(RoleGame(0), 100)
    rates = {name: 100 / best_of(lambda: algs.fit(100), 2) for name in ("omiga", "cfcql", "macql") for algs in [make_algorithm(name, log, bc_steps=5).fit(5)]}
    alg = make_algorithm("omcda", log, hidden=64, batch_size=128, bc_steps=5).fit(5)
    seconds = best_of(lambda: alg.fit(1000), 2)
    assert alg.n_agents == 3 and alg.n_steps_ == 2005
    print(f"\n1000 updates of omcda, three agents: {seconds:.2f} CPU s; gradient steps a second: " + ", ".join(f"{k} {v:.0f}" for k, v in rates.items()))
    assert seconds < 8


# -- operators -------------------------------------------------------------------------------------------------------


def spent(q, b, x):
    "KL of the tilted policy at log strength x, in plain numpy."
    z = np.log(b) + q * math.exp(-x)
    p = np.exp(z - z.max())
    p /= p.sum()
    return (p * np.log(np.maximum(p, 1e-300) / b)).sum()


def budgets(M, A=8, seed=0):
    rng = np.random.default_rng(seed)
    q, b = rng.normal(size=(M, A)), rng.dirichlet(np.ones(A), M)
    return q, b, -np.log(b[np.arange(M), q.argmax(1)]) * rng.uniform(0.05, 0.9, M)


def brent(q, b, d):
    return math.exp(brentq(lambda x: spent(q, b, x) - d, math.log(1e-3), math.log(1e6), xtol=1e-10))


def test_a_strength_beside_brentq():
    q, b, d = budgets(50)
    ours, theirs = lambda: [temperature_for_budget(*row) for row in zip(q, b, d)], lambda: [brent(*row) for row in zip(q, b, d)]
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-4)
    ratio("50 strengths one by one, checks included, beside scipy's brentq", best_of(ours, 5), best_of(theirs, 5), 0.3)


def test_many_strengths_beside_brentq():
    q, b, d = budgets(800)
    ours, theirs = lambda: strengths_for_budgets(q, b, d), lambda: [brent(*row) for row in zip(q, b, d)]
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-4)
    ratio("800 strengths at once beside scipy's brentq", best_of(ours, 5), best_of(theirs, 2), 10)


def test_the_conservative_value_beside_a_loop():
    rng = np.random.default_rng(0)
    q_r, q_c, b, v, w = rng.normal(size=(128, 3, 8)), rng.normal(size=(128, 3, 8)), rng.dirichlet(np.ones(8), (128, 3)), rng.normal(size=(128, 3)), rng.random((128, 3))
    tensors = [torch.as_tensor(x) for x in (q_r, v, q_c, b)]

    def theirs():
        out = np.empty((128, 3))
        for t in range(128):
            for i in range(3):
                z = [math.log(b[t, i, a]) + w[t, i] / 0.5 * (q_r[t, i, a] - v[t, i]) + q_c[t, i, a] for a in range(8)]
                top = max(z)
                out[t, i] = top + math.log(sum(math.exp(x - top) for x in z))
        return out

    ours = lambda: conservative_value(*tensors, 0.5, torch.as_tensor(w))
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    ratio("conservative values of a batch of 128, 3 agents, 8 actions, beside a loop", best_of(ours, 30), best_of(theirs, 3), 10)


def test_tilted_policies_beside_a_loop():
    rng = np.random.default_rng(1)
    q, b = rng.normal(size=(400, 8)), rng.dirichlet(np.ones(8), 400)

    def theirs():
        rows = []
        for t in range(400):
            e = [b[t, a] * math.exp(q[t, a] / 0.5) for a in range(8)]
            rows.append([x / sum(e) for x in e])
        return rows

    ours = lambda: tilted_policy(q, b, 0.5)
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    ratio("400 tilted policies of 8 actions beside a loop", best_of(ours, 30), best_of(theirs, 3), 5)


def test_the_counterfactual_penalty_beside_joint_values():
    g = torch.Generator().manual_seed(0)
    q, w, kl, a = torch.randn(64, 3, 8, generator=g), torch.rand(64, 3, generator=g), torch.rand(64, 3, generator=g), torch.randint(8, (64, 3), generator=g)
    data = q.gather(-1, a[..., None])[..., 0]

    def theirs():
        "Q_tot of every joint action in which one agent moves, row by row."
        total, share = 0.0, torch.softmax(5 * kl, -1)
        for t in range(64):
            base = (w[t] * data[t]).sum()
            for i in range(3):
                moved = torch.stack([base - w[t, i] * data[t, i] + w[t, i] * q[t, i, k] for k in range(8)])
                total = total + share[t, i] * (torch.logsumexp(moved, 0) - base) / 64
        return total

    ours = lambda: counterfactual_penalty(q, data, w, kl)
    torch.testing.assert_close(ours(), theirs())
    ratio("CFCQL's penalty, batch of 64, beside joint values row by row", best_of(ours, 30), best_of(theirs, 2), 20)


def test_episodes_in_step_beside_the_environment():
    game = RoleGame(0)
    alg = make_algorithm("bc", log_role_game(game, 50), bc_steps=20).fit(0)
    ours, theirs = lambda: play_role_game(alg.act, game, 50, seed=0), lambda: evaluate(alg, game.parallel_env(), 50, seed=0)
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-5)
    ratio("50 episodes of the role game in step beside one by one", best_of(ours, 3), best_of(theirs, 2), 5)
