"""The report in a real browser, from disk: phone and desk, light and dark, hostile text."""

import base64
import csv
import json
import re

import pytest
from browser import Browser, available

from icl26.repro.compare import compare
from icl26.repro.papers import UsageError
from icl26.repro.report import report

RULE = {
    "reproduced": [{"test": "above", "bound": 0, "of": "measured", "parts": None, "need": "all"}],
    "partly": [],
    "descriptive": False,
}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAYAAACNMs+9AAAAFUlEQVR42mNk+M9Qz0AEYBxVSF+FABJADveWkH6oAAAAAElFTkSuQmCC"
)
EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> {{ 7 * 7 }} \"' & é"
LONG = "an-unbroken-name-" * 8


def claim(id: str, verdict: str, measured: float | None, **more: object) -> dict:
    return {
        "id": id,
        "statement": f"{id} grows with the number of samples",
        "source": "Table 1",
        "scale": "mechanism",
        "measured": measured,
        "ci_low": None,
        "ci_high": None,
        "n": 8,
        "rule": RULE,
        "verdict": verdict,
        "reason": "",
        "paper_value": 0.5,
        "unit": "points",
        **more,
    }


def write(folder, area: str, paper: str, seed: int, *claims: dict, title: str = "A paper") -> None:
    "A run's folder."
    folder = folder / area / paper / f"cpu-s{seed}"
    (folder / "figures").mkdir(parents=True)
    (folder / "figures/power.png").write_bytes(PIXEL)
    record = {
        "schema": 1,
        "paper": paper,
        "area": area,
        "title": title,
        "started": "2026-01-01T00:00:00Z",
        "wall_s": 61,
        "peak_rss_mb": 900,
        "parameters": {"profile": "cpu", "seed": seed, "device": "auto", "model": None},
        "threads": 1,
        "gpu": None,
        "git_sha": "0" * 40,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "claims": list(claims),
        "figures": ["power.png", "../../secret.png"],
    }
    (folder / "results.json").write_text(json.dumps(record))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    interval = dict(
        ci_low=0.2, ci_high=0.6, baseline={"value": 0.1}, difference={"value": 0.3, "ci_low": 0.1, "ci_high": 0.5}
    )
    parts = [
        {"label": f"n = {n}", "measured": n / 9, "ci_low": n / 9 - 0.2, "ci_high": n / 9 + 0.2, "n": 5}
        for n in range(1, 9)
    ]
    write(
        root,
        "evaluation",
        "alpha",
        0,
        claim("power", "reproduced", 0.4, **interval),
        claim("rate", "reproduced", 0.1, values=parts),
    )
    write(
        root,
        "evaluation",
        "alpha",
        1,
        claim("power", "not reproduced", -0.2),
        claim("rate", "reproduced", 0.2, values=parts),
    )
    write(
        root,
        "decision",
        "beta",
        0,
        claim("evil", "reproduced", 1e-7, statement=EVIL, source=EVIL, unit=EVIL, note=EVIL),
        claim("big", "not run", None, scale="paper", reason="needs a GPU", paper_value=EVIL),
        title=EVIL,
    )
    write(root, "decision", LONG, 0, claim(LONG, "reproduced", 123456789.0, statement=LONG * 3, paper_value=[0.1, 0.2]))
    failed = root / "networks/gamma/cpu-s0"
    failed.mkdir(parents=True)
    (failed / "failure.json").write_text(
        json.dumps(
            {
                "area": "networks",
                "paper": "gamma",
                "title": EVIL,
                "profile": "cpu",
                "seed": 0,
                "status": "failed",
                "reason": EVIL,
                "traceback": f"line 1\n{LONG * 4}\n{EVIL}",
            }
        )
    )
    torn = root / "networks/delta/cpu-s0"
    torn.mkdir(parents=True)
    (torn / "results.json").write_text('{"schema": 1, "pa')
    (root / "secret.png").write_bytes(PIXEL)
    return report(root)


def test_the_page_is_one_file_without_addresses(page):
    html = page.read_text()
    assert not re.search(r"https?://|<link|@import|url\(", html) and html.count("<script>") == 1
    assert html.count("data:image/png;base64,") == 3 and "secret" not in html  # one figure a paper
    assert (
        'onerror="' not in html
        and "<script>document" not in html
        and "49" not in re.findall(r"<h2>(.*?)</h2>", html, re.S)
    )


def test_csv(page):
    lines = list(csv.DictReader((page.parent / "results.csv").open(newline="")))
    assert len(lines) == 2 * (2 + 8) + 2 + 1 + 2
    first = lines[0]
    assert (first["area"], first["paper"]) == ("decision", LONG)
    power = next(r for r in lines if r["claim"] == "power" and r["seed"] == "0")
    assert (power["measured"], power["ci_low"], power["baseline"], power["difference_high"]) == (
        "0.4",
        "0.2",
        "0.1",
        "0.5",
    )
    assert next(r for r in lines if r["claim"] == "evil")["statement"] == EVIL
    assert {r["status"] for r in lines} == {"done", "failed", "invalid"}


def test_no_runs_is_the_users_error(tmp_path):
    with pytest.raises(UsageError, match="no results in this folder"):
        report(tmp_path)


