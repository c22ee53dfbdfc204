"plasticity: the interface, its edges, and that every number and verdict of a run follows from what it recorded."

import inspect
import json
from pathlib import Path

import numpy as np
import papers
import pytest
import torch
from papers import committed, once, plain_signature, run_command, run_here
from recompute import agrees, made_up as p, mean_again
from scipy.stats import norm, wasserstein_distance

import icl26.networks.plasticity as pl
from icl26.networks.plasticity import analysis, use
from icl26.networks.plasticity.circuit import TYPE_NAMES, circuit_from_arrays
from icl26.networks.plasticity.claims import ALIKE, count_alike
from icl26.networks.plasticity.evolution import crowding_distance
from icl26.networks.plasticity.gradient import SpikingCircuit
from icl26.networks.plasticity.studies import run_gradient, run_retest
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement

SPACE = pl.RuleSpace()


# -- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, want",
    [
        (pl.term_values, "(s_pre, s_post, x_pre, x_post, r)"),
        (pl.RuleSpace, "(n_types=17)"),
        (pl.RuleSpace.random, "(self, n, seed, p_gate=0.2)"),
        (pl.Rule, "(gates, pre, post, syn, reward, tau_e, tau_r, threshold)"),
        (pl.Rule.delta_w, "(self, s_pre, s_post, x_pre, x_post, r, pre_type, post_type)"),
        (pl.trace_step, "(x, s, tau, dt)"),
        (pl.bounded_update, "(w, dw, w_max)"),
        (pl.RewardBaseline, "(window=20)"),
        (pl.V1Circuit, "(n_neurons, seed=0)"),
        (pl.probabilistic_dominates, "(mean_a, var_a, mean_b, var_b, threshold=0.9)"),
        (pl.noisy_fronts, "(means, variances, threshold=0.9)"),
        (pl.NeuralEvolution.run, "(self, generations)"),
    ],
)
def test_signatures(call, want):
    assert plain_signature(call) == want


def test_keyword_arguments_of_the_long_ones():
    p = inspect.signature(pl.evaluate_rules).parameters
    assert list(p)[:3] == ["thetas", "circuit", "task"] and p["seed"].kind is p["device"].kind is inspect.Parameter.KEYWORD_ONLY
    p = inspect.signature(pl.NeuralEvolution).parameters
    assert list(p)[:2] == ["space", "evaluate"] and p["pop_size"].kind is inspect.Parameter.KEYWORD_ONLY and p["seed"].default == 0
    p = inspect.signature(pl.ChangeDetection).parameters
    assert p["n_train"].default == 30 and p["n_test"].default == 40


# -- rules -----------------------------------------------------------------------------------------------------------


def test_terms_are_the_products_they_name():
    assert len(pl.TERMS) == 25 and pl.TERMS[:4] == ("Spre", "Xpre", "Spre*Xpre", "Xpre^2") and pl.TERMS[24] == "R"
    assert pl.TERMS[12:24] == tuple(t + "*R" for t in pl.TERMS[:12])
    rng = np.random.default_rng(0)
    for s, t in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, y, r = rng.uniform(0, 2, 3)
        names = dict(Spre=s, Spost=t, Xpre=x, Xpost=y, R=r)
        want = [eval(n.replace("^", "**"), {}, names) for n in pl.TERMS]
        np.testing.assert_allclose(pl.term_values(s, t, x, y, r), want, rtol=1e-6)


def test_the_space_has_2645_numbers_in_the_promised_order():
    assert SPACE.n_params == 2645 and SPACE.bounds.shape == (2645, 2) and pl.RuleSpace(1).n_params == 53
    theta = SPACE.random(1, 0)[0]
    rule, T = SPACE.decode(theta), 17
    at = 25 + 8 * T + 8 * T
    assert float(rule.syn[2, 3, 4]) == theta[at + 2 * T * T + 3 * T + 4] and float(rule.pre[1, 5]) == theta[25 + T + 5]
    assert float(rule.reward) == theta[at + 8 * T * T] and float(rule.tau_r[0]) == theta[-1 - T] and float(rule.threshold) == theta[-1]
    np.testing.assert_array_equal(SPACE.encode(rule), theta)
    thetas = SPACE.random(200, 1)
    assert (thetas >= SPACE.bounds[:, 0]).all() and (thetas <= SPACE.bounds[:, 1]).all() and abs(thetas[:, :25].mean() - 0.2) < 0.03
    np.testing.assert_array_equal(SPACE.random(3, 5), SPACE.random(3, 5))
    for bad in (theta[:-1], np.append(theta, 0), theta[None]):
        with pytest.raises(ValueError, match="2645"):
            SPACE.decode(bad)
    with pytest.raises(ValueError, match="n_types"):
        pl.RuleSpace(0)


