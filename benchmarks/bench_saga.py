"""Graph distances and smoothing in linear time beside the dense way, and how the cost grows with the nodes.

    pytest benchmarks/bench_saga.py -s

Each pair must give the same answer before the clock starts.
"""


import numpy as np
import torch

from icl26.networks.saga import SAGA, make_csbm, normalized_adjacency, propagate, sad
from icl26.networks.saga.data import LINKS, MultiViewGraph, block_edges
from timing import best_of, ratio


def growth(name, seconds):
    "Time at ten times the nodes over time at the nodes; the bound is loose, the ratio is for the reader."
    small, large = seconds
    print(f"\n{name}: {small * 1e3:.2f} ms, times {large / small:.1f} with ten times the nodes")
    assert large / small < 100, f"{name}: {large / small:.1f} times as long for ten times the nodes"


def embeddings(n, d=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g), torch.randn(n, d, generator=g) + 0.3


def sparse_graph(n, degree=12, seed=0):
    "Four classes, about `degree` links a node, whatever n is."
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 4)
    p = degree / n
    return MultiViewGraph([block_edges(y, 2 * p, 2 * p / 3, rng) for _ in range(2)], rng.normal(size=(n, 32)) + y[:, None] / 4, y)


# -- distances -------------------------------------------------------------------------------------------------------


def test_gram_distance_beside_matrices_of_nodes_by_nodes():
    a, b = embeddings(2000)

    def dense():
        u, v = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
        return (u @ u.T - v @ v.T).square().sum()

    ours = lambda: sad(a, b, kind="gram")
    torch.testing.assert_close(ours(), dense(), rtol=1e-3, atol=0)
    ratio("sad, gram, 2000 nodes, beside N×N matrices", best_of(ours, 20), best_of(dense, 5), 3)


def test_moment_distance_beside_matrices_of_nodes_by_nodes():
    a, b = embeddings(2000)
    b = b[:1500]

    def dense():
        u, v = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
        return (u @ u.T).square().mean() + (v @ v.T).square().mean() - 2 * (u @ v.T).square().mean()

    ours = lambda: sad(a, b)
    torch.testing.assert_close(ours(), dense(), rtol=1e-3, atol=1e-6)
    ratio("sad, moments, 2000 and 1500 nodes, beside N×N matrices", best_of(ours, 20), best_of(dense, 5), 3)


# -- smoothing -------------------------------------------------------------------------------------------------------


def test_propagation_beside_dense_matrix_powers():
    g = sparse_graph(1500)
    a = normalized_adjacency(g.adjs[0])
    matrix = a.toarray()
    ours, dense = lambda: propagate(a, g.x, 3), lambda: [np.linalg.matrix_power(matrix, k) @ g.x for k in (1, 2, 3)]
    np.testing.assert_allclose(ours(), dense(), atol=1e-12)
    ratio("3 hops, 1500 nodes, beside dense powers", best_of(ours, 20), best_of(dense, 2), 20)


def test_propagation_beside_dense_products():
    g = sparse_graph(1500)
    a = normalized_adjacency(g.adjs[0])
    matrix = a.toarray()

    def dense():
        out = [g.x]
        for _ in range(3):
            out.append(matrix @ out[-1])
        return out[1:]

    ours = lambda: propagate(a, g.x, 3)
    np.testing.assert_allclose(ours(), dense(), atol=1e-12)
    ratio("3 hops, 1500 nodes, beside dense products one after the other", best_of(ours, 20), best_of(dense, 3), 3)


def test_block_model_beside_a_coin_for_every_pair():
    n, (p, q) = 2000, LINKS["source"][0]
    y = np.arange(n) % 4
    ours = lambda: block_edges(y, p, q, np.random.default_rng(0))

    def dense():
        upper = np.triu(np.random.default_rng(0).random((n, n)) < np.where(y[:, None] == y, p, q), 1)
        return upper | upper.T

    a, b = ours(), dense()
    same = (y[:, None] == y) & ~np.eye(n, dtype=bool)
    for place, prob in ((same, p), (y[:, None] != y, q)):                                    # other draws, the same law: five standard errors
        error = 5 * np.sqrt(prob * (1 - prob) / (place.sum() / 2))
        assert abs(a.toarray()[place].mean() - prob) < error and abs(b[place].mean() - prob) < error
    ratio("block model of 2000 nodes, beside a coin for every pair", best_of(ours, 5), best_of(dense, 3), 1)


# -- growth ----------------------------------------------------------------------------------------------------------


def test_ten_times_the_nodes():
    sizes = (4000, 40_000)
    for kind in ("moment", "gram"):
        pairs = [embeddings(n) for n in sizes]
        growth(f"sad, {kind}, {sizes[0]} nodes", [best_of(lambda: sad(*p, kind=kind), 7) for p in pairs])
    graphs = [sparse_graph(n) for n in sizes]
    normal = [normalized_adjacency(g.adjs[0]) for g in graphs]
    growth(f"2 hops, {sizes[0]} nodes of the same degree", [best_of(lambda: propagate(a, g.x, 2), 5) for a, g in zip(normal, graphs)])


def test_ten_times_the_nodes_in_an_epoch():
    "Two views, two hops, batches of 200; the times of one epoch and of three give that of an epoch without what comes before."
    took = []
    for n in (600, 6000):
        g = sparse_graph(n)
        fit = lambda epochs: SAGA(hidden=64, dim=32, epochs=epochs, batch_size=200).fit(g, g)
        took.append((best_of(lambda: fit(3), 3) - best_of(lambda: fit(1), 3)) / 2)
    growth("an epoch of SAGA, 600 nodes a domain", took)


def test_fixed_pair_beside_the_choice():
    "What the table costs: the same losses from the same weights, an epoch of each."
    source, target = (make_csbm(800, domain=d, seed=0) for d in ("source", "target"))
    kw = dict(hidden=128, dim=64, batch_size=200)
    first = SAGA(**kw, epochs=1, lam=0.0).fit(source, target)                                # λ = 0: equal weights, as a fixed pair has
    fixed = SAGA(**kw, epochs=1, selection=first.pair_).fit(source, target)
    np.testing.assert_array_equal(first.predict_proba(target), fixed.predict_proba(target))
    fit = lambda selection: SAGA(**kw, epochs=6, selection=selection).fit(source, target)
    a, b = best_of(lambda: fit("dynamic"), 3), best_of(lambda: fit(first.pair_), 3)
    print(f"\n6 epochs, 800 nodes a domain: {a * 1e3:.0f} ms with the choice, {b * 1e3:.0f} ms without, ratio {a / b:.2f}")
    assert a / b < 2
