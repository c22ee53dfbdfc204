"""Plasticity rules: batched simulation, dominance and search beside plain loops, snntorch where installed, and pymoo.

    pytest benchmarks/bench_plasticity.py -s

Each pair must give the same answer before the clock starts.
"""


import numpy as np
import pytest
import torch

from icl26.networks.plasticity import ChangeDetection, NeuralEvolution, Neuron, RuleSpace, V1Circuit, noisy_fronts
from icl26.networks.plasticity.evolution import crowding_distance
from icl26.networks.plasticity.rules import monomials
from icl26.networks.plasticity.simulate import Stepper, lay_out, lif_step
from timing import best_of, ratio

SPACE, NEURON = RuleSpace(), Neuron()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# -- spiking steps with plasticity -----------------------------------------------------------------------------------


def batched(thetas, circuit, currents):
    "Plastic steps of all rules; final shares of w_max, (E, P), and spikes of the last step."
    with torch.inference_mode():
        sim = Stepper(circuit, lay_out(thetas, circuit, 5.0, 0.01), len(thetas), NEURON, ChangeDetection())
        spikes = sim.window(currents, True)
    return sim.u, spikes


def plain(theta, circuit, currents):
    "One rule: a loop over neurons and a loop over synapses."
    rule, N = SPACE.decode(theta), circuit.n_neurons
    types, tau = circuit.types.tolist(), rule.tau_e.tolist()
    edges = list(zip(circuit.pre.tolist(), circuit.post.tolist(), circuit.sign.tolist(), circuit.w_max.tolist()))
    c = rule.coefficients(circuit.types[circuit.pre], circuit.types[circuit.post]).tolist()
    w, v, a, s, x = circuit.w0.tolist(), [0.0] * N, [0.0] * N, [0] * N, [0.0] * N
    for external in currents[:, :, 0].tolist():
        syn = [0.0] * N
        for (j, k, sign, _), weight in zip(edges, w):
            syn[k] += sign * weight * s[j]
        for n in range(N):
            v[n] = max(min(v[n] + 0.25 * (syn[n] + external[n] - v[n] - 2 * a[n]), 3), -3)
            s[n] = int(v[n] >= 1)
            v[n], a[n] = (0.0 if s[n] else v[n]), a[n] * (1 - 5 / 150) + 0.15 * s[n]
        for e, (j, k, _, top) in enumerate(edges):
            p, q, y, z = s[j], s[k], x[j], x[k]
            dw = 0.01 * top * sum(a_ * b for a_, b in zip(c[e], (p, y, p * y, y * y, q, z, q * z, z * z, p * q, p * z, y * q, y * z)))   # R is 0: no reward here
            w[e] = min(max(w[e] + max(dw, 0) * (1 - w[e] / top) + min(dw, 0) * w[e] / top, 0), top)
        x = [(1 - 5 / max(tau[types[n]], 5)) * x[n] + s[n] for n in range(N)]
    return np.array(w)


def one_rule_in_torch(theta, circuit, currents):
    "One rule, vectorised over synapses, all 25 terms at every synapse, with its coefficients looked up once and nothing checked on the way."
    rule, pre, post = SPACE.decode(theta), circuit.pre, circuit.post
    c, r = rule.coefficients(circuit.types[pre], circuit.types[post]), torch.zeros(len(pre), dtype=torch.float64)
    keep, top = 1 - 5.0 / rule.tau_e[circuit.types].clamp(min=5.0), circuit.w_max.double()
    w, s, x = circuit.w0.double(), torch.zeros(circuit.n_neurons), torch.zeros(circuit.n_neurons, dtype=torch.float64)
    state = tuple(torch.zeros(circuit.n_neurons, 1) for _ in range(3))
    for external in currents:
        syn = torch.zeros(circuit.n_neurons).index_add_(0, post, (w * circuit.sign).float() * s[pre])
        state, spikes = lif_step(state, syn[:, None], external, NEURON, 5.0)
        s = spikes[:, 0]
        d = 0.01 * top * (monomials(s[pre].double(), s[post].double(), x[pre], x[post], r) * c).sum(-1)
        w = (w + d.clamp(min=0) * (1 - w / top) + d.clamp(max=0) * (w / top)).clamp(min=0).minimum(top)
        x = keep * x + s.double()
    return w.numpy()


def setting(n, P, steps, p_gate=0.2):
    circuit = V1Circuit(n, 0)
    g = torch.Generator().manual_seed(0)
    return SPACE.random(P, 0, p_gate), circuit, 0.9 + 0.3 * torch.randn(steps, n, 1, generator=g)


def test_plastic_steps_beside_a_loop_over_neurons_and_synapses():
    thetas, circuit, currents = setting(100, 64, 30)
    u, _ = batched(thetas, circuit, currents)
    for i in (0, 7):
        np.testing.assert_allclose(u[:, i] * circuit.w_max, plain(thetas[i], circuit, currents), atol=1e-4)
    theirs = best_of(lambda: plain(thetas[0], circuit, currents), 2) * 64
    ratio("30 plastic steps, 100 neurons, 64 rules, beside plain Python (one rule, times 64)", best_of(lambda: batched(thetas, circuit, currents), 5), theirs, 50)


