"""The devices of this machine: its GPUs as their driver names them, else its processor; and their preset.

Not here: reading a fact (facts.py), measuring (measure.py), or which preset a name means (planner.spec.devices).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from executor.preflight.preflight import available_memory, visible_gpus
from executor.system import facts
from planner.basics.quantities import GIB
from planner.spec import Cluster, Gpu, presets
from planner.spec.devices import gpu_preset


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`devices` equal devices of one kind ("cpu" or "cuda"); of a CPU as many as there are cores to run on.

    `preset` is the GPU preset it is, or None; `facts` are the driver's words, each None where it does not say.
    """

    kind: str
    devices: int
    name: str
    preset: str | None
    memory_bytes: float | None
    facts: dict[str, Any]

    @property
    def label(self) -> str:
        """Its name as part of an id."""
        return self.preset or re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def cluster(self, ranks: int, started: int) -> Cluster:
        """A cluster of `ranks` devices like this machine's, of which `started` share a CPU's memory.

        More than it has are nodes like those of the preset.
        """
        found = presets.cluster("localhost" if self.kind == "cpu" else self.preset or "h100-sxm-80gb", gpus=ranks)
        if self.kind == "cpu":
            each = available_memory() / started
            return msgspec.structs.replace(found, gpu=msgspec.structs.replace(found.gpu, memory_bytes=each))
        if self.preset is None:  # a card that no preset knows: its memory is known, its rates are not
            card = Gpu(name=self.name, kind="cuda", memory_bytes=self.memory_bytes)
            return msgspec.structs.replace(found, name=self.label, gpu=card)
        return found


def this_machine(device: str | None = None) -> Machine:
    """The GPUs that a process started here would see, else the processor. `device` "cpu" leaves GPUs aside."""
    gpus = 0 if device == "cpu" else visible_gpus()
    if not gpus:
        cores = facts.cores()
        memory_bytes = presets.host_memory_bytes()
        found: dict[str, Any] = {
            "processor": facts.processor(),
            "cores": cores,
            "memory_gib": None if memory_bytes is None else round(memory_bytes / GIB, 2),
        }
        return Machine(kind="cpu", devices=cores, name="cpu", preset="cpu", memory_bytes=None, facts=found)
    found = facts.card_facts(facts.first_visible())
    name, memory = str(found.get("name") or "unknown GPU"), found.get("memory_bytes")
    preset = gpu_preset(name, memory)
    return Machine(kind="cuda", devices=gpus, name=name, preset=preset, memory_bytes=memory, facts=found)
