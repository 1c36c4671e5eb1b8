"""Claims about calibrations: what an entry holds for, what falls back on what, and what is refused.

Not here: the formulas that the numbers go into (test_steptime.py, test_linktime.py).
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from planner.ask.question import Question, case_of
from planner.basics.errors import PlannerError
from planner.figures.memory import memory_breakdown
from planner.figures.steptime import step_time
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import (
    UNCALIBRATED,
    AllocatorEntry,
    Calibration,
    ComputeEntry,
    LinkEntry,
    as_toml,
    calibration,
)

H100 = ("h100-sxm-80gb", "cuda")


def write(folder: Path, name: str, text: str) -> tuple[str, ...]:
    (folder / "calibrations").mkdir(exist_ok=True)
    (folder / "calibrations" / f"{name}.toml").write_text(text)
    return (str(folder),)


def entry(group: str, **facts: object) -> str:
    shown = "\n".join(f"{key} = {value!r}" for key, value in {"source": "test", **facts}.items())
    return f"[[{group}]]\n{shown}\n"


@pytest.mark.slow
def test_every_number_of_every_runtime_on_every_device_has_a_value():
    for runtime in (*presets.names("runtimes"), "another"):
        for gpu in map(presets.gpu, presets.names("gpus")):
            found = calibration().of(runtime, gpu.name, gpu.kind)
            assert found.compute.matmul_share > 0 and found.bands.time_low <= 1 <= found.bands.time_high
            assert found.curve("NVLink 4", "all_reduce").share > 0


def test_what_a_calibration_leaves_out_is_a_guess_that_says_so(tmp_path: Path):
    folders = write(tmp_path, "mine", entry("compute", matmul_share=0.7, n=5, spread=0.03))

    found = calibration("mine", folders).of("torchtitan", *H100)

    assert found.compute.matmul_share == 0.7
    assert found.compute.memory_share == calibration().of("torchtitan", *H100).compute.memory_share
    assert all(one.source.startswith("guess:") for one in calibration().compute if not one.n)


def test_the_entry_that_names_most_decides_and_own_ones_come_before_those_they_are_based_on(tmp_path: Path):
    write(tmp_path, "base", entry("compute", runtime="torchtitan", gpu=H100[0], matmul_share=0.9, memory_share=0.9))
    text = 'based_on = "base"\n' + entry("compute", gpu="cuda", matmul_share=0.4)
    text += entry("compute", gpu=H100[0], matmul_share=0.5) + entry("compute", runtime="nanotron", matmul_share=0.6)
    folders = write(tmp_path, "mine", text + entry("compute", runtime="nanotron", gpu="cuda", matmul_share=0.7))
    mine = calibration("mine", folders)

    assert mine.of("torchtitan", "a100-sxm-80gb", "cuda").compute.matmul_share == 0.4
    assert mine.of("torchtitan", *H100).compute.matmul_share == 0.5
    assert mine.of("nanotron", "cpu", "cpu").compute.matmul_share == 0.6
    assert mine.of("nanotron", *H100).compute.matmul_share == 0.7
    assert mine.of("torchtitan", *H100).compute.memory_share == 0.9
    assert mine.of("torchtitan", "cpu", "cpu").compute.matmul_share == calibration().of("", "", "").compute.matmul_share


def test_links_are_known_by_name_and_collective(tmp_path: Path):
    text = entry("links", link="EFA", share=0.5) + entry("links", link="EFA", op="all_reduce", share=0.6)
    folders = write(tmp_path, "mine", text + entry("links", op="all_reduce", share=0.7))
    found = calibration("mine", folders).of("torchtitan", *H100)

    assert [found.curve("EFA", op).share for op in ("all_gather", "all_reduce")] == [0.5, 0.6]
    assert found.curve("NVLink 4", "all_reduce").share == 0.7
    guesses = calibration(UNCALIBRATED).of("torchtitan", *H100)
    assert found.curve("NVLink 4", "send") == guesses.curve("NVLink 4", "send")


def test_what_is_written_is_read_back_as_it_was(tmp_path: Path):
    one = Calibration(
        name="mine",
        based_on="uncalibrated",
        allocator=(
            AllocatorEntry(runtime="nanotron", fragmentation=0.125, n=3, spread=0.5, source='a "quoted" source'),
        ),
        compute=(ComputeEntry(gpu="cpu", operation_s=1.5e-5, source="µs"),),
        links=(LinkEntry(link="EFA", op="send", half_bytes=2e6, source="x"),),
    )
    read = calibration("mine", write(tmp_path, "mine", as_toml(one)))

    assert msgspec.structs.replace(read, base=None) == one
    assert read.base == calibration(UNCALIBRATED)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[compute]]\nmatmul_share = 0.5\n", "missing required field `source`"),
        (entry("compute", matmul_share=-0.5), r"> 0.*compute\[0\].matmul_share"),
        (entry("compute", matmul_sahre=0.5), "unknown field `matmul_sahre`"),
        ('based_on = "mine"\n', "based on itself"),
        ('based_on = "nobody"\n', "nobody"),
    ],
)
def test_a_calibration_that_cannot_be_trusted_is_refused(tmp_path: Path, text: str, told: str):
    with pytest.raises(PlannerError, match=told):
        calibration("mine", write(tmp_path, "mine", text))


def test_the_allocator_of_a_prediction_is_the_calibrations(tmp_path: Path):
    facts = {"fragmentation": 0.5, "workspace_bytes": 1e9, "context_bytes": 2e9}
    folders = write(tmp_path, "mine", entry("allocator", runtime="accelerate-ddp", **facts))
    job, layout = TrainingJob(), Layout(engine="ddp", dp_replicate=8)

    def case(known: Calibration) -> Case:
        return case_of(Question(presets.model("7b"), presets.cluster("dgx-h100", 8), job, known), layout)

    mine, usual = (memory_breakdown(case(known)) for known in (calibration("mine", folders), calibration()))

    assert mine.peak.total == usual.peak.total
    assert mine.reserved_bytes == (mine.peak.total + 1e9) * 1.5
    assert mine.device_bytes == mine.reserved_bytes + 2e9


def test_a_better_device_share_shortens_the_step_and_bands_scale_it(tmp_path: Path):
    slower = write(tmp_path, "slow", entry("compute", matmul_share=0.7))
    text = entry("compute", matmul_share=0.8) + entry("bands", runtime="accelerate-ddp", time_low=0.5, time_high=1.25)
    known = calibration("mine", write(tmp_path, "mine", text))
    asked = Question(presets.model("7b"), presets.cluster("dgx-h100", 8), TrainingJob(), known)
    case = case_of(asked, Layout(engine="ddp", dp_replicate=8))
    mine = step_time(case, known)

    assert mine.compute_s < step_time(case, calibration("slow", slower)).compute_s
    assert (mine.low_s, mine.high_s) == (mine.step_s * 0.5, mine.step_s * 1.25)


def test_the_packaged_calibrations_are_toml_whose_fitted_entries_carry_evidence():
    for name in presets.names("calibrations"):
        found = calibration(name)
        for group in ("allocator", "compute", "overlap", "links", "bands"):
            for one in getattr(found, group):
                assert one.n == 0 or one.spread is not None, f"{name}: an entry of {group} is fitted without a spread"
        assert tomllib.loads(as_toml(found)) is not None
