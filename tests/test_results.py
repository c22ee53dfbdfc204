"Verdict rules, the results file and its schema; every committed verdict is computed again."
import copy
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from icl26.repro import Claim, Results, ResultsError, holds, load_results, recompute, schema, validate
from icl26.repro.claims import PAIR_BOUNDS, RECORD_TESTS, SEQUENCE_TESTS
from icl26.repro.results import measurement

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = sorted((ROOT / "results").glob("*/*/results.json"))
BASE = dict(statement="s", source="t", scale="mechanism")

# test -> (bound, numbers that pass, numbers that fail)
CASES = {
    "interval_above": (0.5, dict(measured=0.7, ci=(0.51, 0.9)), dict(measured=0.7, ci=(0.5, 0.9))),
    "interval_below": (0.5, dict(measured=0.3, ci=(0.1, 0.49)), dict(measured=0.3, ci=(0.1, 0.5))),
    "interval_not_above": (0.5, dict(measured=0.7, ci=(0.5, 0.9)), dict(measured=0.7, ci=(0.51, 0.9))),
    "interval_not_below": (0.5, dict(measured=0.3, ci=(0.1, 0.5)), dict(measured=0.3, ci=(0.1, 0.49))),
    "interval_inside": ((-0.1, 0.1), dict(measured=0.0, ci=(-0.1, 0.1)), dict(measured=0.0, ci=(-0.1, 0.11))),
    "interval_contains": (0.0, dict(measured=0.1, ci=(0.0, 0.2)), dict(measured=0.1, ci=(0.01, 0.2))),
    "above": (0.5, dict(measured=0.51), dict(measured=0.5)),
    "below": (0.5, dict(measured=0.49), dict(measured=0.5)),
    "at_least": (0.5, dict(measured=0.5), dict(measured=0.49)),
    "at_most": (0.5, dict(measured=0.5), dict(measured=0.51)),
    "within": ((0.5, 0.1), dict(measured=0.6), dict(measured=0.61)),
    "error_rate_at_most": (0.05, dict(measured=0.09, k=9, n=100), dict(measured=0.1, k=10, n=100)),
    "significant_above": ((0.5, 0.05), dict(measured=0.6, pvalue=0.05), dict(measured=0.6, pvalue=0.051)),
    "significant_below": ((0.5, 0.05), dict(measured=0.4, pvalue=0.05), dict(measured=0.5, pvalue=0.01)),
}


def test_every_rule_has_a_case():
    assert set(CASES) == set(RECORD_TESTS)
    assert PAIR_BOUNDS <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_each_rule_returns_each_of_its_verdicts(name):
    bound, good, bad = CASES[name]
    claim = Claim("c", reproduced=[holds(name, bound)], **BASE)
    assert measurement(claim, **good)["verdict"] == "reproduced"
    assert measurement(claim, **bad)["verdict"] == "not reproduced"
    assert measurement(claim, reason="no data")["verdict"] == "not run"
    part = lambda label, numbers: dict(label=label, **numbers)
    several = Claim("c", reproduced=[holds(name, bound, parts="*")], **BASE)
    verdict = lambda *ps: measurement(several, parts=[part(str(i), p) for i, p in enumerate(ps)])["verdict"]
    assert [verdict(good, good), verdict(good, bad), verdict(bad, bad), verdict(bad)] == \
        ["reproduced", "partly", "not reproduced", "not reproduced"]
    never = Claim("c", reproduced=[holds(name, bound, parts="*")], partly=[], **BASE)
    assert measurement(never, parts=[part("a", good), part("b", bad)])["verdict"] == "not reproduced"


@pytest.mark.parametrize("name, good, bad", [
    ("increasing", (1, 2, 3), (1, 3, 3)), ("decreasing", (3, 2, 1), (3, 3, 1)),
    ("non_decreasing", (1, 0.5, 2), (2, 0.9, 3)), ("non_increasing", (2, 2.5, 1), (1, 2.1, 1))])
def test_sequence_rules(name, good, bad):
    claim = Claim("c", reproduced=[holds(name, parts="*")], **BASE)
    parts = lambda xs: [dict(label=str(i), measured=x, ci=(x - 0.5, x + 0.5)) for i, x in enumerate(xs)]
    assert set(SEQUENCE_TESTS) == {"increasing", "decreasing", "non_decreasing", "non_increasing"}
    assert measurement(claim, parts=parts(good))["verdict"] == "reproduced"
    assert measurement(claim, parts=parts(bad))["verdict"] == "not reproduced"
    assert measurement(claim, parts=parts(good[:1]))["verdict"] == "not reproduced"       # one point is no trend


