"""Facts of a host and its cards as the system and NVML report them, without timing anything.

What is not said is None or left out, never guessed. Not here: which preset that is (machine.py, planner.spec.devices),
or what torch sees of a device (worker/probe/probe.py).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from executor.system.processes import said
from planner import __version__

INTERFACES = Path("/sys/class/net")
"""Linux, Documentation/ABI/testing/sysfs-class-net: `speed` is in megabits per second, -1 where a link is down;
`device` is there of a physical interface alone."""
RECORDED_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")


def versions() -> dict[str, str]:
    """Python's and each package's that a run imports, as installed; one that is absent is left out."""
    from importlib import metadata  # its parser of mail takes long to load, and most commands ask for no version

    found = {"python": sys.version.split()[0], "meshwright": __version__}
    for name in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor() -> str:
    """The processor's name as Linux gives it, else as Python does."""
    if found := re.search(r"^model name\s*:\s*(.+)$", said(Path("/proc/cpuinfo")), re.MULTILINE):
        return found[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def network_bits_per_s() -> float | None:
    """All physical interfaces that are up, together, as their drivers say (megabits)."""
    up = (one.name for one in INTERFACES.glob("*") if said(one / "operstate") == "up")
    return sum(link_bits_per_s(name) or 0.0 for name in up) or None


def first_visible() -> int | str:
    """The first card that CUDA would show a process started here, by NVML's number or its UUID."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.startswith("GPU-") else int(first) if first.isdigit() else 0


def card_facts(card: int | str) -> dict[str, Any]:
    """NVML's facts of a card, by its number or UUID: bytes, watts, Hz; None where card or driver do not report one.

    Empty where NVML's Python package or library is missing.
    """
    return _of_card(
        card,
        lambda nvml, handle: {
            "name": lambda: nvml.nvmlDeviceGetName(handle),
            "memory_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "driver": nvml.nvmlSystemGetDriverVersion,
            "cuda_driver": nvml.nvmlSystemGetCudaDriverVersion_v2,
            "capability": lambda: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))),
            "power_w": lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3,
            "clock_hz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
            "memory_clock_hz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
            "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
            "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
            "link": lambda: _link(nvml, handle),
        },
    )


def free_memory(card: int | str) -> float | None:
    """Bytes of a card that nothing uses now, or None where NVML does not say."""
    asked = _of_card(card, lambda nvml, handle: {"free": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).free)})
    return asked.get("free")


def link_bits_per_s(interface: str) -> float | None:
    """The speed that a physical interface's driver reports; None for a virtual one."""
    place = INTERFACES / interface
    speed = said(place / "speed")  # -1 where it is down
    return float(speed) * 1e6 if (place / "device").exists() and speed.isdigit() and int(speed) else None


def _of_card(card: int | str, questions: Callable[[Any, Any], Mapping[str, Callable[[], Any]]]) -> dict[str, Any]:
    """NVML's answers about a card; empty where there is no NVML or no such card."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, or no library: each its own type
        return {}
    try:
        by_uuid = isinstance(card, str)
        handle = pynvml.nvmlDeviceGetHandleByUUID(card) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(card)
        return {name: _said(ask, pynvml.NVMLError) for name, ask in questions(pynvml, handle).items()}
    except pynvml.NVMLError:  # no such card
        return {}
    finally:
        pynvml.nvmlShutdown()


def _said(ask: Callable[[], Any], refusal: type[Exception]) -> Any:
    try:
        value = ask()
    except refusal:
        return None
    return value.decode() if isinstance(value, bytes) else value


def _link(pynvml: Any, card: Any) -> str:
    """NVLink with its version where a link is up, else the PCI Express the card sits in."""
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetNvLinkState(card, 0):
            return f"NVLink {pynvml.nvmlDeviceGetNvLinkVersion(card, 0)}"
    return f"PCIe {pynvml.nvmlDeviceGetMaxPcieLinkGeneration(card)} x{pynvml.nvmlDeviceGetMaxPcieLinkWidth(card)}"
