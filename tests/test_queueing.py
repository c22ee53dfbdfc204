"queueing: the interface, its edges, operators and structure against independent loops, and that every verdict of a run follows from what it recorded."
import inspect
import itertools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import papers
import pytest
from papers import chat_server, committed, plain_signature, printed, run_command, run_here, use_command
from recompute import agrees

import icl26.decision.queueing as q
from icl26.decision.queueing import experiments as ex
from icl26.decision.queueing import formulate as fm
from icl26.decision.queueing import use
from icl26.decision.queueing.problems import enlarged, has_structure, optimal_values, same_values, skeleton
from icl26.decision.queueing.structure import Cx, I, Super, SuperC, all_properties, largest_family, premises
from icl26.decision.queueing.use import main
from icl26.lm import ScriptedLM, tiny_lm
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement
from icl26.stats import bootstrap_ci, loglog_slope, mean_interval, t_interval, wilson

BY_NAME = {p.name: p for p in q.PROBLEMS}
R = {"reject_cost": 1.5}


def op(kind, *queues, **params):
    return q.Operator(kind, queues, params)


ALL = [op("TA", 1), op("TCA", 0, **R), op("TD", 0), op("TMD", 1, servers=2), op("TCD", 0, effort_cost=0.3), op("TR", 1, 0), op("TTD", 0, 1),
       op("TCJ", 1, 0, cost=0.7), op("TMS", 0, 1), op("TI")]
IDS = [o.kind for o in ALL]


# -- interface -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("f, want", [
    (q.uniformize, "(rates, discount_rate)"),
    (q.has_property, "(V, name, tol=1e-09)"),
    (q.identify_structure, "(graph)"),
    (q.parse_formulation, "(obj)"),
    (q.formulation_correct, "(graph, truth, tol=0.001)"),
    (q.OperatorGraph, "(capacity, events, cost, discount)"),
    (q.OperatorGraph.solve, "(self, tol=1e-08, max_iter=100000)"),
    (q.OperatorGraph.backup, "(self, V)"),
])
def test_signatures(f, want):
    assert plain_signature(f) == want


def test_formulator_defaults():
    s = inspect.signature(q.MCTSFormulator)
    want = dict(n_rollouts=12, n_candidates=3, c=1.4, syntax_check=True, solver_feedback=True, max_repairs=5, seed=0)
    assert {k: s.parameters[k].default for k in want} == want
    assert all(p.kind is p.KEYWORD_ONLY for name, p in s.parameters.items() if name != "lm")


def test_the_package_imports_no_torch(tmp_path):
    code = "import sys, icl26.decision.queueing; print([m for m in ('torch', 'matplotlib', 'networkx', 'pandas') if m in sys.modules])"
    assert printed(code, tmp_path) == "[]"


# -- operators -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("args, message", [
    (("TX", (0,)), "kind"), ((None,), "kind"), (("TA", ()), "needs 1 queue"), (("TA", (0, 1)), "needs 1 queue"), (("TR", (0,)), "2 or more"),
    (("TTD", (0, 0)), "twice"), (("TMS", (1, 1)), "twice"), (("TA", (-1,)), "at least 0"), (("TA", (0.5,)), "whole"), (("TA", "0"), "sequence"), (("TA", (True,)), "whole"),
    (("TCA", (0,)), "reject_cost"), (("TCA", (0,), {"cost": 1}), "'cost'"), (("TCA", (0,), {"reject_cost": -1}), "at least 0"),
    (("TCA", (0,), {"reject_cost": float("nan")}), "finite"), (("TCA", (0,), {"reject_cost": 10**400}), "finite"), (("TCA", (0,), {"reject_cost": "1"}), "finite"),
    (("TMD", (0,), {"servers": 0}), "servers"), (("TMD", (0,), {"servers": 1.5}), "servers"), (("TMD", (0,), {"servers": True}), "servers"),
    (("TCD", (0,)), "effort_cost"), (("TCJ", (0, 1)), "cost"), (("TD", (0,), {"servers": 2}), "no parameter"), (("TI", (0,)), "needs 0"), (("TCJ", (0, 1), 3), "mapping"),
])
def test_bad_operators(args, message):
    with pytest.raises(ValueError, match=message):
        q.Operator(*args)


def test_operators_are_values():
    a = op("TCA", 0, reject_cost=2)
    assert a == op("TCA", 0, reject_cost=2.0) and hash(a) == hash(op("TCA", 0, reject_cost=2.0)) and a != op("TCA", 0, reject_cost=3)
    assert pickle.loads(pickle.dumps(a)) == a and (a.kind, a.queues, a.params) == ("TCA", (0,), {"reject_cost": 2.0})
    with pytest.raises(AttributeError):
        a.kind = "TD"
    with pytest.raises(TypeError, match="assignment"):
        a.params["reject_cost"] = -5
    with pytest.raises(ValueError, match="axis"):
        op("TD", 2).apply(np.zeros((3, 3)))


def by_state(o, V):
    "The table of the alphabet, written again: (value, policy) of every state."
    B, out, act = [n - 1 for n in V.shape], np.zeros(V.shape), np.full(V.shape, -1)
    for x in itertools.product(*map(range, V.shape)):
        go = lambda *steps: V[tuple(max(v + sum(b for k, b in steps if k == i), 0) for i, v in enumerate(x))]
        s, p, i = V[x], o.params, o.queues[0] if o.queues else None
        if o.kind == "TI":
            choices = {None: s}
        elif o.kind == "TA":
            choices = {None: go((i, 1)) if x[i] < B[i] else s}
        elif o.kind == "TCA":
            choices = {1: p["reject_cost"] + s} | ({0: go((i, 1))} if x[i] < B[i] else {})
        elif o.kind == "TD":
            choices = {None: go((i, -1))}
        elif o.kind == "TMD":
            m = min(x[i], p["servers"]) / p["servers"]
            choices = {None: m * go((i, -1)) + (1 - m) * s}
        elif o.kind == "TCD":
            choices = {0: s, 1: p["effort_cost"] + go((i, -1))}
        elif o.kind == "TR":
            choices = {k: go((j, 1)) for k, j in enumerate(o.queues) if x[j] < B[j]} or {0: s}
        elif o.kind == "TMS":
            choices = {k: go((j, -1)) for k, j in enumerate(o.queues)}
        else:
            j = o.queues[1]
            can = x[i] > 0 and x[j] < B[j]
            move = go((i, -1), (j, 1)) if can else s
            choices = {None: move} if o.kind == "TTD" else {0: s} | ({1: p["cost"] + move} if can else {})
        out[x] = min(choices.values())
        act[x] = min((k for k in choices if choices[k] == out[x]), key=lambda k: -1 if k is None else k) if None not in choices else -1
    return out, None if (act == -1).all() else act


