"noisy_valid: the interface, its edges, and that every number and verdict of a run follows from what it recorded."
import csv
import json
import math
import shutil
import sys
import tracemalloc

import numpy as np
import papers
import pytest
from papers import committed, plain_signature, run_command, run_here, use_command
from recompute import BOUNDS, agrees, made_up, wilson_by_hand
from scipy.stats import beta, binom, norm

import icl26.evaluation.noisy_valid as nv
import icl26.evaluation.noisy_valid.use
import icl26.evaluation.noisy_valid.verdicts
from icl26.evaluation.noisy_valid import real
from icl26.evaluation.noisy_valid.judge import Counts
from icl26.evaluation.noisy_valid.power import draw_counts
from icl26.evaluation.noisy_valid.tests import METHODS, decide
from icl26.evaluation.noisy_valid.verdicts import or_nothing
from icl26.repro import load_results, recompute
from icl26.repro.results import measurement
from icl26.stats import mean_interval


def data(seed=0, n_human=80, n_judge=500, rate=0.2, tpr=0.9, fpr=0.1):
    rng = np.random.default_rng(seed)
    h = rng.random(n_human + n_judge) < rate
    j = rng.random(n_human + n_judge) < np.where(h, tpr, fpr)
    return dict(human=h[:n_human], human_judge=j[:n_human], judge_labels=j[n_human:])


# -- interface -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, want", [
    ("estimate_judge", "(human, judge)"),
    ("noisy_threshold", "(tpr, fpr, n1, n0, n_judge, *, alpha, zeta=0.05)"),
    ("certify", "(method, *, alpha, zeta=0.05, judge_labels=None, human=None, human_judge=None, tpr=None, fpr=None, variance='plugin')"),
    ("corrected_rate", "(judge_labels, profile, *, level=0.95)"),
    ("noisy_beats_direct", "(tpr, fpr, failure_rate, alpha)"),
    ("asymptotic_power", "(method, *, failure_rate, alpha, tpr=None, fpr=None, n_human=None, n_judge=None, zeta=0.05)"),
    ("simulate", "(method, *, failure_rate, alpha, tpr, fpr, n_human, n_judge, zeta=0.05, n_trials=1000, seed=None, variance='plugin')"),
])
def test_signatures(name, want):
    assert plain_signature(getattr(nv, name)) == want


def test_results_are_frozen_and_hold_the_promised_fields():
    r = nv.certify("noisy", alpha=0.3, **data())
    assert list(vars(r))[:6] == ["method", "statistic", "threshold", "pvalue", "certified", "informative"]
    assert list(vars(r.profile)) == ["tpr", "fpr", "n1", "n0"]
    for obj, field in ((r, "certified"), (r.profile, "tpr")):
        with pytest.raises(AttributeError):
            setattr(obj, field, 1)
    assert type(r.certified) is bool and all(type(x) is float for x in (r.statistic, r.threshold, r.pvalue))
    assert type(nv.noisy_beats_direct(0.9, 0.1, 0.2, 0.25)) is bool and type(nv.noisy_threshold(0.9, 0.1, 5, 5, 5, alpha=0.2)) is float
    assert nv.noisy_threshold([0.8, 0.9], 0.1, 5, [[5], [6]], 5, alpha=0.2).shape == (2, 2)


# -- certify against item loops written independently ----------------------------------------------------------------

