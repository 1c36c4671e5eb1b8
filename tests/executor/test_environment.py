"""What of the caller's environment reaches a rank, what a person adds to it, and what nobody is shown."""

from __future__ import annotations

import pytest

from executor.run.launch import script_environment
from executor.system.environment import MASK, added, inherited, is_secret, masked
from planner.basics.errors import PlannerError


def test_only_the_allow_list_is_inherited():
    given = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "NCCL_AUTH_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "h",
        "LC_ALL": "C",
    }
    assert inherited(given) == {"PATH": "/bin", "NCCL_DEBUG": "INFO", "LC_ALL": "C"}
    assert is_secret("WANDB_API_KEY") and not is_secret("TOKENIZERS_PARALLELISM")


def test_a_person_adds_the_callers_value_or_their_own_secrets_too():
    environment = {"FOO": "caller's", "HF_TOKEN": "hf-secret"}

    assert added(["FOO", "HF_TOKEN"], environment) == environment
    assert added(["FOO=mine", "BAR=a=b c", "EMPTY="], environment) == {"FOO": "mine", "BAR": "a=b c", "EMPTY": ""}


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("ABSENT", "is not set here. Set it, or give --env ABSENT=VALUE"),
        ("1X=2", "must be NAME or NAME=VALUE"),
        ("A B=2", "must be NAME or NAME=VALUE"),
        ("=2", "must be NAME or NAME=VALUE"),
        ("RANK=3", "is set by the plan and the launcher"),
        ("MESHWRIGHT_RUN_ID=3", "is set by the plan and the launcher"),
        ("FSDP_OFFLOAD_PARAMS=true", "is set by the plan and the launcher"),
        ("X=a\0b", "has a NUL in its value"),
    ],
)
def test_what_would_be_another_run_or_no_variable_is_refused_by_name(given, rule):
    with pytest.raises(PlannerError, match="--env") as caught:
        added([given], {})

    assert rule in caught.value.sentence and caught.value.exit_code == 2


def test_a_refusal_does_not_show_a_value():
    with pytest.raises(PlannerError) as caught:
        added(["MASTER_ADDR=my-password"], {})

    assert "my-password" not in caught.value.sentence


def test_what_a_person_adds_is_masked_whatever_its_name_but_the_launchers_own_choice():
    given = {"PGPASSWORD": "p", "MY_PWD": "q", "FOO": "bar", "https_proxy": "http://me:pw@proxy:3128/x"}
    ours = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    shown = masked(given | ours, [*given, "NCCL_DEBUG"])

    assert shown == dict.fromkeys(given, MASK) | ours
    assert masked({"NCCL_DEBUG": "TRACE"}, ["NCCL_DEBUG"]) == {"NCCL_DEBUG": MASK}


# -- a script of one's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "on_cpu"),
    [
        ("single", {"ACCELERATE_USE_CPU": "true"}),
        ("ddp", {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}),
        ("fsdp2", {"ACCELERATE_TORCH_DEVICE": "cpu"}),
        ("transformers-tp", {"CUDA_VISIBLE_DEVICES": ""}),
        ("deepspeed-pipeline", {"DS_ACCELERATOR": "cpu"}),
    ],
)
def test_only_a_cpu_is_told_to_a_script_beside_deepspeeds_file(engine: str, on_cpu: dict[str, str]) -> None:
    file = "/runs/a b/ds.json"

    assert script_environment(engine, "cpu", None) == on_cpu
    assert script_environment(engine, "cuda", None) == {}
    if engine == "deepspeed-pipeline":
        assert script_environment(engine, "cuda", file) == {"MESHWRIGHT_DEEPSPEED_CONFIG": file}


def test_accelerator_finds_deepspeeds_file_by_its_own_variables() -> None:
    file = "/runs/a b/ds.json"

    assert script_environment("deepspeed", "cuda", file) == {
        "MESHWRIGHT_DEEPSPEED_CONFIG": file,
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": file,
    }