@pytest.mark.parametrize("o", [*ALL, op("TR", 2, 0, 1), op("TMS", 1, 2), op("TMD", 0, servers=9), op("TTD", 2, 1), op("TCA", 2, reject_cost=0)], ids=repr)
def test_operator_by_state(o):
    rng = np.random.default_rng(0)
    for V in (rng.normal(size=(4, 2, 3)), rng.integers(0, 3, size=(2, 5, 2)).astype(float), np.zeros((2, 2, 2))):     # with many ties
        value, policy = by_state(o, V)
        np.testing.assert_allclose(o.apply(V), value, atol=1e-13)
        assert (o.policy(V) is None) == (policy is None)
        if policy is not None:
            np.testing.assert_array_equal(o.policy(V), policy)
            assert o.policy(V).dtype.kind == "i"
        before = V.copy()
        o.apply(V)[...] = 7
        np.testing.assert_array_equal(V, before)


@pytest.mark.parametrize("o", ALL, ids=IDS)
def test_monotone_and_shift_equivariant(o):
    rng = np.random.default_rng(1)
    for _ in range(30):
        V = rng.normal(size=(5, 4))
        W = V + np.maximum(rng.normal(size=V.shape), 0)
        assert (o.apply(V) <= o.apply(W) + 1e-12).all()
        np.testing.assert_allclose(o.apply(V + 3.25), o.apply(V) + 3.25)
        assert np.abs(o.apply(V) - o.apply(W)).max() <= np.abs(V - W).max() + 1e-12


# -- graph and solver ------------------------------------------------------------------------------------------------

def test_uniformize():
    p, gamma = q.uniformize([1, 3], 1)
    np.testing.assert_allclose(p, [0.25, 0.75])
    assert gamma == 0.8
    for bad in (([], 1), ([0], 1), ([-1, 2], 1), ([1], 0), ([1], -1), ([np.inf], 1), ([1], np.nan), ([1e300, 1e308, 1.7e308], 1), ([1], 1e-300), (2, 1), (None, 1), ("ab", 1), ([1], "1")):
        with pytest.raises(ValueError):
            q.uniformize(*bad)


@pytest.mark.parametrize("change, message", [
    (dict(capacity=(0, 3)), "capacity"), (dict(capacity=()), "capacity"), (dict(capacity=(3.5, 3)), "capacity"), (dict(discount=1), "discount"), (dict(discount=-0.1), "discount"),
    (dict(discount=np.nan), "discount"), (dict(events=[(op("TA", 0), 0.5)]), "sum to 1"), (dict(events=[(op("TA", 0), 1.5), (op("TD", 0), -0.5)]), "probability"),
    (dict(events=[(op("TA", 2), 1.0)]), "queue 2"), (dict(events=[]), "sum to 1"), (dict(events=[("TA", 1.0)]), "Operator"), (dict(cost=(1.0,)), "cost"), (dict(cost=np.zeros((3, 3))), "cost"),
    (dict(cost=(1.0, np.inf)), "finite"), (dict(cost=("a", "b")), "cost"), (dict(capacity=3), "capacity"), (dict(capacity=None), "capacity"), (dict(events=3), "events"),
    (dict(events=[op("TA", 0)]), "pair"), (dict(events=[(op("TA", 0), "1")]), "pair"), (dict(events=[(op("TA", 0),)]), "pair"),
])
def test_bad_graphs(change, message):
    good = dict(capacity=(3, 4), events=[(op("TA", 0), 0.5), (op("TD", 1), 0.5)], cost=(1.0, 2.0), discount=0.9)
    q.OperatorGraph(**good)
    with pytest.raises(ValueError, match=message):
        q.OperatorGraph(**{**good, **change})


def test_linear_costs_and_a_closed_form():
    g = q.OperatorGraph((3, 4), [(op("TI"), 1.0)], (1.0, 2.0), 0.9)
    x, y = np.indices((4, 5))
    np.testing.assert_array_equal(g.cost, x + 2.0 * y)
    np.testing.assert_allclose(g.solve().V, (x + 2.0 * y) / 0.1, atol=1e-8)
    np.testing.assert_allclose(q.OperatorGraph((3, 4), [(op("TI"), 1.0)], g.cost, 0.0).solve().V, g.cost)
    with pytest.raises(ValueError, match="shape"):
        g.backup(np.zeros((4, 4)))


def test_backup_is_a_contraction_and_the_bound_holds():
    g, rng = BY_NAME["float_nurse"].graph, np.random.default_rng(0)
    V, W = rng.normal(size=(2, *g.shape)) * 100
    assert np.abs(g.backup(V) - g.backup(W)).max() <= g.discount * np.abs(V - W).max() + 1e-9
    truth = g.solve(tol=1e-9).V
    for tol in (1.0, 1e-2, 1e-5):
        found = g.solve(tol=tol)
        assert found.converged and np.abs(found.V - truth).max() <= tol + 1e-9
    short = g.solve(max_iter=3)
    assert not short.converged and short.iterations == 3 and np.abs(short.V - truth).max() <= short.error
    for tol in (0, -1, np.nan):
        with pytest.raises(ValueError, match="tol"):
            g.solve(tol=tol)


def test_a_bound_that_rounding_hides_is_not_claimed():
    g = q.OperatorGraph((30,), [(op("TA", 0), 0.5), (op("TD", 0), 0.5)], (1e12,), 0.99)
    found = g.solve(tol=1e-12, max_iter=20_000)
    assert not found.converged and found.iterations < 20_000 and found.error < 1e3