def test_a_mixed_term_and_its_R_use_pre_and_post_type():
    theta = np.zeros(2645)
    theta[pl.TERMS.index("Xpre*Spost*R")] = 1
    block = theta[SPACE.parts["syn"]].reshape(8, 17, 17)
    block[6, 2, 9] = 0.5
    rule = SPACE.decode(theta)
    assert float(rule.delta_w(0, 1, 0.4, 0, -2.0, 2, 9)) == pytest.approx(-0.4) and float(rule.delta_w(0, 1, 0.4, 0, -2.0, 9, 2)) == 0
    assert rule.complexity == 1 / 25 and rule.formula() == "dw = Xpre*Spost*R"


def test_gates_are_on_above_a_half_wherever_a_rule_is_made():
    theta = SPACE.random(1, 0, 1.0)[0]
    theta[:25] = np.linspace(0, 1, 25)
    r = SPACE.decode(theta)
    same = pl.Rule(theta[:25], r.pre, r.post, r.syn, r.reward, r.tau_e, r.tau_r, r.threshold)
    assert same.formula() == r.formula() and same.complexity == 12 / 25
    with pytest.raises(ValueError, match="gates"):
        pl.Rule([float("nan")] * 25, r.pre, r.post, r.syn, r.reward, r.tau_e, r.tau_r, r.threshold)


def test_numbers_stay_exact():
    rule = pl.simple_rule({"Xpre": 0.3, "R": 0.7}, threshold=8.1)
    assert float(rule.pre[1, 0]) == 0.3 and float(rule.reward) == 0.7 and float(rule.threshold) == 8.1                # not rounded to float32
    assert float(rule.delta_w(0, 0, 0.1, 0, -0.2, 3, 4)) == 0.3 * 0.1 + 0.7 * -0.2
    assert pl.term_values(1, 0, np.float64(0.1), 0, 0).dtype == torch.float64 and pl.term_values(1, 0, torch.rand(2), np.float64(0.1), 0).dtype == torch.float32


RULE = SPACE.decode(SPACE.random(1, 3)[0])
NAN = float("nan")


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: pl.term_values(NAN, 0, 0, 0, 0), "s_pre: must be finite"),
        (lambda: pl.term_values(torch.ones(3), torch.ones(4), 0, 0, 0), "broadcast"),
        (lambda: RULE.delta_w(0, 0, NAN, 0, 0, 1, 2), "x_pre: must be finite"),               # also where its terms are off
        (lambda: RULE.delta_w(0, 0, 0, 0, 0, 1.5, 2), "pre_type: whole numbers"),
        (lambda: RULE.delta_w(torch.zeros(3), 0, 0, 0, 0, [1, 2], 2), "pre_type"),
        (lambda: pl.trace_step(1.0, 0.0, NAN, 5.0), "tau"),
        (lambda: pl.trace_step(1.0, 0.0, 20.0, "5"), "dt"),
        (lambda: pl.bounded_update(torch.tensor([-0.5]), torch.tensor([0.1]), 1.0), "w: magnitudes"),
        (lambda: pl.bounded_update(torch.tensor([1.5]), torch.tensor([0.1]), 1.0), "w: magnitudes"),
        (lambda: pl.bounded_update(torch.tensor([0.5]), torch.tensor([NAN]), 1.0), "dw: must be finite"),
        (lambda: pl.bounded_update(torch.rand(3), torch.rand(4), 1.0), "broadcast"),
        (lambda: pl.RewardBaseline().update(NAN), "r: a finite number"),
        (lambda: SPACE.encode(np.zeros(2645)), "rule: a Rule"),
        (lambda: SPACE.decode("abc"), "theta"),
        (lambda: SPACE.random(1, -1), "seed: a whole number"),
        (lambda: pl.simple_rule({"Xpre": "a"}), "Xpre: a finite number"),
        (lambda: pl.simple_rule({"Xpre": 1.0}, tau=-1), "tau"),
        (lambda: pl.simple_rule({"Xpre": 1.0}, n_types=0), "n_types"),
        (lambda: pl.V1Circuit(40, 1.5), "seed: a whole number"),
        (lambda: circuit_from_arrays([0], 3, [1], [1.0]), "pre: one axis"),
        (lambda: circuit_from_arrays(CIRCUIT.types, CIRCUIT.pre, CIRCUIT.post, ["a"] * len(CIRCUIT.pre)), "weight: numbers"),
        (lambda: pl.ChangeDetection(stimulus=float("inf")), "stimulus"),
        (lambda: pl.ChangeDetection(p_change="x"), "p_change"),
        (lambda: TASK.schedule(-1), "seed: a whole number"),
        (lambda: pl.evaluate_rules([RULE], CIRCUIT, TASK), "thetas: vectors"),
        (lambda: pl.evaluate_rules(np.zeros(2645), TASK, CIRCUIT), "circuit: a V1Circuit"),
        (lambda: pl.evaluate_rules(np.zeros(2645), CIRCUIT, TASK, seed=None), "seed"),
        (lambda: pl.evaluate_rules(np.zeros(2645), CIRCUIT, TASK, device="abacus"), "device"),
        (lambda: pl.evaluate_rules(np.zeros(2645), CIRCUIT, TASK, batch=0), "batch"),
        (lambda: pl.evaluate_rules(np.zeros(2645), CIRCUIT, TASK, eta="a"), "eta"),
        (lambda: pl.evaluate_rules(np.zeros(2645), CIRCUIT, TASK, reference=4.0), "reference"),
        (lambda: pl.evaluate_rules(np.zeros(2645), CIRCUIT, TASK, neuron=pl.Neuron(tau_m=1.0)), "tau_m"),
        (lambda: pl.Neuron(noise=NAN), "noise"),
        (lambda: pl.Reference(float("inf")), "mean"),
        (lambda: pl.probabilistic_dominates([], [], [], []), "mean_a"),
        (lambda: pl.NeuralEvolution(SPACE, None, pop_size=4), "evaluate: a function"),
        (lambda: pl.NeuralEvolution(SPACE, lambda t, s: t[:, 25 : 31 - s % 2], pop_size=4).run(1), "as many as at first"),
        (lambda: pl.retest(np.zeros(2645), TASK, 3), "seeds: a list"),
        (lambda: pl.drop_inert(np.zeros(2645), TASK, []), "seeds: a list"),
        (lambda: pl.most_accurate(SPACE.random(3, 0), [0.5], 2), "accuracy: 3 finite"),
        (lambda: pl.most_accurate(SPACE.random(3, 0), [0.5, NAN, 0.6], 2), "accuracy"),
        (lambda: pl.families(SPACE.random(3, 0), [0.5]), "accuracy: 3 finite"),
        (lambda: pl.switched_off(np.ones(7)), "thetas"),
        (lambda: pl.train_gradient(CIRCUIT, TASK, streams=5, every=50), "streams: a multiple of 2"),    # one stream would see gratings only
        (lambda: pl.train_gradient(CIRCUIT, TASK, lr=NAN), "lr"),
        (lambda: SpikingCircuit(CIRCUIT)(torch.zeros(3, 5)), "currents"),
    ],
)
def test_mistakes_are_named(call, word):
    with pytest.raises((ValueError, TypeError), match=word) as e:
        call()
    assert "\n" not in str(e.value)