def by_items(method, d, alpha, zeta, tpr, fpr):
    "Statistic, threshold by plain loops over label lists; None for an uninformative judge."
    h, j, u = ([int(x) for x in d[k]] for k in ("human", "human_judge", "judge_labels"))
    z, mean, n, m = norm.ppf(zeta), lambda x: sum(x) / len(x), len(h), len(u)
    var = lambda x: sum((v - mean(x)) ** 2 for v in x) / (len(x) - 1)
    t_list, f_list = [b for a, b in zip(h, j) if a], [b for a, b in zip(h, j) if not a]
    if method == "direct":
        return mean(h), alpha + z * math.sqrt(alpha * (1 - alpha) / n)
    if method in ("ppi", "ppi++"):
        lam = 1.0
        if method == "ppi++":
            cov = sum((a - mean(h)) * (b - mean(j)) for a, b in zip(h, j)) / (n - 1)
            lam = min(max(cov / ((1 + n / m) * var(j + u)), 0), 1)
        rest = [a - lam * b for a, b in zip(h, j)]
        return lam * mean(u) + mean(rest), alpha + z * math.sqrt(lam**2 * var(u) / m + var(rest) / n)
    if method == "oracle":
        limit = fpr + (tpr - fpr) * alpha
        return mean(u), limit + z * math.sqrt(limit * (1 - limit) / m)
    t, f = mean(t_list), mean(f_list)
    if t <= f:
        return None
    if method == "noisy":
        limit = f + (t - f) * alpha
        spread = limit * (1 - limit) / m + alpha**2 * t * (1 - t) / len(t_list) + (1 - alpha) ** 2 * f * (1 - f) / len(f_list)
        return mean(u), limit + z * math.sqrt(spread)
    low = lambda x: beta.ppf(zeta / 3, sum(x), len(x) - sum(x) + 1) if sum(x) else 0.0
    up = beta.ppf(1 - zeta / 3, sum(u) + 1, m - sum(u)) if sum(u) < m else 1.0
    tl, fl = low(t_list), low(f_list)
    return ((up - fl) / (tl - fl) if tl > fl else math.inf), alpha


@pytest.mark.parametrize("method", METHODS)
def test_certify_is_what_item_loops_give(method):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        d = data(seed, int(rng.integers(10, 90)), int(rng.integers(20, 400)), rng.uniform(0.1, 0.5), rng.uniform(0.3, 1), rng.uniform(0, 0.5))
        if not 0 < d["human"].sum() < len(d["human"]):
            continue
        alpha, zeta = rng.uniform(0.1, 0.6), rng.uniform(0.01, 0.4)
        r, want = nv.certify(method, alpha=alpha, zeta=zeta, tpr=0.8, fpr=0.2, **d), by_items(method, d, alpha, zeta, 0.8, 0.2)
        if want is None:
            assert (r.certified, r.pvalue, r.informative) == (False, 1.0, False)
            continue
        np.testing.assert_allclose([r.statistic, r.threshold], want, rtol=1e-9)
        assert r.certified == (want[0] < want[1]) and r.informative
        assert math.isnan(r.pvalue) if method == "exact" else r.certified == (r.pvalue < zeta)


def test_smoothed_changes_the_calibration_terms_only():
    d = dict(human=[1] * 4 + [0] * 8, human_judge=[1] * 4 + [0] * 8, judge_labels=[0] * 90 + [1] * 10)       # a judge without a seen error
    plain, smooth = (nv.certify("noisy", alpha=0.25, variance=v, **d) for v in ("plugin", "smoothed"))
    t, f = 5 / 6, 1 / 10
    se2 = 0.25 * 0.75 / 100 + 0.25**2 * t * (1 - t) / 4 + 0.75**2 * f * (1 - f) / 8
    np.testing.assert_allclose([plain.threshold, smooth.threshold],
                               0.25 + norm.ppf(0.05) * np.sqrt([0.25 * 0.75 / 100, se2]))
    assert plain.statistic == smooth.statistic and plain.calibration_share == 0 and smooth.calibration_share > 0.5


def test_calibration_share_is_the_share_of_the_variance():
    r = nv.certify("noisy", alpha=0.25, **data())
    p = r.profile
    limit = p.fpr + (p.tpr - p.fpr) * 0.25
    calibration = 0.25**2 * p.tpr * (1 - p.tpr) / p.n1 + 0.75**2 * p.fpr * (1 - p.fpr) / p.n0
    np.testing.assert_allclose(r.calibration_share, calibration / (calibration + limit * (1 - limit) / 500))
    assert nv.certify("direct", alpha=0.25, human=data()["human"]).calibration_share == 1
    for rate, k, n in (("tpr", round(p.tpr * p.n1), p.n1), ("fpr", round(p.fpr * p.n0), p.n0)):
        i = p.interval(rate)
        np.testing.assert_allclose([i.low, i.high], [beta.ppf(0.025, k, n - k + 1), beta.ppf(0.975, k + 1, n - k)])