def test_values_are_right_where_rounding_ends_the_search():
    g = BY_NAME["clinic"].graph
    truth = g.solve(tol=1e-10).V
    for tol in (1e-15, 1e-300):
        found = g.solve(tol=tol)
        assert not found.converged and np.abs(found.V - truth).max() <= 1e-9 and all((a is None) or (a == b).all() for a, b in zip(found.policies, g.solve().policies))
    p, gamma = q.uniformize([1.0, 1.2], 1e-9)                                                # discounted over a thousand million units of time
    slow = q.OperatorGraph((12,), [(op("TCA", 0, reject_cost=5), p[0]), (op("TD", 0), p[1])], (1 / 2.2,), gamma)
    found = slow.solve()
    assert not found.converged and found.V[0] == pytest.approx(q.policy_cost(slow, found.policies)[0], rel=1e-5) and found.V[0] > 1e9
    assert found.error > 1                                                                   # the discount itself is rounded
    def with_costs(f):
        return q.OperatorGraph((12,), [(op("TCA", 0, reject_cost=5.0 * f), p[0]), (op("TD", 0), p[1])], (1.0 * f,), 0.95).solve()

    assert not with_costs(1e9).converged and with_costs(1e9).V == pytest.approx(1e9 * with_costs(1).V, rel=1e-7)


@pytest.mark.parametrize("P, n, said", [
    (np.ones((4, 4)), 2, "P: the shape"), (np.ones((4, 1, 4)) / 4, 3, "P: the shape"), (np.ones((4, 1, 4)) / 4, 0, "n_events"), (np.ones((4, 1, 4)) / 4, 2.0, "n_events"),
    (np.full((4, 1, 4), np.nan), 2, "finite"), (np.ones((4, 1, 4)), 2, "sum to 1"), (np.tile([0.5, 0.5, 0.5, -0.5], (4, 1, 1)), 2, "at least 0"),
])
def test_the_event_law_wants_transitions(P, n, said):
    with pytest.raises(ValueError, match=said):
        q.event_law(P, n)
    assert (q.event_law(np.ones((4, 1, 4)) / 4, 2) == 0.5).all()


def test_numbers_beyond_the_range_are_refused():
    with pytest.raises(ValueError, match="cost: .* larger unit"):
        q.OperatorGraph((12,), [(op("TD", 0), 1.0)], (1e307,), 0.95)
    with pytest.raises(ValueError, match="cost: .* larger unit"):
        q.OperatorGraph((12,), [(op("TCA", 0, reject_cost=1e305), 1.0)], (1,), 1 - 1e-9)
    with pytest.raises(q.FormulationError, match="cost") as e:
        q.parse_formulation({**WARD, "holding_cost": {n["name"]: 1e307 for n in WARD["queues"]}})
    assert e.value.stage == "m3"
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="V: finite"):
            op("TCA", 0, **R).policy([1.0, bad])


@pytest.mark.parametrize("name", ["clinic", "float_nurse", "emergency_to_ward", "paint_shop"])
def test_enumerated_process_agrees(name):
    assert ex.enumeration_error(BY_NAME[name].graph) < 1e-8


def test_admission_control_and_its_limits():
    def graph(R, h, B=20):
        p, gamma = q.uniformize([1.0, 1.3], 0.1)
        return q.OperatorGraph((B,), [(op("TCA", 0, reject_cost=R), p[0]), (op("TD", 0), p[1])], (h,), gamma)

    assert (graph(0, 1).solve().policies[0] == 1).all()
    assert (graph(1, 0).solve().policies[0][:-1] == 0).all()
    thresholds = [int(graph(R, 1).solve().policies[0].argmax()) for R in (0, 1, 5, 10, 20)]
    assert thresholds == sorted(thresholds) and len(set(thresholds)) > 2
    policy = graph(5, 1).solve().policies[0]
    assert (np.diff(policy) >= 0).all() and graph(5, 1).solve().policies[1] is None


def test_symmetric_routing_joins_the_shorter_queue_and_c_mu_rule():
    g = q.OperatorGraph((10, 10), [(op("TR", 0, 1), 0.4), (op("TD", 0), 0.3), (op("TD", 1), 0.3)], (1.0, 1.0), 0.95)
    policy, (x, y) = g.solve().policies[0], np.indices((11, 11))
    assert (policy[x < y] == 0).all() and (policy[x > y] == 1).all()
    for costs in ((3.0, 1.0), (1.0, 3.0)):
        g = q.OperatorGraph((10, 10), [(op("TA", 0), 0.2), (op("TA", 1), 0.2), (op("TMS", 0, 1), 0.6)], costs, 0.95)
        served = g.solve().policies[2][1:6, 1:6]
        assert (served == int(np.argmax(costs))).all()


def test_what_is_not_event_based_is_refused():
    P, _ = q.enumerate_mdp(q.OperatorGraph((4,), [(op("TCA", 0, **R), 0.4), (op("TD", 0), 0.6)], (1.0,), 0.9))
    dense = np.stack([m.toarray() for m in P], 1)
    np.testing.assert_allclose(q.event_law(dense, 2), [[0.4, 0.6]] * 5)
    dense[2, 1] = np.eye(10)[2]
    with pytest.raises(q.FormulationError, match="not event-based") as e:
        q.event_law(dense, 2)
    assert e.value.stage == "m3"


# -- formulations as data --------------------------------------------------------------------------------------------

WARD = BY_NAME["clinic"].spec


def changed(path, value):
    spec = json.loads(json.dumps(WARD))
    at = spec
    for k in path[:-1]:
        at = at[k]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return spec


