"""A tokenizer's folder of a stranger: its template may compute so much and no more, and none of its code is run."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from executor.preflight.examples import Chat
from executor.worker.data import limited, tokenizer
from planner.basics.errors import PlannerError

CHAT = Chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}])
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a text of gigabytes": "{{ 'x' * 10**11 }}",
    "lists of lists": "{% set ns = namespace(l=[0]) %}{% for a in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "a macro without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a format of gigabytes": "{{ '%099999999999d' % 1 }}",
}


def folder(tmp_path: Path, **settings: object) -> Path:
    """A tokenizer of whole words with a template, as Transformers reads one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"hi": 0, "there": 1, "[unk]": 2, "</s>": 3}, unk_token="[unk]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "[unk]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(base | settings))
    return tmp_path


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("marks", [False, True])
def test_a_template_without_an_end_is_refused(
    tmp_path: Path, kind: str, marks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "SECONDS", 0.2)
    text = ENDLESS[kind] + ("{% generation %}{% endgeneration %}" if marks else "")
    own = tokenizer.OwnTokenizer(str(folder(tmp_path, chat_template=text)))
    before = signal.getsignal(signal.SIGVTALRM), *(limited.resource.getrlimit(limited.resource.RLIMIT_AS),)
    with pytest.raises(PlannerError, match="its chat template refuses line 3") as said:
        own.marked(CHAT, "line 3")
    assert len(said.value.sentence) <= 400
    assert before == (signal.getsignal(signal.SIGVTALRM), limited.resource.getrlimit(limited.resource.RLIMIT_AS))
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_an_ordinary_template_is_rendered(tmp_path: Path) -> None:
    text = "{% for one in messages %}{{ one.content }} {% if one.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    own = tokenizer.OwnTokenizer(str(folder(tmp_path, chat_template=text)))
    assert own.marked(CHAT, "line 1") == ([0, 1, 3], [False, True, True])


@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_tokenizers_folder_is_never_run_or_asked_about(
    tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "mine.py").write_text(f"open({str(canary)!r}, 'w')\nclass Mine: pass\n")
    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    named = {} if known else {"tokenizer_class": "Mine"}
    place = folder(tmp_path, auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, **named)
    (place / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    try:
        own = tokenizer.own_tokenizer(str(place))
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    else:
        assert type(own).__module__.startswith("transformers.")
    assert not asked and not canary.exists() and "mine" not in sys.modules