@pytest.mark.parametrize("need, passing, ok", [("all", 4, True), ("all", 3, False), ("any", 1, True), ("any", 0, False),
                                               ("none", 0, True), ("none", 1, False), ("most", 3, True), ("most", 2, False)])
def test_need(need, passing, ok):
    claim = Claim("c", reproduced=[holds("above", 0, parts="*", need=need)], partly=[], **BASE)
    parts = [dict(label=str(i), measured=1 if i < passing else -1) for i in range(4)]
    assert (measurement(claim, parts=parts)["verdict"] == "reproduced") == ok


def test_default_rule_reads_the_direction_and_the_difference():
    for higher, interval, verdict in [(True, (0.1, 0.2), "reproduced"), (True, (-0.1, 0.2), "not reproduced"),
                                      (False, (-0.2, -0.1), "reproduced"), (False, (0.1, 0.2), "not reproduced")]:
        claim = Claim("c", higher_is_better=higher, **BASE)
        d = dict(value=sum(interval) / 2, ci_low=interval[0], ci_high=interval[1])
        assert measurement(claim, measured=0.5, ci=(0.4, 0.6), difference=d)["verdict"] == verdict
        assert measurement(claim, measured=d["value"], ci=interval)["verdict"] == verdict


def test_partly_has_its_own_conditions():
    claim = Claim("c", reproduced=[holds("interval_inside", (-0.05, 0.05))], partly=[holds("interval_contains", 0)], **BASE)
    assert measurement(claim, measured=0, ci=(-0.04, 0.04))["verdict"] == "reproduced"
    assert measurement(claim, measured=0, ci=(-0.2, 0.04))["verdict"] == "partly"
    assert measurement(claim, measured=0.1, ci=(0.06, 0.2))["verdict"] == "not reproduced"


def test_the_worst_part_is_shown():
    parts = [dict(label=str(x), measured=x, ci=(x, x), n=3) for x in (0.5, 0.2, 0.9)]
    for higher, worst in ((True, 0.2), (False, 0.9)):
        r = measurement(Claim("c", higher_is_better=higher, **BASE), parts=parts)
        assert (r["measured"], r["ci_low"], r["n"]) == (worst, worst, 3)
    r = measurement(Claim("c", reproduced=[holds("above", 0.3, parts="*")], **BASE), parts=parts)
    assert r["measured"] == 0.2


def test_nan_is_not_run_and_never_reproduced():
    claim = Claim("c", reproduced=[holds("at_most", 1.0)], **BASE)
    assert measurement(claim, measured=float("nan"))["verdict"] == "not run"
    several = Claim("c", reproduced=[holds("at_most", 1.0, parts="*")], **BASE)
    assert measurement(several, parts=[dict(label="a", measured=float("nan"))])["verdict"] == "not reproduced"


def test_descriptive():
    claim = Claim("c", descriptive=True, **BASE)
    assert measurement(claim, measured=2.0)["verdict"] == "descriptive"
    assert measurement(claim, reason="no GPU")["verdict"] == "not run"


def a_run(tmp_path, **kw):
    res = Results("demo", area="evaluation", title="Demo", out_dir=str(tmp_path), **kw)
    res.add(Claim("c", higher_is_better=True, **BASE), measured=0.5, n=3, values=[0.4, 0.5, 0.6],
            difference=dict(value=0.1, ci_low=0.05, ci_high=0.15))
    res.save()
    return load_results(tmp_path / "results.json")


def test_file_round_trip_and_published_schema(tmp_path):
    record = a_run(tmp_path)
    jsonschema.Draft202012Validator.check_schema(schema())
    published = json.loads((ROOT / "results" / "results.schema.json").read_text())
    assert published == json.loads(json.dumps(schema()))
    jsonschema.validate(record, published)
    assert record["parameters"] == dict(profile="smoke", seed=0, device="auto", model=None)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]           # no temporary file stays


@pytest.mark.parametrize("path, value, named", [
    (("claims", 0, "verdict"), "maybe", "claims[0].verdict"), (("claims", 0, "measured"), "high", "claims[0].measured"),
    (("claims", 0, "scale"), "toy", "claims[0].scale"), (("claims",), [], "claims"), (("parameters",), {}, "parameters"),
    (("wall_s",), "long", "wall_s"), (("schema",), 99, "schema"), (("claims", 0, "verdict"), "partly", "claims[0].verdict"),
    (("claims", 0, "extra"), 1, "claims[0]")])