@pytest.mark.parametrize("spec, stage, field", [
    ("{", "m1", "JSON"), ("[1]", "m1", "formulation"), (3, "m1", "formulation"), ('{"queues": NaN}', "m1", "NaN"), ("[" * 100_000, "m1", "JSON"), (changed(["holding_costs"], {}), "m1", "holding_costs"),
    (changed(["parameters"], [1]), "m1", "parameters"), (changed(["queues"], KeyError), "m2", "queues"), (changed(["queues"], []), "m2", "queues"), (changed(["queues"], "a"), "m2", "queues"),
    (changed(["queues", 0, "capacity"], 0), "m2", "capacity"), (changed(["queues", 0, "capacity"], 2.5), "m2", "capacity"), (changed(["queues", 0, "capacity"], "9"), "m2", "capacity"),
    (changed(["queues", 0, "capacity"], 10**400), "m2", "states"), (changed(["queues", 0, "name"], ""), "m2", "name"), (changed(["queues", 0, "size"], 1), "m2", "size"),
    (changed(["queues"], [{"name": "a", "capacity": 1}] * 2), "m2", "twice"), (changed(["queues"], [{"name": str(k), "capacity": 1} for k in range(7)]), "m2", "at most 6"),
    (changed(["queues"], [{"name": str(k), "capacity": 99} for k in range(4)]), "m2", "states"),
    (changed(["discount_rate"], KeyError), "m3", "discount_rate"), (changed(["discount_rate"], 0), "m3", "discount_rate"), (changed(["discount_rate"], True), "m3", "discount_rate"),
    (changed(["holding_cost"], {"bed": 1}), "m3", "bed"), (changed(["holding_cost", "clinic"], -1), "m3", "clinic"), (changed(["holding_cost"], 3), "m3", "holding_cost"),
    (changed(["events"], KeyError), "m3", "events"), (changed(["events"], []), "m3", "events"), (changed(["events", 0, "rate"], 0), "m3", "rate"), (changed(["events", 0, "rate"], KeyError), "m3", "rate"),
    (changed(["events"], [{**WARD["events"][0], "name": str(k)} for k in range(65)]), "m3", "at most 64"), (changed(["events"], [WARD["events"][0]] * 2), "m3", "twice"),
    (changed(["events", 0, "operator"], "TX"), "m4", "TX"), (changed(["events", 0, "operator"], KeyError), "m4", "operator"), (changed(["events", 0, "operator"], ["TA"]), "m4", "operator"),
    (changed(["events", 0, "queues"], ["bed"]), "m4", "bed"), (changed(["events", 0, "queues"], []), "m4", "queues"), (changed(["events", 0, "queues"], "clinic"), "m4", "queues"),
    (changed(["events", 0, "queues"], [["clinic"]]), "m4", "queue"), (changed(["events", 0, "params"], {}), "m4", "reject_cost"), (changed(["events", 0, "params"], {"reject_cost": -2}), "m4", "reject_cost"),
    (changed(["events", 0, "param"], {}), "m4", "param"), ("[]", "m1", "an object is needed, got list"),
    *((changed(["events", 1, "params"], x), "m4", "params") for x in ([], 0, "", False)),
])
def test_bad_formulations_name_level_and_field(spec, stage, field):
    with pytest.raises(q.FormulationError, match=re.escape(field)) as e:
        q.parse_formulation(spec)
    assert e.value.stage == stage and isinstance(e.value, ValueError)
    assert pickle.loads(pickle.dumps(e.value)).stage == stage


def test_formulations_parse_and_absent_costs_are_zero():
    g = q.parse_formulation(json.dumps(WARD))
    assert g.capacity == (15,) and [p for _, p in g.events] == pytest.approx([1 / 2.2, 1.2 / 2.2]) and g.discount == pytest.approx(2.2 / 2.3)
    assert g.cost[1] == pytest.approx(1 / 2.3) and g.events[0][0].params == {"reject_cost": 6.0}
    assert (q.parse_formulation(changed(["holding_cost"], KeyError)).cost == 0).all()
    assert q.parse_formulation(changed(["events", 1, "params"], None)).events[1][0] == op("TD", 0)
    assert q.parse_formulation(changed(["parameters"], {"a": 1, "b": "x", "c": [1, {"d": None}]})).cost.shape == (16,)


# -- structure -------------------------------------------------------------------------------------------------------

def slow_property(V, name):
    kind, *idx = re.findall(r"\w+", name)
    e = [np.eye(V.ndim, dtype=int)[int(k)] for k in idx]
    at = lambda x: V[tuple(x)]
    sides = {"I": lambda x: ([x + e[0]], [x]), "Cx": lambda x: ([x + 2 * e[0], x], [x + e[0], x + e[0]]), "Super": lambda x: ([x + e[0] + e[1], x], [x + e[0], x + e[1]]),
             "SuperC": lambda x: ([x + 2 * e[0], x + e[1]], [x + e[0], x + e[0] + e[1]])}[kind]
    for x in itertools.product(*map(range, V.shape)):
        left, right = sides(np.array(x))
        if all((np.array(p) < V.shape).all() for p in left + right) and sum(map(at, left)) < sum(map(at, right)) - 1e-9:
            return False
    return True


def test_properties_by_brute_force():
    rng, seen = np.random.default_rng(0), {True: 0, False: 0}
    for k in range(60):
        V = np.add.outer(np.cumsum(np.sort(rng.integers(-1, 3, 4))), np.cumsum(np.sort(rng.integers(-1, 3, 4)))).astype(float) + (k % 3) * np.outer(range(4), range(4))
        V[tuple(rng.integers(0, 4, 2))] += k % 2
        for name in ("I(0)", "I(1)", "Cx(0)", "Cx(1)", "Super(0,1)", "Super(1,0)", "SuperC(0,1)", "SuperC(1,0)"):
            held = slow_property(V, name)
            assert q.has_property(V, name) == held, (name, V)
            seen[held] += 1
    assert min(seen.values()) > 50
    assert q.has_property(np.zeros((2, 2)), "Cx(0)") and q.has_property(np.array([0.0, -1e-10]), "I(0)") and not q.has_property(np.array([0.0, -1e-10]), "I(0)", tol=1e-11)


@pytest.mark.parametrize("name", ["I", "I(2)", "I(-1)", "Cx(0,1)", "Super(0)", "Super(0,0)", "super(0,1)", 3, None])
def test_bad_property_names(name):
    with pytest.raises(ValueError, match="name"):
        q.has_property(np.zeros((3, 3)), name)


def test_the_two_wards_and_what_is_absent():
    s = q.identify_structure(BY_NAME["two_wards"].graph)
    assert s.policies == {0: "threshold", 1: "threshold"} and s.properties == frozenset(all_properties(2)) and isinstance(s.properties, frozenset)
    assert all(p == "Super(0,1)" for p in s.properties if p.startswith("Super("))
    assert q.identify_structure(BY_NAME["checkouts"].graph).policies == {0: "switching_curve"}
    assert q.identify_structure(BY_NAME["three_clinics"].graph).policies == {}
    concave = q.OperatorGraph((6,), [(op("TCA", 0, **R), 0.5), (op("TD", 0), 0.5)], np.sqrt(np.arange(7.0)), 0.9)
    assert q.identify_structure(concave).policies == {} and q.identify_structure(concave).properties == {"I(0)"}


def test_unlisted_combinations_have_no_rule():
    none = [(op("TTD", 0, 1), Cx(0)), (op("TTD", 0, 1), SuperC(0, 1)), (op("TMD", 0, servers=2), SuperC(0, 1)), (op("TR", 0, 1, 2), Cx(0)), (op("TMS", 0, 1, 2), SuperC(0, 1)),
            (op("TR", 0, 1), Cx(2)), (op("TCA", 0, **R), Super(1, 2)), (op("TCJ", 0, 1, cost=1), Cx(2))]
    assert all(premises(o, name) is None for o, name in none)
    assert premises(op("TCJ", 0, 1, cost=1), I(0)) == {I(0), I(1)} and premises(op("TD", 0), SuperC(1, 2)) == {SuperC(1, 2)}


