"""A plan trained by LLaMA-Factory, which lives in an environment of its own, on two ranks of this machine: killed,
resumed and measured.

Not here: its parser (tests/environments/test_parsed.py), or TRL, which is installed beside the trainer (test_tool.py).
"""

from __future__ import annotations

import os
import subprocess
from itertools import product
from pathlib import Path
from random import Random

import pytest
from environment import OFFLINE, needs, program
from hanging import HOOK
from test_ssh import PATIENCE_S
from test_tool import LAYOUTS, SEED, STEPS, assert_measured, planned

from executor.folder import rundir
from planner.spec.plan import encode_plan

pytestmark = [needs("llamafactory"), pytest.mark.long]
TOOL = ("--with", "llamafactory", "--random-weights", "--demo-data", "--hosts", "loopback")
AS_PLANNED = ("single", "ddp", "zero1", "zero2")
"""Layouts that Accelerate 1.11 and Transformers 5.6 run as is planned; the ends of FSDP2, and gathering in ZeRO-3, are
others than in the releases that the figures describe."""
PRODUCT = sorted(product(LAYOUTS, ("full", "lora")))


def ended(*words: object, **befalls: str) -> tuple[int, str]:
    """A command of the executor of LLaMA-Factory's environment: its exit code, and what was said."""
    command = [str(word) for word in (program("llamafactory", "executor"), *words, "--yes")]
    done = subprocess.run(
        command, env=os.environ | OFFLINE | befalls, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(("name", "method"), Random(SEED).sample(PRODUCT, 4))
def test_a_drawn_plan_is_trained_and_measured(name: str, method: str, tmp_path: Path) -> None:
    plan, folder = planned(LAYOUTS[name], method, 1), tmp_path / "run"
    (file := tmp_path / "plan.json").write_bytes(encode_plan(plan))

    code, said = ended("run", file, *TOOL, "--run-dir", folder)

    assert code == 0, said
    losses, mesh = rundir.read_losses(folder), rundir.read_mesh(folder)
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert {(seen["world_size"], seen["script"]) for seen in mesh.values()} == {
        (plan.layout.world_size, "llamafactory")
    }
    if name in AS_PLANNED:
        assert_measured(folder, plan, "llamafactory")


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_rank_is_killed_and_the_run_resumed_to_the_losses_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    plan, whole, folder = planned(LAYOUTS[name], "full", 1), tmp_path / "whole", tmp_path / "run"
    (file := tmp_path / "plan.json").write_bytes(encode_plan(plan))
    befalls, given = {"DIE": "1 5 1", "PYTHONPATH": str(HOOK)}, ("--env", "DIE", "--env", "PYTHONPATH")

    code, said = ended("run", file, *TOOL, "--checkpoint-every", 2, "--run-dir", folder, *given, **befalls)
    assert code == 5 and "newest whole checkpoint: checkpoint-4" in said, said
    code, said = ended("resume", folder, **befalls)
    assert code == 0, said
    code, said = ended("run", file, *TOOL, "--run-dir", whole)
    assert code == 0, said

    record = rundir.read_record(folder)
    assert record is not None and (record.status, record.backend) == ("completed", "llamafactory")
    assert [(one.failed_rank, one.resumed_from) for one in record.attempts] == [(1, 4)]
    assert rundir.read_losses(folder) == pytest.approx(rundir.read_losses(whole), rel=1e-6)
