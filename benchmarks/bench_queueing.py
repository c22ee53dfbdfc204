"""Queueing control: operators as slices beside a loop over states, value iteration beside the loop (and mdptoolbox, if it is installed), curves beside tables.

    pytest benchmarks/bench_queueing.py -s

Each pair must give the same answer before the clock starts.
"""
import itertools

import numpy as np
import pytest

from icl26.decision.queueing import OperatorGraph, enumerate_mdp, identify_structure, parse_formulation, policy_cost, structured_search
from icl26.decision.queueing.operators import outcomes
from icl26.decision.queueing.problems import PROBLEMS, enlarged
from timing import best_of, ratio

BY_NAME = {p.name: p for p in PROBLEMS}


# -- operators -------------------------------------------------------------------------------------------------------

def loop_table(graph):
    "For every state and event the choices (lump cost, [(next state, probability)]), looked up once."
    states = list(itertools.product(*map(range, graph.shape)))
    return {x: [(p, [(k, list(to.items())) for k, to in outcomes(op.kind, op.queues, op.params, x, graph.capacity).values()]) for op, p in graph.events] for x in states}


def loop_backup(graph, table, V):
    "One backup, state by state."
    out = np.empty_like(V)
    for x, events in table.items():
        out[x] = graph.cost[x] + graph.discount * sum(p * min(k + sum(w * V[y] for y, w in to) for k, to in choices) for p, choices in events)
    return out


@pytest.mark.parametrize("name", ["emergency_to_ward", "float_nurse", "two_depots"])
def test_backup_beside_a_loop_over_states(name):
    graph = BY_NAME[name].graph
    table, V = loop_table(graph), np.random.default_rng(0).normal(size=graph.shape)
    np.testing.assert_allclose(graph.backup(V), loop_backup(graph, table, V), atol=1e-12)
    ratio(f"backup, {name}, {V.size} states", best_of(lambda: graph.backup(V), 20), best_of(lambda: loop_backup(graph, table, V), 3), 3)


def test_cost_of_ten_times_the_states():
    took = {}
    for B in (99, 316, 999):
        graph = enlarged(BY_NAME["checkouts"].spec, B)
        V = graph.backup(graph.cost)
        took[V.size] = best_of(lambda: graph.backup(V), 15)
    print("\nbackup: " + ", ".join(f"{n} states {t:.5f} s" for n, t in took.items()))
    (n, a), (m, b), (_, c) = took.items()
    assert b / a < 2.5 * m / n                                        # within the cache
    assert c / b < 30                                                  # beyond it memory, not arithmetic, sets the pace


# -- solving ---------------------------------------------------------------------------------------------------------

def loop_iteration(graph, table, tol):
    "Value iteration over states one by one, stopped by the contraction bound."
    V = np.zeros(graph.shape)
    while True:
        W = loop_backup(graph, table, V)
        if np.abs(W - V).max() * graph.discount / (1 - graph.discount) <= tol:
            return W
        V = W


def test_value_iteration_beside_a_loop_over_states():
    graph, tol = BY_NAME["checkouts"].graph, 1e-4
    table = loop_table(graph)
    assert np.abs(graph.solve(tol).V - loop_iteration(graph, table, tol)).max() < 2 * tol
    ratio(f"value iteration, {graph.cost.size} states", best_of(lambda: graph.solve(tol), 5), best_of(lambda: loop_iteration(graph, table, tol), 1), 5)


def test_value_iteration_beside_mdptoolbox():
    mdp = pytest.importorskip("mdptoolbox.mdp", reason="mdptoolbox-hiive is not installed")
    graph, tol = BY_NAME["clinic"].graph, 1e-6
    P, r = enumerate_mdp(graph)
    n, dense = r.shape[0], np.stack([m.toarray() for m in P])
    r = np.where(np.isfinite(r), r, -1e6)
    theirs = mdp.ValueIteration(dense, r, graph.discount, epsilon=tol, max_iter=100_000)
    theirs.run()
    W = -np.array(theirs.V).reshape(*graph.shape, len(graph.events))
    V = graph.cost + graph.discount * W @ np.array([p for _, p in graph.events])
    assert np.abs(V - graph.solve(tol).V).max() < 1e-3 * np.abs(V).max()
    def again():
        mdp.ValueIteration(dense, r, graph.discount, epsilon=tol, max_iter=100_000).run()
    ratio(f"value iteration, {n} states of the enumerated process", best_of(lambda: graph.solve(tol), 5), best_of(again, 2), 1)


@pytest.mark.parametrize("name", ["toll_gate", "two_wards", "checkouts", "bike_sharing"])
def test_structured_search_beside_value_iteration(name):
    graph = enlarged(BY_NAME[name].spec, 150)
    V, found = graph.solve().V, structured_search(graph)
    part = tuple(slice(0, c // 4 + 1) for c in graph.capacity)
    assert ((policy_cost(graph, found.policies) - V)[part] / V[part]).max() < 1e-6
    tol = 0.5e-6 * V.ravel()[0]
    ratio(f"structured search, {name}, {V.size} states", best_of(lambda: structured_search(graph), 3), best_of(lambda: graph.solve(tol), 3), 1)


def test_identification_is_cheap_beside_solving():
    graphs = [parse_formulation(p.spec) for p in PROBLEMS]
    ours, theirs = best_of(lambda: [identify_structure(g) for g in graphs], 3), best_of(lambda: [g.solve() for g in graphs], 1)
    ratio(f"identification beside solving, {len(graphs)} problems", ours, theirs, 3)
    assert isinstance(graphs[0], OperatorGraph)
