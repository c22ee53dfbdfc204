"""The site: built once, every link followed, and looked at in a browser."""
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser, available, serve
from copies import copy_checkout, python
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("index.html", "decision/odr/mle.html", "evaluation/noisy_valid/power.html", "repro/results.html")
browser_needed = pytest.mark.skipif(not available, reason="needs chromium and chromedriver")


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    "The site of this checkout, built by the offline renderer; one build for all workers."
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent
    with FileLock(base / "site.lock"):
        if not (base / "site").exists():
            done = python("-m", "icl26.cli", "docs", "--out", base / "site", "--renderer", "smalldocs", cwd=base)
            (base / "site.log").write_text(done.stdout + done.stderr)
            assert done.returncode == 0, done.stdout + done.stderr
    return base / "site"


@pytest.fixture(scope="module")
def browser(site):
    with serve(site) as url, Browser() as b:
        b.url = url
        yield b


class Read(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.text, self.skip = set(), [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        d = dict(attrs)
        self.skip += tag in ("script", "style")
        self.ids |= {d["id"]} if d.get("id") else set()
        self.links += [d[k] for k in ("href", "src") if d.get(k)]

    def handle_endtag(self, tag):
        self.skip -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.skip:
            self.text.append(data)


# -- what was built ---------------------------------------------------------------------------------------------------------

def test_there_is_a_page_for_every_notebook_without_its_number(site):
    notebooks = [p.relative_to(ROOT / "nbs") for p in (ROOT / "nbs").rglob("*.ipynb")]
    wanted = {p.with_name(re.sub(r"^\d+_", "", p.name)).with_suffix(".html").as_posix() for p in notebooks if p.parts[0][0] != "."}
    assert wanted <= {p.relative_to(site).as_posix() for p in site.rglob("*.html")}
    assert not [p for p in site.rglob("*.html") if re.match(r"\d+_", p.name)]


def test_every_internal_link_leads_somewhere(site):
    pages = {p: Read(p.read_text()) for p in site.rglob("*.html")}
    checked, broken = 0, []
    for page, read in pages.items():
        for link in read.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            target = target / "index.html" if target.is_dir() else target
            checked += 1
            anchor = unquote(url.fragment)
            if not target.is_file() or (anchor and "=" not in anchor and target in pages and anchor not in pages[target].ids):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken and checked > 1000


def test_nothing_is_loaded_from_elsewhere_and_own_links_are_relative(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe)\b[^>]*src="(?:https?:)?//[^"]*"', text), page
        assert not re.findall(r'<link\b[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//', text), page
        assert not re.findall(r'<a\b[^>]*href="https://icl26\.github\.io/icl26/', text), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"@import\s+(?:url\()?[\"']?https?:", sheet.read_text()), sheet


def test_entries_have_signature_docments_and_source_link(site):
    text = (site / "stats.html").read_text()
    plain = "".join(Read(text).text)
    assert re.search(r"def bootstrap_ci\(\s+values", plain) and "\n    *,\n" in plain
    assert "# called as statistic" in plain
    lines = (ROOT / "icl26/stats.py").read_text().splitlines()
    number = int(re.search(r'/icl26/stats\.py#L(\d+)"[^>]*>source</a>(?:(?!<h3).)*<h3[^>]*id="bootstrap_ci"', text, re.S)[1])
    assert lines[number - 1].startswith("def bootstrap_ci(")


def test_the_tables_of_papers_come_from_the_results(site):
    home = " ".join("".join(Read((site / "index.html").read_text()).text).split())
    for path in (ROOT / "results").glob("*/*/results.json"):
        claims = json.loads(path.read_text())["claims"]
        assert f"· {path.parent.name}" in home
        for verdict in {c["verdict"] for c in claims}:
            assert f"{verdict}: {', '.join(c['id'] for c in claims if c['verdict'] == verdict)}" in home
    assert "Noisy but Valid" in "".join(Read((site / "papers.html").read_text()).text)


