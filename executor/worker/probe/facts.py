"""The device and host of a probe's rank, as torch, NVML and the system describe them.

Not here: reading what NVML and the system say (executor/system/facts.py), or any measurement.
"""

from __future__ import annotations

from typing import Any

import torch

from executor.system import facts
from planner.calibrate.probe import Device
from planner.spec.presets import host_memory_bytes


def device_facts(device: torch.device) -> dict[str, Any]:
    """The keys of planner.calibrate.probe.Device, those that are known: torch's words before NVML's."""
    if device.type == "cpu":
        return {"name": facts.processor(), "kind": "cpu", "memory_bytes": host_memory_bytes()}
    seen = torch.cuda.get_device_properties(device)
    found = facts.card_facts(f"GPU-{seen.uuid}") | {
        "name": seen.name,
        "kind": "hip" if torch.version.hip else "cuda",
        "memory_bytes": float(seen.total_memory),
        "capability": f"{seen.major}.{seen.minor}",
        "multiprocessors": seen.multi_processor_count,
    }
    return {key: found[key] for key in Device.__struct_fields__ if found.get(key) is not None}


def host_facts() -> dict[str, Any]:
    """The keys of planner.calibrate.probe.Host, of the node that this rank is on."""
    return {
        "processor": facts.processor(),
        "cores": facts.cores(),
        "memory_bytes": host_memory_bytes(),
        "network_bits_per_s": facts.network_bits_per_s(),
    }
