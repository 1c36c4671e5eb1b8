"""Claims about the site of mkdocs.yml: it builds without a warning, every link, anchor and asset in it exists, nothing
is loaded from another host, and lists and tables are lists and tables.

Not here: links of the pages as GitHub shows them, or what the pages say (test_docs.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

PROJECT = Path(__file__).resolve().parents[1]
LOADS = {"src", "srcset", "poster", "data", "action", "formaction", "background", "xlink:href"}
"""Attributes whose address a browser loads by itself; of an `a`, `href` is only followed when it is clicked."""
ELSEWHERE = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"@import\s+(?:url\()?[\"']?([^\"');]+)|url\(\s*[\"']?([^\"')]+)")
IN_SCRIPT = re.compile(r"[\"'`](?:https?://(?=[\w$])(?!www\.w3\.org)|//(?=[\w-]+\.\w))[^\"'`\s]*")
INLINE = ("a", "b", "br", "code", "em", "i", "span", "strong", "sub", "sup")
NO_TEXT = ("code", "h1", "h2", "h3")
SOURCE = re.compile(r"^ *(?:[-*] |\d+\. |\|.*\|$)|\]\(", re.MULTILINE)
"""What a block of text has where Markdown was meant as a list, a table or a link and is shown as text."""


class Page(HTMLParser):
    """The addresses, anchors and blocks of text of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._inside = Counter[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._inside[tag] += 1
        if tag not in INLINE:
            self.texts.append("")
        for name, value in attributes:
            if name in ("id", "name") and value and tag != "meta":
                self.ids.add(value)
            elif name == "style" and value:
                self.styles.append(value)
            elif name in LOADS and value:
                parts = value.split(",") if name == "srcset" else [value]
                self.loads += [part.split()[0] for part in parts]
            elif name == "href" and value:
                (self.links if tag == "a" else self.loads).append(value)

    def handle_endtag(self, tag: str) -> None:
        self._inside[tag] -= 1

    def handle_data(self, data: str) -> None:
        if self._inside["style"] > 0:
            self.styles.append(data)
        elif self._inside["script"] > 0:
            self.scripts.append(data)
        elif self._inside["article"] and not any(self._inside[tag] for tag in NO_TEXT):
            self.texts[-1] += data


@cache
def read(path: Path) -> Page:
    return Page(path.read_text())


def is_elsewhere(address: str) -> bool:
    return bool(ELSEWHERE.match(address))


def loaded_by_style(css: str) -> list[str]:
    return [one or other for one, other in IN_STYLE.findall(re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL))]


def loaded_by_script(js: str) -> list[str]:
    """Addresses of other hosts in a script's strings: those it could fetch or import."""
    return IN_SCRIPT.findall(re.sub(r"/\*.*?\*/", "", js, flags=re.DOTALL))