def test_largest_family_is_unique_and_the_union_of_all():
    rng = np.random.default_rng(3)
    for _ in range(60):
        ops = [ex.random_operator(rng) for _ in range(rng.integers(1, 5))]
        start = [p for p in all_properties(2) if rng.random() < 0.8]
        family = largest_family(ops, start)[0]
        assert family == ex.by_subsets(ops, start)
        assert all(largest_family(list(rng.permutation(ops)), list(rng.permutation(start)))[0] == family for _ in range(3))


@pytest.mark.parametrize("o, given, conclusion", [
    (op("TD", 0), {Cx(0)}, Cx(0)), (op("TCA", 0, **R), {Super(0, 1), SuperC(1, 0)}, SuperC(1, 0)), (op("TTD", 0, 1), {I(0), I(1), Cx(0)}, Cx(0)),
    (op("TMD", 0, servers=2), {I(0), I(1), SuperC(0, 1)}, SuperC(0, 1)), (op("TCD", 0, effort_cost=1), {Cx(1)}, Cx(1)),
])
def test_wrong_rules_are_refuted_by_a_function(o, given, conclusion):
    violation, V = q.attack_rule(o, given, conclusion)
    assert violation > 0.05 and all(q.has_property(V, p, 1e-7) for p in given)


@pytest.mark.parametrize("o", [op("TD", 0), op("TCA", 0, **R), op("TCJ", 0, 1, cost=1)], ids=repr)
def test_rules_of_the_table_survive(o):
    for name in all_properties(2):
        if (given := premises(o, name)) is not None:
            assert q.attack_rule(o, given, name)[0] < 1e-7


def test_random_claims_are_true_and_careless_ones_are_not():
    audits = [ex.audit(ex.random_graph([1, s], capacity=120)) for s in range(8)]
    assert not any(a["failed"] for a in audits) and sum(a["checked"] for a in audits) > 20
    p = BY_NAME["admission_to_a_line"]
    big = enlarged(p.spec, 60)
    assert not ex.audit(big, share=0.25)["failed"] and ex.audit(big, ex.careless_structure(big), share=0.25)["failed"]


# -- problems --------------------------------------------------------------------------------------------------------

def test_problems_are_many_and_differ():
    assert len(q.PROBLEMS) >= 24 and sum(len(p.spec["queues"]) >= 2 for p in q.PROBLEMS) >= 10
    assert sum(not q.identify_structure(p.graph).policies for p in q.PROBLEMS) >= 6
    assert len({p.name for p in q.PROBLEMS}) == len({p.text for p in q.PROBLEMS}) == len({skeleton(p.spec) for p in q.PROBLEMS}) == len(q.PROBLEMS)
    assert {o["operator"] for p in q.PROBLEMS for o in p.spec["events"]} == set(q.KINDS)
    assert all(p.graph.solve().converged for p in q.PROBLEMS)


def test_correctness_ignores_order_and_names_only():
    p = BY_NAME["emergency_to_ward"]
    spec = json.loads(json.dumps(p.spec).replace("department", "unit A"))
    spec["queues"].reverse()
    spec["events"].reverse()
    assert q.formulation_correct(q.parse_formulation(spec), p.graph) and not q.formulation_correct(None, p.graph)
    spec["events"][0]["rate"] *= 1.2
    assert not q.formulation_correct(q.parse_formulation(spec), p.graph)
    assert not q.formulation_correct(BY_NAME["clinic"].graph, p.graph)
    assert same_values(np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3).T) and not same_values(None, np.zeros(3))
    assert has_structure(enlarged(p.spec, 40), enlarged(p.spec, 40).solve().V) == {0: True, 1: True}


# -- formulation -----------------------------------------------------------------------------------------------------

def stage_of(prompt):
    (stage,) = re.findall(r"^Stage: (\w+)$", prompt, re.M)
    return stage


def perfect(p, score="0.8"):
    answers = dict(zip(fm.LEVELS, fm.split(p.spec)))
    return lambda prompt: score if stage_of(prompt) == "score" else "Here:\n```json\n" + json.dumps(answers[stage_of(prompt)]) + "\n```\nDone. {}"


def test_a_right_model_is_understood():
    for name in ("clinic", "float_nurse", "two_depots"):
        p, seen = BY_NAME[name], []
        f = q.MCTSFormulator(ScriptedLM(lambda prompt: (seen.append(stage_of(prompt)), perfect(p)(prompt))[1])).formulate(p.text)
        assert q.formulation_correct(f.graph, p.graph) and f.score == pytest.approx(0.8) and f.n_calls == len(seen) == 4 * 3 + 12 == len(f.trace)
        assert set(seen) == {"m1", "m2", "m3", "m4", "score"}


@pytest.mark.parametrize("score, want", [("0.35 or so", 0.35), ("7", 1.0), ("1e400", 1.0), ("-2", 0.0), ("0", 0.0), ("no idea", 0.0)])
def test_scores(score, want):
    f = q.MCTSFormulator(ScriptedLM(perfect(BY_NAME["clinic"], score)), n_rollouts=1).formulate(BY_NAME["clinic"].text)
    assert f.score == want and q.formulation_correct(f.graph, BY_NAME["clinic"].graph)       # valid, whatever its score
    assert f.spec is not None and q.parse_formulation(f.spec).capacity == f.graph.capacity


def test_the_mean_of_equal_scores_is_that_score():
    assert q.MCTSFormulator(ScriptedLM(perfect(BY_NAME["clinic"], "0.8"))).formulate(BY_NAME["clinic"].text).score == 0.8


def test_an_invalid_formulation_wins_only_without_solver_feedback():
    p, count = BY_NAME["clinic"], iter(range(10_000))

    def script(prompt):
        if stage_of(prompt) == "score":
            return "0.9" if "TXX" in prompt.split("Operators:")[0] else "0"
        said = perfect(p)(prompt)
        return said.replace("TCA", "TXX") if stage_of(prompt) == "m4" and next(count) % 2 else said

    def search(sf):
        return q.MCTSFormulator(ScriptedLM(script), n_rollouts=4, syntax_check=False, solver_feedback=sf).formulate(p.text)

    assert q.formulation_correct(search(True).graph, p.graph) and search(True).score == 0
    assert (search(False).graph, search(False).score) == (None, 0.0)


