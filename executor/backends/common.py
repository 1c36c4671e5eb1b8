"""Shared by all backends: rules that hold for the trainer, and reading a file back through its framework.

The framework's parser runs in another process, so that this package never imports torch. Not here: any file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.backends.launched import FLASH_MODULES, LAUNCHED
from planner.basics.errors import PlannerError, did_you_mean
from planner.inventory import lora_targets
from planner.inventory.optimizers import BITSANDBYTES_8BIT
from planner.inventory.units import savable_modules
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule, as_option, one_of
from planner.parallelism.rules import DEFAULTS, accepts
from planner.spec import TrainingJob
from planner.spec.formats import FORMATS

if TYPE_CHECKING:
    from subprocess import CompletedProcess

HEADER = "# generated from plan {hash}; do not edit"
HASH_SHOWN = len("sha256:") + 12
"""Characters of the plan's hash in a file's note, whose line then fits a terminal."""
READ_BACK_TIMEOUT_S = 120
MISSING = 3
"""Exit code by which the reading process says that the framework lacks a name."""
SELECTIVE = tuple(name for name, launched in LAUNCHED.items() if launched.selective)
"""Engines whose selective recomputation was trained against one process."""
EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
"""Families with experts that were trained against one process. Their routers' auxiliary loss stays off, as Transformers
5.23 has it (`output_router_logits`): it is the mean of a micro-batch's own load, so a split batch would have another
loss than the whole one."""

OWN_ATTENTION = ("bloom", "falcon")
"""Families whose modules in Transformers 5.23 call attention themselves and not through its attention interface, by
which the trainer recomputes it (executor/worker/model/recompute.py)."""


def _planned_alone(field: str, holds: Callable[[Case], bool], why: str, fix: str, what: str = "") -> Rule:
    """A rule against what is predicted and the trainer does not build; `what` names it where it is not the field."""
    return Rule(
        name=f"{what or field} not launchable",
        field=field,
        holds=holds,
        sentence=lambda case: f"it is planned, but not launchable yet: {why}",
        fix=lambda case: fix,
    )


def _on_gpus(field: str, library: str, chosen: Callable[[Case], bool], fix: str) -> Rule:
    """A rule against a library's kernels on devices that are no NVIDIA GPUs."""
    return Rule(
        name=f"{library} without a GPU",
        field=field,
        holds=lambda case: not chosen(case) or case.cluster.gpu.kind == "cuda",
        sentence=lambda case: f"{library}'s kernels run on NVIDIA GPUs, not on {case.cluster.gpu.name}",
        fix=lambda case: fix,
    )


LEFT_OUT = "Leave it out, or plan it alone"


def not_built(field: str, why: str) -> Rule:
    """A rule against a field of the layout that the trainer leaves at its default."""
    default = DEFAULTS[field]
    return _planned_alone(
        field, lambda case: getattr(case.layout, field) == default, why, f"Use {field}={as_option(default)}"
    )


def _of_job(field: str, asked: Callable[[TrainingJob], bool], why: str) -> Rule:
    """A rule against a choice of the job that the trainer does not build."""
    return _planned_alone(field, lambda case: not asked(case.job), why, LEFT_OUT)


def _targets_unknown(case: Case) -> list[str]:
    legal = lora_targets(case.model)
    return [name for name in (case.job.adapters.targets if case.job.adapters else ()) if name not in legal]


def _copies_unknown(case: Case) -> list[str]:
    legal = savable_modules(case.model)
    return [name for name in (case.job.adapters.modules_to_save if case.job.adapters else ()) if name not in legal]


def _blends_documents(case: Case) -> str:
    """The feature of a model's attention that its own mask expresses and the trainer's document mask would lose."""
    if case.model.positions == "alibi":
        return "ALiBi"
    window = case.model.sliding_window
    return f"a sliding window of {window} tokens" if window is not None and window < case.job.seq_len else ""


