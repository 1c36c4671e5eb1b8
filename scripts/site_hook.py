"""The hook of mkdocs.yml: pages outside docs/, links to files of the repository, no address of another host, and the
page that answers in a browser.

README.md is the first page. A link to a file that is no page of the site becomes the file's path as code; a link to a
file that does not exist is left as it is, so that a strict build refuses it. Not here: the order of pages (mkdocs.yml),
or what is generated in pages (docs.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.structure.files import File, Files

from scripts import page

PROJECT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "presets/README.md": "presets.md",
}
"""Pages outside docs/, and their places in the site."""
ANSWERS = "try"
"""The folder of the page that answers."""
NOT_BUILT = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Try it</title></head><body>
<p>This copy of the site was built without Pyodide: python scripts/page.py fetch, then make site.</p></body></html>"""
SOURCES = {place: source for source, place in PAGES.items()}
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
ADDRESS = re.compile(r"([\"'`])https?://(?!www\.w3\.org)(?=[\w$])")
"""An address at the beginning of a JavaScript string; the W3C's are names of namespaces, which nothing loads."""


def on_config(config: Any) -> Any:
    """Write out the entries of the navigation that name many pages, such as `decisions/0*.md`."""
    config.nav = [_expanded(entry) for entry in config.nav]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/, and what a browser runs, where that is here."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(PROJECT / source).read_text()))
    if not page.fetched():
        files.append(File.generated(config, f"{ANSWERS}/index.html", content=NOT_BUILT))
        return files
    with TemporaryDirectory() as scratch:
        page.build(Path(scratch) / ANSWERS)
        for one in sorted(Path(scratch).rglob("*")):
            if one.is_file():
                place = one.relative_to(scratch).as_posix()
                files.append(File.generated(config, place, content=one.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point a page's links to where the site has what they name."""
    here = page.file.src_uri
    folder = os.path.dirname(SOURCES.get(here, f"docs/{here}"))

    def pointed(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups(default="")
        path = os.path.normpath(os.path.join(folder, target))
        place = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if place or not (PROJECT / path).exists():
            return f"{mark}[{text}]({os.path.relpath(place or target, os.path.dirname(here))}{anchor})"
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return "".join(part if at % 2 else LINK.sub(pointed, part) for at, part in enumerate(FENCE.split(markdown)))


def on_post_build(config: Any) -> None:
    """Take other hosts' addresses out of the theme's scripts: what it would load from them, this site does not use."""
    for script in Path(config.site_dir).rglob("*.js"):
        script.write_text(ADDRESS.sub(r"\1about:blank?", script.read_text()))


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(below) for title, below in entry.items()}
    if not isinstance(entry, list):
        return entry
    docs = PROJECT / "docs"
    places = [sorted(map(str, docs.glob(one))) if isinstance(one, str) and "*" in one else [one] for one in entry]
    return [
        os.path.relpath(one, docs) if isinstance(one, str) and one.startswith("/") else _expanded(one)
        for some in places
        for one in some
    ]