def test_repairs_get_the_error_and_are_limited():
    p, prompts = BY_NAME["clinic"], []

    def script(prompt):
        prompts.append(prompt)
        return perfect(p)(prompt) if stage_of(prompt) != "m3" else json.dumps({"events": [], "discount_rate": 0.1})

    f = q.MCTSFormulator(ScriptedLM(script), n_rollouts=1, n_candidates=1, max_repairs=2).formulate(p.text)
    asked = [x for x in prompts if stage_of(x) == "m3"]
    assert (f.graph, f.score) == (None, 0.0) and len(asked) == 3 and "events" in asked[1].split("It was refused")[1] and "It was refused" not in asked[0]
    assert [t["error"] is not None for t in f.trace] == [False, False, True, True, True]


def test_dead_ends_are_left_for_what_works():
    p, count = BY_NAME["clinic"], iter(range(10_000))
    script = lambda prompt: perfect(p)(prompt) if stage_of(prompt) != "m2" or next(count) % 3 else "{"
    f = q.MCTSFormulator(ScriptedLM(script), max_repairs=0).formulate(p.text)
    assert q.formulation_correct(f.graph, p.graph)


def test_solver_feedback_and_syntax_check_can_be_switched_off():
    p = BY_NAME["clinic"]
    broken = lambda prompt: perfect(p)(prompt).replace("TCA", "TXX")
    for sf in (True, False):
        f = q.MCTSFormulator(ScriptedLM(broken), n_rollouts=2, syntax_check=False, solver_feedback=sf).formulate(p.text)
        assert (f.graph, f.score) == (None, 0.0)
        assert any(t["stage"] == "score" for t in f.trace) == (not sf)


def test_equal_formulations_share_their_rewards():
    p, count = BY_NAME["two_wards"], iter(range(10_000))

    def script(prompt):
        said = perfect(p)(prompt)
        if stage_of(prompt) == "m2" and next(count) % 2:
            said = json.dumps({"queues": p.spec["queues"][::-1]})
        return said

    f = q.MCTSFormulator(ScriptedLM(script), n_rollouts=3).formulate(p.text)
    assert f.n_calls == 4 * 3 + 3                                       # one child at every level
    flipped = {**p.spec, "queues": p.spec["queues"][::-1]}
    assert fm.graph_key(q.parse_formulation(flipped)) == fm.graph_key(p.graph)


def test_nothing_is_executed(tmp_path):
    evil = f"__import__('pathlib').Path('{tmp_path}/made').touch()"
    f = q.MCTSFormulator(ScriptedLM(lambda prompt: json.dumps({"parameters": {"a": evil}})), n_rollouts=1).formulate("x")
    assert f.graph is None and not (tmp_path / "made").exists()


@pytest.mark.parametrize("change, error", [
    (dict(n_rollouts=0), ValueError), (dict(n_candidates=0), ValueError), (dict(c=-1), ValueError), (dict(max_repairs=-1), ValueError), (dict(seed=-1), ValueError),
    (dict(n_rollouts=1.5), ValueError), (dict(max_calls=0), ValueError), (dict(lm=None), TypeError),
])
def test_bad_settings(change, error):
    with pytest.raises(error, match=next(iter(change))):
        q.MCTSFormulator(**{**dict(lm=ScriptedLM(str)), **change})
    for text in ("", "  ", None):
        with pytest.raises(ValueError, match="text"):
            q.MCTSFormulator(ScriptedLM(str)).formulate(text)


def test_the_simulated_model_errs_as_it_says_and_repeats_itself():
    lm, p = q.NoisyProposer(q.PROBLEMS), BY_NAME["ferry"]
    a, b = (q.MCTSFormulator(lm, seed=4).formulate(p.text) for _ in range(2))
    assert (a.score, a.n_calls, a.trace) == (b.score, b.n_calls, b.trace)
    never = q.NoisyProposer(q.PROBLEMS, ill_formed=0, wrong=0)
    assert all(never.judge(p, q.Prompting(never, mode="steps", seed=1).formulate(p.text).graph) for p in q.PROBLEMS[::4])
    always = q.NoisyProposer(q.PROBLEMS, ill_formed=1.0)
    f = q.MCTSFormulator(always, n_rollouts=2).formulate(p.text)
    assert f.graph is None and f.n_calls == 3 * 6
    assert sum(map(sum, (e.values() for e in lm.errors.values()))) == pytest.approx(4 * 0.15)


def test_budgets_are_kept():
    lm, p = q.NoisyProposer(q.PROBLEMS), BY_NAME["clinic"]
    for make in (lambda n: q.MCTSFormulator(lm, n_rollouts=500, max_calls=n), lambda n: q.Prompting(lm, attempts=500, max_calls=n), lambda n: q.Prompting(lm, attempts=500, choose="frequent", max_calls=n)):
        for n in (1, 7, 30):
            assert make(n).formulate(p.text).n_calls <= n