TRAINER: tuple[Rule, ...] = (
    Rule(
        name="family not built",
        field="family",
        holds=lambda case: case.model.described is not None or case.model.family in FORMATS,
        sentence=lambda case: f"the trainer builds no {case.model.family}",
        fix=lambda case: f"Known: {', '.join(FORMATS)}",
    ),
    Rule(
        name="code of the model's folder",
        field="model",
        holds=lambda case: case.model.described is None or not case.model.described.remote_code,
        sentence=lambda case: f"the trainer runs no code of a model's folder, which {case.model.name} is made of",
        fix=lambda case: "Train it with a script of your own: executor run --script",
    ),
    Rule(
        name="experts of another family",
        field="family",
        holds=lambda case: (
            case.model.moe is None or case.model.described is not None or case.model.family in EXPERT_FAMILIES
        ),
        sentence=lambda case: (
            f"the trainer supports the mixtures of experts {one_of(EXPERT_FAMILIES)}, not {case.model.name}"
        ),
        fix=lambda case: "Use one of these, or a dense model",
    ),
    Rule(
        name="adapters for modules that do not exist",
        field="lora_targets",
        holds=lambda case: not _targets_unknown(case),
        sentence=lambda case: (
            f"{_targets_unknown(case)[0]} is not a linear module of a layer of {case.model.name}, a {case.model.family}"
        ),
        fix=lambda case: did_you_mean(_targets_unknown(case)[0], lora_targets(case.model)),
    ),
    Rule(
        name="modules that cannot be copied",
        field="modules_to_save",
        holds=lambda case: not _copies_unknown(case),
        sentence=lambda case: (
            f"{_copies_unknown(case)[0]} is not a module outside the layers of {case.model.name} with its own weight"
        ),
        fix=lambda case: "Leave it out, or use method=full",
    ),
    Rule(
        name="packed documents are not kept apart",
        field="packing",
        holds=lambda case: case.job.packing != "packed" or not _blends_documents(case),
        sentence=lambda case: f"{case.model.name} has {_blends_documents(case)}, which the document mask replaces",
        fix=lambda case: "Use packing=padded",
    ),
    Rule(
        name="recomputation not built",
        field="recompute",
        holds=lambda case: case.layout.recompute in ("none", "full") or case.layout.engine in SELECTIVE,
        sentence=lambda case: f"only whole layers are recomputed where {case.layout.engine} splits them",
        fix=lambda case: f"Use recompute=full, or engine {one_of(SELECTIVE)}",
    ),
    Rule(
        name="attention out of the trainer's reach",
        field="recompute",
        holds=lambda case: case.layout.recompute != "attention" or case.model.family not in OWN_ATTENTION,
        sentence=lambda case: (
            f"Transformers' {case.model.family} calls attention itself, not through the attention interface by which "
            "the trainer recomputes it"
        ),
        fix=lambda case: "Use recompute=full",
    ),
    accepts(
        "optimizer",
        ("adamw", "sgd", *BITSANDBYTES_8BIT),
        "the trainer builds torch's AdamW and SGD and bitsandbytes' 8-bit ones",
    ),
    Rule(
        name="8-bit states of whole weights alone",
        field="optimizer",
        holds=lambda case: case.job.optimizer.name not in BITSANDBYTES_8BIT or case.layout.facts.whole_copies,
        sentence=lambda case: (
            "it is planned, but not launchable yet: checkpoints of 8-bit states are of whole weights, and "
            f"{case.layout.engine} splits them"
        ),
        fix=lambda case: "Use engine ddp, or optimizer adamw or sgd",
    ),
    accepts("precision", ("fp32", "bf16", "pure-bf16"), "the trainer has no loss scaling and no 8-bit products"),
    Rule(
        name="4-bit experts",
        field="method",
        holds=lambda case: (
            case.job.base_quantization is None
            or case.model.moe is None
            or (case.packs_experts and case.layout.facts.framework == "accelerate" and case.layout.facts.whole_copies)
        ),
        sentence=lambda case: (
            "the trainer packs experts where a rank has all of them"
            if case.packs_experts
            else f"bitsandbytes packs linear modules, and the experts of {case.model.name} are one tensor a layer"
        ),
        fix=lambda case: "Use method=lora, or quantize_experts with engine single or ddp",
    ),
    _of_job("adapter_kind", lambda job: bool(job.adapters and job.adapters.kind != "lora"), "adapters are peft's LoRA"),
    _of_job(
        "quantization",
        lambda job: job.base_quantization is not None and job.base_quantization.base != "nf4",
        "bases are packed into nf4",
    ),
    _of_job("image_tokens", lambda job: job.image_tokens > 0, "the trainer has no data of images, and trains on text"),
    _of_job("step_in_backward", lambda job: job.optimizer.in_backward, "weights are stepped after backward"),
    _of_job("paged_states", lambda job: job.optimizer.paged, "states stay on the devices"),
    _planned_alone(
        "method",
        lambda case: case.lora is None or case.parts.adapters == "peft",
        "the trainer's adapters are peft's modules",
        "Use the runtime's default version",
        what="functions of adapters",
    ),
    _planned_alone(
        "loss",
        lambda case: case.layout.loss != "fused",
        "the trainer's own loss in pieces is chunked",
        "Use loss=chunked",
        what="fused loss",
    ),
    _planned_alone(
        "attention",
        lambda case: case.layout.attention in (None, "eager", "sdpa", *FLASH_MODULES),
        "the trainer runs Transformers' eager code, torch's scaled_dot_product_attention and FlashAttention 2 and 3",
        "Use attention=sdpa",
    ),
    _on_gpus("attention", "FlashAttention", lambda case: case.layout.attention in FLASH_MODULES, "Use attention=sdpa"),
    _planned_alone(
        "attention",
        lambda case: case.layout.attention not in FLASH_MODULES or case.job.mean_seq_len is None,
        "the trainer keeps documents apart by a mask, which FlashAttention's kernels do not take",
        "Use attention=sdpa, or leave mean_seq_len out",
        what="FlashAttention of documents",
    ),
    _planned_alone(
        "attention",
        lambda case: case.layout.attention not in FLASH_MODULES or case.layout.recompute in ("none", "full"),
        "the trainer recomputes FlashAttention with whole layers alone",
        "Use recompute=full, or attention=sdpa",
        what="FlashAttention by itself again",
    ),
    _on_gpus("liger", "Liger-Kernel", lambda case: bool(case.layout.liger), "Leave it out"),
    _planned_alone(
        "liger",
        lambda case: not (case.layout.liger and case.layout.facts.splits),
        "its kernels were read over whole modules, which this engine splits",
        LEFT_OUT,
        what="liger of split modules",
    ),
    _planned_alone(
        "liger",
        lambda case: not case.layout.liger or case.model.described is None,
        "its kernels were looked at in families that are written by hand",
        LEFT_OUT,
        what="liger of imported models",
    ),
    _planned_alone(
        "compile",
        lambda case: case.layout.compile != "whole",
        "the trainer compiles layer by layer",
        "Use compile=block",
        what="whole compile",
    ),
    not_built("offload_activations", "activations stay on the devices"),
    not_built("zero_secondary_shard", "gathered weights are kept once"),
)
"""What executor/worker builds, under any engine."""


