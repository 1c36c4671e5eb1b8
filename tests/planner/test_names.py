"""A name is printable in any script and a path has no control character, wherever one is read; quoted texts read back.

Not here: what is written of a plan with such names (tests/executor/test_nasty.py).
"""

from __future__ import annotations

import copy
import json
import random
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from planner.ask import options
from planner.basics import names, quoting
from planner.basics.errors import PlannerError, is_visible
from planner.decide.planning import plan_of
from planner.decide.strategies import answer
from planner.spec import presets
from planner.spec.huggingface import config_dict
from planner.spec.plan import PATHS as PLAN_PATHS
from planner.spec.plan import Input, decode_plan, encode_plan, hash_of
from planner.spec.presets import FOR_READERS, packaged
from tests.nasty import TEXTS

GOOD = [
    "llama-3-8b",
    "Llama 3",
    "模型-7b",
    "Ламa",
    "नमूना",
    "مدل\u200cفارسی",
    "モデル\u3000七",
    "a/b",
    "x" * 200,
    "é\u0301",
]
BAD = ["", " ", "-x", "--help", "a\nb", "a\tb", "a\rb", "\x1b[31m", "a\x7f", "a\x9b", "a\u202eb", "a\u2066b", "\u200eb",
       "a\u2028b", "a\udc80", "a\0b", "x" * 201, "\ufeffx"]  # fmt: skip
PATHS = [*(text for text in GOOD if text), "-x", "a\u202eb", "x" * 10_000, " ", "$(id)", "a'b\"c"]
NO_PATHS = ["a\nb", "a\tb", "\x1b[31m", "a\x7f", "a\x9b", "a\x85b", "a\u2028b", "a\udc80", "a\0b"]


@pytest.mark.parametrize("text", GOOD, ids=ascii)
def test_a_name_may_be_of_any_script(text):
    assert names.check_name(text, "model") == text


@pytest.mark.parametrize("text", BAD, ids=ascii)
def test_a_name_that_is_no_name_is_refused_in_one_printable_line(text):
    with pytest.raises(PlannerError) as refused:
        names.check_name(text, "model")
    assert refused.value.sentence.isprintable(), refused.value.sentence


@pytest.mark.parametrize("text", PATHS, ids=lambda text: ascii(text)[:20])
def test_a_path_may_have_any_length_and_sign(text):
    assert names.check_path(text, "data") == text


@pytest.mark.parametrize("text", NO_PATHS, ids=ascii)
def test_a_path_with_a_control_character_is_refused(text):
    with pytest.raises(PlannerError) as refused:
        names.check_path(text, "data")
    assert refused.value.sentence.isprintable()


@pytest.mark.parametrize("place", ["name", "list", "key", "inner", "path"])
def test_no_text_of_a_decoded_file_is_passed_over(place):
    bad = "a\nb"
    raw = {
        "name": {"model": {"name": bad}},
        "list": {"lora": {"targets": ["q_proj", bad]}},
        "key": {"flops": {bad: 1.0}},
        "inner": {"tiers": [{"link": {"name": bad}}]},
        "path": {"recipe": {"data": bad}},
    }[place]
    with pytest.raises(PlannerError):
        names.check_texts(raw, "plan.json", paths={"data"})


def drawn(seed: int, count: int) -> list[str]:
    """Texts of characters that some reader takes for something else."""
    chance = random.Random(seed)
    signs = "ab1 \n\t\r'\"\\$`!#&|;<>(){}[]*?~=%:,-\x00\x1b\x7f\x85\x9b\u2028\u202e\u200dé模😀"
    return ["".join(chance.choices(signs, k=chance.randint(0, 12))) for _ in range(count)]


def test_bash_reads_every_quoted_word_as_that_word():
    """300 words in one command line, with every control character that an argument may have."""
    texts = [text.replace("\0", "") for text in drawn(7, 300)] + [chr(code) for code in range(1, 256)]
    line = f"printf '%s\\0' {quoting.for_shell(texts)}"
    assert "\n" not in line
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout.decode().split("\0")
    assert said[:-1] == texts


