"""What is refused before anything is made, with the right exit code and a way out."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest
from msgspec.structs import replace
from test_rundir import make_plan

from executor.backends.launched import FLASH_MODULES, LIGER_MODULE, PACKAGES
from executor.folder import ownscript
from executor.folder.checkpoints import expected_bytes
from executor.preflight import preflight
from planner.basics.errors import PlannerError
from planner.inventory import parameters
from planner.parallelism.case import Case
from planner.spec import Gpu, Layout, Optimizer, TrainingJob
from planner.spec.plan import PhaseMemory, Plan, Prediction

GIB = 2**30
DDP = Layout(engine="ddp", dp_replicate=2)


def on(kind: str, peak: float | None = None) -> Plan:
    plan = make_plan(DDP)
    memory = (PhaseMemory(phase="backward", terms={"params": peak}),) if peak else ()
    cluster = msgspec.structs.replace(plan.cluster, gpu=Gpu(name="device", kind=kind))
    return msgspec.structs.replace(plan, cluster=cluster, prediction=Prediction(memory=memory))


def refusal(check: object, *arguments: object, **named: object) -> PlannerError:
    with pytest.raises(PlannerError) as caught:
        check(*arguments, **named)  # type: ignore[operator]
    assert "\n" not in caught.value.sentence
    return caught.value


def test_ranks_are_spread_evenly_and_an_uneven_split_names_those_that_work():
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))

    assert (preflight.check_shape(plan, 1), preflight.check_shape(plan, 2)) == (2, 1)
    for nodes in (3, 0, -1):
        error = refusal(preflight.check_shape, plan, nodes)
        assert error.exit_code == 2 and "Try 1, 2" in error.sentence


def test_a_layout_that_is_not_its_cluster_is_refused():
    plan = make_plan(Layout(engine="ddp", dp_replicate=4))
    assert "the layout has 4 ranks" in refusal(preflight.check_shape, plan, 1).sentence


def test_a_cuda_plan_needs_its_devices_here():
    preflight.check_devices(on("cuda"), found=2)
    preflight.check_devices(on("cpu"), found=0)
    for found, shown in ((0, "no CUDA device"), (1, "1 CUDA device")):
        error = refusal(preflight.check_devices, on("cuda"), found=found)
        assert error.exit_code == 3 and shown in error.sentence


def test_another_release_than_the_plan_describes_is_doubted_and_a_repair_of_the_same_is_not():
    plan = on("cpu")
    runtime = msgspec.structs.replace(plan.runtime, version="transformers 5.23.0, torch 2.13, peft 018ca9d, vllm 1.0")
    plan = msgspec.structs.replace(plan, runtime=runtime)

    preflight.check_versions(plan, {"transformers": "5.23.4", "torch": "2.13.1+cu130", "peft": "0.21"})
    preflight.check_versions(on("cpu"))
    with pytest.raises(preflight.Doubt) as caught:
        preflight.check_versions(plan, {"transformers": "4.57.6", "torch": "2.9.0"})

    told = caught.value.sentence
    assert told.startswith("versions=transformers 4.57.6 and torch 2.9.0: differs from what the plan's figures")
    assert "describe, transformers 5.23.0 and torch 2.13. planner presets runtimes lists" in told


def test_devices_hidden_from_cuda_are_not_counted(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for visible, expected in ((None, 2), ("", 0), ("1", 1), ("0,1", 2), ("0,7,1", 1), ("-1", 0), ("GPU-x", 1)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert preflight.visible_gpus() == expected, visible


def test_the_predicted_peaks_of_all_ranks_must_fit_the_host_together():
    preflight.check_host_memory(on("cpu", 2 * GIB), available=4 * GIB)
    preflight.check_host_memory(on("cpu"), available=1)  # nothing predicted, nothing to say
    preflight.check_host_memory(on("cuda", 80 * GIB), available=1)
    error = refusal(preflight.check_host_memory, on("cpu", 2 * GIB), available=4 * GIB - 1)
    assert error.exit_code == 3 and "2 ranks x 2.00 GiB" in error.sentence


def test_what_every_rank_takes_to_load_must_fit_a_gpu_hosts_memory():
    plan = on("cuda")
    twice = 2 * 4 * max(weight.elements for weight in Case.of(plan).weights())
    preflight.check_loading_memory(plan, available=2 * twice, ranks=2)
    preflight.check_loading_memory(on("cpu"), available=1, ranks=2)
    error = refusal(preflight.check_loading_memory, plan, available=2 * twice - 1, ranks=2)
    assert error.exit_code == 3 and "loading takes that much" in error.sentence

    layout = Layout(engine="deepspeed-autotp", zero_stage=1, tp=2)
    cut = msgspec.structs.replace(plan, layout=layout)
    whole = 4 * parameters(plan.model)
    preflight.check_loading_memory(cut, available=2 * whole, ranks=2)
    refusal(preflight.check_loading_memory, cut, available=2 * whole - 1, ranks=2)


def test_a_disk_must_have_room_for_the_weights(tmp_path):
    preflight.check_disk(tmp_path / "not" / "yet", 1, "--run-dir", "fix")
    error = refusal(preflight.check_disk, tmp_path / "not" / "yet", 2**80, "--run-dir", "Name another")
    assert error.exit_code == 3 and "Name another" in error.sentence


def test_this_machine_has_some_memory_free():
    assert 2**20 < preflight.available_memory() < 2**50


@pytest.mark.slow
def test_software_that_is_installed_passes():
    preflight.check_software(DDP, TrainingJob(optimizer=Optimizer(name="lion-8bit")))
    preflight.check_software(replace(DDP, engine="deepspeed"), TrainingJob(method="qlora"))


def test_8_bit_optimizers_need_bitsandbytes(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    preflight.check_software(DDP, TrainingJob())
    error = refusal(preflight.check_software, DDP, TrainingJob(optimizer=Optimizer(name="adamw-8bit")))
    assert error.exit_code == 3 and "bitsandbytes not installed" in error.sentence


@pytest.mark.parametrize(
    ("chosen", "module"),
    [*(({"attention": name}, module) for name, module in FLASH_MODULES.items()), ({"liger": ("norm",)}, LIGER_MODULE)],
)
def test_other_code_needs_its_package(monkeypatch, chosen, module):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else name)
    preflight.check_software(replace(DDP, attention="sdpa"), TrainingJob())
    error = refusal(preflight.check_software, replace(DDP, **chosen), TrainingJob())
    assert error.exit_code == 3 and f"{module} not installed" in error.sentence
    assert error.fix.endswith(f"pip install {PACKAGES[module]}")


def test_a_script_that_is_not_there_is_refused(tmp_path):
    (script := tmp_path / "train.py").write_text("")
    ownscript.check_script(str(script))
    assert refusal(ownscript.check_script, str(tmp_path / "absent.py")).exit_code == 2


@pytest.mark.parametrize(("kind", "peak"), [("cuda", 0.0), ("cpu", 2.0 * GIB)])
def test_copies_of_checkpoints_need_host_memory_on_a_cpu_beside_the_ranks_own(kind, peak):
    plan = on(kind, 2.0 * GIB)
    need = 2 * peak + expected_bytes(plan)

    preflight.check_copy_memory(plan, available=need, ranks=2)
    error = refusal(preflight.check_copy_memory, plan, available=need - 1, ranks=2)
    assert (error.field, error.exit_code) == ("--checkpoint-every", 3)
