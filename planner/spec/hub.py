"""A config.json from the Hugging Face hub, when it can be reached.

An answer is kept as long as the process lives, and nowhere else: a plan holds the sizes by value. Not here: what it
says (huggingface.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from planner.basics import reading
from planner.basics.errors import PlannerError
from planner.spec import ModelSpec
from planner.spec.huggingface import decoded, spec_of

TIMEOUT_S = 5.0
MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


_kept: dict[tuple[str, str], ModelSpec] = {}
"""Models by the hub and their id there: a sweep, a fit and a screen ask for the same one many times."""


def is_kept(name: str) -> bool:
    """Whether the hub was asked for this model before, and is not asked again."""
    return (_endpoint(), name) in _kept


def is_model_id(name: str) -> bool:
    """Whether a name reads as the hub's `owner/model`, and is not a path that exists here."""
    return MODEL_ID.fullmatch(name) is not None and not name.endswith(".json") and not Path(name).exists()


def fetch_model(name: str) -> ModelSpec:
    """The model `owner/name` of the hub, asked for once; HF_ENDPOINT and HF_TOKEN mean what the hub's tools take them
    for."""
    key = _endpoint(), name
    if key not in _kept:
        _kept[key] = _fetched(name)
    return _kept[key]


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _fetched(name: str) -> ModelSpec:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen  # the network stack takes tens of milliseconds to load

    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    offline = "Give a preset (planner presets models), or the model's config.json as a file"
    try:
        request = Request(f"{_endpoint()}/{name}/resolve/main/config.json", headers=headers)
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            raw = answer.read(reading.RECORD_BYTES)
    except HTTPError as error:
        reason = {401: "is private or does not exist", 403: "is gated", 404: "does not exist or has no config.json"}
        fix = "Set HF_TOKEN if you have access to it" if error.code in (401, 403) else "Check its name"
        rule = f"{reason.get(error.code, f'gives error {error.code}')} on the hub, and is not a path here"
        raise PlannerError("model", name, rule, fix) from None
    except (OSError, HTTPException, ValueError) as error:
        cause = getattr(error, "reason", None) or error
        raise PlannerError(
            "model", name, f"is not a path here, and the hub cannot be reached ({cause})", offline
        ) from None
    return spec_of(decoded(raw, name), Path(name), name.rpartition("/")[2])