def test_a_wrong_field_is_refused_by_name(tmp_path, path, value, named):
    record = copy.deepcopy(a_run(tmp_path))
    at = record
    for p in path[:-1]:
        at = at[p]
    at[path[-1]] = value
    with pytest.raises(ResultsError) as e:
        validate(record)
    assert named in str(e.value)


@pytest.mark.parametrize("field", ["paper", "parameters", "claims", "versions", "threads"])
def test_a_missing_field_is_refused_by_name(tmp_path, field):
    record = a_run(tmp_path)
    del record[field]
    with pytest.raises(ResultsError, match=field):
        validate(record)


def test_truncated_and_missing_files(tmp_path):
    a_run(tmp_path)
    f = tmp_path / "results.json"
    f.write_text(f.read_text()[:200])
    with pytest.raises(ResultsError, match="not valid JSON"):
        load_results(f)
    with pytest.raises(ResultsError, match="No such file"):
        load_results(tmp_path / "none.json")


def test_gpu_without_cuda_is_not_run():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    res = Results("demo", area="a", title="t", profile="gpu")
    assert not res.running
    res.not_run_all([Claim("c", higher_is_better=True, **BASE)])
    assert res.claims["c"]["verdict"] == "not run" and "CUDA" in res.claims["c"]["reason"]
    assert Results("demo", area="a", title="t", profile="gpu", device="cpu").running


def test_light_import():
    code = "import sys, icl26.repro; print([m for m in ('numpy', 'scipy', 'torch', 'pandas', 'papermill', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.parent.name)
def test_committed_verdicts_follow_from_the_recorded_values(path):
    record = load_results(path)
    assert record["parameters"]["profile"] == "cpu" and not record["incomplete"]
    for claim in record["claims"]:
        assert recompute(claim)[0] == claim["verdict"], claim["id"]


@pytest.mark.parametrize("numbers, name", [(dict(ci=(0.9, 0.1)), "ci"), (dict(n=-1), "n"), (dict(pvalue=1.5), "pvalue"),
                                           (dict(pvalue=-0.1), "pvalue")])
def test_impossible_numbers_are_refused(numbers, name):
    claim = Claim("c", higher_is_better=True, **BASE)
    with pytest.raises(ValueError, match=f"^{name}: "):
        measurement(claim, measured=0.5, **numbers)
    with pytest.raises(ValueError, match=f"^{name}: part 'a'"):
        measurement(claim, parts=[dict(label="a", measured=0.5, **numbers)])
    assert measurement(claim, measured=0.5, ci=(0.6, 0.7))["verdict"] == "reproduced"  # a shifted interval is no mistake


def test_impossible_rules_are_refused():
    for test, bound in (("within", (0, -0.1)), ("interval_inside", (1, 0)), ("significant_above", (0, 0)),
                        ("significant_above", (0, 1)), ("significant_below", (0, 5))):
        with pytest.raises(ValueError, match="^bound: "):
            holds(test, bound)
    with pytest.raises(ValueError, match="^parts: "):
        holds("above", 0, parts=3)
    with pytest.raises(ValueError, match="^higher_is_better: "):
        Claim("c", higher_is_better="yes", **BASE)
    with pytest.raises(ValueError, match="^bound: "):
        holds("above", True)
    assert holds("above", np.float32(0.5)).bound == 0.5 and holds("above", np.int64(2)).bound == 2.0
    rule = (holds("above", b) for b in (0, 1))
    assert len(Claim("c", reproduced=rule, **BASE).reproduced) == 2


@pytest.mark.parametrize("change", [dict(cache={"hits": "many", "builds": 1, "build_s": 1.0}), dict(wall_s=10**400),
                                    dict(parameters=dict(profile={}, seed=0, device="auto", model=None))],
                         ids=["cache", "huge", "profile"])
def test_a_damaged_file_is_a_results_error(change, tmp_path):
    record = a_run(tmp_path) | change
    (tmp_path / "results.json").write_text(json.dumps(record))
    with pytest.raises(ResultsError):
        load_results(tmp_path / "results.json")
    (tmp_path / "results.json").write_text("[" * 100_000)
    with pytest.raises(ResultsError, match="too deeply"):
        load_results(tmp_path / "results.json")
