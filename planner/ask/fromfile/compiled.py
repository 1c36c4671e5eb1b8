"""What files say of torch.compile: the Trainer's keys, which Axolotl and LLaMA-Factory hand on; Accelerate's section.

Where the job is one that compiled code is not modelled of, the account says so in place of an option. Not here: which
jobs those are in detail (planner/parallelism/rules.py, COMPILED).
"""

from __future__ import annotations

from planner.ask.fromfile.sheet import Sheet
from planner.ask.fromfile.trainer import whole_head
from planner.spec.engines import ENGINES

SECTION = "dynamo_config"
REGIONS = f"{SECTION}.dynamo_use_regional_compilation"
PLAIN_MODES = ("default", "max-autotune-no-cudagraphs")
"""Modes of Inductor that hold what its default does; the others record CUDA graphs, which have memory of their own."""
DOES_NOT_FUSE = ("eager", "aot_eager")


def of_trainer(sheet: Sheet) -> None:
    """`torch_compile`, which a backend or a mode switches on too: the whole model (transformers 5.23.0,
    training_args.py; accelerate 1.15.0, accelerator.py, prepare_model)."""
    keys = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    key = next((key for key in keys if sheet.on(key)), None)
    if key is None or sheet.data.get("torch_compile") == "auto":
        return
    _read(sheet, "whole", key, keys)


def of_accelerate(sheet: Sheet) -> None:
    """The section `dynamo_config`: off, the whole model, or each layer by itself (accelerate 1.15.0,
    utils/dataclasses.py, TorchDynamoPlugin)."""
    key = f"{SECTION}.dynamo_backend"
    if sheet.has(key) and str(sheet.data[key]).upper() in ("NO", "FALSE"):  # YAML 1.1 reads a bare NO as false
        sheet.ignore_section(SECTION, "off")
    elif sheet.has(key):
        _read(sheet, "block" if sheet.flag(REGIONS) else "whole", key, (REGIONS, key, f"{SECTION}.dynamo_mode"))


def _read(sheet: Sheet, compiled: str, key: str, keys: tuple[str, str, str]) -> None:
    """`keys` are the last key that says what is compiled, the backend's and the mode's."""
    backend, mode = (str(sheet.data.get(one) or "").lower() for one in keys[1:])
    if backend in DOES_NOT_FUSE:
        sheet.unmodelled(key, f"backend {backend} fuses nothing, and keeps what its graphs keep", "less")
    elif backend in ("", "inductor") and mode in ("", *PLAIN_MODES) and _is_modelled(sheet):
        sheet.means("compile", compiled, *keys)


def _is_modelled(sheet: Sheet) -> bool:
    """Whether anything is known of such a job under torch.compile, as far as the file has said until now."""
    engines = sheet.says("engine")
    compiles = engines is None or any(ENGINES[name].compiles for name in engines)
    zero3 = sheet.says("zero_stage") == 3 and engines is not None and "deepspeed" in engines
    plain = sheet.says("method") in (None, "full") and sheet.says("packing") != "packed"
    others = ("liger", "loss", "alone", "offload_activations", "offload_params")
    return compiles and not zero3 and plain and whole_head(sheet) and not any(sheet.says(name) for name in others)
