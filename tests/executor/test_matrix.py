"""The measurement matrix: what it holds for which machine, edges found by the planner, ids, and refusals.

Not here: running a cell (tests/cluster/test_measure.py), rows (test_measure.py).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from executor.measure.machine import Machine, this_machine
from executor.measure.matrix import BEYOND, MatrixCell, cells
from planner.basics.errors import PlannerError
from planner.basics.quantities import GIB
from planner.spec import presets
from planner.spec.devices import gpu_preset

HEAD = '[[cells]]\non = "cpu"\n'
PLAIN = HEAD + 'model = "tiny-llama"\nlayout = "single"\n'


@lru_cache(maxsize=32)
def built_in(name: str, machine_name: str, world: int | None) -> list[MatrixCell]:
    return cells(name, MACHINES[machine_name], world)


def card(devices: int = 1, preset: str = "h100-sxm-80gb", name: str = "NVIDIA H100 80GB HBM3") -> Machine:
    return Machine(kind="cuda", devices=devices, name=name, preset=preset, memory_bytes=80 * GIB, facts={})


MACHINES = {"cpu": this_machine("cpu"), "1 gpu": card(), "8 gpus": card(8)}


def matrix(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def share(cell: MatrixCell) -> float:
    one = cell.estimate
    return one.memory.device_bytes / one.case.cluster.gpu.memory_bytes


def refusal(folder: Path, text: str) -> PlannerError:
    with pytest.raises(PlannerError) as refused:
        cells(matrix(folder, text), this_machine("cpu"))
    assert refused.value.exit_code == 2
    return refused.value


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("small", None), ("full", None), ("small", 8), ("full", 8)])
@pytest.mark.parametrize("machine", ["cpu", "1 gpu", "8 gpus"])
def test_every_built_in_cell_can_be_planned_and_has_an_id_of_its_own(name: str, world: int | None, machine: str):
    found = built_in(name, machine, world)

    assert found and [cell.refusal for cell in found if cell.refusal] == []
    assert len({cell.id for cell in found}) == len(found)
    for cell in found:
        assert cell.plan.layout.world_size == (world or cell.plan.layout.world_size) and cell.fake_world == bool(world)
        assert cell.plan.layout.world_size <= (world or max(MACHINES[machine].devices, 4))


@pytest.mark.slow
def test_the_full_matrix_holds_the_small_one_under_the_same_ids():
    for machine in MACHINES:
        small, full = ({cell.id for cell in built_in(name, machine, None)} for name in ("small", "full"))
        assert small < full


@pytest.mark.slow
def test_one_gpu_gets_models_up_to_8b_and_cells_on_both_sides_of_the_boundary():
    found = built_in("full", "1 gpu", None)

    assert "llama-3-8b" in {cell.plan.model.name for cell in found}
    beyond = [cell for cell in found if share(cell) > 1]
    assert all(share(cell) > BEYOND for cell in beyond)
    assert 0 < len(beyond) < len(found) / 2
    assert sum(0.9 < share(cell) <= 1 for cell in found) > 10


@pytest.mark.slow
def test_a_smaller_card_gets_other_cells_none_of_them_hopeless():
    small = cells("small", card(preset="t4-16gb", name="Tesla T4"))
    assert {cell.plan.model.name for cell in small} < {
        cell.plan.model.name for cell in built_in("small", "1 gpu", None)
    }
    assert all(share(cell) <= 1 or share(cell) > BEYOND for cell in small)


def test_largest_is_the_last_micro_batch_that_fits_and_beyond_the_first_well_past_it(tmp_path: Path):
    text = (
        HEAD + 'model = "mini-llama"\nlayout = "single"\nprecision = "fp32"\nseq_len = 256\nmemory_limit_gib = 0.5\n'
        'micro_batch_size = ["largest", "beyond"]\n'
    )
    largest, beyond = cells(matrix(tmp_path, text), this_machine("cpu"))

    first = beyond.plan.layout.micro_batch_size
    assert share(largest) <= 1 and share(beyond) > BEYOND
    assert largest.memory_limit == beyond.memory_limit == 0.5 * GIB
    one_more = text.replace('["largest", "beyond"]', str([largest.plan.layout.micro_batch_size + 1, first - 1]))
    assert cells(matrix(tmp_path, one_more), this_machine("cpu")) == []  # they do not fit: a product leaves them out
    one_less = text.replace('"largest", ', "").replace("0.5", str(0.5 * (share(beyond) + 0.01) / BEYOND))
    (bisected,) = cells(matrix(tmp_path, one_less), this_machine("cpu"))
    assert bisected.plan.layout.micro_batch_size == first + 1


def test_a_fake_world_fills_nodes_with_tensor_groups_and_shards_over_the_rest():
    by_layout = {cell.options["runtime"]: cell.plan.layout for cell in cells("small", card(), 64)}
    tp, hsdp = by_layout["transformers-tp"], by_layout["accelerate-fsdp2"]
    assert (tp.tp, tp.dp_shard, tp.world_size) == (8, 8, 64)
    assert hsdp.world_size == 64


def test_what_the_planner_refuses_is_a_cell_with_its_reason(tmp_path: Path):
    text = HEAD + 'model = "gpt2"\nlayout = "single"\nseq_len = 100000\n'
    (found,) = cells(matrix(tmp_path, text), this_machine("cpu"))
    assert found.estimate is None and "seq_len=100000" in found.refusal

    text = HEAD + 'model = "tiny-llama"\nlayout = "single"\noptimizer = "lion"\n'
    (found,) = cells(matrix(tmp_path, text), this_machine("cpu"))
    assert "optimizer=lion" in found.refusal


def test_a_mistake_in_a_matrix_names_the_table_and_the_key(tmp_path: Path):
    assert (
        "cells[1]: precison=fp32: is not an option of planner estimate. Did you mean precision"
        in refusal(tmp_path, HEAD + 'model = "tiny-llama"\nprecison = "fp32"\n').sentence
    )
    assert "cells[1]: layout=fsdp3" in refusal(tmp_path, HEAD + 'model = "tiny-llama"\nlayout = "fsdp3"\n').sentence
    assert "model: is missing" in refusal(tmp_path, HEAD + 'layout = "single"\n').sentence
    assert "cells[1]: gpus=two: must be" in refusal(tmp_path, PLAIN + 'gpus = "two"\n').sentence
    assert "memory_limit_gib=-1: must be" in refusal(tmp_path, PLAIN + "memory_limit_gib = -1\n").sentence
    assert "holds no [[cells]]" in refusal(tmp_path, "a = 1\n").sentence
    assert "is not TOML" in refusal(tmp_path, "[[cells]\n").sentence
    with pytest.raises(PlannerError, match="cannot be read"):
        cells(str(tmp_path / "absent.toml"), this_machine("cpu"))


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 93.6, "h100-nvl-94gb"),
        ("NVIDIA A100-SXM4-80GB", 80.0, "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40.0, "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", 80.0, "a100-pcie-80gb"),
        ("NVIDIA H200", 140.4, "h200-141gb"),
        ("NVIDIA GeForce RTX 4090", 24.0, "rtx-4090-24gb"),
        ("NVIDIA L4", 22.5, "l4-24gb"),
        ("NVIDIA L40S", 45.0, "l40s-48gb"),
        ("Tesla T4", 15.0, "t4-16gb"),
        ("Tesla V100-SXM2-32GB", 32.0, "v100-32gb"),
        ("NVIDIA A10G", 22.5, "a10g-24gb"),
        ("NVIDIA Q9000 Imaginary", 80.0, None),
    ],
)
def test_a_driver_s_name_finds_its_preset(name: str, gib: float, preset: str | None):
    assert gpu_preset(name, gib * GIB) == preset


def test_a_card_that_no_preset_knows_has_its_memory_and_no_rates():
    unknown = Machine(kind="cuda", devices=1, name="NVIDIA Q9000", preset=None, memory_bytes=10 * GIB, facts={})
    gpu = unknown.cluster(1, 1).gpu
    assert (gpu.name, gpu.memory_bytes, gpu.flops_per_s) == ("NVIDIA Q9000", 10 * GIB, {})
    assert all(cell.estimate.time.step_s is None for cell in cells("small", unknown))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('precision = "bf17"', "mxfp8 or nvfp4. Did you mean bf16"),
        ('reshard_after_forward = "yes"', "must be true or false"),
        ("seq_len = true", "must be a value of its own. See --seq-len"),
    ],
)
def test_an_option_that_a_command_line_would_not_take_is_refused_with_the_table_it_is_in(tmp_path, line, rule):
    error = refusal(tmp_path, f'[[cells]]\non = "cpu"\nmodel = "tiny-llama"\nlayout = "ddp"\n{line}\n')

    assert error.field == f"mine.toml: cells[1]: {line.split()[0]}"
    assert rule in error.sentence


@pytest.mark.parametrize(
    ("share", "preset"), [(0.921, "h100-sxm-80gb"), (1.079, "h100-sxm-80gb"), (0.919, None), (1.081, None)]
)
def test_a_cards_memory_may_be_8_percent_from_its_presets(share: float, preset: str | None):
    assert gpu_preset("NVIDIA H100 80GB HBM3", share * presets.gpu("h100-sxm-80gb").memory_bytes) == preset