def test_words_without_control_characters_are_quoted_as_the_standard_library_does():
    texts = [text for text in drawn(8, 300) if all(map(is_visible, text))]
    assert quoting.for_shell(texts) == shlex.join(texts)


def test_yaml_reads_every_text_as_that_text():
    texts = [*drawn(9, 300), "y", "No", "null", "1e3", "0x10", "1:30", "2001-01-01", "=", "<<", "~", ""]
    whole = {text: [text, {"k": text}] for text in texts}
    assert list(yaml.safe_load_all(quoting.for_yaml([whole, texts]))) == [whole, texts]


@pytest.mark.parametrize("word", ["y", "1e3", "0o17", "+1", ".5", "on", "2001-01-01", "1_000", "!x", "&x", "@x"])
def test_yaml_quotes_what_another_reader_takes_for_no_text(word):
    """kubectl and sky read by other rules than PyYAML: y is a boolean and 1e3 a number to some."""
    assert quoting.for_yaml([{"value": word}]) == f'value: "{word}"\n'


@pytest.mark.parametrize("text", drawn(10, 40), ids=ascii)
def test_no_line_of_a_comment_stands_outside_it(text):
    for line in quoting.for_comment(text).splitlines():
        assert line.startswith("#")


@pytest.mark.parametrize("text", drawn(11, 40), ids=ascii)
def test_a_terminal_gets_only_what_is_printed(text):
    shown = quoting.for_terminal(text)
    assert not any(
        (char < " " and char not in "\n\t") or "\x7f" <= char < "\xa0" or char in "\u202e\u2028" for char in shown
    )


def test_colours_are_dropped_and_other_sequences_shown():
    assert quoting.for_terminal("\x1b[1;31mred\x1b[0m \x1b[2J\x1b]0;title\x07") == "red \\x1b[2J\\x1b]0;title\\x07"


@pytest.fixture(scope="module")
def raw_plan() -> dict[str, Any]:
    """A plan in which every text that a plan may have stands somewhere, decoded."""
    asked = {"model": "tiny", "gpus": "8", "nodes": "2", "cluster": "dgx-h100", "method": "lora"}
    plan = plan_of(answer(options.question(asked)).estimates[0])
    paths = {"data": "/d/x.txt", "validation_data": "/d/y.txt", "tokenizer": "/t", "checkpoint": "/c"}
    job = replace(plan.job, recipe=replace(plan.job.recipe, **paths))
    scaling = {"rope_type": "linear", "factor": 2.0}
    inputs = (Input(field="data", path="/d/x.txt", digest="sha256:0", bytes=1),)
    whole = replace(plan, job=job, inputs=inputs, model=replace(plan.model, rope_scaling=scaling))
    raw: dict[str, Any] = first_of_each(msgspec.json.decode(encode_plan(whole)))
    return raw


def first_of_each(value: Any) -> Any:
    """A decoded file with one value in each list: the 40th collective is read as the first is."""
    if isinstance(value, dict):
        return {key: first_of_each(one) for key, one in value.items()}
    return [first_of_each(one) for one in value[:1]] if isinstance(value, list) else value


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where texts stand in a decoded file: the way to each, and to each mapping's first key as ("key", way)."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(one, str):
            yield (*at, key)
        elif isinstance(one, dict | list):
            yield from places(one, (*at, key))


def changed(raw: Any, at: tuple[Any, ...], text: str) -> dict[str, Any]:
    """The same with another text at a place, sealed anew."""
    made = copy.deepcopy(raw)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = text
    made["content_hash"] = hash_of(made)
    return made


