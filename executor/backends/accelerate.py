"""The Accelerate backend: plans of one device, DDP, FSDP2 and HSDP as an Accelerate 1.15 configuration file, and back.

The environment of a run is what Accelerate's own launcher makes of that file, so a plan and its configuration cannot
drift apart unseen. Not here: training (worker/engines/accelerate.py).
"""

from __future__ import annotations

from executor.backends.common import HASH_SHOWN, HEADER, TRAINER, read_back, readable
from executor.backends.launched import launched_by
from planner.ask import tofile
from planner.ask.fromfile.accelerate import PARALLEL, SIZES
from planner.ask.tofile import accelerate
from planner.ask.tofile.table import entries
from planner.spec.plan import Plan

CONFIG = "config/accelerate.yaml"


class AccelerateBackend:
    """Backend of the engines `single`, `ddp` and `fsdp2`."""

    name = "accelerate"
    engines = launched_by(name)
    rules = TRAINER

    def files(self, plan: Plan) -> dict[str, str]:
        """accelerate.yaml, usable with `accelerate launch --config_file` too."""
        layout, cluster, sharded = plan.layout, plan.cluster, plan.layout.engine == "fsdp2"
        lines = [
            HEADER.format(hash=plan.sealed().content_hash[:HASH_SHOWN]),
            "compute_environment: LOCAL_MACHINE",
            "debug: false",
            f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU'}",
            "enable_cpu_affinity: false",
            *(_section("fsdp_config", _fsdp(plan)) if sharded else ()),
            f"mixed_precision: '{_mixed_precision(plan)}'",
            f"num_machines: {cluster.nodes}",
            f"num_processes: {layout.world_size}",
            *(_section("parallelism_config", _parallelism(plan)) if sharded else ()),
            "rdzv_backend: static",
            "same_network: true",
        ]
        return {CONFIG: "\n".join(lines) + "\n"}

    def drift(self, plan: Plan, folder: str) -> list[str]:
        """Differences between the file as Accelerate's launcher reads it and the plan."""
        found = read_back("accelerate", folder, CONFIG)
        if "error" in found:
            return [f"{CONFIG}: Accelerate cannot read it: {found['error']}"]
        differences = [f"{CONFIG}: {key} is not known to Accelerate and would be ignored" for key in found["unknown"]]
        expected = self.expected_environment(plan) | {
            "num_processes": str(plan.layout.world_size),
            "num_machines": str(plan.cluster.nodes),
        }
        effective = found["environment"] | found["counts"]
        for key in sorted(expected.keys() | effective.keys()):
            if key in expected and expected[key] != effective.get(key):
                differences.append(f"{CONFIG}: {key} is {effective.get(key, 'unset')}, the plan says {expected[key]}")
            elif key not in expected and key not in HARMLESS:
                differences.append(f"{CONFIG}: {key} is {effective[key]}, the plan does not set it")
        return differences

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """The variables that Accelerate's launcher exports for this file."""
        return exported(folder, CONFIG)

    def expected_environment(self, plan: Plan) -> dict[str, str]:
        """The variables that decide how a run is split, as the plan has them."""
        expected = {"ACCELERATE_MIXED_PRECISION": _mixed_precision(plan), "ACCELERATE_DYNAMO_BACKEND": "NO"}
        if plan.layout.engine != "fsdp2":
            return expected
        expected |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
        for key, value in _fsdp(plan).items():
            expected[ENVIRONMENT_NAMES.get(key, key.upper())] = _word(value)
        for key, value in _parallelism(plan).items():
            expected[key.upper()] = str(value)
        return expected


ENVIRONMENT_NAMES = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}

HARMLESS = frozenset(
    # Set by the launcher whatever the file says; FSDP2 reads none of these, or they have no effect at their default.
    {
        "ACCELERATE_DYNAMO_MODE",
        "ACCELERATE_DYNAMO_USE_DYNAMIC",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        "FSDP_SHARDING_STRATEGY",
        "FSDP_BACKWARD_PREFETCH",
        "FSDP_FORWARD_PREFETCH",
        "FSDP_USE_ORIG_PARAMS",
        "FSDP_SYNC_MODULE_STATES",
        "FSDP_MIN_NUM_PARAMS",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "PARALLELISM_CONFIG_CP_BACKEND",
        "PARALLELISM_CONFIG_SP_BACKEND",
    }
)


def _mixed_precision(plan: Plan) -> str:
    return "bf16" if plan.job.precision == "bf16" else "no"


def exported(folder: str, file: str) -> dict[str, str]:
    """The variables that Accelerate's launcher exports for a file of a folder."""
    found = readable("accelerate", "Accelerate", folder, file)
    return dict(sorted(found["environment"].items()))


def _fsdp(plan: Plan) -> dict[str, object]:
    values = tofile.values(plan)
    fixed = {key: value for key, (value, _) in accelerate.fsdp_fixed("fsdp_", values["classes"]).items()}
    said = entries(accelerate.fsdp_rows("fsdp_"), values, ("offload_params", "reshard_after_forward"))
    own = {
        "fsdp_activation_checkpointing": False,  # recompute is the model's own, the same under every engine
        "fsdp_cpu_ram_efficient_loading": False,  # every rank builds the same weights from one seed
        "fsdp_version": 2,
    }
    return dict(sorted((fixed | said | own).items()))


def _parallelism(plan: Plan) -> dict[str, object]:
    # Accelerate ignores these keys without a word when the prefix is missing.
    sizes = {f"{PARALLEL}_{name}_size": getattr(plan.layout, option) for name, option in SIZES.items()}
    return dict(sorted((sizes | {f"{PARALLEL}_sp_size": 1}).items()))


def _section(name: str, values: dict[str, object]) -> list[str]:
    return [f"{name}:", *(f"  {key}: {_word(value)}" for key, value in values.items())]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