# -- structured solver -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["clinic", "night_counter", "checkouts", "surgery", "container_yards"])
def test_structured_policies_are_optimal_inside(name):
    g = enlarged(BY_NAME[name].spec, 100)
    found, V = q.structured_search(g), g.solve().V
    part = tuple(slice(0, c // 4 + 1) for c in g.capacity)
    excess = (q.policy_cost(g, found.policies) - V)[part] / V[part]
    assert excess.max() < 1e-6 and excess.min() > -1e-6


def test_an_attack_on_queues_that_are_not_there():
    admit = op("TCA", 0, **R)
    for args, said in (((admit, [I(0)], I(3)), "conclusion: queue 3"), ((admit, [I(5)], I(0)), "given: queue 5"), ((op("TA", 4), [I(0)], I(0)), "op: queue 4"), ((admit, I(0), I(0)), "given: a collection")):
        with pytest.raises(ValueError, match=said):
            q.attack_rule(*args)
    assert q.attack_rule(op("TA", 2), (p for p in [Cx(1)]), Cx(1), d=3, width=4)[0] < 1e-9


def test_a_policy_that_does_not_fit_is_named():
    g = q.OperatorGraph((3, 3), [(op("TCA", 0, **R), 0.5), (op("TD", 1), 0.5)], (1, 1), 0.9)
    best, none = g.solve().policies
    assert (q.policy_cost(g, [best.tolist(), none]) == q.policy_cost(g, [best, none])).all()
    for policies, said in (([best], "policies: one for each of the 2"), ([best, None, None], "got 3"), ([None, None], r"policies\[0\]"), ([best, best], r"policies\[1\]"),
                           ([best[:, :1], None], "shape"), ([best + 2, None], "0 to 1"), ([0 * best - 1, None], "0 to 1"), ([best * 1.0, None], "whole numbers")):
        with pytest.raises(ValueError, match=said):
            q.policy_cost(g, policies)
    for how in (dict(first=0), dict(first=2.5), dict(share=0), dict(share=np.nan), dict(max_rounds=0)):
        with pytest.raises(ValueError, match=next(iter(how))):
            q.structured_search(g, **how)


def test_policy_cost_by_a_dense_solve_and_bad_policies():
    p = BY_NAME["emergency_to_ward"]
    solved = p.graph.solve()
    np.testing.assert_allclose(q.policy_cost(p.graph, solved.policies), solved.V, atol=1e-6)
    worse = [None if x is None else np.zeros_like(x) for x in solved.policies]
    with pytest.raises(ValueError, match="impossible"):
        q.policy_cost(p.graph, worse)
    with pytest.raises(ValueError, match="no structure"):
        q.structured_search(p.graph)


# -- the command -----------------------------------------------------------------------------------------------------

def test_solve_command(tmp_path, capsys):
    (tmp_path / "s.json").write_text(json.dumps(BY_NAME["ferry"].spec))
    done = use_command("queueing", "solve", "s.json", "--plot", "p.png", "--out", "p.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "switching curve" in done.stdout and "near a full buffer blocking bends it" in done.stdout and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    written = json.loads((tmp_path / "p.json").read_text())
    assert [d["proved"] for d in written["decisions"]] == ["threshold", "switching_curve"]
    np.testing.assert_array_equal(written["decisions"][1]["policy"], BY_NAME["ferry"].graph.solve().policies[1])
    (tmp_path / "idle.json").write_text(json.dumps({**WARD, "events": WARD["events"][1:]}))
    assert main(["solve", str(tmp_path / "idle.json")]) == 0 and "nothing is decided" in capsys.readouterr().out


def test_the_report_says_how_exact_it_is():
    def scaled(f):
        return {**WARD, "holding_cost": {n: f * h for n, h in WARD["holding_cost"].items()},
                "events": [{**e, "params": {k: f * v for k, v in e["params"].items()}} if e["operator"] == "TCA" else e for e in WARD["events"]]}

    assert use.solve_system(WARD).warnings() == []
    assert "decisions may be wrong" in str(use.solve_system(scaled(1e-12))) and use.solve_system(scaled(1e-12), 1e-20).warnings() == []
    dear, plain = use.solve_system(scaled(1e10)), use.solve_system(WARD)
    assert "not to the tolerance" in str(dear) and dear.solution.V == pytest.approx(1e10 * plain.solution.V, rel=1e-8)
    assert use.solve_system(scaled(1e10), 1.0).warnings() == []


@pytest.mark.parametrize("argv, said", [
    (["solve", "missing.json"], "No such file"), (["solve", "bad.json"], "discount_rate"), (["solve", "half.json"], "not valid JSON"), (["solve", "binary.json"], "UTF-8"),
    (["solve", "s.json", "--out", "s.json"], "would be overwritten"), (["solve", "s.json", "--out", "nowhere/x.json"], "there is no folder"), (["solve", "s.json", "--tol", "0"], "--tol"),
    (["solve", "s.json", "--tol", "inf"], "--tol inf"), (["solve", "s.json", "--tol", "nan"], "--tol nan"), (["solve", "s.json", "--plot", "p.xyz"], ".png"), (["solve", "s.json", "--plot", "p"], ".png"),
    (["formulate", "empty.txt", "--model", "x"], "empty"), (["formulate", "t.txt", "--model", "no/such/folder/here"], "--model"), (["formulate", "t.txt", "--model", "x", "--seed", "-1"], "--seed"),
    (["formulate", "t.txt"], "--model"), (["nothing"], "invalid choice"),
])
def test_mistakes_are_one_line(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("s.json").write_text(json.dumps(WARD)), Path("bad.json").write_text(json.dumps({**WARD, "discount_rate": 0}))
    Path("half.json").write_text('{"queues"'), Path("binary.json").write_bytes(b"\xff\xfe\x00"), Path("empty.txt").write_text(" \n"), Path("t.txt").write_text("A queue.")
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and not list(Path().glob("p*"))


def test_formulate_command(tmp_path, monkeypatch, capsys):
    p = BY_NAME["clinic"]
    (tmp_path / "t.txt").write_text(p.text)
    monkeypatch.setattr("icl26.decision.queueing.use.open_lm", lambda *_: (ScriptedLM(perfect(p)), False))
    assert main(["formulate", str(tmp_path / "t.txt"), "--model", "x", "--rollouts", "2", "--out", str(tmp_path / "s.json")]) == 0
    assert "for unlimited buffers: threshold" in capsys.readouterr().out
    assert q.formulation_correct(q.parse_formulation((tmp_path / "s.json").read_text()), p.graph)
    monkeypatch.setattr("icl26.decision.queueing.use.open_lm", lambda *_: (ScriptedLM(lambda _: "no"), False))
    assert main(["formulate", str(tmp_path / "t.txt"), "--model", "x", "--rollouts", "1"]) == 1
    assert "no JSON object" in capsys.readouterr().err


# -- runs ------------------------------------------------------------------------------------------------------------

def expected(part, seed):
    "Estimate and interval of a part from its values or counts; None: there is nothing to compute them from."
    values, label = part.get("values"), part["label"]
    if part.get("k") is not None:
        return wilson(part["k"], part["n"])
    if label.startswith("exponent"):
        return loglog_slope([5, 10, 20, 40, 80], np.reshape(values, (part["n"], -1)), n_resamples=2000, seed=seed)
    if label.startswith(("complete", "beside: random graphs, policies")):
        return bootstrap_ci(np.reshape(values, (-1, 2)).astype(float), lambda b, axis: b[..., 0].sum(axis) / b[..., 1].sum(axis), method="percentile", n_resamples=4000, seed=0)
    if values is None:
        return None
    if label.startswith(("speed-up", "cost gap")):
        return (min if label.startswith("speed") else max)(values), None, None
    return t_interval(values) if np.ptp(values) == 0 else mean_interval(values, seed=seed)


def check_run(record):
    "Every verdict follows from the recorded numbers, and every estimate and interval from the recorded values. Number of parts that were checked."
    checked = 0
    for c in record["claims"]:
        assert recompute(c)[0] == c["verdict"]
        parts = {p["label"]: p for p in c["values"] or []}
        for label, part in parts.items():
            if (want := expected(part, record["parameters"]["seed"])) is not None:
                agrees(part, want)
                checked += 1
        if c["id"] == "C3" and parts:
            for better, worse in (("SF", "none"), ("SF+SC", "SF")):
                assert parts[f"apart {better} − {worse}"]["measured"] == pytest.approx(parts[f"accuracy {better}"]["ci_low"] - parts[f"accuracy {worse}"]["ci_high"])
                checked += 1
        if c["id"] == "C4" and parts:
            judged = parts["tree − best of n"]
            assert [c["difference"][k] for k in ("value", "ci_low", "ci_high")] == [judged[k] for k in ("measured", "ci_low", "ci_high")]
            assert c["measured"] - c["baseline"]["value"] == pytest.approx(judged["measured"])
    return checked


def against(c):
    "The recorded parts, spoiled."
    worst = {"C1": 1.0, "C2": 0.0, "C3": -0.5, "C4": -0.5, "C5": 9.0, "C6": 0.5, "own-C7": 0.5, "own-C8": 1.0}[c["id"]]
    spoil = lambda p: {**p, "measured": worst, "ci_low": worst - 0.01, "ci_high": worst + 0.01}
    return [spoil(p) for p in c["values"]]


def test_the_smoke_run(tmp_path_factory):
    record = load_results(papers.smoke("queueing", tmp_path_factory))
    assert {c["id"] for c in record["claims"]} == {c.id for c in q.claims("smoke")} and check_run(record) > 0


def test_the_committed_run():
    record = load_results(committed("queueing"))
    claims = {c.id: c for c in q.claims("cpu")}
    assert [c["id"] for c in record["claims"]] and {c["id"] for c in record["claims"]} == set(claims) and record["incomplete"] is None
    assert check_run(record) > 30
    for c in record["claims"]:
        assert c["verdict"] != "not run" and measurement(claims[c["id"]], parts=against(c))["verdict"] == "not reproduced"


def test_a_policy_without_a_threshold_is_not_called_one(tmp_path, capsys):
    "Rejecting at 1 and 2, admitting from 3 on, rejecting when full: on a small buffer the cost of blocking bends the policy."
    spec = dict(queues=[dict(name="ward", capacity=6)], holding_cost={"ward": 1.3}, discount_rate=0.12,
                events=[dict(name="care", rate=1.0, operator="TMD", queues=["ward"], params={"servers": 1}),
                        dict(name="walk-in", rate=2.0, operator="TA", queues=["ward"]),
                        dict(name="surgery", rate=0.95, operator="TCD", queues=["ward"], params={"effort_cost": 9.9}),
                        dict(name="referral", rate=1.2, operator="TCA", queues=["ward"], params={"reject_cost": 2.7})])
    report = use.solve_system(spec)
    k = [e["name"] for e in spec["events"]].index("referral")
    policy = report.solution.policies[k]
    assert policy.tolist() == [0, 1, 1, 0, 0, 0, 1]
    assert report.first_states(k) == "reject at 1–2 and 6 in ward, else admit"
    assert report.seen_on_the_buffer(k).startswith("not seen on these buffers")
    assert use.runs(np.array([1, 0, 1, 1, 0, 1], bool)) == "0, 2–3 and 5" and use.runs(np.array([0, 1, 1], bool)) == "1–2"


def test_use_reads_a_byte_order_mark_and_keeps_its_files_apart(tmp_path, capsys):
    path = tmp_path / "system.json"
    path.write_text(json.dumps(q.PROBLEMS[0].spec), encoding="utf-8-sig")
    assert main(["solve", str(path)]) == 0
    capsys.readouterr()
    both = str(tmp_path / "x.png")
    assert main(["solve", str(path), "--plot", both, "--out", both]) == 2 and not Path(both).exists()
    assert capsys.readouterr().err == f"icl26: error: --plot and --out: two different files are needed, got {both} for both\n"


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "a"])
def test_rounds_are_checked(bad):
    with pytest.raises(ValueError, match="max_iter"):
        q.PROBLEMS[0].graph.solve(max_iter=bad)


def test_gpu_profile_runs_on_a_tiny_model(tmp_path):
    tiny_lm(max_positions=4096, d_model=8, n_layers=1, n_heads=1, seed=0).save_pretrained(tmp_path / "model")
    record = load_results(run_command("queueing", tmp_path / "out", "--profile", "gpu", "--device", "cpu", "--model", tmp_path / "model", ICL26_TINY="1"))
    claims = {c["id"]: c for c in record["claims"]}
    assert claims["C3"]["verdict"] == claims["C4"]["verdict"] == "not reproduced" and claims["C3"]["scale"] == claims["C4"]["scale"] == "mechanism"
    assert all("no language model" in claims[k]["reason"] for k in ("C1", "C2", "C5", "C6", "own-C7", "own-C8")) and record["model_hashes"]
    assert check_run(record) == 8


def test_gpu_profile_asks_a_server(tmp_path, monkeypatch):
    "An OpenAI-compatible server on this machine whose answers are no formulations: searched for, scored, recorded."
    with chat_server(lambda body: "I do not know.") as chat:
        for name, value in dict(ICL26_TINY="1", ICL26_CACHE=str(tmp_path / "cache"), OPENAI_API_KEY="sk-nothing", ICL26_QUEUEING_SERVER=chat.url).items():
            monkeypatch.setenv(name, value)
        claims = {c["id"]: c for c in run_here("queueing", tmp_path / "out", profile="gpu", device="cpu", model="some-model")["claims"]}
    assert len(chat.asked) > 10 and {b["model"] for b in chat.asked} == {"some-model"}
    assert all("answered by a server" in claims[k]["note"] and claims[k]["verdict"] == "not reproduced" for k in ("C3", "C4"))


def test_gpu_profile_without_a_gpu_says_so(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("queueing", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])


def test_reasons_do_not_depend_on_the_process(tmp_path):
    "Properties are kept in sets, whose order changes with Python's hash seed; what is said of them must not."
    code = ("from icl26.decision.queueing import PROBLEMS, identify_structure\n"
            "for p in PROBLEMS: print(list(identify_structure(p.graph).lost.items()))")
    one, two, three = (printed(code, tmp_path, PYTHONHASHSEED=seed) for seed in ("1", "2", "3"))
    assert one == two == three and one.count("has no rule for it") > 2