@pytest.mark.parametrize(
    "texts", [random.Random(11).sample(TEXTS, 12), pytest.param(TEXTS, marks=pytest.mark.long)], ids=["12", "60"]
)
def test_a_plan_with_a_nasty_text_at_any_place_is_refused_or_means_that_text(
    raw_plan: dict[str, Any], texts: list[str]
) -> None:
    """About 60 places, of which a few are paths: those take what no terminal or script is misled by when quoted."""
    counted = {"refused": 0, "kept": 0}
    for at in (at for at in places(raw_plan) if at != ("content_hash",)):
        for text in texts:
            try:
                plan = decode_plan(msgspec.json.encode(changed(raw_plan, at, text)), "plan.json")
            except PlannerError as error:
                assert error.sentence.isprintable(), (at, text)
                counted["refused"] += 1
                continue
            back = msgspec.to_builtins(plan)
            for key in at:
                back = back[key]
            assert back == text, at
            rule = names.path_rule if at[-1] in PLAN_PATHS else names.name_rule
            assert rule(text) is None, (at, text)
            counted["kept"] += 1
    assert counted["refused"] > 100 and counted["kept"] > 100, counted


@pytest.mark.parametrize("text", [text for text in TEXTS if "/" not in text and "\0" not in text and len(text) < 200])
def test_a_model_named_after_its_folder_has_a_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "models" / text).mkdir(parents=True)
    config = msgspec.json.encode(config_dict(presets.model("tiny")))
    (tmp_path / "models" / text / "config.json").write_bytes(config)
    try:
        model = options.model_of({"model": str(tmp_path / "models" / text)}, ())
    except PlannerError as error:
        assert names.name_rule(text), "a good name was refused"
        assert error.sentence.isprintable()
        assert "rename the folder" in error.sentence
    else:
        assert model.name == text
        assert names.name_rule(text) is None


@pytest.mark.parametrize("kind", ["models", "gpus", "nodes", "clusters", "runtimes", "kernels"])
def test_any_text_of_a_preset_file_but_its_sources_is_a_name(tmp_path: Path, kind: str) -> None:
    """Every packaged file of the kind that has texts, each text in turn."""
    path = next(one for one in sorted((packaged() / kind).glob("*.toml")) if list(texts_of(one)))
    whole = path.read_text()
    for text in texts_of(path):
        for nasty in ("m\ntouch canary\n#", "a\u202eb", "x" * 201, "-x"):
            changed_file = tmp_path / kind / path.name
            changed_file.parent.mkdir(exist_ok=True)
            changed_file.write_text(whole.replace(f'"{text}"', json.dumps(nasty), 1))
            with pytest.raises(PlannerError) as refused:
                presets.as_written(kind, path.stem, folders=[tmp_path])
            assert refused.value.sentence.isprintable()


def texts_of(path: Path) -> Iterator[str]:
    raw = tomllib.loads(path.read_text())
    facts = {key: value for key, value in raw.items() if key not in FOR_READERS}
    for at in places(facts):
        if "sources" in at:  # of a runtime's version
            continue
        inner: Any = facts
        for key in at:
            inner = inner[key]
        yield inner


@pytest.mark.parametrize("text", [text for text in TEXTS if "/" not in text and "\0" not in text and len(text) < 200])
@pytest.mark.parametrize("kind", ["gpus", "models", "clusters", "runtimes"])
def test_a_preset_is_not_found_under_a_name_that_is_none(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / kind).mkdir()
    ours = next(iter(sorted((packaged() / kind).glob("[a-z]*.toml"))))
    (tmp_path / kind / f"{text.lower()}.toml").write_text(ours.read_text())
    look = {"gpus": presets.gpu, "models": presets.model, "clusters": presets.cluster, "runtimes": presets.runtime}
    try:
        found = look[kind](text, folders=[tmp_path])
    except PlannerError as error:
        assert error.sentence.isprintable()
    else:
        assert found.name == text.lower()
        assert names.name_rule(text) is None


@pytest.mark.parametrize("text", drawn(12, 40), ids=ascii)
def test_json_for_a_terminal_means_the_same_and_moves_no_cursor(text):
    encoded = msgspec.json.encode({text: [text]})
    shown = quoting.in_json(encoded)
    assert msgspec.json.decode(shown) == {text: [text]}
    assert all(map(is_visible, shown.decode()))