# -- edges -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call, text", [
    (lambda: nv.estimate_judge([1, 0], [1, 0, 1]), "human and judge"),
    (lambda: nv.estimate_judge([1, 1], [1, 0]), "at least one failure and one pass"),
    (lambda: nv.estimate_judge([1, 3], [1, 0]), "human: labels must be 0 or 1"),
    (lambda: nv.noisy_threshold(0.9, 0.1, 5, 0, 5, alpha=0.2), "n0"),
    (lambda: nv.noisy_threshold(0.9, -0.1, 5, 5, 5, alpha=0.2), "fpr"),
    (lambda: nv.noisy_threshold(0.9, 0.1, 5, 5, 5, alpha=0.2, zeta=0), "zeta"),
    (lambda: nv.certify("wald", alpha=0.2), "method"),
    (lambda: nv.certify("noisy", alpha=1.2, **data()), "alpha"),
    (lambda: nv.certify("exact", alpha=0.2, human=[0, 1]), "judge_labels, human_judge"),
    (lambda: nv.certify("exact", alpha=0.2, human=[0, 0], human_judge=[1, 0], judge_labels=[1]), "human"),
    (lambda: nv.certify("noisy", alpha=0.2, human=[1, 1], human_judge=[1, 0], judge_labels=[1]), "human"),
    (lambda: nv.certify("ppi++", alpha=0.2, human=[1], human_judge=[1], judge_labels=[1, 0]), "two items"),
    (lambda: nv.certify("oracle", alpha=0.2, judge_labels=[1, 0], tpr=2, fpr=0), "tpr"),
    (lambda: nv.certify("noisy", alpha=0.2, variance="other", **data()), "variance"),
    (lambda: nv.corrected_rate([0, 1], nv.JudgeProfile(0.2, 0.2, 5, 5)), "profile"),
    (lambda: nv.noisy_beats_direct(0.9, 0.1, 1.0, 0.25), "failure_rate"),
    (lambda: nv.asymptotic_power("noisy", failure_rate=1, alpha=0.2, tpr=1, fpr=0, n_human=9, n_judge=9), "failure_rate"),
    (lambda: nv.asymptotic_power("exact", failure_rate=0.1, alpha=0.2), "method"),
    (lambda: nv.simulate("ppi", failure_rate=0.1, alpha=0.2, tpr=0.9, fpr=0.1, n_human=1, n_judge=9), "n_human"),
    (lambda: nv.simulate("noisy", failure_rate=0.1, alpha=0.2, tpr=1.9, fpr=0.1, n_human=9, n_judge=9), "tpr"),
    (lambda: nv.simulate("noisy", failure_rate=0.1, alpha=0.2, tpr=0.9, fpr=0.1, n_human=9, n_judge=9, n_trials=0), "n_trials"),
    (lambda: nv.required_human("direct", failure_rate=0.3, alpha=0.2), "failure_rate"),
    (lambda: nv.required_human("noisy", failure_rate=0.1, alpha=0.2), "tpr, fpr, n_judge"),
    (lambda: nv.minimum_tpr(fpr=0.1, failure_rate=0.2, alpha=0.2, n_human=9, n_judge=9), "failure_rate"),
    (lambda: nv.claims("fast"), "profile"),
])
def test_bad_input_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_planning_finds_the_smallest_number():
    assert nv.required_human("direct", failure_rate=1e-4, alpha=0.9) == 1
    assert nv.required_human("noisy", failure_rate=0.5, alpha=0.999, tpr=1, fpr=0, n_judge=10_000) == 2
    for rate in (0.05, 0.15, 0.2):
        n = nv.required_human("direct", failure_rate=rate, alpha=0.25)
        low, high = (nv.asymptotic_power("direct", failure_rate=rate, alpha=0.25, n_human=m) for m in (n - 1, n))
        assert low < 0.8 <= high


def test_an_uninformative_judge_certifies_nothing_and_raises_nothing():
    d = dict(human=[1, 0] * 20, human_judge=[0, 1] * 20, judge_labels=[0] * 500)
    for m in ("noisy", "exact"):
        r = nv.certify(m, alpha=0.9, **d)
        assert (r.certified, r.pvalue, r.informative) == (False, 1.0, False)
    r = nv.certify("oracle", alpha=0.9, judge_labels=[0] * 500, tpr=0.1, fpr=0.6)
    assert (r.certified, r.pvalue, r.informative) == (False, 1.0, False)
    assert all(nv.certify(m, alpha=0.9, **d).informative for m in ("ppi", "ppi++"))
    assert nv.asymptotic_power("noisy", failure_rate=0.1, alpha=0.2, tpr=0.4, fpr=0.4, n_human=99, n_judge=99) == 0


