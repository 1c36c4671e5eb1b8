"""Facts of a device and a host that need no timing: what NVML, torch and the system say of themselves.

What is not said is left out, never guessed. Not here: any measurement.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch


def device_facts(device: torch.device) -> dict[str, Any]:
    """The keys of planner.truth.probe.Device."""
    if device.type == "cpu":
        return {"name": processor(), "kind": "cpu", "memory_bytes": _memory_bytes()}
    seen = torch.cuda.get_device_properties(device)
    facts = {
        "name": seen.name,
        "kind": "hip" if torch.version.hip else "cuda",
        "memory_bytes": float(seen.total_memory),
        "capability": f"{seen.major}.{seen.minor}",
        "multiprocessors": seen.multi_processor_count,
    }
    return facts | {key: value for key, value in _nvml_facts(device).items() if value is not None}


def host_facts() -> dict[str, Any]:
    """The keys of planner.truth.probe.Host, of the node that this rank is on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {"processor": processor(), "cores": cores, "memory_bytes": _memory_bytes()}
    return facts | {"network_bits_per_s": _network_bits_per_s()}


def processor() -> str:
    """The processor's name as Linux gives it, else as Python does."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def _memory_bytes() -> float | None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _network_bits_per_s() -> float | None:
    """All physical interfaces that are up, together, as their drivers say (megabits)."""
    total = 0.0
    for interface in Path("/sys/class/net").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if (interface / "device").exists() and (interface / "operstate").read_text().strip() == "up":
                total += max(float((interface / "speed").read_text()), 0.0) * 1e6
    return total or None


def _nvml_facts(device: torch.device) -> dict[str, Any]:
    """Power limit, clocks, driver and NVLink of one card; nothing where NVML is not there."""
    try:
        import pynvml
    except ImportError:
        return {}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            asked = {
                "driver": lambda: str(pynvml.nvmlSystemGetDriverVersion()),
                "power_w": lambda: pynvml.nvmlDeviceGetPowerManagementLimit(card) / 1e3,
                "clock_hz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM) * 1e6,
                "memory_clock_hz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_MEM) * 1e6,
                "link": lambda: _link(pynvml, card),
            }
            facts = {}
            for key, ask in asked.items():
                with contextlib.suppress(pynvml.NVMLError):
                    facts[key] = ask()
            return facts
        finally:
            pynvml.nvmlShutdown()
    return {}


def _link(pynvml: Any, card: Any) -> str:
    """NVLink with its version where a link is up, else the PCI Express the card sits in."""
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetNvLinkState(card, 0):
            return f"NVLink {pynvml.nvmlDeviceGetNvLinkVersion(card, 0)}"
    return f"PCIe {pynvml.nvmlDeviceGetMaxPcieLinkGeneration(card)} x{pynvml.nvmlDeviceGetMaxPcieLinkWidth(card)}"
