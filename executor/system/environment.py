"""Environment of a rank: an allow-list of the caller's variables and those the user adds, without other secrets.

Not here: what the launcher or a backend sets for a rank (launch.py, launchers/, backends/).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from planner.basics.errors import PlannerError

# What a rank inherits of the caller's environment. Everything else, tokens and passwords above all, stays out.
INHERITED = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV CONDA_PREFIX PYTHONPATH LD_LIBRARY_PATH CC CXX
    CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ROCM_PATH
    XDG_CACHE_HOME HF_HOME HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE OMP_NUM_THREADS PYTORCH_ALLOC_CONF
    MESHWRIGHT_DEBUG
    """.split()  # noqa: SIM905  # a list literal of thirty strings is no easier to read
)
INHERITED_PREFIXES = ("LC_", "NCCL_", "TORCH_NCCL_", "CUDNN_", "CUBLAS_")

DECIDED_PREFIXES = ("MESHWRIGHT_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
DECIDED = frozenset(
    """
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME
    MASTER_ADDR MASTER_PORT DS_ACCELERATOR
    """.split()  # noqa: SIM905
)
"""What the plan and the launcher decide; another value would be another run."""

NETWORK_DEBUG = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
"""Variables that make NCCL and torch log why ranks do not reach each other; gloo always does."""

# An inherited variable that is named so is left out, whatever its prefix.
SECRET_WORDS = frozenset(
    """
    KEY KEYS TOKEN TOKENS SECRET SECRETS PASSWORD PASSWD PASSPHRASE PASS PAT CREDENTIAL CREDENTIALS AUTH APIKEY COOKIE
    """.split()  # noqa: SIM905
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MASK = "***"
FIELD = "--env"


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is passed on to the ranks."""
    return {
        name: value
        for name, value in environment.items()
        if name in INHERITED or (name.startswith(INHERITED_PREFIXES) and not is_secret(name))
    }


def added(given: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that `--env NAME` (with the caller's value) and `--env NAME=VALUE` add. PlannerError names the
    variable, never a value."""
    found: dict[str, str] = {}
    for text in given:
        name, has_value, value = text.partition("=")
        if not NAME.fullmatch(name):
            rule = "must be NAME or NAME=VALUE, a name of letters, digits and underscores"
            raise PlannerError(FIELD, name, rule, "Try --env HF_TOKEN")
        if name in DECIDED or name.startswith(DECIDED_PREFIXES):
            raise PlannerError(FIELD, name, "is set by the plan and the launcher", "Leave it out")
        if "\0" in value:
            raise PlannerError(FIELD, name, "has a NUL in its value, which no environment holds", "Leave it out")
        if not has_value and name not in environment:
            raise PlannerError(FIELD, name, "is not set here", f"Set it, or give --env {name}=VALUE")
        found[name] = value if has_value else environment[name]
    return found


def debugging(given: tuple[str, ...]) -> tuple[str, ...]:
    """Variables that `--env` adds, with the debug logs of NCCL and torch on unless it sets them."""
    return (*(f"{name}={value}" for name, value in NETWORK_DEBUG.items()), *given)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that it is a secret, passed on only by `--env`."""
    return not SECRET_WORDS.isdisjoint(name.upper().split("_"))


def is_ours(name: str, value: str) -> bool:
    """Whether a variable of those added is the launcher's own choice: every other value may be a secret."""
    return NETWORK_DEBUG.get(name) == value


def masked(environment: Mapping[str, str], added: Iterable[str]) -> dict[str, str]:
    """An environment as it may be shown and kept: without the values of what a person added."""
    hidden = {name for name in added if not is_ours(name, environment.get(name, ""))}
    return {name: MASK if name in hidden else value for name, value in environment.items()}