def test_a_trial_without_failures_counts_as_not_certified():
    c = Counts(*(np.array(x) for x in ([0, 3], [0, 4], [0, 1], [40, 36], [0, 5], [999, 999])))
    assert decide("noisy", c, alpha=0.5).certified.tolist() == [False, True]
    assert decide("direct", c, alpha=0.5).certified.all()
    setting = dict(alpha=0.25, tpr=0.9, fpr=0.1, n_human=20, n_judge=100, n_trials=50, seed=0)
    assert nv.simulate("exact", failure_rate=0.0, **setting) == 0 and nv.simulate("ppi", failure_rate=0.0, **setting) > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_simulation_is_repeatable_and_does_not_depend_on_items(method):
    s = dict(failure_rate=0.15, alpha=0.25, tpr=0.9, fpr=0.1, n_human=60, n_trials=3000)
    assert nv.simulate(method, **s, n_judge=10**4, seed=5) == nv.simulate(method, **s, n_judge=10**4, seed=5)
    shares = {nv.simulate(method, **s, n_judge=2000, seed=k) for k in range(6)}
    assert method in ("exact", "oracle") or len(shares) > 1
    tracemalloc.start()
    many = nv.simulate(method, **s, n_judge=10**8, seed=5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6                                                             # items would take 100 MB a trial
    assert abs(many - nv.simulate(method, **s, n_judge=10**6, seed=6)) < 4 * math.sqrt(0.5 / 3000)   # no judge noise is left in either


def test_the_exact_test_keeps_its_level_at_thirty_labels():
    for rate in (0.1, 0.25, 0.5):
        share = nv.simulate("exact", failure_rate=rate, alpha=rate, tpr=0.95, fpr=0.3, n_human=30, n_judge=10_000, n_trials=20_000, seed=1)
        assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)


def test_drawn_counts_have_the_right_law():
    c = draw_counts(np.random.default_rng(0), failure_rate=0.3, tpr=0.8, fpr=0.1, n_human=10, n_judge=7, n_trials=200_000)
    seen = np.bincount(c.k1, minlength=11) / 200_000                           # marginally k1 ~ Bin(n_M, R_M TPR)
    np.testing.assert_allclose(seen, binom.pmf(np.arange(11), 10, 0.24), atol=0.004)
    seen = np.bincount(c.kj, minlength=8) / 200_000
    np.testing.assert_allclose(seen, binom.pmf(np.arange(8), 7, 0.3 * 0.8 + 0.7 * 0.1), atol=0.004)


# -- a run: intervals and verdicts from the recorded numbers ---------------------------------------------------------

@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return papers.smoke("noisy_valid", tmp_path_factory)


def check_part(claim, part):
    "The interval of a part, again, from the counts or values that it recorded."
    values, n = part.get("values"), part["n"]
    if claim in ("type1", "naive", "real"):
        assert part["measured"] == part["k"] / n
        want = part["k"] / n, *wilson_by_hand(part["k"], n)
    elif claim in ("oracle", "ppi"):
        x = np.r_[np.ones(values[0]), -np.ones(values[1]), np.zeros(n - sum(values))]
        half = norm.ppf(0.975) * x.std(ddof=1) / math.sqrt(n)
        assert abs(part["measured"] - x.mean()) < 1e-12
        want = x.mean(), x.mean() - half, x.mean() + half
    elif claim == "boundary":
        if part["measured"] is None:
            assert 0 in (values[1], values[3])
            return
        (a, b), (c, d) = wilson_by_hand(*values[:2]), wilson_by_hand(*values[2:])
        p, q = values[0] / values[1], values[2] / values[3]
        want = (p + q) / 2, (p + q) / 2 - 0.5 * math.hypot(p - a, q - c), (p + q) / 2 + 0.5 * math.hypot(b - p, d - q)
        assert abs(part["measured"] - (p + q) / 2) < 1e-12
    else:
        assert abs(part["measured"] - np.mean(values)) < 1e-12
        want = mean_interval(values, seed=0)
    agrees(part, want, atol=1e-9)


