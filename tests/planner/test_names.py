"""A name is printable in any script and a path has no control character; quoted texts read back as they were."""

import random
import shlex
import subprocess

import pytest
import yaml

from planner.basics import names, quoting
from planner.basics.errors import PlannerError

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
    texts = [text for text in drawn(8, 300) if all(char >= " " and not "\x7f" <= char < "\xa0" for char in text)]
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
