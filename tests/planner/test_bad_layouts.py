"""Bad input to `planner estimate`: one line, the rule, the nearest legal value, for each way to misuse a technique."""

from __future__ import annotations

import pytest

from planner.basics import command
from planner.cli import planner

SIXTY_FOUR = ["--model", "7b", "--gpus", "64"]
MOE = ["--model", "mixtral-8x7b", "--gpus", "64"]
BAD = [
    ([*SIXTY_FOUR, "--tp", "6"], "tp=6: it does not divide the 32 attention heads", "Use tp=4"),
    ([*SIXTY_FOUR, "--pp", "64"], "pp=64: 64 stages are more than the 32 layers", "Use pp=32"),
    (
        [
            *SIXTY_FOUR,
            "--pp",
            "4",
            "--virtual-stages",
            "3",
            "--pp-schedule",
            "interleaved",
            "--zero-stage",
            "1",
            "--grad-accum",
            "4",
        ],
        "virtual_stages=3: ",
        "Use virtual_stages=",
    ),
    ([*MOE, "--ep", "16"], "ep=16: it does not divide the 8 experts", "Use ep=8"),
    ([*MOE, "--ep", "8", "--pp", "16"], "ep=8: it does not divide dp_shard x cp x tp = 4", "Use ep=4"),
    (
        [*MOE, "--ep", "8", "--dp-replicate", "64"],
        "ep=8: it does not divide",
        "Use ep=1, or dp_shard=64 in the place of dp_rep",
    ),
    ([*SIXTY_FOUR, "--cp", "8", "--seq-len", "2047"], "cp=8: a sequence of 2047 tokens does not divide", "Use cp=1"),
    ([*SIXTY_FOUR, "--ep", "4"], "ep=4: llama-2-7b is dense", "Use ep=1"),
    ([*SIXTY_FOUR, "--lora-targets", "q_prj"], "lora_targets=q_prj: is not a linear module", "Did you mean q_proj"),
    ([*SIXTY_FOUR, "--tp", "2", "--dp-shard", "64"], "dp_shard=64: group sizes", "use dp_shard=32"),
    ([*SIXTY_FOUR, "--tp", "4", "--pp", "3"], "but there are 64 GPUs", "nearest"),
    ([*SIXTY_FOUR, "--pp", "2", "--stage-layers", "30,3"], "they sum to 33, the model has 32 layers", "Try 16,16"),
    ([*SIXTY_FOUR, "--strategy", "ddp", "--dp-shard", "64"], "strategy=ddp: the sizes given make fsdp", "Give the"),
]


@pytest.mark.parametrize(("arguments", "rule", "fix"), BAD)
def test_a_layout_that_cannot_be_is_refused_in_one_line(
    arguments: list[str], rule: str, fix: str, capsys: pytest.CaptureFixture[str]
):
    assert command.exit_code(planner, ["estimate", *arguments], name="planner") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert rule in err and fix in err, err


def test_a_second_copy_of_the_weights_is_gathered_by_later_micro_batches_alone(capsys: pytest.CaptureFixture[str]):
    arguments = [*SIXTY_FOUR, "--dp-shard", "64", "--runtime", "deepspeed-zero", "--zero-stage", "3"]
    hpz = ["--zero-secondary-shard", "8", "--grad-accum"]

    for accum in ("1", "4"):
        assert command.exit_code(planner, ["estimate", *arguments, *hpz, accum], name="planner") in (0, 3)
        assert "zero3" in capsys.readouterr().out