def test_a_broken_link_fails_the_build_and_keep_going_says_it(tmp_path):
    top = copy_checkout(tmp_path / "copy", folders=("icl26",))
    (top / "nbs").mkdir()
    for name in ("_quarto.yml", "styles.css", "icon.svg"):
        shutil.copy(ROOT / "nbs" / name, top / "nbs" / name)
    cells = [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Home\n\n> x\n\n[lost](00_lost.ipynb)"}]
    cells += [{"cell_type": "markdown", "id": "b", "metadata": {}, "source": "[lost](lm/00_lost.ipynb)"}]
    nb = {"cells": cells, "metadata": {"kernelspec": {"name": "python3", "language": "python", "display_name": "python3"}},
          "nbformat": 4, "nbformat_minor": 5}
    (top / "nbs/index.ipynb").write_text(json.dumps(nb))
    how = {"cwd": top, "package": top}
    done = python("-m", "icl26.cli", "docs", "--renderer", "smalldocs", **how)
    assert done.returncode == 1 and "index.html: lm/lost.html" in done.stderr and "Traceback" not in done.stderr
    assert not (top / "_docs").exists()
    done = python("-m", "icl26.cli", "docs", "--renderer", "smalldocs", "--keep-going", **how)
    assert done.returncode == 0 and "index.html: lm/lost.html" in done.stdout and (top / "_docs/index.html").exists()


def test_quarto_is_used_where_it_is_installed(tmp_path):
    "A stand-in on PATH that records how it is called: the same work folder, without running code."
    top = copy_checkout(tmp_path / "copy", folders=("icl26",))
    (top / "nbs").mkdir()
    nb = {"cells": [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Home\n\n> x"}],
          "metadata": {"kernelspec": {"name": "python3", "language": "python", "display_name": "python3"}},
          "nbformat": 4, "nbformat_minor": 5}
    (top / "nbs/index.ipynb").write_text(json.dumps(nb))
    quarto = tmp_path / "bin/quarto"
    quarto.parent.mkdir()
    quarto.write_text('#!/bin/sh\necho "$@" > ' + f'{tmp_path}/called; ls > {tmp_path}/files\n'
                      'mkdir -p _docs/site_libs; echo "<head></head>" > _docs/index.html\n')
    quarto.chmod(0o755)
    done = python("-m", "icl26.cli", "docs", cwd=top, package=top, PATH=f"{quarto.parent}:{os.environ['PATH']}")
    assert done.returncode == 0 and "rendering with quarto" in done.stdout, done
    assert (tmp_path / "called").read_text() == "render --no-execute\n"
    assert {"_quarto.yml", "sidebar.yml", "index.ipynb"} <= set((tmp_path / "files").read_text().split())
    quarto.write_text("#!/bin/sh\necho 'ERROR: no such thing' >&2; exit 3\n")
    done = python("-m", "icl26.cli", "docs", cwd=top, package=top, PATH=f"{quarto.parent}:{os.environ['PATH']}")
    assert done.returncode == 1 and "ERROR: no such thing" in done.stderr and "Traceback" not in done.stderr


# -- what a reader sees -------------------------------------------------------------------------------------------------------

MATHS = """return {math: document.querySelectorAll('.math').length, drawn: document.querySelectorAll('mjx-container').length,
  wrong: document.querySelectorAll('g[data-mml-node="merror"]').length,
  undefined: [...document.querySelectorAll('g[data-mml-node="mtext"]')].filter(e => e.getAttribute('fill') === 'red').length,
  remote: [...document.querySelectorAll('script[src], link[rel=stylesheet]')].map(e => e.src || e.href)
            .filter(u => !u.startsWith(location.origin))}"""
DRAWN = "return document.querySelectorAll('mjx-container').length >= document.querySelectorAll('.math').length"
VISIBLE = "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return r.width > 0 && r.height > 0 && r.left >= 0"


@browser_needed
@pytest.mark.browser
@pytest.mark.parametrize("page", PAGES)
def test_page_in_a_browser(browser, page):
    browser.emulate(1280, 900, scheme="light")
    browser.get(f"{browser.url}/{page}")
    browser.wait(DRAWN)
    seen = browser.execute(MATHS)
    assert seen["math"] == seen["drawn"] and not seen["wrong"] and not seen["undefined"] and seen["remote"] == []
    assert seen["math"] > 50 or "mle" not in page
    assert browser.execute(VISIBLE, "#quarto-sidebar") and browser.overflow() <= 0
    assert [m for m in browser.log() if m["level"] == "SEVERE"] == []

    browser.emulate(390, 844, mobile=True)                          # a phone
    browser.get(f"{browser.url}/{page}")
    browser.wait(DRAWN)
    assert browser.overflow() <= 0
    assert not browser.execute(VISIBLE, "#quarto-sidebar")
    browser.execute("document.querySelector('.quarto-btn-toggle').click()")
    browser.wait(VISIBLE, "#quarto-sidebar")

    browser.emulate(1280, 900, scheme="dark")
    browser.get(f"{browser.url}/{page}")
    for where in ("body", "#quarto-sidebar", "main pre"):
        colours = browser.wait("const s = getComputedStyle(document.querySelector(arguments[0])); const n = c => c.match(/[\\d.]+/g).map(Number);"
                               "return {back: n(s.backgroundColor), text: n(s.color)}", where)
        assert sum(colours["back"][:3]) < 250 < sum(colours["text"][:3]), (where, colours)


@browser_needed
@pytest.mark.browser
def test_figures_are_sharp_and_fit(browser):
    for width in (1280, 390):
        browser.emulate(width, 900)
        browser.get(f"{browser.url}/evaluation/noisy_valid/power.html")
        browser.wait("return document.images.length && [...document.images].every(i => i.complete)")
        images = browser.execute("return [...document.querySelectorAll('main img')].map(i => ({shown: i.getBoundingClientRect().width,"
                                 "own: i.naturalWidth, alt: i.alt, right: i.getBoundingClientRect().right}))")
        assert images and all(0 < i["shown"] <= i["own"] / 2 + 1 and i["right"] <= width for i in images), images
        assert all(i["alt"] for i in images)


def word_of_one_page(site):
    "A word that stands in the body of one page only, and in no title."
    entries = json.loads((site / "search.json").read_text())
    where, titles = {}, set()
    for e in entries:
        page = e["href"].split("#")[0]
        titles |= set(re.findall(r"[a-z]{4,}", f"{e.get('title', '')} {e.get('section', '')}".lower()))
        for word in set(re.findall(r"\b[a-z]{9,14}\b", e["text"])):
            where.setdefault(word, set()).add(page)
    word = min(w for w, pages in where.items() if pages == {"stats.html"} and w not in titles)
    return word, "stats.html"


@browser_needed
@pytest.mark.browser
def test_search_finds_a_word_of_one_pages_body(browser, site):
    word, page = word_of_one_page(site)
    browser.emulate(1280, 900)
    browser.get(f"{browser.url}/decision/odr/mle.html")
    typed = ("const i = document.querySelector('.smalldocs-search input'); i.focus(); i.value = arguments[0];"
             "i.dispatchEvent(new Event('input', {bubbles: true}))")
    browser.execute(typed, word)
    hits = browser.wait("return [...document.querySelectorAll('.smalldocs-search-results a.search-result')].map(a => a.href)")
    assert urlsplit(hits[0]).path == f"/{page}", (word, hits)
    browser.get(hits[0])
    assert word in browser.execute("return document.querySelector('main').innerText.toLowerCase()")
    browser.execute(typed, "xqzzywordthatisnowhere")
    browser.wait("return document.querySelector('.search-none') && !document.querySelector('a.search-result')")


@browser_needed
@pytest.mark.browser
def test_copy_buttons_and_theme_toggle(browser):
    browser.emulate(1280, 900, scheme="light")
    browser.get(f"{browser.url}/index.html")
    blocks, buttons = browser.execute("return [document.querySelectorAll('main pre > code').length, document.querySelectorAll('.code-copy-button').length]")
    assert buttons >= 5 and blocks >= buttons
    browser.cdp("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.execute("document.querySelector('.code-copy-button').click()")
    browser.wait("return document.querySelector('.code-copy-button-checked')")
    assert "make reproduce" in browser.execute("return navigator.clipboard.readText()")
    before = browser.execute("return getComputedStyle(document.body).backgroundColor")
    browser.execute("smalldocsToggleScheme()")
    browser.wait("return getComputedStyle(document.body).backgroundColor !== arguments[0]", before)
    browser.get(f"{browser.url}/papers.html")                       # the choice holds on the next page
    assert browser.execute("return getComputedStyle(document.body).backgroundColor") != before
    browser.execute("smalldocsToggleScheme()")
