"""A page as headless Chromium shows it, with the network off: its elements, console, and what it asked for.

Not here: any claim about a page (planner/test_pages.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--dump-dom",
)  # fmt: skip
OWN_HOSTS = ("google.com", "googleapis.com")
"""What Chromium itself looks for at every start."""
PATIENCE_S = 120


def browser() -> str | None:
    """Chromium's program."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(frozen=True)
class Opened:
    """`console` are the lines that the page wrote there, `requests` what it asked for beside itself."""

    html: str
    console: tuple[str, ...]
    requests: frozenset[str]

    @property
    def figures(self) -> dict[str, float | None]:
        """Value of each `data` element by its key."""
        return _Figures(self.html).found

    @property
    def text(self) -> str:
        """Everything that is there to read."""
        return " ".join("".join(_Figures(self.html).told).split())


def opened(page: Path, scratch: Path) -> Opened:
    """The page in a browser of its own, in a network namespace without a way out where that can be had."""
    program = browser()
    assert program is not None
    log = scratch / f"{page.stem}.net.json"
    alone = ["unshare", "-n"] if os.geteuid() == 0 and shutil.which("unshare") else []
    told = [f"--user-data-dir={scratch / page.stem}", f"--log-net-log={log}", page.resolve().as_uri()]
    done = subprocess.run(
        [*alone, program, *FLAGS, *told], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    events = log.read_text()
    try:
        known = json.loads(events)
    except ValueError:  # the browser ended before it wrote the end
        known = json.loads(events.rstrip().rstrip(",") + "]}")
    asked = {event["params"]["url"] for event in known["events"] if "url" in event.get("params", {})}
    beside = {url for url in asked if not (urlsplit(url).hostname or "").endswith(OWN_HOSTS)}
    console = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return Opened(done.stdout, console, frozenset(beside - {page.resolve().as_uri()}))


@dataclass(frozen=True)
class Widths:
    """Pixels: of the window, of what the page takes, and how much wider than its own box each table is."""

    window: int
    page: int
    hidden: tuple[int, ...]


MEASURE = """<script>
document.querySelectorAll("details").forEach(one => one.open = true);
const tables = [...document.querySelectorAll("table")].map(one => one.scrollWidth - one.clientWidth);
const found = [innerWidth, document.documentElement.scrollWidth, tables];
document.title = JSON.stringify(found);
</script>"""


def widths(page: Path, scratch: Path, window: int) -> Widths:
    """The page's widths in a window that wide, everything unfolded. Its policy, which forbids to measure by a script,
    is taken out of a copy."""
    program = browser()
    assert program is not None
    copy = scratch / f"{page.stem}-measured.html"
    copy.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text()) + MEASURE)
    told = [f"--user-data-dir={scratch / copy.stem}", f"--window-size={window},900", copy.resolve().as_uri()]
    done = subprocess.run([program, *FLAGS, *told], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    title = re.search(r"<title>(\[.*?\])</title>", done.stdout)
    assert title is not None, done.stderr
    inner, whole, hidden = json.loads(title[1])
    return Widths(inner, whole, tuple(hidden))


class _Figures(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: dict[str, float | None] = {}
        self.told: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "data" and given.get("data-key"):
            value = given.get("value")
            self.found[str(given["data-key"])] = float(value) if value else None

    def handle_data(self, data: str) -> None:
        self.told.append(data)
