"""Claims about the seconds of single kernels: by hand where a hand can follow, and laws over all GPUs with numbers.

Not here: how near they are to measurements (test_kernel_tables.py, and `make kernels-judge`).
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.basics.errors import PlannerError
from planner.basics.formula import trace
from planner.figures.kernels.attention import attention_bytes, attention_kernel_seconds, causal_flops
from planner.figures.kernels.collectives import across_seconds, domain_seconds, log2_up, shared_cards_rate
from planner.figures.kernels.experts import expert_rows, experts_seconds, grouped_seconds, routed
from planner.figures.kernels.products import (
    Device,
    Product,
    bounded_seconds,
    cast_seconds,
    cold_bytes,
    device_of,
    held_back_seconds,
    kernel_seconds,
    named,
    product_seconds,
    products_seconds,
    waves_of,
)
from planner.figures.kernels.step import formats_known
from planner.spec import presets
from planner.spec.kernel_times import FOLDER, KernelTimes, ProductTimes, folders, kernel_times

PLAIN = ProductTimes(
    format="bf16", stepped=1.0, tile_s=0.0, launch_s=0.0, memory_share=1.0, flop_j=1e-30, byte_j=1e-30, settle_s=0.0,
    share=1.0, share_16k=0.01, share_8k=0.01, share_4k=0.01, ramp=0.0, sharpness=60.0, split_s=0.0, source="by hand",
)  # fmt: skip
TEN = Device("ten", {"bf16": 1e13}, 1e30, math.inf, KernelTimes(gpu="ten", multiprocessors=10, l2_bytes=1.0))
"""Ten multiprocessors of 1 TFLOP/s each, and a memory that takes no time."""
WITH_NUMBERS = [name for name in presets.names("gpus") if kernel_times(name) is not None]
MEASURED = [name for name in WITH_NUMBERS if kernel_times(name).products]
sizes = st.integers(1, 40_000)


def alone(m: float, n: float, k: float, one: ProductTimes = PLAIN) -> float:
    return kernel_seconds(m, n, k, 1e13, 0.0, TEN, one)


def bf16(gpu: str) -> tuple[Device, ProductTimes]:
    device = named(gpu)
    return device, device.times.product("bf16")


def test_whole_waves_of_whole_tiles_run_at_the_peak():
    # 2 x 10 tiles of 256 x 256 on ten multiprocessors: two waves of 2 x 65,536 x 1,000 FLOP at 1 TFLOP/s
    assert alone(512, 2560, 1000) == pytest.approx(2 * 131.072e-6)
    assert alone(512, 2560, 1000) == pytest.approx(2 * 512 * 2560 * 1000 / 1e13)


def test_one_row_more_costs_a_row_of_the_tile_that_wastes_least():
    # 513 rows are five rows of 128 x 256 tiles: 5 x 10 tiles, five waves of 65.536 us; of 256 x 256 it would be three
    # waves of 131.072 us.
    assert alone(513, 2560, 1000) == pytest.approx(5 * 65.536e-6)


def test_where_there_is_one_tile_its_loop_is_split():
    # One tile of 256 x 256 with k split in eight, or two of 128 x 256 in four: eight parts of 131.072 us side by side.
    assert alone(256, 256, 8000) == pytest.approx(2 * 65536 * 1000 / 1e12)
    dear = msgspec.structs.replace(PLAIN, split_s=1.0)
    assert alone(256, 256, 8000, dear) == pytest.approx(2 * 32768 * 8000 / 1e12)  # two tiles, nothing split


def test_filling_the_loop_costs_elements_of_k_and_a_tile_its_start():
    ramped = msgspec.structs.replace(PLAIN, ramp=200.0, tile_s=5e-6)
    # 256 x 256 in two waves; in 256 x 128 it were four waves with four starts
    assert alone(512, 2560, 1000, ramped) == pytest.approx(2 * (131.072e-6 * 1.2 + 5e-6))


def test_waves_between_whole_ones_and_as_many_as_there_are():
    assert waves_of(25, 10, 1.0) == 3
    assert waves_of(25, 10, 0.0) == 2.5
    assert waves_of(25, 10, 0.4) == pytest.approx(0.4 * 3 + 0.6 * 2.5)
    assert waves_of(4, 10, 0.0) == 1  # a tile is not shared out


def test_arithmetic_and_memory_beside_each_other():
    assert bounded_seconds(3.0, 4.0, 1.0) == 7
    assert bounded_seconds(3.0, 4.0, 2.0) == pytest.approx(5)
    assert bounded_seconds(3.0, 4.0, 50.0) == pytest.approx(4)


def test_half_of_what_just_fits_the_cache_comes_from_memory_and_little_of_less():
    assert cold_bytes(80.0, 80.0, 100.0) == pytest.approx(40)
    assert cold_bytes(40.0, 40.0, 100.0) == pytest.approx(40 / 17)
    assert cold_bytes(40.0, math.inf, 100.0) == 40


def test_power_holds_a_long_kernel_back_and_a_short_one_not():
    assert held_back_seconds(1.0, 500.0, 250.0, 0.0) == 2  # 500 J at 250 W
    assert held_back_seconds(1.0, 500.0, 250.0, 1.0) == pytest.approx(1.5)
    assert held_back_seconds(1.0, 500.0, 250.0, 1e9) == pytest.approx(1)
    assert held_back_seconds(1.0, 100.0, 250.0, 0.0) == 1


def test_a_cast_reads_sixteen_bits_and_writes_eight():
    assert cast_seconds(1000, 2000, 3e6, 0.5) == pytest.approx(3 * 2e6 / 1.5e6)


@given(m=sizes, n=sizes, k=sizes)
@settings(max_examples=25, deadline=None)
def test_a_product_is_never_faster_than_the_peak_nor_than_its_operands_arrive(m: int, n: int, k: int):
    for gpu in MEASURED:
        device, one = bf16(gpu)
        found = product_seconds(m, n, k, device, one)
        assert found > 2 * m * n * k / (device.peak("bf16") * max(one.share, 1.0))
        weights_s = 2 * n * k / device.bytes_per_s
        assert found > weights_s
        assert found >= (2 * m * n * k * one.flop_j) / device.power_w


@given(m=sizes, n=sizes, k=sizes, more=st.integers(1, 3000))
@settings(max_examples=25, deadline=None)
def test_a_larger_product_takes_no_less_time(m: int, n: int, k: int, more: int):
    for gpu in ("a100-sxm-80gb", "b200-180gb", "l40s-48gb"):
        device, one = bf16(gpu)
        here = product_seconds(m, n, k, device, one) * (1 - 1e-12)
        for larger in ((m + more, n, k), (m, n + more, k), (m, n, k + more)):
            assert product_seconds(*larger, device, one) >= here


def test_columns_are_what_numbers_are_one_by_one():
    chance = np.random.default_rng(1)
    m, n, k = (chance.integers(1, 20_000, 30).astype(float) for _ in "mnk")
    for gpu in MEASURED:
        device, one = bf16(gpu)
        column = product_seconds(m, n, k, device, one, 5.0, sustained=False)
        single = [product_seconds(*each, device, one, 5.0, sustained=False) for each in zip(m, n, k, strict=True)]
        np.testing.assert_allclose(column, single, rtol=1e-12)
    device = named("h100-sxm-80gb")
    attention, collective = device.times.attend(), device.times.collective("all_reduce")
    batch, heads = np.ceil(m / 5000), np.ceil(n / 500)
    column = attention_kernel_seconds(batch, k, heads, heads, 128, device, attention)
    single = [
        attention_kernel_seconds(*each, 128, device, attention) for each in zip(batch, k, heads, heads, strict=True)
    ]
    np.testing.assert_allclose(column, single, rtol=1e-12)
    column = domain_seconds("all_reduce", m * n, batch, 450e9, collective)
    single = [domain_seconds("all_reduce", a * b, c, 450e9, collective) for a, b, c in zip(m, n, batch, strict=True)]
    np.testing.assert_allclose(column, single, rtol=1e-12)


def test_a_list_of_products_is_their_sum_by_format_and_count():
    device, one = bf16("h100-sxm-80gb")
    eight = device.times.product("fp8")
    both = products_seconds([Product(4096, 4096, 4096, 3), Product(4096, 8192, 4096, 1, "fp8")], device)
    assert both == pytest.approx(
        3 * product_seconds(4096, 4096, 4096, device, one) + product_seconds(4096, 8192, 4096, device, eight)
    )
    column = products_seconds([Product(np.array([128.0, 4096.0]), 4096, 4096)], device)
    assert column[1] == pytest.approx(product_seconds(4096, 4096, 4096, device, one))
    assert products_seconds([Product(1, 1, 1, 1, "fp8")], named("a100-sxm-80gb")) is None


def test_a_step_holds_clocks_back_more_than_a_benchmark():
    device, one = bf16("l40s-48gb")
    short = product_seconds(4096, 4096, 4096, device, one, sustained=False)
    assert product_seconds(4096, 4096, 4096, device, one) > 1.1 * short


def test_what_nobody_measured_is_the_nearest_gpus_and_says_so():
    assert named("h100-pcie-80gb").times.product("bf16").gpu == "h100-sxm-80gb"
    assert named("gb300-279gb").times.product("fp8").gpu == "b300-270gb"
    assert named("b200-180gb").times.expert("bf16").gpu == "h100-sxm-80gb"
    assert named("h100-sxm-80gb").times.attend(backward=True).backward_share is not None
    assert named("cpu") is None
    assert kernel_times("../gpus/cpu") is None
    assert device_of(msgspec.structs.replace(presets.gpu("h100-sxm-80gb"), memory_bytes_per_s=None)) is None


def test_a_new_gpu_needs_to_name_one_that_is_near(tmp_path: Path):
    """Whose own nearest ones then tell the rest: an H100's backward of attention is a B200's."""
    (tmp_path / FOLDER).mkdir()
    chip = "multiprocessors = 132\nl2_bytes = 5e7\nnearest = {}\n"
    (tmp_path / FOLDER / "near.toml").write_text(chip.format('["h100-sxm-80gb"]'))
    (tmp_path / FOLDER / "apart.toml").write_text(chip.format("[]"))
    near, apart = (kernel_times(name, (str(tmp_path), *folders())) for name in ("near", "apart"))

    assert [one.gpu for one in near.chain][1:3] == ["h100-sxm-80gb", kernel_times("h100-sxm-80gb").nearest[0]]
    assert near.attend(backward=True) == named("h100-sxm-80gb").times.attend(backward=True)
    known, unknown = (Device("mine", {"bf16": 1e15, "fp8": 2e15}, 3e12, 700.0, times) for times in (near, apart))
    assert formats_known(known, ("bf16", "fp8"))
    assert not formats_known(unknown, ("bf16",))

    (tmp_path / FOLDER / "wrong.toml").write_text(chip.format('["h100-smx-80gb"]'))
    with pytest.raises(PlannerError, match=r"wrong.toml: nearest=h100-smx-80gb.*Did you mean .*h100-sxm-80gb"):
        kernel_times("wrong", (str(tmp_path), *folders())).product("bf16")


@pytest.mark.parametrize("gpu", WITH_NUMBERS)
def test_every_file_is_of_a_gpu_names_known_ones_and_has_a_product(gpu: str):
    times = kernel_times(gpu)
    told = {"first_tile"} if times.first_tile else set()
    assert set(times.sources) == {"generation", "multiprocessors", "l2_bytes", "nearest"} | told
    chain = [one.gpu for one in times.chain]
    assert chain[: len(times.nearest) + 1] == [gpu, *times.nearest] and len(times.nearest) > 0
    assert len(set(chain)) == len(chain)
    assert times.product("bf16") is not None
    assert all(one.source and (one.n or one.source.startswith("guess")) for one in times.products)


def test_attention_is_never_faster_than_the_pairs_it_needs_and_backward_takes_longer():
    device = named("b200-180gb")
    one = device.times.attend(backward=True)
    for batch, seq, heads in ((1, 512, 4), (4, 4096, 32), (1, 131_072, 8)):
        forward = attention_kernel_seconds(batch, seq, heads, heads, 128, device, one)
        backward = attention_kernel_seconds(batch, seq, heads, heads, 128, device, one, backward=True)
        assert forward > causal_flops(batch, seq, heads, 128, 128) / device.peak("bf16")
        assert backward > forward


def test_balanced_experts_have_equal_rows_and_skewed_ones_the_same_sum_at_most_all():
    assert expert_rows(1024, 8, 128, 4) == (64.0,) * 32
    skewed = expert_rows(1024, 8, 128, 1, 1.2)
    assert sum(skewed) == pytest.approx(1024 * 8, rel=0.01)
    assert max(skewed) > 4 * 64
    assert sum(expert_rows(1024, 8, 128, 4, 1.2)) > 1024 * 8 / 4  # the fullest of four ranks
    assert expert_rows(1024, 8, 128, 4, 1.2) == expert_rows.__wrapped__(1024, 8, 128, 4, 1.2)
    assert expert_rows(1024, 2, 2, 2, 1.2) == (1024,)  # a token goes to an expert once


def test_experts_with_uneven_rows_take_longer_and_idle_ones_no_weights():
    device = named("h100-sxm-80gb")
    one = device.times.expert("bf16")
    even, odd = routed([300.0] * 32), routed([300.0 * 32 - 31] + [1.0] * 31)
    assert even.tiles[128] == 32 * 3
    assert odd.tiles[128] == 75 + 31
    args = (1200, 4096, 1536, 2, 128, device, one)
    assert experts_seconds(odd, *args) > experts_seconds(even, *args)
    idle, alone_ = routed([300.0, *[0.0] * 31]), routed([300.0])
    assert grouped_seconds(idle, 4096, 1536, device, one) == grouped_seconds(alone_, 4096, 1536, device, one)


def test_attention_of_inference_writes_keys_and_values_once_more():
    # 1,000 tokens of 8 + 2 heads of 128 + 128 elements of 2 bytes; keys and values of 2 heads again
    assert attention_bytes(1, 1000, 8, 2, 128, 128) == 2 * 1000 * 10 * 256
    assert attention_bytes(1, 1000, 8, 2, 128, 128, cached=True) == 2 * 1000 * 12 * 256
    device = named("l40s-48gb")
    sizes = (64, 512, 16, 16, 64, device, device.times.attend())
    assert attention_kernel_seconds(*sizes, cached=True) > 1.05 * attention_kernel_seconds(*sizes)


def test_experts_that_nobody_tuned_run_the_first_kernel_of_the_list():
    device = named("h200-141gb")
    one = device.times.expert("bf16")
    rows = routed([300.0] * 32)
    args = (1200, 4096, 1536, 2, 128, device, one)
    tuned_s, untuned_s = experts_seconds(rows, *args), experts_seconds(rows, *args, tuned=0.0)
    assert untuned_s > 2 * tuned_s
    both = experts_seconds(rows, *args, tuned=np.array([1.0, 0.0]))
    assert list(both) == pytest.approx([tuned_s, untuned_s], rel=1e-12)
    other = named("a100-sxm-80gb")
    one = other.times.expert("bf16")
    alike = [experts_seconds(rows, 1200, 4096, 1536, 2, 128, other, one, tuned=tuned) for tuned in (1.0, 0.0)]
    assert alike[0] == alike[1]  # nobody says how its first kernel does


def test_collectives_grow_with_bytes_and_change_protocol():
    device = named("h100-sxm-80gb")
    for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
        one = device.times.collective(op)
        found = [domain_seconds(op, 2.0**power, 8, 450e9, one) for power in range(10, 34)]
        assert found == sorted(found)
        assert found[0] > one.launch_s
        assert domain_seconds(op, 1e9, 1, 450e9, one) == 0


def test_trees_need_the_logarithm_of_nodes_and_rings_all_ranks():
    assert [log2_up(nodes) for nodes in (1, 2, 3, 64, 65)] == [0, 1, 2, 6, 7]
    np.testing.assert_array_equal(log2_up(np.array([1.0, 2.0, 3.0, 64.0, 65.0])), [0, 1, 2, 6, 7])
    small = across_seconds("all_reduce", 1e3, 64, 8, 0.0, 400e9, 1e-5)
    assert small == pytest.approx(2 * 6 * 1e-5, rel=0.01)
    gathered = across_seconds("all_gather", 1e3, 64, 8, 0.0, 400e9, 1e-5)
    assert gathered == pytest.approx(511e-5, rel=0.01)


def test_the_slower_of_node_and_network_holds_oversubscribed_or_reduced_in_the_switch():
    large = 64e9
    plain = across_seconds("all_reduce", large, 64, 8, 0.1, 400e9, 1e-5)
    assert plain == pytest.approx(2 * large * 63 / 64 / 400e9, rel=0.01)
    assert across_seconds("all_reduce", large, 64, 8, 9.0, 400e9, 1e-5) == pytest.approx(9, rel=0.01)
    tapered = across_seconds("all_reduce", large, 64, 8, 0.1, 400e9, 1e-5, 2.0)
    assert tapered == pytest.approx(2 * plain, rel=0.01)
    switched = across_seconds("all_reduce", large, 64, 8, 0.1, 400e9, 1e-5, 1.0, True)
    assert switched == pytest.approx(plain / 2, rel=0.02)
    assert across_seconds("all_reduce", large, 1, 8, 0.1, 400e9, 1e-5) == 0.1


def test_ranks_share_the_cards_of_their_node():
    assert shared_cards_rate(8, 8, 50e9, 8) == 400e9
    assert shared_cards_rate(2, 8, 50e9, 8) == 100e9
    assert shared_cards_rate(4, 1, 50e9, 8) == 50e9


def test_a_trace_has_the_kernel_and_not_every_tile_that_was_tried():
    device, one = bf16("h100-sxm-80gb")
    with trace("product") as root:
        product_seconds(4096, 4096, 4096, device, one)
    names = [step.name for step in root.steps[0].steps]
    assert names.count("kernel_seconds") == 1
    assert not root.steps[0].steps[names.index("kernel_seconds")].steps