def readable(framework: str, title: str, folder: str, config: str) -> dict[str, Any]:
    """`read_back` of a file that must parse (PlannerError); `title` is how people write the framework."""
    found = read_back(framework, folder, config)
    if "error" in found:
        raise PlannerError(
            config, None, f"{title} cannot read it: {found['error']}", "Make the run folder again", exit_code=4
        )
    return found


def read_back(framework: str, folder: str, config: str) -> dict[str, Any]:
    """The effective values of a configuration file, as its framework's own code reads it."""
    path = Path(folder) / config
    try:
        stat = path.stat()
    except OSError:
        return {"error": f"{path} is missing"}
    return _read_back(framework, str(path.resolve()), stat.st_mtime_ns, stat.st_size)


RunReader = Callable[[str, str], "CompletedProcess[str]"]
"""What executor.worker.readback says of a file (framework, path). TimeoutError where the framework gives no answer."""


def in_a_process(framework: str, path: str) -> CompletedProcess[str]:
    """Read a file in a process that imports the framework for it: seconds."""
    import subprocess

    command = [sys.executable, "-m", "executor.worker.readback", framework, path]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=READ_BACK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None


_reader: ContextVar[RunReader] = ContextVar("reader", default=in_a_process)


@contextmanager
def read_by(reader: RunReader) -> Iterator[None]:
    """Inside, files are read back by this reader."""
    before = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(before)


@lru_cache(maxsize=32)
def _read_back(framework: str, path: str, modified_ns: int, size: int) -> dict[str, Any]:
    import json  # here alone: the planner imports this module to ask what can be launched, and start time counts

    try:
        done = _reader.get()(framework, path)
    except TimeoutError:
        return {"error": f"its parser did not answer in {READ_BACK_TIMEOUT_S} s"}
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        if "No module named" in reason:
            raise PlannerError(
                framework, None, f"cannot be imported ({reason})", "Install meshwright[run]", exit_code=4
            )
        if done.returncode == MISSING:
            rule = f"installed without what the trainer imports: {reason}"
            raise PlannerError(framework, None, rule, "Install the version of constraints.txt", exit_code=3)
        return {"error": reason}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
