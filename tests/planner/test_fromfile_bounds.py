"""What a file asks for and no figure counts: the words of verdicts under it on every face, and launching, which a file
of another's launcher is not asked about.

Not here: what each key is understood to be (test_fromfile_classes.py).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_fromfile import run

from planner.ask import options
from planner.ask.fits import KEPT, Uncounted, qualified
from planner.decide import estimate_json, strategies
from planner.decide.answers import Answer
from planner.views.shown import SAID, shown_layout
from planner.views.verdict import answer_text

CASES = Path(__file__).parent / "configs" / "third"
MORE, LESS = ("its_own_key",), ("fused_loss",)
KINDS = {
    "at least": Uncounted(more=MORE),
    "at most": Uncounted(less=LESS),
    "unsure": Uncounted(more=MORE, less=LESS),
}
SURE = {"at least": {"yes", "likely", "close"}, "at most": {"no", "close"}, "unsure": {"yes", "likely", "close", "no"}}
"""Words that a bound forbids."""

GPUS = ("h200", "a10g-24gb")
"""One that holds the model, and one that does not."""


def asked(uncounted: Uncounted, **given: Any) -> Answer:
    plain = {
        "model": "1b",
        "gpus": "2",
        "seq_len": "2048",
        "micro_batch_size": "2",
        "strategy": "ddp",
        "method": "full",
    }
    return strategies.answer(msgspec.structs.replace(options.question(plain | given), uncounted=uncounted))


@pytest.mark.parametrize(("word", "kind"), [*itertools.product(("yes", "likely", "close", "no"), KINDS)])
def test_a_verdict_says_no_more_than_a_bound_allows(word: str, kind: str):
    found = qualified(word, KINDS[kind])

    assert found not in SURE[kind]
    assert found in (word, kind)


@pytest.mark.parametrize(("kind", "gpu"), [*itertools.product(KINDS, GPUS)])
def test_text_json_and_explorer_say_the_same_bound(kind: str, gpu: str):
    sure = asked(Uncounted(), gpu=gpu).estimates[0]
    found = asked(KINDS[kind], gpu=gpu)
    text, said = answer_text(found), msgspec.json.decode(estimate_json.as_json(found))
    one, word = said["estimates"][0], qualified(sure.verdict, KINDS[kind])
    shown = shown_layout(found.estimates[0], found.question)

    assert found.estimates[0].memory == sure.memory
    assert (one["verdict"], shown.verdict) == (word, word)
    assert one["fits"] is (None if word in KEPT else sure.fits)
    assert one["fits_probability"] is one["room_probability"] is None
    assert said["uncounted"] == {"more": list(KINDS[kind].more), "less": list(KINDS[kind].less), "bound": kind}
    assert f" {word} " in next(line for line in text.splitlines() if " ddp " in f" {line} ")
    assert all(key in text and key in said["warnings"][-1] for key in (*KINDS[kind].more, *KINDS[kind].less))
    assert shown.reasons[0].startswith(SAID[word])


FILES = ("ax_qlora_paged.yaml", "lf_lora_8192_mb6.yaml", "lf_sft_full.yaml")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_launcher_is_not_asked_about_launching(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = tmp_path / "plan.json"
    words = ("--from", str(CASES / name), "--gpus", "8", "--gpu", "h200")
    code, out, _ = run(capsys, "--json", *words)
    written, text, told = run(capsys, *words, "-o", str(plan))
    one = json.loads(out)["estimates"][0]

    assert (code, written, plan.exists()) == (0, 0, True)
    assert "cannot be launched" not in text
    assert ("no backend launches it" in told) is (not one["launchable"])
