"""Models by their id on the hub, against a hub that answers on this machine, and against none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest

from planner.basics.errors import PlannerError
from planner.spec import presets
from planner.spec.hub import fetch_model, is_model_id
from planner.spec.huggingface import config_dict

GATED, BROKEN = "/meta/gated/resolve/main/config.json", "/some/broken/resolve/main/config.json"


class Hub(BaseHTTPRequestHandler):
    """Knows one model, gates another, serves nonsense for a third; remembers the last token it was shown."""

    shown: str | None = None

    def do_GET(self) -> None:
        Hub.shown = self.headers.get("Authorization")
        known = self.path == "/openai-community/gpt2/resolve/main/config.json"
        body = b"<html>" if self.path == BROKEN else json.dumps(config_dict(presets.model("gpt2"))).encode()
        self.send_response(200 if known or self.path == BROKEN else 403 if self.path == GATED else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    yield
    server.shutdown()
    server.server_close()


def test_a_model_is_read_from_the_hub_and_shown_the_token(hub: None):
    model = fetch_model("openai-community/gpt2")

    assert model == msgspec.structs.replace(presets.model("gpt2"), parameters=None)
    assert Hub.shown == "Bearer secret"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("meta/gated", "is gated on the hub, and is not a path here. Set HF_TOKEN"),
        ("some/unknown", "does not exist or has no config.json"),
        ("some/broken", "some/broken: is not a JSON object"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(hub: None, name: str, said: str):
    with pytest.raises(PlannerError, match=said) as refusal:
        fetch_model(name)

    assert "\n" not in refusal.value.sentence
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "not an address"])
def test_a_hub_out_of_reach_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, endpoint: str):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)

    with pytest.raises(PlannerError, match=r"the hub cannot be reached .*Give a preset") as refusal:
        fetch_model("some/model")
    assert "\n" not in refusal.value.sentence


@pytest.mark.parametrize(
    ("name", "yes"),
    [("org/name", True), ("a.b/c-1.5B", True), ("tests/planner", False), ("../x", False), ("x/config.json", False),
     ("/etc/x", False), ("a/b/c", False), ("llama-2-7b", False)],
)  # fmt: skip
def test_an_id_is_told_from_a_path(name: str, yes: bool, monkeypatch: pytest.MonkeyPatch):
    from pathlib import Path

    monkeypatch.chdir(Path(__file__).parents[2])
    assert is_model_id(name) is yes