def test_every_interval_and_verdict_follows_from_the_recorded_values(smoke):
    for path in filter(None, (smoke, committed("noisy_valid"))):
        record = load_results(path)
        assert [c["id"] for c in record["claims"]] == ["type1", "naive", "boundary", "oracle", "ppi", "estimator", "real"]
        for c in record["claims"]:
            assert c["verdict"] == recompute(c)[0] and c["values"]
            for part in c["values"]:
                check_part(c["id"], part)
        cells = {c["id"]: c["values"] for c in record["claims"]}
        shown = {"type1": (max, "noisy "), "naive": (min, "lenient"), "boundary": (min, "theorem"), "oracle": (min, "n_M=100"),
                 "estimator": (min, ""), "real": (max, "noisy ")}
        for c in record["claims"]:                                              # the worst part that the rule asks about, with its interval
            if c["id"] == "ppi":                                                    # speaks of most cells: their median gain, without an interval
                kept = [p["measured"] for p in cells["ppi"] if p["label"].startswith("ppi++ level-kept ")]
                assert c["measured"] == pytest.approx(np.median(kept)) and c["ci_low"] is None and c["n"] == len(kept)
                continue
            pick, start = shown[c["id"]]
            worst = pick((p for p in cells[c["id"]] if p["label"].startswith(start) and p["measured"] is not None), key=lambda p: p["measured"])
            assert [c[k] for k in BOUNDS] == [worst[k] for k in BOUNDS], c["id"]


@pytest.mark.skipif(committed("noisy_valid") is None, reason="no committed run")
def test_the_committed_run_is_the_full_grid():
    cells = {c["id"]: c["values"] for c in load_results(committed("noisy_valid"))["claims"]}
    noisy = [p for p in cells["type1"] if p["label"].startswith("noisy ")]
    assert len(noisy) == 48 and min(p["n"] for p in noisy) >= 4000
    assert len(cells["naive"]) == 16 and sum(p["label"].startswith("lenient") for p in cells["naive"]) == 2
    assert len(cells["boundary"]) == 6 and [p["label"] for p in cells["oracle"]] == [f"n_M={n}" for n in (25, 100, 400, 1600)]
    assert sum(p["label"].startswith("ppi++ ") for p in cells["ppi"]) == 32
    assert sum(p["label"].startswith("noisy transport") for p in cells["real"]) == 9


def test_the_smoke_run_stays_in_its_budget(smoke):
    record = load_results(smoke)
    assert record["peak_rss_mb"] < 2048 and record["parameters"]["profile"] == "smoke"
    assert {"level.png", "boundary.png", "oracle_gap.png", "power.png", "real.png"} <= {p.name for p in (smoke.parent / "figures").iterdir()}


# -- numbers that go against the paper -------------------------------------------------------------------------------

def against(part, claim):
    "The part, moved to where the paper is wrong, with its interval."
    shift = {"type1": 0.2, "real": 0.2, "naive": -1.5, "ppi": -1.0}.get(claim)
    if claim == "boundary":
        return part | made_up(part["label"], 0.6, 0.1, part["n"])
    if claim == "oracle":                                                       # the gap grows with n_M
        return part | made_up(part["label"], 0.01 * int(part["label"].removeprefix("n_M=")), n=part["n"])
    if claim == "ppi" and part["label"].startswith("best-oracle"):
        shift = 1.5
    return part | {k: part[k] + shift for k in BOUNDS}


@pytest.mark.parametrize("claim", ["type1", "naive", "boundary", "oracle", "ppi", "real"])
def test_numbers_against_the_paper_are_not_reproduced(smoke, claim):
    (record,) = (c for c in load_results(smoke)["claims"] if c["id"] == claim)
    (rule,) = (c for c in nv.claims("smoke") if c.id == claim)
    parts = [against(p, claim) for p in record["values"]]
    assert measurement(rule, parts=parts)["verdict"] == "not reproduced"


