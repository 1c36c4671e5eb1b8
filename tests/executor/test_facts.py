"""What the system and NVML say of a host, its interfaces and its cards; what they do not say is left out.

The interfaces are files as Linux shows them, and NVML is the test's own, since a quick test has no card. Not here: a
real card (tests/gpu).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.system import facts


def interface(root: Path, name: str, speed: str | None, state: str = "up", physical: bool = True) -> None:
    (root / name).mkdir()
    (root / name / "operstate").write_text(state + "\n")
    if speed is not None:
        (root / name / "speed").write_text(speed + "\n")
    if physical:
        (root / name / "device").mkdir()


def test_the_speeds_of_physical_interfaces_that_are_up_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "INTERFACES", tmp_path)
    assert facts.network_bits_per_s() is None
    interface(tmp_path, "down", "25000", state="down")
    interface(tmp_path, "virtual", "10000", physical=False)
    interface(tmp_path, "silent", None)
    interface(tmp_path, "odd", "fast")
    interface(tmp_path, "unknown", "-1")
    interface(tmp_path, "nought", "0")
    assert facts.network_bits_per_s() is None
    interface(tmp_path, "first", "100000")
    interface(tmp_path, "second", "1")
    assert facts.network_bits_per_s() == 100e9 + 1e6

    assert facts.link_bits_per_s("first") == 100e9 and facts.link_bits_per_s("second") == 1e6
    assert facts.link_bits_per_s("down") == 25e9  # what it can, whether or not a cable is in
    for name in ("virtual", "silent", "odd", "unknown", "nought", "none"):
        assert facts.link_bits_per_s(name) is None


@pytest.mark.parametrize(
    ("listed", "first"),
    [(None, 0), ("", 0), ("3", 3), ("2,5", 2), (" 4 ,1", 4), ("GPU-8f,GPU-1", "GPU-8f"), ("MIG-1", 0), ("-1", 0)],
)
def test_the_first_card_is_the_first_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, first: int | str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert facts.first_visible() == first


class Refused(Exception):
    """As NVMLError."""


class Library(SimpleNamespace):
    """NVML of a host with two cards, the second of which has no link and says little."""

    NVMLError, NVML_CLOCK_SM, NVML_CLOCK_MEM = Refused, 1, 2
    open = 0

    def __getattr__(self, name: str) -> Any:
        def call(handle: int | None = None, what: int | None = None) -> Any:
            answers = {
                "nvmlDeviceGetName": [b"NVIDIA H100", "NVIDIA X"],
                "nvmlDeviceGetMemoryInfo": [SimpleNamespace(total=8 * 10**10, free=7 * 10**10), None],
                "nvmlDeviceGetCudaComputeCapability": [(9, 0), None],
                "nvmlDeviceGetPowerManagementLimit": [700_000, None],
                "nvmlDeviceGetMaxClockInfo": [{1: 1980, 2: 2619}.get(what or 0), None],
                "nvmlDeviceGetEccMode": [(1, 0), (0, 1)],
                "nvmlDeviceGetMigMode": [(0, 1), (1, 0)],
                "nvmlDeviceGetNvLinkState": [1 if what == 0 else None, 0],
                "nvmlDeviceGetNvLinkVersion": [4 if what == 0 else None, None],
                "nvmlDeviceGetMaxPcieLinkGeneration": [5, 4],
                "nvmlDeviceGetMaxPcieLinkWidth": [16, 8],
                "nvmlSystemGetDriverVersion": [b"570.1"],
                "nvmlSystemGetCudaDriverVersion_v2": [12080],
            }
            answer = answers[name][handle or 0]
            if answer is None:
                raise Refused(name)
            return answer

        return call

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, card: int) -> int:
        if card not in (0, 1):
            raise Refused("no such card")
        return card

    def nvmlDeviceGetHandleByUUID(self, card: str) -> int:
        return {"GPU-0": 0, "GPU-1": 1}[card]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_a_card_says_bytes_watts_and_hertz(library: Library) -> None:
    wanted = {
        "name": "NVIDIA H100", "memory_bytes": 8e10, "driver": "570.1", "cuda_driver": 12080, "capability": "9.0",
        "power_w": 700.0, "clock_hz": 1.98e9, "memory_clock_hz": 2.619e9, "ecc": True, "mig": False, "link": "NVLink 4",
    }  # fmt: skip
    assert facts.card_facts(0) == facts.card_facts("GPU-0") == wanted
    assert facts.free_memory(0) == 7e10
    assert library.open == 0


def test_what_a_card_does_not_say_is_none_and_a_link_that_is_down_is_the_bus(library: Library) -> None:
    found = facts.card_facts("GPU-1")
    assert {name for name, value in found.items() if value is None} == {
        "memory_bytes", "capability", "power_w", "clock_hz", "memory_clock_hz"}  # fmt: skip
    assert (found["name"], found["link"], found["ecc"], found["mig"]) == ("NVIDIA X", "PCIe 4 x8", False, True)
    assert facts.free_memory(1) is None


def test_no_such_card_and_no_library_say_nothing(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.card_facts(2) == {} and facts.free_memory(2) is None
    assert library.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert facts.card_facts(0) == {} and facts.free_memory(0) is None
