"""How a trainer's file hands on to DeepSpeed, and what it means when it hands on to nothing.

Not here: DeepSpeed's keys (deepspeed.py) or Trainer's (trainer.py).
"""

from __future__ import annotations

from planner.ask.fromfile import deepspeed, files
from planner.ask.fromfile.sheet import Sheet


def deepspeed_section(sheet: Sheet, key: str) -> None:
    """A path to DeepSpeed's JSON, or the table itself; values beside the trainer's own must agree with them."""
    name = sheet.data.get(key)
    if isinstance(name, str):
        path = files.referenced(name, sheet.path)
        inner = Sheet(deepspeed.NAME, str(path), files.load(path))
        if not deepspeed.detect(inner.tables):
            raise sheet.wrong(key, "is not a DeepSpeed configuration", "Name DeepSpeed's JSON file")
        sheet.ignore(key, f"read as {path}")
    else:
        tables = sheet.tables.get(key)
        inner = Sheet(deepspeed.NAME, f"{sheet.path}: {key}", tables if isinstance(tables, dict) else {})
    own = {name: sheet.says(name) for name in ("micro_batch_size", "grad_accum", "max_grad_norm", "lr", "weight_decay")}
    deepspeed.agree(inner, {name: value for name, value in own.items() if value is not None})
    deepspeed.read(inner, trainer=True)
    sheet.include(inner.close(deepspeed.HARMLESS, deepspeed.NOT_MODELLED), key)


def no_split(sheet: Sheet) -> None:
    """Neither FSDP nor DeepSpeed: torchrun and Accelerate then wrap the model in DDP."""
    note = "neither FSDP nor DeepSpeed is asked for"
    sheet.means("strategy", "ddp", note=note)
    sheet.means("engine", ("ddp",), note=note)
