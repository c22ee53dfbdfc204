"saga: the interface, its edges, values known from elsewhere, and that every number and verdict of a run follows from what it recorded."

import json
import sys
from functools import partial

import numpy as np
import papers
import pytest
import scipy.sparse as sp
import torch
from papers import committed, once, plain_signature, run_command, run_here, said, use_command
from recompute import made_up, t_by_hand
from scipy.stats import beta
from sklearn.base import clone
from sklearn.metrics.pairwise import rbf_kernel

import icl26.networks.saga as sg
from icl26.networks.saga import use
from icl26.networks.saga.baselines import Farthest, covariance, mmd
from icl26.networks.saga.data import block_edges, views_of
from icl26.networks.saga.model import Network, Projection, cycled_batches, intra_alignment_loss, mean_entropy
from icl26.networks.saga.sad import moment_table, second_moment
from icl26.networks.saga.studies import ABLATIONS, CROSSED, STATIC, Clocked, Turned, build, rank_correlation, seconds, switches, train, watched
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement

SMALL = dict(hidden=16, dim=8, epochs=4)


@pytest.fixture(scope="module")
def pair():
    return tuple(sg.make_csbm(90, domain=d, seed=1) for d in ("source", "target"))


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, want",
    [
        (sg.make_csbm, "(n, *, domain, seed, n_classes=4, n_features=32)"),
        (sg.MultiViewGraph, "(adjs, x, y=None)"),
        (sg.normalized_adjacency, "(adj)"),
        (sg.propagate, "(adj_norm, x, hops, teleport=0.0)"),
        (sg.sad, "(z_s, z_t, *, normalize=True, kind='moment')"),
        (sg.sad_table, "(zs, zt, **kw)"),
        (sg.dominant_pair, "(table)"),
        (sg.sad_weights, "(table, lam=1.0)"),
        (sg.cross_alignment_loss, "(p, q, tau=1.0)"),
        (sg.SAGA, "(*, hops=2, teleport=0.0, hidden=256, dim=128, alpha=0.95, beta=1.0, delta=0.01, lam=1.0, tau=1.0, lr=0.001, weight_decay=0.0001, epochs=50, "
                  "batch_size=None, dropout=0.0, selection='dynamic', anchor='domain', cross_view=False, seed=0, device='cpu')"),
        (sg.SAGA.fit, "(self, source, target)"),
        (sg.SAGA.predict, "(self, graph)"),
        (sg.SAGA.predict_proba, "(self, graph)"),
        (sg.SAGA.transform, "(self, graph)"),
    ],
)
def test_signatures(call, want):
    assert plain_signature(call) == want


# -- graphs ----------------------------------------------------------------------------------------------------------