def test_traces_and_bounds():
    x = torch.zeros(2)
    for _ in range(500):
        x = pl.trace_step(x, 1.0, torch.tensor([20.0, 1.0]), 5.0)                           # τ below Δt counts as Δt
    np.testing.assert_allclose(x, [4, 1], rtol=1e-5)
    w = torch.rand(500)
    for scale in (0.1, 50.0):
        new = pl.bounded_update(w, scale * torch.randn(500), 1.0)
        assert (new >= 0).all() and (new <= 1).all()
    assert torch.equal(pl.bounded_update(w, torch.zeros(500), 1.0), w)
    np.testing.assert_allclose(pl.trace_step([1.0, 2.0], np.array([0, 1]), [10, 50], 5.0), [0.5, 2.8], rtol=1e-6)
    assert pl.RewardBaseline().update(torch.tensor([True, False])).tolist() == [0.5, -0.5]
    b = pl.RewardBaseline()
    assert [b.update(1.0) for _ in range(2)] == [0.5, 0.0]
    for _ in range(30):
        b.update(0.0)
    assert b.update(1.0) == 1.0                                                             # only the last twenty count


def test_files_of_rules(tmp_path):
    rule = SPACE.decode(SPACE.random(1, 3)[0])
    pl.save_rule(rule, tmp_path / "r.json")
    np.testing.assert_array_equal(SPACE.encode(pl.load_rule(tmp_path / "r.json")), SPACE.encode(rule))
    record = json.loads((tmp_path / "r.json").read_text())
    for change, word in (({"terms": ["Q"]}, "terms"), ({"tau_e": [1]}, "tau_e"), ({"n_types": 0}, "n_types"), ({"threshold": None}, "threshold"), ({"threshold": "5"}, "threshold"), ({"threshold": True}, "threshold"), ({"threshold": 10**400}, "threshold"), ({"reward": 7}, "reward")):
        (tmp_path / "bad.json").write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=word) as e:
            pl.load_rule(tmp_path / "bad.json")
        assert "bad.json" in str(e.value)


# -- circuit and task ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [34, 100, 301])
def test_circuits(n):
    c = pl.V1Circuit(n, seed=1)
    assert c.types.shape == (n,) and len(c.type_names) == 17 and set(c.types.tolist()) == set(range(17))
    assert (c.pre != c.post).all() and c.sign.shape == c.w0.shape == c.pre.shape and (c.w0 >= 0).all()
    names = [c.type_names[i] for i in c.types[c.pre].tolist()]
    assert [s > 0 for s in c.sign.tolist()] == [name.endswith(" E") for name in names]
    with pytest.raises(ValueError, match="n_neurons"):
        pl.V1Circuit(33)