def ppi_verdict(*parts):
    "The verdict of claim `ppi`; each part is (start of its label, measured), give or take 0.01."
    (rule,) = (c for c in nv.claims("smoke") if c.id == "ppi")
    records = [made_up(f"{start} n_M=100 {i}", m) for i, (start, m) in enumerate(parts)]
    return measurement(rule, parts=or_nothing(records, "ppi++ level-kept "))


def test_ppi_is_judged_where_no_cell_keeps_its_level():
    kept, broken, best = "ppi++ level-kept", "ppi++ level-broken", "best-oracle"
    assert ppi_verdict((kept, 0.1), (broken, -0.1), (best, -0.1))["verdict"] == "reproduced"
    assert ppi_verdict((kept, -0.1), (broken, 0.1), (broken, 0.1), (best, -0.1))["verdict"] == "partly"
    record = ppi_verdict((broken, 0.1), (broken, 0.1), (broken, -0.1), (best, -0.1))         # two of three: the stand-in doesn't count as a cell
    assert record["verdict"] == "partly" and record["values"][-1]["label"] == "ppi++ level-kept in no cell"
    assert ppi_verdict((broken, 0.1), (broken, -0.1), (best, -0.1))["verdict"] == "not reproduced"
    assert ppi_verdict((broken, 0.1), (best, 0.1))["verdict"] == "not reproduced"
    with pytest.raises(ValueError, match="no part matches"):                                # a wrong label is still an error
        ppi_verdict((kept, 0.1), ("best_oracle", -0.1))


def test_a_run_where_no_cell_keeps_its_level_ends_with_a_verdict(tmp_path):
    "Type-I errors of 30 % in every cell, and PPI++ with more power than Noisy HT everywhere."
    def change(source):
        if source.startswith("if res.running:\n    parts, versus"):
            source = source.replace("says, name =", "level[n, t, f] = {m: np.arange(1000) < 300 for m in TESTS}\n        says, name =")
            source = source.replace("says[other], says[\"noisy\"]))", "*(np.arange(1000) < x for x in (700, 500))))")
            assert source.count("np.arange(1000)") == 2
        return "" if source.startswith("#| fig-alt") else source

    record = {c["id"]: c for c in run_here("noisy_valid", tmp_path, change, profile="smoke", seed=0)["claims"]}["ppi"]
    assert record["verdict"] == "partly" and record["note"].startswith("PPI++ has more power in 0 of the 0 cells")
    assert record["measured"] == pytest.approx(0.2)


def test_the_descriptive_claim_has_no_verdict_to_win(smoke):
    (rule,) = (c for c in nv.claims("smoke") if c.id == "estimator")
    parts = [dict(label="x", measured=0.1, ci_low=0.05, ci_high=0.2, n=9)]
    assert measurement(rule, parts=parts)["verdict"] == "descriptive"


# -- the gpu profile -------------------------------------------------------------------------------------------------

WORDS = "you are a kind rude awful silly person thanks for the edit please stop now and never come back again".split()


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    "Tiny models of the profile's classes (Llama and Qwen2), in the layout of a local copy of the Hub, and three small CSV files."
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from icl26.lm import HFLM, byte_tokenizer, tiny_lm

    folder = tmp_path_factory.mktemp("stand_in")
    vocabulary = sorted({w for q in real.QUESTIONS.values() for w in q.split()} | set(WORDS)
                        | set("Reply with Yes or No only. Text: Answer: User's question: Yes No".split()))
    for seed, name in enumerate((real.JUDGES[0], real.TESTED[1])):
        lm = tiny_lm(vocabulary, seed=seed)
        if seed == 0:                                                            # the judge is asked as a chat
            lm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
        lm.save_pretrained(folder / "models" / name)
    tokenizer = byte_tokenizer()                                                  # byte-level, as Qwen's is
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.125, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
    HFLM(model, tokenizer).save_pretrained(folder / "models" / real.TESTED[0])
    (folder / "data").mkdir()
    write_data(folder / "data")
    return folder


def write_data(folder):
    rng = np.random.default_rng(0)
    for name in real.SOURCES:
        with open(folder / f"{name}.csv", "w", newline="") as f:
            w = csv.writer(f)
            w.writerow(["text", "label", "prompt"])
            for _ in range(80):
                text = " ".join(rng.choice(WORDS, rng.integers(3, 14)))
                w.writerow([text, int(rng.random() < 0.4), "are you kind" if name == "saferlhf" else ""])