def test_plastic_steps_beside_one_rule_at_a_time_in_torch():
    thetas, circuit, currents = setting(100, 64, 30)
    u, _ = batched(thetas, circuit, currents)
    np.testing.assert_allclose(u[:, 3] * circuit.w_max, one_rule_in_torch(thetas[3], circuit, currents), atol=1e-4)
    theirs = best_of(lambda: [one_rule_in_torch(t, circuit, currents) for t in thetas[:8]], 2) * 8
    ratio("30 plastic steps, 100 neurons, 64 rules, beside one rule at a time with all terms (eight rules, times 8)", best_of(lambda: batched(thetas, circuit, currents), 5), theirs, 3)


def test_time_grows_with_rules_and_synapses_about_linearly():
    seconds = {(n, P): best_of(lambda a=setting(n, P, 20): batched(*a), 4) for n, P in ((100, 16), (100, 128), (280, 16))}
    print("\n20 plastic steps:", {k: f"{v * 1e3:.1f} ms" for k, v in seconds.items()})
    assert seconds[100, 128] < 24 * seconds[100, 16] and seconds[280, 16] < 24 * seconds[100, 16]


def test_neurons_beside_snntorch():
    snn = pytest.importorskip("snntorch")
    leaky = snn.Leaky(beta=0.75, threshold=1.0, reset_mechanism="zero", reset_delay=False)
    plain_neuron = Neuron(adapt_step=0.0, adapt_weight=0.0, clip=1e9)
    currents = torch.rand(200, 100, 32, generator=torch.Generator().manual_seed(0)) * 2.4

    def ours():
        state, out = tuple(torch.zeros(100, 32) for _ in range(3)), []
        for c in currents:
            state, s = lif_step(state, torch.zeros(100, 32), c, plain_neuron, 5.0)
            out.append(s)
        return torch.stack(out)

    def theirs():
        mem, out = torch.zeros(100, 32), []
        for c in currents:
            s, mem = leaky(0.25 * c, mem)
            out.append(s)
        return torch.stack(out)

    with torch.no_grad():
        assert (ours() != theirs()).float().mean() < 1e-3
        ratio("200 steps of 3200 neurons beside snntorch's Leaky", best_of(ours, 5), best_of(theirs, 5), 0.5)


# -- selection -------------------------------------------------------------------------------------------------------


def test_fronts_beside_pymoo():
    from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting

    for n in (96, 1000):
        mu = np.random.default_rng(0).normal(size=(n, 6)).round(2)
        ours, theirs = lambda: noisy_fronts(mu, np.zeros_like(mu)), lambda: NonDominatedSorting().do(mu)
        assert [sorted(f) for f in ours()] == [sorted(f) for f in theirs()]
        ratio(f"fronts of {n} individuals, 6 objectives, no noise, beside pymoo", best_of(ours, 7), best_of(theirs, 5), 0.005)  # pymoo sorts in compiled code; ours also weighs variances


def test_crowding_beside_pymoo():
    from pymoo.operators.survival.rank_and_crowding.metrics import calc_crowding_distance

    f = np.random.default_rng(0).random((400, 6))
    a, b = crowding_distance(f), calc_crowding_distance(f, filter_out_duplicates=False)
    inner = np.isfinite(a)
    np.testing.assert_allclose(a[inner] / 6, b[inner])
    ratio("crowding distance of 400, beside pymoo", best_of(lambda: crowding_distance(f), 7), best_of(lambda: calc_crowding_distance(f, filter_out_duplicates=False), 7), 0.1)


def test_a_generation_beside_nsga2():
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.core.problem import Problem
    from pymoo.optimize import minimize

    target = np.linspace(-0.5, 0.5, 6)
    f = lambda x: np.stack([(x[:, 25] - t) ** 2 + x[:, 26] ** 2 for t in target], 1)

    class Trivial(Problem):
        def __init__(self):
            super().__init__(n_var=2645, n_obj=6, xl=SPACE.bounds[:, 0], xu=SPACE.bounds[:, 1])

        def _evaluate(self, x, out, *args, **kwargs):
            out["F"] = f(x)

    ours = lambda: NeuralEvolution(SPACE, lambda x, seed: f(x), pop_size=64, seed=1).run(20)
    theirs = lambda: minimize(Trivial(), NSGA2(pop_size=64), ("n_gen", 21), seed=1, verbose=False)
    h, r = ours(), theirs()
    start = f(SPACE.random(64, 0)).sum(1).mean()
    assert h.means.sum(1).mean() < 0.7 * start and r.pop.get("F").sum(1).mean() < 0.7 * start       # both search
    ratio("20 generations of 64 with a trivial evaluation, 2645 numbers, beside NSGA-II", best_of(ours, 3), best_of(theirs, 3), 0.3)