def test_networks_from_files(tmp_path):
    c = pl.V1Circuit(50, 2)
    pl.save_circuit(c, tmp_path / "c.npz")
    back = pl.load_circuit(tmp_path / "c.npz")
    assert torch.equal(back.pre, c.pre) and torch.equal(back.post, c.post) and torch.equal(back.sign, c.sign)
    assert pl.load_circuit(tmp_path / "c.npz", n_neurons=40, seed=3).n_neurons == 40
    for name in ("plain", "c.v1"):                                                          # under the name that was given, whatever it ends in
        pl.save_circuit(c, tmp_path / name)
        assert torch.equal(pl.load_circuit(tmp_path / name).pre, c.pre)
    with pytest.raises(ValueError, match="has 50 neurons, got 51"):
        pl.load_circuit(tmp_path / "c.npz", n_neurons=51)
    for bad in (tmp_path, tmp_path / "none" / "c.npz"):
        with pytest.raises(OSError, match="folder that exists"):
            pl.save_circuit(c, bad)
    np.save(tmp_path / "a.npy", np.ones(3))
    data = (tmp_path / "c.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(data[: len(data) // 2])
    for name in ("a.npy", "half.npz"):
        with pytest.raises(ValueError, match=name):
            pl.load_circuit(tmp_path / name)
    for i in range(0, len(data), 61):                                                       # a byte changed: read, or one named error
        (tmp_path / "spoilt.npz").write_bytes(data[:i] + bytes([data[i] ^ 85]) + data[i + 1 :])
        try:
            pl.load_circuit(tmp_path / "spoilt.npz")
        except (ValueError, OSError) as e:
            assert "spoilt.npz" in str(e)
    order = np.random.default_rng(0).permutation(50)                                        # neurons in any order
    place = np.argsort(order)
    mixed = circuit_from_arrays(c.types.numpy()[order], place[c.pre.numpy()], place[c.post.numpy()], c.w0.numpy())
    assert torch.equal(mixed.types, c.types) and len(mixed.pre) == len(c.pre)
    with pytest.raises(ValueError, match="weight"):
        circuit_from_arrays(c.types, c.pre, c.post, -c.w0)


POPULATIONS = ["i1Htr3a"] + [f"{'e' if k == 'E' else 'i'}{layer}{'Any' if k == 'E' else k}" for layer in ("23", "4", "5", "6") for k in ("E", "Pvalb", "Sst", "Htr3a")]


def sonata(folder, c, *, nodes="node_type_id pop_name\n" + "".join(f"{100 + i} {p}\n" for i, p in enumerate(POPULATIONS)),
           edges="edge_type_id syn_weight\n7 1.5\n8 -2.0\n", populations=("v1_to_v1",)):
    h5py = pytest.importorskip("h5py")
    (folder / "v1_node_types.csv").write_text(nodes)
    (folder / "v1_v1_edge_types.csv").write_text(edges)
    with h5py.File(folder / "v1_nodes.h5", "w") as f:
        f["nodes/v1/node_type_id"] = c.types.numpy() + 100
    with h5py.File(folder / "v1_v1_edges.h5", "w") as f:
        for name in populations:
            g = f.create_group(f"edges/{name}")
            g["source_node_id"], g["target_node_id"], g["edge_type_id"] = c.pre.numpy(), c.post.numpy(), np.where(c.sign.numpy() > 0, 7, 8)
    return pl.load_circuit(folder)


def test_sonata(tmp_path):
    c = pl.V1Circuit(60, 0)
    back = sonata(tmp_path, c)
    assert torch.equal(back.pre, c.pre) and torch.equal(back.types, c.types) and torch.equal(back.sign, c.sign)


@pytest.mark.parametrize(
    "damage, word",
    [(dict(populations=("a", "b")), "one population"), (dict(populations=()), "one population"), (dict(nodes="foo bar\n1 2\n"), "node_type_id: is no column"), (dict(nodes=""), "not a table"),
     (dict(nodes="node_type_id pop_name\n1 e4Any\n"), "node_type_id: 100 is not among"), (dict(nodes="node_type_id pop_name\n1 x\n"), "pop_name"),
     (dict(edges="edge_type_id syn_weight\n7 1\n"), "edge_type_id: 8 is not among"), (dict(edges="edge_type_id syn_weight\n7 a\n8 1\n"), "syn_weight")],
)
def test_damaged_sonata(tmp_path, damage, word):
    with pytest.raises(ValueError, match=word) as e:
        sonata(tmp_path, pl.V1Circuit(60, 0), **damage)
    assert str(tmp_path) in str(e.value)


def test_without_h5py_the_message_says_so(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match="h5py"):
        pl.load_circuit(tmp_path)


def test_the_task():
    for domain, blocks in (("grating", 2), ("natural", 2), ("both", 4)):
        t = pl.ChangeDetection(domain, n_train=10, n_test=12)
        s = t.schedule(4)
        assert (~s.scored).sum() == blocks and s.scored[~s.train].sum() == 12 and s.scored[s.train].sum() == 10
        i = np.flatnonzero(s.scored)
        np.testing.assert_array_equal(s.change[i], s.image[i] != s.image[i - 1])
    with pytest.raises(ValueError, match="domain"):
        pl.ChangeDetection("film")
    for gain in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gain"):
            pl.ChangeDetection(gain=gain)
    assert pl.ChangeDetection("grating", 0, 10, p_change=0.0).chance(0) == 1


# -- simulation ------------------------------------------------------------------------------------------------------

CIRCUIT, TASK = pl.V1Circuit(60, 0), pl.ChangeDetection(n_train=4, n_test=10)


@pytest.fixture(scope="module")
def six():
    thetas = SPACE.random(6, 2)
    return thetas, pl.evaluate_rules(thetas, CIRCUIT, TASK, seed=1, keep_weights=True)


def test_a_rule_does_not_depend_on_its_batch(six):
    thetas, e = six
    for rows in ([0], [3, 1], [5, 4, 0]):
        np.testing.assert_array_equal(pl.evaluate_rules(thetas[rows], CIRCUIT, TASK, seed=1).objectives, e.objectives[rows])
    np.testing.assert_array_equal(pl.evaluate_rules(thetas, CIRCUIT, TASK, seed=1, batch=2).rates, e.rates)
    assert (pl.evaluate_rules(thetas, CIRCUIT, TASK, seed=2).rates != e.rates).any()


def test_objectives_are_what_they_say(six):
    thetas, e = six
    assert e.objectives.shape == (6, 6) and e.rates.shape == (6, 60) and e.synchrony.shape == e.accuracy.shape == (6,)
    np.testing.assert_allclose(e.objectives[:, 0], 1 - e.accuracy)
    np.testing.assert_allclose(e.objectives[:, 1], thetas[:, :25].sum(1) / 25)
    np.testing.assert_allclose(e.objectives[:, 2], e.rates.max(1))
    by_type = np.stack([e.rates[:, (CIRCUIT.types == t).numpy()].mean(1) for t in range(17)], 1)
    np.testing.assert_allclose(e.objectives[:, 4], np.abs(by_type - 4).mean(1))
    q = np.exp(np.log(4) - 0.5 + norm.ppf((np.arange(60) + 0.5) / 60))
    np.testing.assert_allclose(e.objectives[:, 5], [wasserstein_distance(r, q) for r in e.rates])
    phi = thetas[:, -1:]
    np.testing.assert_allclose(((e.readout > phi) == e.change).mean(1), e.accuracy)
    assert (e.weights >= 0).all() and (e.weights <= CIRCUIT.w_max.numpy() + 1e-6).all()


def test_shared_coefficients_are_the_same_in_both_spaces():
    one = pl.RuleSpace(1)
    small = one.random(1, 4, 0.4)[0]
    r = one.decode(small)
    whole = pl.Rule(r.gates, r.pre.expand(8, 17), r.post.expand(8, 17), r.syn.expand(8, 17, 17), r.reward, r.tau_e.expand(17), r.tau_r.expand(17), r.threshold)
    a, b = (pl.evaluate_rules(t, CIRCUIT, TASK, seed=1) for t in (small, SPACE.encode(whole)))
    np.testing.assert_array_equal(a.objectives, b.objectives)
    with pytest.raises(ValueError, match="2645"):
        pl.evaluate_rules(np.zeros((2, 54)), CIRCUIT, TASK)


def test_silence_and_runaway():
    silent = pl.evaluate_rules(np.zeros(2645), CIRCUIT, pl.ChangeDetection("grating", 2, 4, gain=0.0), neuron=pl.Neuron(bias=0.0, noise=0.0))
    assert (silent.rates == 0).all() and np.isfinite(silent.objectives).all() and silent.objectives[0, 5] > 3
    wild = pl.evaluate_rules(SPACE.random(3, 0, 1.0), CIRCUIT, pl.ChangeDetection("grating", 3, 4), neuron=pl.Neuron(bias=500.0), eta=5.0)
    assert np.isfinite(wild.objectives).all() and wild.rates.max() <= 200


def test_plasticity_off_changes_nothing(six):
    thetas, _ = six
    off = pl.evaluate_rules(pl.switched_off(thetas), CIRCUIT, TASK, seed=1, keep_weights=True)
    zero = pl.evaluate_rules(thetas, CIRCUIT, TASK, seed=1, keep_weights=True, eta=0.0)
    np.testing.assert_array_equal(off.objectives[:, [0, 2, 3, 4, 5]], zero.objectives[:, [0, 2, 3, 4, 5]])
    np.testing.assert_array_equal(off.weights, zero.weights)


# -- selection and search --------------------------------------------------------------------------------------------


def test_dominance_by_hand():
    z = [0.0, 0.0]
    assert pl.probabilistic_dominates([0, 0], z, [1, 0], z) and not pl.probabilistic_dominates([0, 0], z, [0, 0], z) and not pl.probabilistic_dominates([0, 1], z, [1, 0], z)
    gap = norm.ppf(0.9) * np.sqrt(0.5)
    for factor, want in ((1.01, True), (0.99, False)):
        assert pl.probabilistic_dominates([0, 0], [0.25, 1], [factor * gap, 0], [0.25, 1]) is want
    assert pl.probabilistic_dominates([0, 0], [0.25, 1], [0.99 * gap, 0], [0.25, 1], threshold=0.8)


def test_fronts_beside_pymoo():
    nds = pytest.importorskip("pymoo.util.nds.non_dominated_sorting")
    rng = np.random.default_rng(0)
    for n in (1, 17, 120):
        mu = rng.normal(size=(n, 3)).round(1)
        fronts = pl.noisy_fronts(mu, np.zeros_like(mu))
        assert [sorted(f) for f in fronts] == [sorted(f) for f in nds.NonDominatedSorting().do(mu)]
        assert [sorted(f) for f in pl.noisy_fronts(mu, np.zeros_like(mu), 1.0)] == [sorted(f) for f in fronts]
        noisy = pl.noisy_fronts(mu, rng.random((n, 3)))
        assert sorted(np.concatenate(noisy).tolist()) == list(range(n)) and len(noisy[0]) >= len(fronts[0])
    assert np.isinf(crowding_distance(np.array([[0.0, 1], [1, 0]]))).all()


def test_the_search_keeps_its_promises():
    seeds, sizes = [], []

    def evaluate(thetas, seed):
        seeds.append(seed)
        sizes.append(len(thetas))
        assert (thetas >= SPACE.bounds[:, 0]).all() and (thetas <= SPACE.bounds[:, 1]).all()
        return np.stack([thetas[:, 25 + k] ** 2 for k in range(6)], 1)

    for pop in (2, 9):
        seeds.clear(), sizes.clear()
        h = pl.NeuralEvolution(SPACE, evaluate, pop_size=pop, seed=1).run(12)
        assert h.population.shape == (pop, 2645) and h.means.shape == h.variances.shape == (pop, 6) and h.n_evals == sum(sizes) and len(set(seeds)) == len(seeds)
        if pop > 6:
            assert (np.diff(h.best_per_generation, axis=0) <= 1e-12).all()                  # without noise the best is never dropped
        np.testing.assert_allclose(h.means, np.stack([h.population[:, 25 + k] ** 2 for k in range(6)], 1))
    a, b = (pl.NeuralEvolution(SPACE, evaluate, pop_size=5, seed=3).run(3).population for _ in range(2))
    np.testing.assert_array_equal(a, b)
    for bad in ((), (-1,), (9,), (0.5,)):
        with pytest.raises(ValueError, match="objectives"):
            pl.NeuralEvolution(SPACE, evaluate, pop_size=4, objectives=bad).run(1)
    with pytest.raises(ValueError, match="evaluate"):
        pl.NeuralEvolution(SPACE, lambda t, s: np.full((len(t), 6), np.nan), pop_size=4).run(1)


def test_gradients_reach_the_weights():
    net = SpikingCircuit(CIRCUIT)
    spikes = net(1.5 + 0.3 * torch.randn(12, 60, 1, generator=torch.Generator().manual_seed(0)))
    spikes[:, net.output].sum().backward()
    assert (net.u.grad != 0).float().mean() > 0.3
    run = pl.train_gradient(CIRCUIT, pl.ChangeDetection("grating", 0, 10), trials=20, every=10, streams=5)
    assert run.trials.tolist() == [0, 10, 20] and (run.u >= 0).all() and (run.u <= 1).all()


def test_errors_through_two_trials_are_trials_of_one_stream():
    task = pl.ChangeDetection("grating", 0, 10)
    seen, step = [], torch.optim.Adam.step

    def count(self, *a, **k):
        seen.append(self.param_groups[0]["params"][0].grad.clone())
        return step(self, *a, **k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", count)
        runs = [pl.train_gradient(CIRCUIT, task, trials=20, every=20, streams=s, window=w, seed=3) for s, w in ((2, 1), (2, 2), (1, 4))]
    assert len(seen) == 10 + 5 + 5                                                         # trials / (streams · window)
    assert all(r.trials.tolist() == [0, 20] for r in runs) and not torch.equal(seen[0], seen[10])
    with pytest.raises(ValueError, match="window"):
        pl.train_gradient(CIRCUIT, task, trials=20, every=10, streams=2, window=3)


def test_gradients_and_rules_see_the_same_images(monkeypatch):
    seen, drive = [], pl.ChangeDetection.drive

    def spy(self, circuit, seed):
        out = drive(self, circuit, seed)
        seen.append((self.n_train, out))
        return out

    monkeypatch.setattr(pl.ChangeDetection, "drive", spy)
    retest_of_a_rule = run_retest([np.zeros(2645)], [[0, 900, 1]], 40, dict(domain="grating", n_train=2, n_test=8))
    ((_, own),) = seen
    seen.clear()
    out = run_gradient("adam", [0, 900, 1], 40, 20, dict(domain="grating", n_train=0, n_test=8), 10.0, streams=5, every=10)
    *same, (_, other) = seen
    assert len(same) == 4 and all(torch.equal(x, own) for _, x in same) and not torch.equal(other, own)      # training, three tests; images it never saw
    assert 0 <= out["unseen"] <= 1 and retest_of_a_rule["accuracy"].shape == (1, 1)


def test_the_device_reaches_every_simulation(monkeypatch):
    devices, simulate = [], analysis.simulate
    monkeypatch.setattr(analysis, "simulate", lambda *a, device="none", **k: devices.append(device) or simulate(*a, **k))
    pl.drop_inert(SPACE.random(1, 0), TASK, [0], n_neurons=40, device="cuda")
    analysis.time_course(np.zeros(2645), CIRCUIT, pl.ChangeDetection("grating", 0, 20), device="cuda")
    assert len(devices) >= 2 and set(devices) == {"cuda"}


# -- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return load_results(papers.smoke("plasticity", tmp_path_factory))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "Profile gpu on the CPU at the sizes for tests, on a network from a file, by the command: papermill runs every experiment in a kernel of its own."
    def make(folder):
        pl.save_circuit(pl.V1Circuit(60, 5), folder / "v1.npz")
        return run_command("plasticity", folder / "gpu", "--profile", "gpu", "--device", "cpu", "--model", folder / "v1.npz", ICL26_TINY="1")

    return load_results(once("plasticity-gpu", tmp_path_factory, make))


IDS = {"C1", "C2", "C3", "C4", "C5", "C6", "own-C7", "own-C8"}


def check_record(record):
    "Verdicts from rules, estimates and intervals from values, the count of C2 from its parts."
    checked = 0
    for c in record["claims"]:
        assert c["verdict"] == recompute(c)[0]
        for p in c["values"] or []:
            if p.get("values") is not None:
                agrees(p, mean_again(p["values"], record["parameters"]["seed"]))
                checked += 1
        if c["id"] == "C2" and c["values"]:
            pairs = [p for p in c["values"] if not p["label"].startswith("beside") and p["label"] != ALIKE]
            assert c["values"][0]["measured"] == count_alike(pairs)
    return checked


def test_smoke_measures_c1_and_everything_follows(smoke):
    assert {c["id"] for c in smoke["claims"]} == IDS
    assert [c["id"] for c in smoke["claims"] if c["verdict"] != "not run"] == ["C1"] and check_record(smoke) > 4


def test_smoke_is_the_same_again(smoke, tmp_path, monkeypatch):
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path / "cache"))
    assert json.dumps(run_here("plasticity", tmp_path, profile="smoke")["claims"]) == json.dumps(smoke["claims"])