def fewer(real_trials):
    "A change of the reproduction's text: the profile's grid with few trials, and so many of them on texts."
    size, small = "GRID | dict(real_trials=1000", f"GRID | dict(trials=200, plane=3, plane_trials=200, curve_trials=200, real_trials={real_trials}"
    return lambda source: source.replace(size, small)


def test_gpu_profile_runs_on_tiny_models(stand_in, tmp_path):
    path = run_command("noisy_valid", tmp_path / "gpu", "--profile", "gpu", "--device", "cpu", "--model", stand_in / "models",
                       change=fewer(1000), **{real.DATA_FOLDER: str(stand_in / "data")})
    record = load_results(path)
    claims = {c["id"]: c for c in record["claims"]}
    assert not any(c["verdict"] == "not run" for c in record["claims"])
    assert claims["real"]["scale"] == claims["estimator"]["scale"] == "mechanism"  # tiny models: a check of the path
    assert [real.plays_the_paper(m) for m in (None, str(stand_in / "models"), str(stand_in / "models" / real.JUDGES[0]), "some/judge")] == [True, True, False, False]
    assert {c.scale for c in nv.verdicts.claims("gpu") if c.id in ("real", "estimator")} == {"paper"}
    assert set(record["data_hashes"]) == set(real.SOURCES) and set(record["model_hashes"]) == {real.JUDGES[0], *real.TESTED}
    judged = {p["label"].split(" ", 3)[3] for p in claims["real"]["values"] if p["label"].startswith("noisy same")}
    assert "saferlhf by Llama-3.1-8B-Instruct" in judged and any(j.startswith("jigsaw of Qwen2.5-0.5B-Instruct by") for j in judged)
    assert all(p["n"] == 1000 for p in claims["real"]["values"])
    for c in record["claims"]:
        for part in c["values"]:
            check_part(c["id"], part)


@pytest.mark.parametrize("lacking", ["a data set", "a judge"])
def test_gpu_profile_without_data_or_models_leaves_two_claims_not_run(stand_in, tmp_path, monkeypatch, lacking):
    data, models = (shutil.copytree(stand_in / name, tmp_path / name) for name in ("data", "models"))
    if lacking == "a data set":
        (data / "saferlhf.csv").unlink()
    else:
        shutil.rmtree(models / real.JUDGES[0])
    monkeypatch.setenv(real.DATA_FOLDER, str(data))
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path / "cache"))
    record = run_here("noisy_valid", tmp_path / "out", fewer(200), profile="gpu", device="cpu", model=str(models))
    reasons = {c["id"]: c["reason"] for c in record["claims"] if c["verdict"] == "not run"}
    assert set(reasons) == {"estimator", "real"} and len(record["claims"]) == 7
    wanted = "saferlhf.csv: no such file" if lacking == "a data set" else f"holds no {real.JUDGES[0]}"
    assert all(wanted in r for r in reasons.values())


def test_either_variable_names_the_folder_of_data(tmp_path, monkeypatch):
    for name in ("common", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "jigsaw.csv").write_text(f"text,label\n{name},0\n")
    monkeypatch.delenv(real.OWN_FOLDER, raising=False)
    monkeypatch.setenv("ICL26_DATA", str(tmp_path / "common"))
    assert real.load_texts("jigsaw", 5).text == ("common",)
    monkeypatch.setenv("ICL26_NOISY_VALID_DATA", str(tmp_path / "own"))
    assert real.load_texts("jigsaw", 5).text == ("own",)


def test_a_model_that_cannot_be_loaded_is_named_and_the_others_are_asked(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path / "cache"))
    data = [real.load_texts("jigsaw", 80, folder=stand_in / "data")]
    where = {name: str(stand_in / "models" / name) for name in (real.JUDGES[0], *real.TESTED)}
    judge = {real.JUDGES[0]: where[real.JUDGES[0]]}
    found, hashes, _, missing = real.text_populations(data, judge, {real.TESTED[0]: where[real.TESTED[0]], real.TESTED[1]: str(tmp_path)}, device="cpu")
    assert set(hashes) == {real.JUDGES[0], real.TESTED[0]} and all("Qwen" in p.name for p in found)
    assert len(missing) == 1 and missing[0].startswith(real.TESTED[1])


