"""What this machine has to measure on: its GPUs as their driver names them, else its processor; and their preset.

Not here: measuring (executor.measure), or what a preset says (planner.presets).
"""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import msgspec

from executor.preflight import available_memory, visible_gpus
from planner import presets
from planner.spec import Cluster, Gpu
from planner.units import GIB

MEMORY_ALLOWANCE = 0.08
"""How far a card's memory may be from its preset's: drivers, ECC and PyTorch count it differently by 3 GB of 80."""
USUAL = {"sxm": 0, "pcie": 1, "nvl": 2}
"""Forms of one GPU, the one meant first where the driver's name does not say."""


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
        """So many ranks on devices like this machine's, of which `started` share a CPU's memory.

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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        facts: dict[str, Any] = {
            "processor": _processor(),
            "cores": cores,
            "memory_gib": round(_host_memory() / GIB, 2),
        }
        return Machine(kind="cpu", devices=cores, name="cpu", preset="cpu", memory_bytes=None, facts=facts)
    facts = _nvml_facts()
    name, memory = str(facts.get("name") or "unknown GPU"), facts.get("memory_bytes")
    preset = gpu_preset(name, memory)
    return Machine(kind="cuda", devices=gpus, name=name, preset=preset, memory_bytes=memory, facts=facts)


def gpu_preset(name: str, memory_bytes: float | None) -> str | None:
    """The GPU preset that a driver's name means ("NVIDIA H100 80GB HBM3" is h100-sxm-80gb), or None.

    The family is a word of the name, the memory decides between sizes, and PCIe or NVL is said where it is one.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    form = next((one for one in USUAL if any(word.startswith(one) for word in words)), None)
    found = []
    for preset in presets.names("gpus"):
        parts = [part for part in preset.split("-") if not re.fullmatch(r"\d+gb", part)]
        forms = [part for part in parts if part in USUAL]
        if not words.issuperset(part for part in parts if part not in USUAL):
            continue
        memory = presets.gpu(preset).memory_bytes
        off = abs(memory_bytes / memory - 1) if memory and memory_bytes else 0.0
        if off > MEMORY_ALLOWANCE or (form and forms and forms[0] != form):
            continue
        found.append((USUAL[forms[0]] if forms else 0, -len(parts), off, preset))
    return min(found)[-1] if found else None


def _nvml_facts() -> dict[str, Any]:
    """What NVML says of the first GPU that is visible; empty where its Python package or library is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, or no library: each its own type
        return {}
    handle = pynvml.nvmlDeviceGetHandleByIndex(_first_visible())
    asked = {
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "memory_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "cuda_driver": pynvml.nvmlSystemGetCudaDriverVersion_v2,
        "compute_capability": lambda: ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
        "power_limit_w": lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
        "sm_clock_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "ecc": lambda: bool(pynvml.nvmlDeviceGetEccMode(handle)[0]),
        "mig": lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0]),
        "pcie_generation": lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_width": lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    }
    facts: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            value = ask()
        except pynvml.NVMLError:  # this card or driver does not say
            value = None
        facts[name] = value.decode() if isinstance(value, bytes) else value
    return facts


def _first_visible() -> int:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _host_memory() -> float:
    import psutil  # type: ignore[import-untyped]  # part of the [run] extra

    return float(psutil.virtual_memory().total)