def test_gpu_profile_runs_every_experiment_on_a_network_from_a_file(tiny):
    assert {c["id"] for c in tiny["claims"]} == IDS and all(c["verdict"] != "not run" and "tiny" in c["note"] for c in tiny["claims"])
    assert tiny["model_hashes"] and check_record(tiny) > 30
    c = {c["id"]: {p["label"]: p for p in c["values"]} for c in tiny["claims"]}
    assert c["own-C7"]["learning rate 0 − switched off, largest"]["measured"] == 0 and c["own-C7"]["largest change of a weight"]["measured"] == 0


def test_gpu_profile_without_a_gpu_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("plasticity", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"]) and record["wall_s"] < 20


def test_the_committed_run_follows_from_its_values():
    path = committed("plasticity")
    if path is None:
        pytest.skip("no committed run")
    assert check_record(load_results(path)) > 50


# -- numbers that go against the paper -------------------------------------------------------------------------------


AGAINST = {
    "C1": [[p("evolved − best random", 0.0), p("evolved − no plasticity", 0.0)]],
    "C2": [[dict(label=ALIKE, measured=2, n=10)]],
    "C3": [[p(f"measure: {n}", 0.0) for n in ("a", "b", "c")]],
    "C4": [[p("60 against the size of the search", -0.06), p("60 neurons: rule − no plasticity", 0.1)], [p("60 against the size of the search", 0), p("60 neurons: rule − no plasticity", 0)]],
    "C5": [[p("Adam, seed 0", 9), p("rule − no plasticity, gratings", 0.1)], [p("Adam, seed 0", 100), p("rule − no plasticity, gratings", 0)]],
    "C6": [[p("17 types − shared", 0.0)]],
    "own-C7": [[p("learning rate 0 − off", 0.01), p("largest change of a weight", 0), p("switched off − no plasticity", 0)]],
    "own-C8": [[p("unbroken: the rule − switched off", x), p("broken: signs flipped − switched off", x), p("broken: shuffled − switched off", x)] for x in (0.05, 0)],
}


@pytest.mark.parametrize("claim", AGAINST)
def test_numbers_against_the_paper_are_not_reproduced(claim):
    (rule,) = (c for c in pl.claims("cpu") if c.id == claim)
    for parts in AGAINST[claim]:
        assert measurement(rule, parts=parts)["verdict"] == "not reproduced"


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    rule = str(tmp_path / "rule.json")
    assert use.main(["example", rule]) == 0 and use.main(["show", rule]) == 0
    shown = capsys.readouterr().out
    assert "dw = Spre*Xpost + Xpre*Spost" in shown and "largest sum" not in shown           # all pairs of types are equal
    assert use.main(["test", rule, "--neurons", "40", "--seeds", "2", "--train", "2", "--test", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"accuracy", "max rate"} <= set(found["measures"]) and len(found["measures"]["accuracy"]["per_seed"]) == 2
    Path(tmp_path / "cut.json").write_text(Path(rule).read_text()[:100])
    for args, word in ((["example", rule], "exists"), (["show", str(tmp_path / "cut.json")], "cut.json"), (["test", rule, "--neurons", "5"], "n_neurons"), (["test", rule, "--seeds", "1"], "seeds"),
                       (["test", rule, "--circuit", str(tmp_path / "no.npz")], "no.npz"), (["dance"], "dance")):
        assert use.main(args) == 2
        err = capsys.readouterr().err
        assert err.startswith("icl26: error: ") and word in err and err.count("\n") == 1


def test_a_network_from_a_file_by_command(tmp_path, capsys):
    rule, net = str(tmp_path / "rule.json"), tmp_path / "c.npz"
    use.main(["example", rule])
    pl.save_circuit(pl.V1Circuit(40, 0), net)
    before, short = net.read_bytes(), ["--circuit", str(net), "--seeds", "2", "--train", "2", "--test", "8"]
    capsys.readouterr()
    assert use.main(["test", rule, *short]) == 0 and "\n40 neurons" in capsys.readouterr().out      # what was used, not the default
    for more, word in ((["--neurons", "41"], "has 40 neurons, got 41"), (["--out", str(net)], "--out"), (["--out", rule], "--out"), (["--out", str(tmp_path / "no/x.json")], "--out")):
        assert use.main(["test", rule, *short, *more]) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("icl26: error: ") and word in err and err.count("\n") == 1
    assert net.read_bytes() == before                                                       # an input is never overwritten
    assert use.main(["test", rule, "--neurons", "40", "--seeds", "2", "--train", "0", "--test", "2", "--out", str(tmp_path / "out.json")]) == 0
    assert "ROC area       left out" in capsys.readouterr().out and json.loads((tmp_path / "out.json").read_text())["left_out"] == ["ROC area"]


@pytest.mark.parametrize(
    "change, word",
    [({"rule": np.zeros(53)}, "rule"), ({"pre": [0.5, 1]}, "pre"), ({"pre": [[0, 1]]}, "(pre|post|w)"), ({"types": []}, "types"), ({"w": [-0.5, 0.5]}, "w"), ({"w": [NAN, 0.5]}, "w"),
     ({"w_max": [1.0] * 3}, "w_max"), ({"w_max": 0.0, "w": [0.0, 0.0]}, "w_max"), ({"w_max": float("inf")}, "w_max"), ({"eta": NAN}, "eta"), ({"eta": -1}, "eta"), ({"dt": "a"}, "dt")],
)
def test_synapses_name_their_mistakes(change, word):
    with pytest.raises((ValueError, TypeError), match=f"^{word}: "):
        pl.PlasticSynapses(**dict(rule=pl.simple_rule({"Spre*Spost": 1.0}, n_types=1), pre=[0, 1], post=[2, 2], types=[0, 0, 0], w=[0.5, 0.5], w_max=1.0) | change)


def test_steps_take_zeros_and_ones():
    s = pl.PlasticSynapses(pl.simple_rule({"Spre*Spost": 1.0}, n_types=1), [0, 1], [2, 2], [0, 0, 0], [0.5, 0.5], 1.0)
    for spikes in ([NAN, 0, 1], [5, 0, 1], [-1, 0, 1], [1, 0], "abc"):
        with pytest.raises(ValueError, match="spikes"):
            s.step(spikes)
    for delta in (NAN, "x", [1.0, 2.0]):
        with pytest.raises(ValueError, match="delta"):
            s.reward(delta)
    assert s.w.tolist() == [0.5, 0.5]


def test_a_rule_in_a_network_of_ones_own():
    rule = pl.simple_rule({"Spre*Spost": 1.0}, n_types=1)
    s = pl.PlasticSynapses(rule, [0, 1], [2, 2], [0, 0, 0], [0.5, 0.5], 1.0, eta=0.1)
    w = s.step([1, 0, 1])
    np.testing.assert_allclose(w, [0.5 + 0.1 * 0.5, 0.5])                                   # adaptive scaling halves the step
    assert TYPE_NAMES[0] == "L1 Htr3a"