def test_gpu_profile_without_a_gpu_says_so_in_seconds(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("noisy_valid", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])
    assert record["wall_s"] < 15


def test_without_datasets_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in (real.DATA_FOLDER, real.OWN_FOLDER):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ImportError, match="pip install datasets") as e:
        real.load_texts("jigsaw", 5)
    assert real.DATA_FOLDER in str(e.value)


# -- the command -----------------------------------------------------------------------------------------------------

def test_the_command_certifies_and_plans(tmp_path, monkeypatch, capsys):
    d = data(3, n_human=100, n_judge=3000, rate=0.12)
    rows = [f"{int(j)},{int(h)}" for h, j in zip(d["human"], d["human_judge"])] + [f"{int(j)}," for j in d["judge_labels"]]
    (tmp_path / "labels.csv").write_text("judge,human\n" + "\n".join(rows) + "\n")
    run = use_command("noisy_valid", "certify", "labels.csv", "--alpha", "0.25", "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    report, want = json.loads(run.stdout), nv.certify("noisy", alpha=0.25, **d)
    assert report["certified"] == want.certified and report["tests"]["noisy"]["threshold"] == want.threshold
    assert {"tpr", "fpr", "failure_rate"} <= set(report)
    monkeypatch.chdir(tmp_path)
    assert nv.use.main(["certify", "labels.csv", "--alpha", "0.25"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("CERTIFIED: failure rate < 0.25") and "TPR" in text
    run = use_command("noisy_valid", "certify", "labels.csv", "--alpha", "0.1", "--exit-code", cwd=tmp_path)
    assert run.returncode == 3 and run.stdout.startswith("NOT CERTIFIED")
    assert nv.use.main(["plan", "--alpha", "0.25", "--failure-rate", "0.15", "--tpr", "0.9", "--fpr", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_human_noisy"] == nv.required_human("noisy", failure_rate=0.15, alpha=0.25, tpr=0.9, fpr=0.1, n_judge=10_000)


@pytest.mark.parametrize("args, text", [
    (("certify", "none.csv", "--alpha", "0.2"), "No such file"),
    (("certify", "bad.csv", "--alpha", "0.2"), "bad.csv, line 3: human must be 0 or 1, got 'maybe'"),
    (("certify", "bad.csv"), "--alpha"),
    (("plan", "--alpha", "0.1", "--failure-rate", "0.2", "--tpr", "0.9", "--fpr", "0.1"), "failure_rate"),
    (("plan", "--alpha", "0.2", "--failure-rate", "0.1", "--tpr", "0.9"), "--tpr and --fpr"),
])
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, args, text, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("judge,human\n1,0\n0,maybe\n")
    code, err = nv.use.main(list(args)), capsys.readouterr().err
    assert code == 2 and text in err and err.startswith("icl26: error:") and "Traceback" not in err


def test_a_good_model_is_told_what_else_works(tmp_path):
    data = {"human": np.zeros(50, bool), "human_judge": np.r_[np.ones(3, bool), np.zeros(47, bool)], "judge_labels": np.arange(200) < 20}
    with pytest.raises(ValueError, match="all passes.*'direct', 'ppi' or 'ppi\\+\\+'"):
        nv.use.certificate(data, alpha=0.2)
    assert nv.use.certificate(data, alpha=0.2, method="direct")["certified"]


@pytest.mark.parametrize("text, said", [("text,label\nno label\n", "line 2: label must be 0 or 1, got ''"),
                                        ("label,text\n1,good\n1\n", "line 3: the row has no text"),
                                        (b"text,label\ngood,1\n\xff\xfe,0\n", "not a CSV file in UTF-8"),
                                        ("label,text\n1,hello, you idiot\n", "line 2: more fields than columns"),
                                        ("text,label,label\na,1,0\n", "each once"),
                                        ("text,label\n" + "x" * 140_000 + ",1\n", "field larger than field limit")])
def test_damaged_rows_of_texts_are_named(tmp_path, text, said):
    from icl26.evaluation.noisy_valid.real import read_texts

    path = tmp_path / "jigsaw.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=said) as e:
        read_texts(path)
    assert str(path) in str(e.value)
