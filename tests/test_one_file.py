"""Claims about docs/one_file.py: it stands alone in 200 lines, and predicts what the planner predicts, within 2 %.

Six questions are its own; others are drawn from the domain that docs/one-file.md gives it, the same ones every time.
Not here: whether the planner is right (tests/cluster, tests/truth).
"""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from planner import estimate
from planner.spec import presets

PROJECT = Path(__file__).resolve().parents[1]
FILE, PAGE = PROJECT / "docs" / "one_file.py", PROJECT / "docs" / "one-file.md"
LINES, TOLERANCE = 200, 0.02
SEED, DRAWS = 12, 8
"""Draws of each method."""


def imported():
    spec = spec_from_file_location("one_file", FILE)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


one_file = imported()

ASKED = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1", "zero_stage": 1},
    "zero2": {"strategy": "zero2", "zero_stage": 2},
    "fsdp": {"strategy": "fsdp", "reshard_after_forward": True},
    "tensor": {"dp_shard": 1},
    "lora": {"strategy": "ddp"},
}
"""What makes the planner answer for a method."""
UNNAMED = {"tinyllama-1.1b"}
"""Models that are no preset: the planner is given their sizes."""


def planned(ask):
    """The planner's estimate for a question of the file."""
    model = one_file.MODELS[ask.model]
    sizes = {name: getattr(model, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    shards = {"zero1": "dp_shard", "zero2": "dp_shard", "fsdp": "dp_shard", "tensor": "tp"}
    ranks = {shards[ask.method]: ask.gpus} if ask.method in shards else {}
    adapters = {"lora_rank": ask.rank} if ask.method == "lora" else {}
    answer = estimate(
        **(sizes if ask.model in UNNAMED else {"model": ask.model}),
        **ASKED[ask.method],
        **ranks,
        **adapters,
        method="lora" if ask.method == "lora" else "full",
        gpus=ask.gpus,
        micro_batch_size=ask.sequences,
        seq_len=ask.length,
        grad_accum=1,
        recompute="full" if ask.recompute else "none",
    )
    [found] = answer.estimates
    return found


def figures(ask) -> dict[str, tuple[float, float]]:
    """(the file's, the planner's) of each figure that is compared."""
    found = planned(ask)
    peak, mine = found.memory.peak, one_file.states(ask)
    pairs = {
        "peak": (max(one_file.moments(ask).values()), peak.total),
        "sent": (one_file.sent(ask), sum(call.wire_bytes_per_rank for call in found.comm.engine)),
    }
    if peak.phase != "load":  # where there is no optimizer yet
        pairs |= {"weights": (mine["weights"], peak.terms["params"])}
        pairs |= {"optimizer": (mine["optimizer"], peak.terms["optimizer"])}
    return pairs


def too_far(ask) -> dict[str, float]:
    """Relative errors of more than the tolerance."""
    errors = {name: mine / planners - 1 for name, (mine, planners) in figures(ask).items()}
    return {name: error for name, error in errors.items() if not abs(error) <= TOLERANCE}


def drawn(method: str):
    """Questions of one method from the whole domain."""
    chance = random.Random(f"{SEED} {method}")
    for _ in range(DRAWS):
        model = chance.choice(sorted(one_file.MODELS))
        most = min(one_file.MODELS[model].kv_heads, 8) if method == "tensor" else 256
        yield one_file.Question(
            model,
            method,
            chance.choice([n for n in (2, 4, 8, 16, 32, 64, 128, 256) if n <= most]),
            chance.choice((1, 2, 3, 4, 8)),
            chance.choice((512, 1024, 2048, 4096, 8192)),
            recompute=chance.random() < 0.5,
            rank=chance.choice((8, 16, 64)),
        )


def named(ask) -> str:
    again = "-recomputed" * ask.recompute
    return f"{ask.model}-{ask.method}-{ask.gpus}-{ask.sequences}x{ask.length}{again}"


@pytest.mark.parametrize("ask", one_file.QUESTIONS, ids=named)
def test_it_answers_its_six_questions_as_the_planner_does(ask):
    assert too_far(ask) == {}


@pytest.mark.parametrize("ask", [ask for method in ASKED for ask in drawn(method)], ids=named)
def test_it_answers_questions_of_its_domain_as_the_planner_does(ask):
    assert too_far(ask) == {}


def test_its_questions_are_six_of_different_methods_with_recomputation_and_without():
    assert sorted(ask.method for ask in one_file.QUESTIONS) == sorted(ASKED)
    assert {ask.recompute for ask in one_file.QUESTIONS} == {True, False}


@pytest.mark.parametrize("name", sorted({*one_file.MODELS} - UNNAMED))
def test_its_models_have_as_many_parameters_as_published(name):
    assert one_file.MODELS[name].parameters == presets.model(name).parameters


@pytest.mark.parametrize("left_out", one_file.kept_by_layer(one_file.QUESTIONS[0]))
def test_an_activation_that_is_forgotten_is_found(left_out, monkeypatch):
    right = one_file.kept_by_layer
    monkeypatch.setattr(one_file, "kept_by_layer", lambda ask: right(ask) | {left_out: 0.0})

    assert any("peak" in too_far(ask) for ask in one_file.QUESTIONS)


@pytest.mark.parametrize("ask", one_file.QUESTIONS, ids=named)
def test_a_gather_that_sends_a_tenth_more_is_found(ask, monkeypatch):
    right = one_file.all_gather
    monkeypatch.setattr(one_file, "all_gather", lambda size, n: 1.1 * right(size, n))

    assert set(too_far(ask)) == {"sent"}


def test_it_has_200_lines_at_most():
    assert len(FILE.read_text().splitlines()) <= LINES


def test_it_imports_the_standard_library_alone():
    nodes = list(ast.walk(ast.parse(FILE.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]

    assert names
    assert [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names] == []


def test_its_page_shows_what_it_prints(tmp_path):
    command = [sys.executable, "-I", "-S", str(FILE)]  # without any package that is installed
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert f"```text\n{done.stdout}```" in PAGE.read_text()
    assert len(done.stdout.splitlines()) == len(one_file.QUESTIONS)
