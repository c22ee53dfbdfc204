"Every paper's reproduction at `smoke`, twice, in fresh processes with an empty cache: it runs, measures, and repeats itself."
import json

import papers
import pytest
from papers import committed, run_command

from icl26.repro import find_papers, load_results

SLUGS = [p.slug for p in find_papers()]


@pytest.mark.parametrize("slug", SLUGS)
def test_same_seed_same_claims(slug, tmp_path, tmp_path_factory):
    one = load_results(papers.smoke(slug, tmp_path_factory))                       # which the paper's own tests read too
    two = load_results(run_command(slug, tmp_path / "two", "--profile", "smoke", "--seeds", 0))
    text = [json.dumps(r["claims"], indent=1, ensure_ascii=False).encode() for r in (one, two)]
    assert text[0] == text[1]
    assert one["parameters"] == dict(profile="smoke", seed=0, device="auto", model=None)
    assert any(c["verdict"] != "not run" for c in one["claims"])
    assert one["peak_rss_mb"] < 2048


@pytest.mark.parametrize("slug", SLUGS)
def test_a_committed_cpu_run_exists(slug):
    record = load_results(committed(slug))
    assert record["paper"] == slug and record["parameters"]["profile"] == "cpu"