def from_elsewhere(folder: Path) -> dict[str, list[str]]:
    """What pages, styles and scripts of a site load from other hosts, by file."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        addresses: list[str] = []
        if path.suffix == ".html":
            page = read(path)
            addresses += page.loads + [one for css in page.styles for one in loaded_by_style(css)]
            addresses += [one.lstrip("\"'`") for js in page.scripts for one in loaded_by_script(js)]
        elif path.suffix in (".css", ".svg"):
            addresses += loaded_by_style(path.read_text())
            addresses += read(path).loads if path.suffix == ".svg" else []
        elif path.suffix == ".js":
            addresses += [one.lstrip("\"'`") for one in loaded_by_script(path.read_text())]
        if away := [one for one in addresses if is_elsewhere(one)]:
            found[str(path.relative_to(folder))] = away
    return found


def broken(folder: Path) -> tuple[dict[str, list[str]], int]:
    """Links and assets of a site's pages and styles that lead nowhere, by file; and how many were followed."""
    pages = {path: read(path) for path in folder.rglob("*.html")}
    asked = {path: page.links + page.loads for path, page in pages.items()}
    asked |= {path: loaded_by_style(path.read_text()) for path in folder.rglob("*.css")}
    found: dict[str, list[str]] = {}
    followed = 0
    for path, addresses in asked.items():
        for address in addresses:
            scheme, host, target, _, anchor = urlsplit(address)
            if scheme or host:
                continue
            followed += 1
            base = folder if target.startswith("/") else path.parent
            place = (base / unquote(target).lstrip("/")).resolve() if target else path
            place = place / "index.html" if place.is_dir() else place
            no_anchor = anchor and place in pages and unquote(anchor) not in pages[place].ids
            if not place.is_file() or not place.is_relative_to(folder) or no_anchor:
                found.setdefault(str(path.relative_to(folder)), []).append(address)
    return found, followed


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options],
        cwd=PROJECT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built").resolve() / "site"
    done = build(folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_every_page_of_docs_is_in_the_site(site):
    sources = {path.relative_to(PROJECT / "docs").with_suffix(".html") for path in PROJECT.glob("docs/**/*.md")}

    assert {str(one) for one in sources if not (site / one).is_file()} == set()
    assert "You have a model, some GPUs" in (site / "index.html").read_text()  # README.md


def test_every_link_anchor_and_asset_of_the_site_exists(site):
    wrong, followed = broken(site)

    assert wrong == {}
    assert followed > 1000


def test_nothing_is_loaded_from_another_host(site):
    assert from_elsewhere(site) == {}


def test_lists_tables_and_links_are_not_shown_as_text(site):
    shown = {
        str(path.relative_to(site)): wrong
        for path in site.rglob("*.html")
        if (wrong := [one for one in read(path).texts if SOURCE.search(one)])
    }

    assert shown == {}


def test_a_strict_build_refuses_what_leads_nowhere(tmp_path):
    (tmp_path / "docs").mkdir()
    targets = ("no-such-page.md", "here.md#no-such-anchor", "../no-such-file.toml", "/here.md", "no-such-picture.svg")
    (tmp_path / "docs" / "here.md").write_text("# Words\n\n" + "\n".join(f"[a]({one})" for one in targets))
    (tmp_path / "docs" / "omitted.md").write_text("# In no list\n")
    config = (PROJECT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    for name in ("docs_dir: docs", "hooks: [scripts"):
        assert name in config
    config = config.replace("docs_dir: docs", f"docs_dir: {tmp_path}/docs").replace("[scripts", f"[{PROJECT}/scripts")
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: [here.md, index.md, contributing.md]\n")

    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))

    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if "'here.md'" in line or "omitted.md" in line]
    missing = [one for one in (*targets, "omitted.md") if not any(one in line for line in warnings)]
    assert missing == []


def test_what_is_broken_or_loaded_from_elsewhere_is_found(tmp_path):
    (tmp_path / "page.html").write_text(
        '<link rel="preconnect" href="https://a.example"><link rel="stylesheet" href="one.css">'
        '<script src="//b.example/x.js"></script><script>fetch("https://c.example/")</script><p id="here">Text</p>'
        '<a href="https://fine.example">a</a><a href="#here">b</a><a href="#there">c</a><a href="gone.html">d</a>'
        '<img srcset="https://d.example/1.png 1x, https://e.example/2.png 2x"><article><p>- a list</p></article>'
    )
    (tmp_path / "one.css").write_text(
        '/* https://g.example */ @import "https://f.example/f.css"; '
        "a { background: url(//h.example/i.png) url(gone.png) }"
    )
    (tmp_path / "one.js").write_text(
        '/* "https://i.example" */ a("http://www.w3.org/2000/svg"); b(`https://j.example`)'
    )

    assert broken(tmp_path)[0] == {"page.html": ["#there", "gone.html"], "one.css": ["gone.png"]}
    assert {name: re.findall(r"(\w)\.example", str(away)) for name, away in from_elsewhere(tmp_path).items()} == {
        "page.html": ["a", "b", "d", "e", "c"],
        "one.css": ["f", "h"],
        "one.js": ["j"],
    }
    assert [one for one in read(tmp_path / "page.html").texts if SOURCE.search(one)] == ["- a list"]
