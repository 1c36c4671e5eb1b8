"""What each engine is launched with, as a table written by hand, and what a framework's parser answers.

Not here: launches (tests/cluster), or how the table is drawn (docs/layouts.md).
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from executor.backends import common
from planner.basics.errors import PlannerError
from planner.decide.capabilities import capabilities

ALL, WHOLE = ("none", "attention", "sac:matmul", "full"), ("none", "full")
METHODS = ("full", "lora", "qlora")
TABLE: dict[str, tuple[Any, ...]] = {
    # engine: backend, splits, stages, copies of shards, methods, recomputation, what waits in host memory
    "single": ("accelerate", ("nothing",), (0,), False, METHODS, ALL, ()),
    "ddp": ("accelerate", ("data",), (0,), False, METHODS, ALL, ()),
    "fsdp2": ("accelerate", ("data",), (3,), True, METHODS, ALL, ("params",)),
    "deepspeed": ("deepspeed", ("data",), (1, 2, 3), False, METHODS, ALL, ("optimizer", "params")),
    "deepspeed-autotp": ("deepspeed", ("tp",), (1, 2, 3), False, ("full",), WHOLE, ()),
    "deepspeed-pipeline": ("deepspeed", ("pp", "pp x tp"), (1,), False, ("full", "lora"), WHOLE, ()),
    "deepspeed-ulysses": ("deepspeed", ("cp (ulysses)",), (1, 2, 3), False, ("full",), WHOLE, ("optimizer", "params")),
    "transformers-tp": ("transformers", ("tp", "ep"), (3,), True, ("full",), WHOLE, ()),
}


def test_every_engine_is_launched_with_what_the_trainer_builds() -> None:
    found = {
        one.engine: (
            one.backend, one.splits, one.zero_stages, one.replicas_of_shards, one.methods, one.recompute, one.offload
        )
        for one in capabilities()
    }  # fmt: skip
    assert found == TABLE
    families = {one.engine: set(one.families) for one in capabilities()}
    assert all({"llama", "qwen3"} <= some for some in families.values()) and all(one.tied for one in capabilities())
    mixtures = {"mixtral", "qwen3_moe"}
    assert {engine for engine, some in families.items() if mixtures <= some} == {
        "single", "ddp", "fsdp2", "transformers-tp"}  # fmt: skip
    assert {engine for engine, some in families.items() if mixtures & some} == {
        "single", "ddp", "fsdp2", "transformers-tp"}  # fmt: skip


READ = getattr(common._read_back, "__wrapped__", common._read_back)  # without what it keeps


def answered(code: int, out: str = "", error: str = "") -> Any:
    with common.read_by(lambda framework, path: subprocess.CompletedProcess([], code, out, error)):
        return READ("deepspeed", "file", 0, 0)


def test_a_parser_s_answer_is_its_last_line_and_its_error_the_last_of_what_it_said() -> None:
    assert answered(0, 'a warning\n{"effective": 1}\n') == {"effective": 1}
    assert answered(1, error="traceback\nValueError: no\n") == {"error": "ValueError: no"}
    assert answered(7) == {"error": "exit code 7"}
    with pytest.raises(PlannerError, match="cannot be imported") as refused:
        answered(1, error="ModuleNotFoundError: No module named 'deepspeed'")
    assert refused.value.exit_code == 4
    with pytest.raises(PlannerError, match="without what the trainer imports: no name x") as refused:
        answered(common.MISSING, error="no name x")
    assert refused.value.exit_code == 3

    def late(framework: str, path: str) -> Any:
        raise TimeoutError

    with common.read_by(late):
        assert READ("deepspeed", "file", 1, 1) == {"error": "its parser did not answer in 120 s"}