@pytest.mark.parametrize("damage", ["{}", "[]", "[" * 100_000, '{"paper": "b", "status": "failed", "parameters": 5}',
    '{"paper": "b", "status": "failed", "parameters": null}', '{"paper": "b", "status": "failed", "wall_s": "x"}'],
    ids=["empty", "list", "deep", "parameters", "null", "wall_s"])  # fmt: skip
def test_a_damaged_failure_is_shown_and_kills_nothing(damage, tmp_path):
    write(tmp_path, "games", "coin", 0, claim("c", "reproduced", 0.4))
    (tmp_path / "games/bad/cpu-s0").mkdir(parents=True)
    (tmp_path / "games/bad/cpu-s0/failure.json").write_text(damage)
    report(tmp_path)
    lines = list(csv.DictReader((tmp_path / "results.csv").open(newline="")))
    assert [(r["paper"], r["status"]) for r in lines] == [("bad", "invalid"), ("coin", "done")]
    assert compare(tmp_path, tmp_path) == 0


def test_seeds_of_several_kinds_are_ordered(tmp_path):
    for seed in (10, 2, "x"):
        (tmp_path / f"games/bad/cpu-s{seed}").mkdir(parents=True)
        failure = {"area": "games", "paper": "bad", "profile": "cpu", "seed": seed, "status": "failed"}
        (tmp_path / f"games/bad/cpu-s{seed}/failure.json").write_text(json.dumps(failure))
    report(tmp_path)
    lines = list(csv.DictReader((tmp_path / "results.csv").open(newline="")))
    assert {r["seed"] for r in lines} == {"2", "10", "x"}


@pytest.fixture(params=[(390, 844), (1280, 900)], ids=["phone", "desk"])
def browser(request, page):
    if not available:
        pytest.skip("needs Chromium and chromedriver")
    with Browser(*request.param) as browser:
        browser.emulate(*request.param, mobile=request.param[0] < 500)
        browser.get(page.as_uri())
        yield browser


ROWS = "return [...document.querySelectorAll('#claims tbody tr')].filter(r => r.offsetParent).length"
OVER = """return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, svg') &&
 e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))"""


@pytest.mark.browser
def test_in_the_browser(browser, page, tmp_path):
    colours = {}
    for scheme in ("light", "dark"):
        browser.emulate(browser.width, browser.height, mobile=browser.width < 500, scheme=scheme)
        assert browser.execute("return innerWidth") == browser.width
        assert browser.execute(OVER) == [] and browser.overflow() == 0
        colours[scheme] = browser.execute(
            "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        )
        browser.screenshot(tmp_path / f"{browser.width}-{scheme}.png")
    assert colours["light"] == colours["dark"][::-1] or colours["light"][0] != colours["dark"][0]
    browser.execute("document.querySelector('.theme').click()")  # the button overrules the system
    assert browser.execute("return getComputedStyle(document.body).backgroundColor") == colours["light"][0]

    assert browser.execute("return document.title") == "icl26 report"  # nothing that a notebook wrote has run
    assert "<script>document.title = 'owned'</script>" in browser.execute("return document.body.innerText")
    assert browser.execute("return [...document.images].every(i => i.naturalWidth == 10 && i.alt)") is True
    assert (
        browser.execute(
            "return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length"
        )
        == 0
    )
    assert [e for e in browser.log() if e["level"] in ("SEVERE", "WARNING")] == []

    assert browser.execute("return document.querySelectorAll('svg.strip').length") >= 10
    assert (
        browser.execute(
            "return Math.min(...[...document.querySelectorAll('svg.strip')].map(s => s.getBoundingClientRect().width))"
        )
        > 150
    )
    dot = "const s = document.querySelector('svg.strip'), b = s.getBoundingClientRect();"
    dot += "const c = s.querySelector('.ours').getBoundingClientRect();"
    assert browser.execute(dot + "return c.left >= b.left && c.right <= b.right && c.width == 10")


@pytest.mark.browser
def test_filter_and_sort(browser):
    pick = "const s = document.querySelector('[name={}]'); s.value = '{}'; s.dispatchEvent(new Event('input'));"
    assert browser.execute(ROWS) == 5
    browser.execute(pick.format("verdict", "not reproduced"))
    assert (
        browser.execute(ROWS) == 1
        and browser.execute("return document.querySelector('#shown').textContent") == "1 of 5 claims"
    )
    assert browser.execute(
        "return [...document.querySelectorAll('section.paper')].filter(s => s.offsetParent).map(s => s.id)"
    ) == ["alpha-cpu"]
    browser.execute(
        pick.format("verdict", "") + pick.format("area", "decision").replace("const s", "const t").replace("s.", "t.")
    )
    assert browser.execute(ROWS) == 3
    browser.execute(
        "const i = document.querySelector('.tools input'); i.value = 'BIG'; i.dispatchEvent(new Event('input'))"
    )
    assert browser.execute(ROWS) == 1
    browser.execute(
        "const i = document.querySelector('.tools input'); i.value = ''; i.dispatchEvent(new Event('input'));"
        + pick.format("area", "")
    )
    browser.execute("document.querySelectorAll('#claims th button')[6].click()")
    verdicts = "return [...document.querySelectorAll('#claims tbody .chip')].map(c => c.textContent)"
    assert browser.execute(verdicts) == ["not reproduced", "not run", "reproduced", "reproduced", "reproduced"]
    browser.execute("document.querySelectorAll('#claims th button')[6].click()")
    assert browser.execute(verdicts)[-1] == "not reproduced"