def test_graph_checks():
    x, a = np.zeros((3, 2)), sp.csr_array((3, 3))
    assert sg.MultiViewGraph([a, a], x).n_views == 2 and sg.MultiViewGraph([a], x, [0, 1, 1]).y.dtype == np.int64
    for args, text in (
        (([], x), "at least one view"), (([a], np.zeros(3)), "x:"), (([sp.csr_array((2, 2))], x), "3 nodes"), (([sp.csr_array((3, 2))], x), "square"),
        (([sp.csr_array(-np.ones((3, 3)))], x), "0 or more"), (([sp.csr_array(np.full((3, 3), np.inf))], x), "finite"), (([a], x * np.nan), "finite"),
        (([a], x, [0, 1]), "y:"), (([a], x, [0, 1, 0.5]), "whole"),
    ):
        with pytest.raises(ValueError, match=text):
            sg.MultiViewGraph(*args)
    for args, text in ((([a * 1j + 1j * sp.eye_array(3)], x), "real"), (([a], x, [0, 1, 1e30]), "whole"), (([a], [[1], [1, 2]]), "different lengths"), ((torch.eye(3), x), "write .adj.")):
        with pytest.raises(ValueError, match=text):
            sg.MultiViewGraph(*args)
    with pytest.raises(TypeError, match="adjs: a list"):
        sg.MultiViewGraph(3, x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_of_any_type_and_layout_are_read():
    rng = np.random.default_rng(0)
    a, x = (rng.random((5, 5)) < 0.4).astype(float), rng.integers(-3, 4, (5, 2)).astype(float)
    for adj in (torch.as_tensor(a), torch.as_tensor(a).to_sparse(), torch.as_tensor(a).to_sparse_csr(), torch.as_tensor(a).bool().to_sparse(), torch.as_tensor(a).half()):
        for features in (torch.as_tensor(x).requires_grad_(), torch.as_tensor(x).bfloat16(), torch.as_tensor(x).to_sparse()):
            g = sg.MultiViewGraph([adj], features, torch.arange(5))
            assert (g.adjs[0].toarray() == a).all() and (g.x == x).all() and g.y.tolist() == list(range(5))
    z = randn(6, 3)
    assert sg.sad(z.numpy(), z.flip(0).tolist()) == sg.sad(z, z.flip(0)) and sg.dominant_pair(torch.tensor([[2.0, 1.0]]).bfloat16()) == (0, 1)
    with pytest.raises(TypeError, match="z_t"):
        sg.sad(z, None)


@pytest.mark.parametrize("unit", [1e-200, 1e-13, 1e200])
def test_the_unit_of_the_features_does_not_matter(pair, unit):
    np.testing.assert_allclose(views_of(sg.MultiViewGraph(pair[0].adjs, pair[0].x * unit), 2), views_of(pair[0], 2), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_normalised_adjacency_is_the_dense_formula_and_its_spectrum_is_right(seed):
    rng = np.random.default_rng(seed)
    a = rng.random((25, 25)) * (rng.random((25, 25)) < 0.2)                                  # directed, with self-loops
    b = np.maximum(a, a.T)
    np.fill_diagonal(b, 1)
    got = sg.normalized_adjacency(sp.coo_array(a))
    np.testing.assert_allclose(got.toarray(), b / np.sqrt(np.outer(b.sum(1), b.sum(1))), atol=1e-14)
    values = np.linalg.eigvalsh(got.toarray())
    assert values.min() > -1 and abs(values.max() - 1) < 1e-12


def test_isolated_nodes_and_constant_degree():
    assert sg.normalized_adjacency(sp.csr_array((4, 4))).toarray().tolist() == np.eye(4).tolist()
    n, k = 12, 4
    circulant = sum(sp.csr_array(np.roll(np.eye(n), s, 0)) for s in range(1, k + 1))
    x = np.random.default_rng(0).normal(size=(n, 3))
    want = sum(np.roll(x, s, 0) for s in range(-k, k + 1)) / (2 * k + 1)
    np.testing.assert_allclose(sg.propagate(sg.normalized_adjacency(circulant), x, 1)[0], want)


def test_propagation_is_dense_matrix_powers(pair):
    a = sg.normalized_adjacency(pair[0].adjs[1])
    dense = a.toarray()
    got = sg.propagate(a, pair[0].x, 3)
    np.testing.assert_allclose(got, [np.linalg.matrix_power(dense, k) @ pair[0].x for k in (1, 2, 3)], atol=1e-12)
    np.testing.assert_array_equal(sg.propagate(a, pair[0].x, 2, 1.0), [pair[0].x] * 2)
    half = [pair[0].x]
    for _ in range(3):
        half.append(0.5 * dense @ half[-1] + 0.5 * pair[0].x)
    np.testing.assert_allclose(sg.propagate(a, pair[0].x, 3, 0.5), half[1:], atol=1e-12)
    for hops, teleport in ((0, 0.0), (1, -0.1), (1, 1.1), (1.5, 0.0), (None, 0.0), ("2", 0.0), (np.inf, 0.0), (1, "0")):
        with pytest.raises(ValueError, match="hops|teleport"):
            sg.propagate(a, pair[0].x, hops, teleport)


def test_block_model_has_the_probabilities_that_are_stated():
    n = 1200
    for domain, links in (("source", [(0.05, 0.01), (0.04, 0.02)]), ("target", [(0.05, 0.01), (0.02, 0.03)])):
        g = sg.make_csbm(n, domain=domain, seed=5)
        same = g.y[:, None] == g.y
        for a, (p, q) in zip(g.adjs, links):
            d = a.toarray()
            assert (d == d.T).all() and not d.diagonal().any() and set(np.unique(d)) == {0, 1}
            np.testing.assert_allclose([d[same & ~np.eye(n, dtype=bool)].mean(), d[~same].mean()], [p, q], rtol=0.05)
    one, two = (sg.make_csbm(4000, domain="source", seed=s) for s in (0, 1))                 # means are shared by seeds and domains
    means = np.array([[g.x[g.y == c].mean(0) for c in range(4)] for g in (one, two)])
    assert abs(means[0] - means[1]).max() < 0.25 and 0.2 < means[0].std() < 0.5
    assert abs(one.x[one.y == 0].std(0).mean() - 1) < 0.02
    moved = sg.make_csbm(4000, domain="target", seed=0)
    shift = np.array([moved.x[moved.y == c].mean(0) for c in range(4)]) - means[0]
    assert abs(shift - shift.mean(0)).max() < 0.3 and 0.3 < shift.mean(0).std() < 0.95       # one draw for all nodes


def test_block_edges_reach_every_pair_once():
    y = np.array([0, 1, 1, 2, 0, 2, 2])
    np.testing.assert_array_equal(block_edges(y, 1.0, 1.0, np.random.default_rng(0)).toarray(), 1 - np.eye(7))
    np.testing.assert_array_equal(block_edges(y, 1.0, 0.0, np.random.default_rng(0)).toarray(), (y[:, None] == y) & ~np.eye(7, dtype=bool))


# -- the distance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moment", "gram"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sad_is_the_brute_force_and_has_its_symmetries(kind, normalize):
    a, b = randn(40, 5), randn(40, 5, seed=1)
    u, v = ((z / z.norm(dim=1, keepdim=True) if normalize else z).numpy() for z in (a, b))
    brute = ((u @ u.T - v @ v.T) ** 2).sum() if kind == "gram" else ((u.T @ u - v.T @ v) ** 2).sum() / 1600
    kw = dict(kind=kind, normalize=normalize)
    np.testing.assert_allclose(float(sg.sad(a, b, **kw)), brute, rtol=1e-10)
    assert sg.sad(a, b, **kw).ndim == 0 and sg.sad(a, a, **kw) == 0
    turn, order = torch.linalg.qr(randn(5, 5, seed=2))[0], torch.randperm(40)
    for other in (sg.sad(b, a, **kw), sg.sad(a @ turn, b @ turn, **kw), sg.sad(a[order], b[order], **kw)):
        np.testing.assert_allclose(float(other), brute, rtol=1e-10)


def test_moments_do_not_care_about_size_or_order():
    a, b = randn(30, 4), randn(17, 4, seed=1)
    want = float(sg.sad(a, b))
    np.testing.assert_allclose(float(sg.sad(torch.cat([a, a, a]), b)), want)
    np.testing.assert_allclose(float(sg.sad(a, b[torch.randperm(17)])), want)
    with pytest.raises(ValueError, match="equal size"):
        sg.sad(a, b, kind="gram")
    with pytest.raises(ValueError, match="wide"):
        sg.sad(a, b[:, :3])


def test_rows_of_zeros_give_no_nan():
    z = torch.zeros(3, 4, requires_grad=True)
    for kind in ("moment", "gram"):
        value = sg.sad(z, randn(3, 4, dtype=torch.float32), kind=kind)
        assert value.isfinite() and torch.autograd.grad(value, z)[0].isfinite().all()


def test_no_matrix_of_nodes_by_nodes():
    z = randn(60_000, 3, dtype=torch.float32)                                                # N x N would be 14 GB
    assert sg.sad(z, z.flip(0)) < 1e-10 and sg.sad(z, z, kind="gram") == 0


def test_table_choice_and_weights():
    zs, zt = ([[randn(n, 3, seed=10 * n + 3 * v + k) for k in range(2)] for v in range(3)] for n in (6, 8))
    table = sg.sad_table(zs, zt)
    assert table.shape == (3, 2)
    np.testing.assert_allclose(table.numpy(), [[float(sg.sad(zs[v][k], zt[v][k])) for k in range(2)] for v in range(3)])
    cross = moment_table(*(torch.stack([torch.stack([second_moment(z) for z in row]) for row in side]) for side in (zs, zt)), cross_view=True)
    np.testing.assert_allclose(float(cross[2, 0, 1]), float(sg.sad(zs[2][1], zt[0][1])))
    assert sg.dominant_pair(table) == divmod(int(table.argmin()), 2)
    assert sg.dominant_pair(torch.zeros(2, 2)) == (0, 0) and sg.dominant_pair(torch.tensor([[2.0, 1.0], [1.0, 1.0]])) == (0, 1)
    np.testing.assert_allclose(sg.sad_weights(table, 3.0).numpy(), np.exp(-3 * table) / np.exp(-3 * table).sum())
    assert torch.allclose(sg.sad_weights(torch.full((2, 2), 1e30)), torch.full((2, 2), 0.25))
    for t in ([[0.0, 1e30]], [[3e38, 1.0]], [[0.0, np.inf]], [[np.inf, np.inf]]):
        for lam in (0.0, 1.0, 1e3):
            w = sg.sad_weights(torch.tensor(t), lam)
            assert w.isfinite().all() and abs(float(w.sum()) - 1) < 1e-6
    assert sg.sad_weights(torch.full((1, 4), np.inf)).tolist() == [[0.25] * 4] == sg.sad_weights(torch.tensor([[0.0, np.inf, 1.0, 2.0]]), 0.0).tolist()
    for lam in (-1, np.inf, np.nan):
        with pytest.raises(ValueError, match="lam"):
            sg.sad_weights(table, lam)
    z = randn(5, 3).requires_grad_()
    assert not sg.sad_weights(sg.sad_table([[z]], [[randn(5, 3)]])).requires_grad            # no gradient through the weights
    with pytest.raises(ValueError, match="zt"):
        sg.sad_table(zs, zt[:2])


# -- losses ----------------------------------------------------------------------------------------------------------


def test_cross_alignment_loss_is_the_formula():
    p, q = randn(4, 3), randn(6, 3, seed=1)
    c = (p / p.norm(dim=1, keepdim=True)) @ (q / q.norm(dim=1, keepdim=True)).T
    for tau in (0.1, 1.0, 5.0):
        e = np.exp(c.numpy() / tau)
        np.testing.assert_allclose(float(sg.cross_alignment_loss(p, q, tau)), -np.log(e.mean(1)).mean() - np.log(e.mean(0)).mean())
    p.requires_grad_()
    official = lambda: -2 * torch.tensor(0.0) - (c_of(p, q)).logsumexp(1).mean() - (c_of(p, q)).logsumexp(0).mean() + 2 * np.log(24)
    c_of = lambda a, b: torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T
    one, two = torch.autograd.grad(sg.cross_alignment_loss(p, q), p)[0], torch.autograd.grad(official(), p)[0]
    torch.testing.assert_close(one, two)                                                     # another constant, the same gradient


def test_losses_by_hand():
    m, w, anchor = randn(2, 3, 4, 4), torch.rand(2, 3, dtype=torch.float64), randn(4, 4, seed=1)
    np.testing.assert_allclose(float(intra_alignment_loss(m, w, anchor)), sum(w[i] * ((m[i] - anchor) ** 2).sum() for i in np.ndindex(2, 3)))
    logits = randn(7, 3)
    p = logits.softmax(1).numpy()
    np.testing.assert_allclose(float(mean_entropy(logits)), -(p * np.log(p)).sum(1).mean())
    x, y = randn(9, 2), randn(5, 2, seed=1)
    d = ((torch.cat([x, y])[:, None] - torch.cat([x, y])) ** 2).sum(-1).mean().item()
    k = lambda a, b: np.mean([rbf_kernel(a, b, gamma=1 / (f * d)).mean() for f in (0.25, 1, 4)])
    np.testing.assert_allclose(float(mmd(x, y)), k(x, x) + k(y, y) - 2 * k(x, y))
    np.testing.assert_allclose(covariance(x), np.cov((x / x.norm(dim=1, keepdim=True)).T, bias=True), atol=1e-12)


def test_a_batch_of_one_and_ragged_batches():
    head = Projection(4).train()
    before = head.norm.running_mean.clone()
    assert head(torch.ones(1, 4)).isfinite().all() and torch.equal(before, head.norm.running_mean)
    seen = [(len(s), len(t)) for s, t in cycled_batches(7, 3, 2)]
    assert seen == [(2, 2), (2, 2), (2, 2), (1, 2)]
    many = [i for _, t in cycled_batches(40, 3, 2) for i in t.tolist()]
    assert max(map(many.count, range(3))) - min(map(many.count, range(3))) <= 1


# -- the estimator ---------------------------------------------------------------------------------------------------


def test_fit_predict_and_history(pair):
    m = sg.SAGA(**SMALL)
    assert m.fit(*pair) is m
    assert m.predict(pair[1]).shape == (90,) and m.transform(pair[1]).shape == (90, 16) and m.predict_proba(pair[1]).shape == (90, 4)
    assert (m.predict(pair[1]) == m.classes_[m.predict_proba(pair[1]).argmax(1)]).all() and m.classes_.tolist() == [0, 1, 2, 3]
    for i, h in enumerate(m.history_):
        assert h["epoch"] == i and np.shape(h["sad"]) == (2, 2) and h["pair"] == sg.dominant_pair(torch.as_tensor(h["sad"])) and np.isfinite(h["loss_s"])
    x = torch.as_tensor(views_of(pair[1], 2))
    with torch.no_grad():
        z = torch.cat(list(m.net_.encoder(x[:, m.pair_[1]])), 1)
        torch.testing.assert_close(torch.as_tensor(m.predict_proba(pair[1])), m.net_.classifier(z).softmax(1))


def by_hand(source, target, *, anchor="domain", cross_view=False, selection="dynamic", hops=2, teleport=0.0, alpha=0.95, beta=1.0, delta=0.01, lam=1.0, tau=1.0):
    "The first epoch written out with dense matrices and loops; of the package only the weights at the start. Pair, table, losses, gradients."
    def smoothed(g):
        out = []
        for a in g.adjs:
            b = np.maximum(a.toarray(), a.toarray().T)
            np.fill_diagonal(b, 1)
            b, x = b / np.sqrt(np.outer(b.sum(1), b.sum(1))), g.x
            out.append([(x := (1 - teleport) * b @ x + teleport * g.x) for _ in range(hops)])
        return [[torch.tensor(x / np.linalg.norm(x, axis=1, keepdims=True), dtype=torch.float32) for x in view] for view in out]

    unit = lambda z: z / z.norm(dim=1, keepdim=True)
    moment = lambda z: unit(z).T @ unit(z) / len(z)
    ell = lambda p, q: -(unit(p) @ unit(q).T / tau).exp().mean(1).log().mean()
    far = lambda p, q: ((moment(p) - moment(q)) ** 2).sum()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Network(source.n_features, 2, 4, 16, 8)
    x = {d: smoothed(g) for d, g in (("S", source), ("T", target))}
    z = {d: [[net.encoder(h) for h in view] for view in x[d]] for d in x}
    every = [(v, k) for v in range(2) for k in range(hops)]
    table = np.array([[[far(z["S"][a][k], z["T"][b][k]).item() for k in range(hops)] for b in range(2)] for a in range(2)])
    own = np.array([table[v, v] for v in range(2)])
    table = table if cross_view else own
    w = np.exp(-lam * own) / np.exp(-lam * own).sum()
    if isinstance(selection, tuple):
        pair, w = selection, np.full((2, hops), 1 / (2 * hops))
    else:
        pair = None if selection == "average" else tuple(int(i) for i in np.unravel_index(table.argmin(), table.shape))
    used = [pair[-1]] if pair else list(range(hops))
    head = {"S": pair[0], "T": pair[-2]} if pair else {"S": 0, "T": 0}
    star = {d: z[d][head[d]][pair[-1]] if pair else sum(z[d][v][k] for v, k in every) / len(every) for d in z}
    read = {d: torch.cat([z[d][v][pair[-1]] if pair else star[d] for v in range(2)], 1) for d in z}
    other = {"S": "T", "T": "S"} if anchor == "cross" else {"S": "S", "T": "T"}
    q = net.classifier(read["T"]).softmax(1)
    losses = dict(
        loss_r=sum(((net.decoder(z[d][v][k]) - x[d][v][k]) ** 2).mean() for d in z for v in range(2) for k in used) / (2 * len(used)),
        loss_ia=sum(w[v, k] * far(z[d][v][k], star[other[d]]) for d in z for v, k in every),
        loss_ca=ell(*(p := [net.heads[head[d]](star[d]) for d in "ST"])) + ell(*p[::-1]),
        loss_s=-net.classifier(read["S"]).log_softmax(1)[range(source.n_nodes), source.y].mean(), loss_t=-(q * q.log()).sum(1).mean())
    losses["loss"] = losses["loss_r"] + alpha * losses["loss_ia"] + (1 - alpha) * losses["loss_ca"] + beta * losses["loss_s"] + delta * losses["loss_t"]
    grads = torch.autograd.grad(losses["loss"], list(net.parameters()), allow_unused=True)
    return pair, table, {name: value.item() for name, value in losses.items()}, list(zip(net.parameters(), grads))


@pytest.mark.parametrize("settings", [{}, dict(anchor="cross"), dict(cross_view=True, anchor="cross", hops=3), dict(selection="average"), dict(selection="average", anchor="cross"),
                                      dict(selection=(1, 0)), dict(cross_view=True, selection=(1, 0, 1)), dict(teleport=0.3, alpha=0.4, beta=2.0, delta=0.5, lam=20.0, tau=0.3)])
def test_an_epoch_is_the_formulas_as_a_whole(settings):
    source, target = sg.make_csbm(30, domain="source", seed=1), sg.make_csbm(23, domain="target", seed=2)
    pair, table, losses, start = by_hand(source, target, **settings)
    m = sg.SAGA(hidden=16, dim=8, epochs=1, weight_decay=0.0, **settings).fit(source, target)
    (h,) = m.history_
    assert h["pair"] == pair
    if not isinstance(settings.get("selection"), tuple):
        np.testing.assert_allclose(h["sad"], table, rtol=1e-3)
    for name, value in losses.items():
        np.testing.assert_allclose(h[name], value, rtol=1e-3, atol=1e-6, err_msg=name)
    for (before, grad), after in zip(start, m.net_.parameters()):                            # Adam's first step is lr times the sign of the gradient
        if grad is None:
            assert torch.equal(before, after)
        else:
            clear = grad.abs() > 1e-5
            torch.testing.assert_close((after - before)[clear], -1e-3 * grad.sign()[clear], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("selection", ["dynamic", (0, 0), "average"])
def test_a_training_that_diverges_is_an_error_and_predicts_nothing(pair, selection):
    m = sg.SAGA(**SMALL, lr=1e30, selection=selection)
    with pytest.raises(ValueError, match="lr: training diverged"):
        m.fit(*pair)
    with pytest.raises(RuntimeError, match="not fitted"):
        m.predict(pair[1])


@pytest.mark.parametrize("settings", [{}, dict(anchor="cross"), dict(selection="average"), dict(cross_view=True), dict(batch_size=20, dropout=0.2)])
def test_target_labels_are_never_used_and_seeds_decide(pair, settings):
    source, target = pair
    fit = lambda y, seed=0: sg.SAGA(**SMALL, **settings, seed=seed).fit(source, sg.MultiViewGraph(target.adjs, target.x, y)).predict_proba(target)
    want = fit(target.y)
    np.testing.assert_array_equal(fit(np.roll(target.y, 7)), want)
    np.testing.assert_array_equal(fit(None), want)
    assert (fit(target.y, 1) != want).any()


def test_source_labels_may_be_any_whole_numbers(pair):
    names = np.array([7, -2, 100, 3])
    a, b = sg.SAGA(**SMALL).fit(*pair), sg.SAGA(**SMALL)
    order = np.argsort(names)
    b.fit(sg.MultiViewGraph(pair[0].adjs, pair[0].x, np.sort(names)[pair[0].y]), pair[1])
    assert b.classes_.tolist() == sorted(names)
    np.testing.assert_array_equal(b.predict(pair[1]), names[order][a.predict(pair[1])])


def test_forms(pair):
    few = sg.make_csbm(21, domain="target", seed=2)
    fixed = sg.SAGA(**SMALL, selection=(1, 0)).fit(pair[0], few)
    assert {h["pair"] for h in fixed.history_} == {(1, 0)} and np.isnan(fixed.history_[0]["sad"]).all()
    average = sg.SAGA(**SMALL, selection="average").fit(pair[0], few)
    assert average.history_[-1]["pair"] is None and average.transform(few).shape == (21, 16)
    wide = sg.SAGA(**SMALL, cross_view=True).fit(pair[0], few)
    assert np.shape(wide.history_[0]["sad"]) == (2, 2, 2) and all(h["pair"] == sg.dominant_pair(torch.as_tensor(h["sad"])) for h in wide.history_)
    pieces = sg.SAGA(**SMALL, batch_size=20).fit(pair[0], few)                               # 90 = 4 x 20 + 10, 21 nodes cycled
    whole = sg.SAGA(**SMALL).fit(pair[0], few)
    np.testing.assert_allclose(pieces.history_[0]["sad"], whole.history_[0]["sad"], rtol=1e-4)
    one = sg.make_csbm(41, domain="target", seed=2)
    assert np.isfinite(sg.SAGA(**SMALL, batch_size=40).fit(one, one).predict_proba(one)).all()          # the last batch has one node
    three = sg.MultiViewGraph([*pair[0].adjs, pair[0].adjs[0]], pair[0].x, pair[0].y)
    assert sg.SAGA(**SMALL | dict(hops=3)).fit(three, three).history_[0]["sad"].shape == (3, 3)


def test_errors(pair):
    source, target = pair
    with pytest.raises(ValueError, match="labels"):
        sg.SAGA().fit(sg.MultiViewGraph(source.adjs, source.x), target)
    with pytest.raises(ValueError, match="views"):
        sg.SAGA().fit(source, sg.MultiViewGraph(target.adjs[:1], target.x))
    with pytest.raises(ValueError, match="features"):
        sg.SAGA().fit(source, sg.MultiViewGraph(target.adjs, target.x[:, 1:]))
    for bad in (dict(selection=(0, 2)), dict(selection="all"), dict(selection=(0.5, 0)), dict(selection=("a", 0)), dict(selection=(True, 0)), dict(anchor="x"), dict(epochs=0),
                dict(lr=0), dict(lr="a"), dict(alpha="x"), dict(beta=np.nan), dict(delta=np.inf), dict(tau=None), dict(teleport=-1), dict(batch_size=0), dict(batch_size=True),
                dict(seed=-1), dict(seed=0.5), dict(device="tpu"), dict(device="cuda:99"), dict(cross_view="no")):
        with pytest.raises(ValueError, match=next(iter(bad))):
            sg.SAGA(**bad).fit(source, target)
    with pytest.raises(RuntimeError, match="not fitted"):
        sg.SAGA().predict(target)
    with pytest.raises(ValueError, match="profile"):
        sg.claims("laptop")
    with pytest.raises(TypeError, match="graph: a MultiViewGraph"):
        sg.SAGA(**SMALL).fit(*pair).predict(target.x)
    for model, text in ((sg.FixedView(5, **SMALL), "view: "), (sg.FixedView(-1, **SMALL), "view: "), (sg.FixedHop(2, **SMALL), "hop: ")):
        with pytest.raises(ValueError, match=text):
            model.fit(*pair)
    for call, text in ((lambda: sg.make_csbm(9.5, domain="source", seed=0), "n: "), (lambda: sg.make_csbm(9, domain="source", seed=None), "seed: "),
                       (lambda: sg.make_csbm(9, domain=["source"], seed=0), "domain: "), (lambda: sg.make_digits(domain="source", seed=0, neighbors=0), "neighbors: "),
                       (lambda: sg.make_digits(domain="source", seed=0, neighbors=2000), "n: "), (lambda: sg.shuffled(target, -1), "seed: "),
                       (lambda: sg.plot_sad(sg.SAGA(), ["a", "b"]), "not fitted")):
        with pytest.raises(ValueError, match=text):
            call()


def test_the_same_graph_leaves_nothing_to_choose(pair):
    a, b = (sg.SAGA(**SMALL, anchor=anchor).fit(pair[0], pair[0]) for anchor in ("domain", "cross"))
    assert max(h["sad"].max() for h in a.history_) < 1e-9
    np.testing.assert_allclose(a.predict_proba(pair[0]), b.predict_proba(pair[0]), atol=1e-3)


def test_variants(pair):
    for cls in (sg.SourceOnly, sg.DANN, sg.CORAL, sg.MMD):
        one, two = (cls(**SMALL).fit(*pair).predict_proba(pair[1]) for _ in range(2))
        np.testing.assert_array_equal(one, two)
    table = torch.tensor([[3.0, 1.0], [0.5, 2.0]])
    assert Farthest().choose(table) == (0, 0) and sg.FixedView(0).choose(table) == (0, 1) and sg.FixedHop(1).choose(table) == (0, 1)
    assert clone(sg.FixedHop(1, epochs=7)).get_params()["epochs"] == 7
    gone = sg.MultiViewGraph(pair[1].adjs, pair[1].x + 50)
    np.testing.assert_array_equal(sg.SourceOnly(**SMALL).fit(pair[0], gone).predict_proba(pair[1]), sg.SourceOnly(**SMALL).fit(*pair).predict_proba(pair[1]))
    plain, turned = (cls(**SMALL, anchor="cross").fit(*pair).history_ for cls in (sg.SAGA, Turned))
    np.testing.assert_allclose(plain[0]["loss"] - turned[0]["loss"], 2 * 0.95 * plain[0]["loss_ia"], rtol=1e-3)
    seen = watched(sg.SAGA)(**SMALL, batch_size=30).fit(*pair)
    np.testing.assert_array_equal(seen.predict_proba(pair[1]), sg.SAGA(**SMALL, batch_size=30).fit(*pair).predict_proba(pair[1]))


def test_gcn(pair):
    pytest.importorskip("torch_geometric")
    one, two = (sg.GCN(hidden=8, epochs=5).fit(*pair) for _ in range(2))
    np.testing.assert_array_equal(one.predict_proba(pair[1]), two.predict_proba(pair[1]))
    assert one.history_[-1]["loss_s"] < one.history_[0]["loss_s"]
    assert one.transform(pair[1]).shape == (90, 8)
    with pytest.raises(ValueError, match="graph: needs 2 views and 32 features"):
        one.predict(sg.MultiViewGraph(pair[1].adjs, pair[1].x[:, 1:]))


def test_gcn_without_the_package_says_what_to_install(pair, monkeypatch):
    for name in ("torch_geometric", "torch_geometric.nn", "torch_geometric.data"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install .icl26\[networks\]"):
        sg.GCN(epochs=1).fit(*pair)
    with pytest.raises(ImportError, match=r"pip install .icl26\[networks\]"):
        sg.from_pyg(object())


# -- measures --------------------------------------------------------------------------------------------------------


def test_measures():
    assert switches([[0, 0], [0, 1], [0, 1], [1, 1]]) == dict(count=2, last=3, share=0.25)
    x = np.arange(9.0)
    assert rank_correlation(x, x**3) == 1 and rank_correlation(x, -x) == -1 and rank_correlation(x, 0 * x) == 0
    rising = [0, 1, 3, 6, 10], [0, 4, 7, 9, 10]                                              # both rise, one ever faster, one ever slower
    np.testing.assert_allclose([rank_correlation(*rising), rank_correlation(*rising, changes=True)], [1, -1])
    a, b = np.array([[0, 2, 1, 4, 9], [5, 1, 2, 7, 8]])                                      # differences 2 -1 3 5 and -4 1 5 1: ranks 2 1 3 4 and 1 2.5 4 2.5
    np.testing.assert_allclose(rank_correlation(a, b, changes=True), np.corrcoef([2, 1, 3, 4], [1, 2.5, 4, 2.5])[0, 1])


def test_time_is_that_of_the_epochs_alone(pair, monkeypatch):
    m, ticks = Clocked(**SMALL), iter(range(99))
    m.clock = lambda: next(ticks)
    assert m.fit(*pair).took_ == [1] * SMALL["epochs"] and next(ticks) == 2 * SMALL["epochs"]
    np.testing.assert_array_equal(m.predict_proba(pair[1]), sg.SAGA(**SMALL).fit(*pair).predict_proba(pair[1]))
    import icl26.networks.saga.model as model
    import time

    def slow(*args):
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        return views_of(*args)

    monkeypatch.setattr(model, "views_of", slow)                                             # smoothing as slow as that of a large graph
    took = seconds(dict(name="block model", n=16, seed=0), 1, **SMALL)
    assert max(t.max() for t in took.values()) < 2 * 0.05 / SMALL["epochs"]


def test_methods_by_name_are_the_estimators(pair):
    assert set(CROSSED) == {"pair (1→0, 2)", "pair (0→1, 2)"} and set(CROSSED) <= set(ABLATIONS) and not set(CROSSED) & set(STATIC) and len(STATIC) == 7
    for source, target in ((1, 0), (0, 1)):
        m = build(f"pair ({source}→{target}, 2)", SMALL, 90).fit(*pair)
        assert {h["pair"] for h in m.history_} == {(source, target, 1)}
        want = sg.SAGA(**SMALL, cross_view=True, selection=(source, target, 1)).fit(*pair)
        np.testing.assert_array_equal(m.predict_proba(pair[1]), want.predict_proba(pair[1]))
    whole = build("SAGA", SMALL, 90).fit(*pair)                                              # one batch: watched all the same
    assert len(whole.seen_) == len(whole.history_)
    np.testing.assert_allclose(whole.history_[0]["sad"], sg.SAGA(**SMALL).fit(*pair).history_[0]["sad"], rtol=1e-4)


def test_a_run_does_not_depend_on_anything_but_its_arguments():
    job = dict(data=dict(name="digits", n=60, seed=3), method="SAGA", seed=2, hidden=16, dim=8, epochs=3, batch_size=30)
    torch.manual_seed(0)
    a = train(**job)
    torch.manual_seed(1)
    np.random.seed(3)
    b = train(**job)
    assert set(a) == set(b) and {"acc", "f1", "pairs", "sad", "ce_t", "acc_free", "acc_oracle"} <= set(a)
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


# -- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    pytest.importorskip("torch_geometric")
    return papers.smoke("saga", tmp_path_factory)


def official_run(folder):
    "Profile gpu on made-up pairs in the official format, one of them not larger than a batch."
    for name, domain in (("ACM1", "source"), ("ACM2", "target")):
        sg.save_domain(sg.make_csbm(20, domain=domain, seed=0, n_classes=3, n_features=6), folder / "data" / name)
    for name, domain in (("CN", "source"), ("US", "target")):
        sg.save_domain(sg.make_csbm(8, domain=domain, seed=0, n_classes=2, n_features=5), folder / "data" / name, ("pap", "pp"), one_hot=False)
    return run_command("saga", folder / "gpu", "--profile", "gpu", "--device", "cpu", "--model", folder / "data", ICL26_TINY="1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "On the CPU at the sizes for tests, by the command: papermill runs every experiment."
    pytest.importorskip("torch_geometric")
    return once("saga-gpu", tmp_path_factory, official_run)


COMMITTED = committed("saga")


def expected(part):
    "Estimate and interval of a part from its values, by formulas of our own; None: nothing to compute it from."
    values, n = part.get("values"), part["n"]
    if part.get("k") is not None:
        k = part["k"]
        assert k == sum(values)
        return k / n, 0.0 if k == 0 else beta.ppf(0.025, k, n - k + 1), 1.0 if k == n else beta.ppf(0.975, k + 1, n - k)
    if values is None:
        return None
    if part["label"].startswith("same graph"):                                               # the largest of all, no interval
        return (max(abs(v) for v in values),) * 3
    x = np.array(values, float)
    return t_by_hand(x) if np.ptp(x) >= 1e-12 else (x.mean(),) * 3


@pytest.mark.parametrize("which", ["smoke", "tiny", "committed"])
def test_every_number_and_verdict_follows_from_what_was_recorded(which, request):
    if which == "committed" and COMMITTED is None:
        pytest.skip("no committed run")
    record = load_results(COMMITTED if which == "committed" else request.getfixturevalue(which))
    assert [c["id"] for c in record["claims"] if c["verdict"] != "not run"] and {c["id"] for c in record["claims"]} == {c.id for c in sg.claims()}
    checked = 0
    for c in record["claims"]:
        assert c["verdict"] == recompute(c)[0]
        for part in c["values"] or []:
            if (want := expected(part)) is not None:
                got = [part["measured"], *(part[k] if part.get(k) is not None else part["measured"] for k in ("ci_low", "ci_high"))]
                assert part["label"].startswith("same graph") or part["ci_low"] is not None
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9, err_msg=part["label"])
                checked += 1
        if part_values := {p["label"]: np.array(p["values"], float) for p in c["values"] or [] if p.get("values")}:
            for name in {k.split(":")[0] for k in part_values if k.endswith("cross-anchored − SAGA")}:  # differences are those of the accuracies beside them
                np.testing.assert_allclose(part_values[f"{name}: cross-anchored − SAGA"],
                                           part_values[f"beside: accuracy of cross-anchored, {name}"] - part_values[f"beside: accuracy of SAGA, {name}"], atol=1e-12)
        if c["id"] == "own-C7" and c["values"]:
            alike = [p for p in c["values"] if p["label"].startswith("same graph")]
            assert len(alike) == 3 and all(len(p["values"]) == p["n"] for p in alike)
    assert checked > 10


def test_smoke_measures_two_claims(smoke):
    record = load_results(smoke)
    measured = {c["id"] for c in record["claims"] if c["verdict"] != "not run"}
    assert measured == {"C1", "C6"}
    assert all("smoke" in c["reason"] for c in record["claims"] if c["id"] not in measured)
    for c in record["claims"]:                                                               # 200 nodes and two seeds
        for part in c["values"] or []:
            if "accuracy" in part["label"]:
                np.testing.assert_allclose(200 * np.array(part["values"]), np.round(200 * np.array(part["values"])), atol=1e-6)
                assert part["n"] == 2


def test_gpu_profile_runs_every_path_at_a_tiny_size(tiny):
    record = load_results(tiny)
    assert record["parameters"]["profile"] == "gpu" and record["parameters"]["device"] == "cpu"
    assert all(c["verdict"] != "not run" and "tiny" in c["note"] for c in record["claims"]) and {c["scale"] for c in record["claims"]} == {"mechanism"}
    assert {"accuracy.png", "embeddings.png", "trajectories.png", "gap.png"} <= {p.name for p in (tiny.parent / "figures").iterdir()}
    values = {c["id"]: {p["label"]: p for p in c["values"]} for c in record["claims"]}
    assert {"ACM1→ACM2: dynamic", "CN→US: dynamic", "CN→US: dynamic − hop 2"} <= set(values["C4"])
    assert {f"US→CN: − {m}" for m in ABLATIONS} <= set(values["C2"]) and "time, CN→US" in values["C5"]
    assert {"beside: shuffled, cross-anchored − SAGA, ACM1→ACM2", "beside: shuffled, SAGA − source-only MLP, ACM1→ACM2"} <= set(values["own-C7"])


def test_gpu_profile_without_a_gpu_or_without_data_says_so_in_seconds(tmp_path):
    record = run_here("saga", tmp_path, profile="gpu", device="cpu", model=str(tmp_path))
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("official data" in c["reason"] for c in record["claims"])
    if not torch.cuda.is_available():
        record = run_here("saga", tmp_path, profile="gpu")
        assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])
    assert record["wall_s"] < 20


def test_the_committed_run_has_the_sizes_of_the_cpu_profile():
    if COMMITTED is None:
        pytest.skip("no committed run")
    c = {c["id"]: {p["label"]: p for p in c["values"]} for c in load_results(COMMITTED)["claims"]}
    assert all(p["n"] == 5 for label, p in c["C1"].items()) and len([x for x in c["C2"] if not x.startswith("beside")]) == 2 * len(ABLATIONS)
    assert {x.split(":")[0] for x in c["C3"] if not x.startswith("beside")} == {"block model", "digits"}


# -- numbers that go against the paper -------------------------------------------------------------------------------


p = partial(made_up, n=5)
AGAINST = {
    "C1": [[p("a: − source-only MLP", 0.0), p("a: − source-only GCN", 0.2), p("a: − best static", 0.2)], [p("a: − source-only MLP", 0.1, 0.2), p("a: − best static", 0.2)]],
    "C2": [[p("a: − view 0", 0.0), p("a: − DANN", 0.2)], [p("a: − view 0", -0.2), p("a: − DANN", -0.2)]],
    "C3": [[p("a: all three", 1.0), p("b: all three", 0.6)]],
    "C4": [[p("a: dynamic", 0.0), p("a: dynamic − view 0", 0.3)], [p("a: dynamic", -0.5), p("a: dynamic − view 0", -0.3)]],
    "C5": [[p("time, a", 1.3)], [p("time, a", 1.245)]],
    "C6": [[p("a: cross-anchored − SAGA", 0.0), p("b: cross-anchored − SAGA", -0.2)]],
    "own-C7": [[p("shuffled, a", x), p("true edges, a", y), p("same graph, largest SAD", z)] for x, y, z in ((0.1, 0.1, 0), (-0.1, 0.0, 0), (-0.1, 0.1, 1))],
    "own-C8": [[p("C6, a", 0.1), p("C6, b", -0.1)]],
}


@pytest.mark.parametrize("claim", AGAINST)
def test_numbers_against_the_paper_are_not_reproduced(claim):
    (rule,) = (c for c in sg.claims("cpu") if c.id == claim)
    for parts in AGAINST[claim]:
        assert measurement(rule, parts=parts)["verdict"] == "not reproduced"


# -- one's own graphs ------------------------------------------------------------------------------------------------


def test_from_pyg_composes_paths_and_reads_edge_types():
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data, HeteroData

    rng = np.random.default_rng(0)
    b = rng.random((6, 4)) < 0.4                                                             # papers by authors
    h = HeteroData()
    h["paper"].x, h["paper"].y, h["author"].num_nodes = torch.zeros(6, 2), torch.arange(6) % 2, 4
    h["paper", "by", "author"].edge_index = torch.as_tensor(np.stack(b.nonzero()))
    h["author", "of", "paper"].edge_index = torch.as_tensor(np.stack(b.T.nonzero()))
    h["paper", "cites", "paper"].edge_index = torch.tensor([[0, 0], [1, 1]])
    h["paper", "cites", "paper"].edge_weight = torch.tensor([1.0, 2.0])
    g = sg.from_pyg(h, views=[[("paper", "by", "author"), ("author", "of", "paper")], ("paper", "cites", "paper")])
    np.testing.assert_array_equal(g.adjs[0].toarray(), (b.astype(int) @ b.T.astype(int) > 0).astype(float))
    assert g.adjs[1].toarray()[0, 1] == 3 and g.adjs[1].nnz == 1 and g.y.tolist() == [0, 1] * 3 and sg.from_pyg(h, y=None).y is None
    d = Data(x=torch.zeros(3, 1), edge_index=torch.tensor([[0, 1], [1, 2]]), edge_type=torch.tensor([5, 2]), y=torch.eye(3))
    g = sg.from_pyg(d)
    assert g.adjs[0].toarray()[1, 2] == 1 and g.adjs[1].toarray()[0, 1] == 1 and g.y.tolist() == [0, 1, 2]          # types in order, one-hot labels
    for make, text in (
        (lambda: sg.from_pyg(h, views=[("paper", "by", "author")]), "must lead from"),
        (lambda: sg.from_pyg(h, views=[("paper", "on", "paper")]), "no edge type"),
        (lambda: sg.from_pyg(h, node_type="venue"), "node_type"),
        (lambda: sg.from_pyg(d, views=[0]), "no edge has the type 0"),
        (lambda: sg.from_pyg(Data(x=torch.zeros(3, 1), edge_index=d.edge_index, edge_type=d.edge_type, edge_weight=torch.ones(3))), "2 edges need as many weights, got 3"),
        (lambda: sg.from_pyg(Data(x=torch.zeros(2, 1), edge_index=torch.tensor([[0], [2]]))), "between 0 and 1"),
        (lambda: sg.from_pyg(Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=2)), "has no 'x'"),
    ):
        with pytest.raises(ValueError, match=text):
            make()
    with pytest.raises(TypeError, match="HeteroData"):
        sg.from_pyg({})
    for y, text in ((torch.tensor([0, -1, 1]), "'y' has 1 numbers below 0"), (torch.tensor([[1, 0], [1, 1], [0, 1]]), "the first is row 1"), (torch.zeros(3, 2), "3 of 3 are not")):
        d.y = y                                                                              # nodes with no label, or with two
        with pytest.raises(ValueError, match=text):
            sg.from_pyg(d)
        assert sg.from_pyg(d, y=None).y is None
    for views in (3, "by", [3], [[]], ["by"], [("paper", "cites")]):
        with pytest.raises(ValueError, match="views: "):
            sg.from_pyg(h, views=views)
    path = [[("paper", "by", "author"), ("author", "of", "paper")]]
    n = h["paper", "by", "author"].edge_index.shape[1]
    h["paper", "by", "author"].edge_weight = torch.arange(n).bfloat16()                      # the first is 0: no edge
    first = np.zeros_like(b)
    first[tuple(np.stack(b.nonzero())[:, 0])] = True
    np.testing.assert_array_equal(sg.from_pyg(h, views=path).adjs[0].toarray(), ((b & ~first).astype(int) @ b.T.astype(int) > 0).astype(float))
    for wrong in (-1.0, float("nan")):
        h["paper", "by", "author"].edge_weight = torch.full((n,), wrong)
        with pytest.raises(ValueError, match="weights must be finite and 0 or more"):
            sg.from_pyg(h, views=path)


def test_views_taken_by_themselves_must_be_the_same_in_both_graphs():
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data, HeteroData

    def hetero(kinds):
        out = HeteroData()
        out["user"].x, out["user"].y = torch.eye(4), torch.arange(4) % 2
        for kind in kinds:
            out["user", kind, "user"].edge_index = torch.tensor([[0, 1], [1, 2]])
        return out

    typed = lambda kinds: sg.from_pyg(Data(x=torch.eye(4), y=torch.arange(4) % 2, edge_index=torch.tensor([[0, 1], [1, 2]]), edge_type=torch.tensor(kinds)))
    a, b = hetero(["trades", "follows"]), hetero(["follows", "trades"])
    edges = [("user", "follows", "user"), ("user", "trades", "user")]
    for source, target in ((sg.from_pyg(a), sg.from_pyg(b)), (typed([0, 1]), typed([0, 2])), (sg.from_pyg(a, views={"p": edges[0], "q": edges[1]}), sg.from_pyg(b, views={"q": edges[1], "p": edges[0]}))):
        with pytest.raises(ValueError, match="target: needs the views of the source in their order"):
            sg.SAGA(**SMALL).fit(source, target)
    m = sg.SAGA(**SMALL).fit(sg.from_pyg(a, views=edges), sg.from_pyg(b, views=edges))       # a list is taken as it is
    assert m.predict(sg.from_pyg(a)).shape == (4,)
    with pytest.raises(ValueError, match="graph: needs the views"):
        sg.SAGA(**SMALL).fit(sg.from_pyg(a), sg.from_pyg(a)).predict(sg.from_pyg(b))
    assert sg.adapt(sg.from_pyg(a), sg.from_pyg(a), **SMALL)[1].views == ["trades", "follows"]


def test_advice_names_what_the_numbers_show(pair):
    flat = sg.MultiViewGraph(pair[0].adjs, np.ones_like(pair[0].x), pair[0].y)               # nothing to learn
    assert "the source itself is hardly learnt" in repr(sg.adapt(flat, pair[1], **SMALL)[1])
    source, target = (sg.make_csbm(160, domain=d, seed=2) for d in ("source", "target"))     # learnt; the target falls into one class
    far = sg.MultiViewGraph(target.adjs, target.x + 20)
    kw = dict(hidden=32, dim=16, epochs=40, batch_size=40)
    report = sg.adapt(source, far, **kw)[1]
    assert report.source_accuracy > 0.7 and report.shares.max() > 0.9 and "try anchor='cross'" in repr(report)
    report = sg.adapt(source, far, anchor="cross", selection=(0, 0), alpha=0.0, **kw)[1]     # told so already
    assert report.shares.max() > 0.9 and "try anchor" not in repr(report) and "too far apart" in repr(report)
    assert sg.adapt(source, source, **kw)[1].advice is None


def test_loaders_read_the_official_format(tmp_path):
    n, coo = 5, torch.sparse_coo_tensor(torch.tensor([[0, 1, 0], [1, 2, 1]]), torch.tensor([1.0, 2.0, 3.0]), (5, 5), check_invariants=True)       # not coalesced
    for name, views, label in (("ACM2", ("pap", "psp"), torch.eye(3)[[0, 1, 2, 1, 0]]), ("FR", ("pap", "pp"), torch.tensor([9, 1, 2, 1, 9]))):
        (tmp_path / name).mkdir()
        for file, value in (("feat", torch.ones(n, 2)), ("label", label), *((v, coo) for v in views)):
            torch.save(value, tmp_path / name / f"{file}.pt")
    a, b = sg.load_acm(tmp_path, "ACM2"), sg.load_mag(tmp_path, "FR")
    assert a.y.tolist() == [0, 1, 2, 1, 0] and b.y.tolist() == [9, 1, 2, 1, 9]
    assert a.adjs[0].toarray()[0, 1] == 4 and a.adjs[0].nnz == 2 and a.n_views == b.n_views == 2
    (tmp_path / "FR/pp.pt").unlink()
    with pytest.raises(FileNotFoundError, match="pp.pt"):
        sg.load_mag(tmp_path, "FR")
    (tmp_path / "ACM2/feat.pt").write_bytes(b"x" * 50)
    with pytest.raises(ValueError, match="feat.pt: not a tensor"):
        sg.load_acm(tmp_path, "ACM2")
    torch.save(coo.bfloat16(), tmp_path / "FR/pp.pt")
    torch.save(torch.tensor([[9], [1], [2], [1], [9]]).bfloat16(), tmp_path / "FR/label.pt")
    torch.save(torch.ones(n, 2).bfloat16(), tmp_path / "FR/feat.pt")
    c = sg.load_mag(tmp_path, "FR")
    assert c.y.tolist() == b.y.tolist() and (c.x == b.x).all() and c.adjs[1].toarray()[0, 1] == 4
    for file, wrong in (("label", torch.zeros(n, 0)), ("label", torch.zeros(n, dtype=torch.complex64)), ("label", torch.zeros(n, 2, 2)), ("feat", torch.ones(n, 2, dtype=torch.complex64)),
                        ("label", torch.zeros(n, 3)), ("label", torch.ones(n, 3)), ("label", torch.full((n, 3), float("nan"))),
                        ("pp", torch.eye(n, dtype=torch.complex64)), ("pp", coo.to(torch.complex64))):
        held = (tmp_path / f"FR/{file}.pt").read_bytes()
        torch.save(wrong, tmp_path / f"FR/{file}.pt")
        with pytest.raises(ValueError, match=f"{file}.pt: "):
            sg.load_mag(tmp_path, "FR")
        (tmp_path / f"FR/{file}.pt").write_bytes(held)
    for views in ("pap", ("pap", "pap"), ("feat", "pap")):
        for call in (lambda: sg.load_domain(tmp_path / "FR", views), lambda: sg.save_domain(c, tmp_path / "new", views)):
            with pytest.raises(ValueError, match="views: a list of different names"):
                call()
    with pytest.raises(ValueError, match="one_hot"):
        sg.save_domain(sg.MultiViewGraph(c.adjs, c.x, c.y - 5), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for call in (lambda: sg.load_acm(tmp_path, "CN"), lambda: sg.load_mag(tmp_path, "ACM1")):
        with pytest.raises(ValueError, match="name"):
            call()


def run(*argv):
    return said(use.main, *argv)


def test_the_command(tmp_path):
    assert run("example", tmp_path / "e")[0] == 0
    args = ["adapt", tmp_path / "e/source", tmp_path / "e/target", "--epochs", "2", "--device", "cpu"]
    done = use_command("saga", *args, "--out", "o.csv", "--plot", "p.png", cwd=tmp_path)
    assert done.returncode == 0 and "300 nodes of the target" in done.stdout, done.stderr
    lines = (tmp_path / "o.csv").read_text().splitlines()
    assert lines[0] == "node,class,probability" and len(lines) == 301 and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    code, out, err = run(*args, "--json")
    assert code == 0 and len(json.loads(out)["predictions"]) == 300
    assert [int(line.split(",")[1]) for line in lines[1:]] == json.loads(out)["predictions"]                            # the same in another process
    (tmp_path / "e/target/label.pt").unlink()                                                # a target needs no labels
    assert json.loads(run(*args, "--json")[1])["target_accuracy"] is None
    inputs = {f: f.read_bytes() for f in (tmp_path / "e").rglob("*.pt")}
    (tmp_path / "link.pt").hardlink_to(tmp_path / "e/target/psp.pt")
    for out in (*inputs, tmp_path / "link.pt", tmp_path / "e/source/../target/pap.pt"):
        code, _, err = run(*args, "--out", out)
        assert code == 2 and "is an input file" in err and err.count("\n") == 1
    assert inputs == {f: f.read_bytes() for f in (tmp_path / "e").rglob("*.pt")}
    if not torch.cuda.is_available():
        code, out, err = run(*args[:-1], "cuda")
        assert code == 2 and err.startswith("icl26: error: device: 'cuda' cannot be used here") and err.count("\n") == 1 and not out
    (tmp_path / "e/target/pap.pt").write_bytes(bytes(range(200)))
    for argv, text in (
        (args, "pap.pt"), (["adapt", tmp_path / "no", tmp_path], "no such folder"), ([*args, "--out", tmp_path], "is a folder"), ([*args, "--plot", "x.doc"], "--plot"),
        ([*args, "--views", "pap,,psp"], "--views"), ([*args, "--views", ""], "--views"), ([*args, "--views", "pap,pap"], "--views"),
        (["example", tmp_path], "exists"), ([], "required"),
    ):
        code, out, err = run(*argv)
        assert code == 2 and err.startswith("icl26: error: ") and text in err and err.count("\n") == 1, (argv, err)
    assert run("--help")[0] == 0


def test_a_folder_that_cannot_be_written_to_is_found_before_training(tmp_path, monkeypatch):
    run("example", tmp_path / "e")
    monkeypatch.setattr(use, "adapt", lambda *a, **kw: pytest.fail("trained first"))

    def refuse(*args, **kw):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    for option in ("--out", "--plot"):
        code, _, err = run("adapt", tmp_path / "e/source", tmp_path / "e/target", option, tmp_path / "x.png")
        assert code == 2 and f"{option}: {tmp_path}" in err and "nothing can be written there (Permission denied)" in err and err.count("\n") == 1
