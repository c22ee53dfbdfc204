"Every paper's reproduction at `smoke`, twice, in fresh processes with an empty cache: it runs, measures, and repeats itself."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from icl26.repro import find_papers, load_results

ROOT = Path(__file__).resolve().parent.parent
ICL26 = Path(sys.executable).with_name("icl26")


def reproduce(slug, out, cache):
    "Run one smoke job through the command line and return its results."
    env = os.environ | {"ICL26_CACHE": str(cache)}
    run = subprocess.run([ICL26, "reproduce", slug, "--profile", "smoke", "--seeds", "0", "--jobs", "1", "--out", out],
                         capture_output=True, text=True, timeout=300, env=env, cwd=out.parent)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (path,) = out.glob(f"*/{slug}/smoke-s0/results.json")
    return load_results(path)


@pytest.mark.parametrize("slug", [p.slug for p in find_papers()])
def test_same_seed_same_claims(slug, tmp_path):
    one = reproduce(slug, tmp_path / "one", tmp_path / "cache1")
    two = reproduce(slug, tmp_path / "two", tmp_path / "cache2")
    text = [json.dumps(r["claims"], indent=1, ensure_ascii=False).encode() for r in (one, two)]
    assert text[0] == text[1]
    assert one["parameters"] == dict(profile="smoke", seed=0, device="auto", model=None)
    assert any(c["verdict"] != "not run" for c in one["claims"])
    assert one["peak_rss_mb"] < 2048


@pytest.mark.parametrize("slug", [p.slug for p in find_papers()])
def test_a_committed_cpu_run_exists(slug):
    (path,) = (ROOT / "results").glob(f"*/{slug}/results.json")
    record = load_results(path)
    assert record["paper"] == slug and record["parameters"]["profile"] == "cpu"
