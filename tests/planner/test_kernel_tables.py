"""Claims about tables of measured kernels: what is read and refused, that every row has an answer, how far off the
shipped numbers are, and that a fit finds numbers again.

Not here: the formulas by hand (test_kernel_seconds.py), or kernels left out (`make kernels-judge`).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from planner.basics import command
from planner.calibrate.kernels.predict import RowPrediction, answers, grouped, seconds_of
from planner.calibrate.kernels.score import summary
from planner.calibrate.kernels.tables import KernelRow, read
from planner.cli import planner
from planner.figures.kernels.products import named
from planner.spec.kernel_times import kernel_times
from scripts.kernels import gaussian_process, judge
from scripts.kernels.measured import Measured, measured
from tests.truth.kernel_fits.fit import by_best, fit
from tests.truth.kernel_fits.tuning import Case, is_untuned, untuned

TRUTH = Path(__file__).resolve().parents[1] / "truth" / "kernels"
TABLES = ("matmul", "attention", "experts", "collectives", "training_ops")
MOST = {"product bf16": 0.07, "product fp8": 0.07, "attention forward": 0.065, "experts bf16": 0.1, "collective": 0.07}
"""Median error of the shipped numbers over the rows they were fitted to, on any GPU."""
HEAD = "gpu,dtype,m,n,k,us\n"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command.exit_code(planner, list(arguments), name="planner")
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture(scope="module")
def rows() -> dict[str, list[KernelRow]]:
    return {name: read(TRUTH / f"{name}.csv") for name in TABLES}


@pytest.fixture(scope="module")
def found(rows: dict[str, list[KernelRow]]) -> dict[str, list[RowPrediction]]:
    return {name: answers(some) for name, some in rows.items()}


def test_every_row_of_the_tables_is_predicted_but_shares_without_a_size(
    rows: dict[str, list[KernelRow]], found: dict[str, list[RowPrediction]]
):
    for name in TABLES:
        assert len(found[name]) == len(rows[name]) > 250
        reasons = {answer.skipped for answer in found[name] if answer.predicted_s is None}
        told = {"a share of the memory's rate without a size is not a kernel"} if name == "training_ops" else set()
        assert reasons == told


@pytest.mark.parametrize("name", TABLES[:4])
def test_shipped_numbers_describe_the_rows_they_were_fitted_to(
    rows: dict[str, list[KernelRow]], found: dict[str, list[RowPrediction]], name: str
):
    for one in summary(rows[name], found[name]):
        kind = "collective" if one.kind.startswith("collective") else one.kind
        assert one.compared == one.rows
        assert one.measured_on == one.gpu or (one.gpu, kind) == ("l40s-48gb", "collective")
        assert one.median < MOST[kind], one


def test_json_has_a_row_for_each_line_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tmp_path / "mine.csv"
    table.write_text(
        HEAD + "h100-sxm-80gb,bf16,4096,4096,4096,230\nh100-sxm-80gb,bf16,4096,4096,4096,\nnobody,bf16,1,1,1,5\n"
        "a100-sxm-80gb,fp8,4096,4096,4096,5\nh100-sxm-80gb,int3,1,1,1,5\nh100-sxm-80gb,bf16,x,1,1,5\n"
        "h100-sxm-80gb,bf16,2.5,1,1,5\n"
    )
    code, out, _ = asked(capsys, "replay", str(table), "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["schema"] == "replay-kernels/1"
    assert [one["id"] for one in answer["rows"]] == [f"mine:{line}" for line in range(2, 9)]
    first, second = answer["rows"][:2]
    assert first["predicted_us"] == second["predicted_us"] > 150
    assert (first["measured_us"], second["measured_us"]) == (230, None)
    assert [one["skipped"] for one in answer["rows"][2:]] == [
        "'nobody' is not a GPU known here",
        "a100-sxm-80gb has no units for fp8",
        "h100-sxm-80gb has no units for int3",
        "m is not a number: 'x'",
        "m is not a count: '2.5'",
    ]
    assert all(one["predicted_us"] is None for one in answer["rows"][2:])


def test_text_is_a_table_by_gpu_and_kind_and_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "each.jsonl"
    code, out, err = asked(capsys, "replay", str(TRUTH / "training_ops.csv"), "-o", str(output))
    assert code == 0
    assert "905 of 914 kernels predicted." in out
    assert "     9  a share of the memory's rate without a size is not a kernel" in out
    assert len(output.read_text().splitlines()) == 914
    assert err == f"wrote {output}\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a,b\n1,2\n", "is not a table of kernels"),
        ("", "is not a table of kernels"),
        (HEAD, "hold no row"),
    ],
)
def test_other_tables_are_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, rule: str):
    (tmp_path / "t.csv").write_text(text)
    code, _, err = asked(capsys, "replay", str(tmp_path / "t.csv"))
    assert code == 2
    assert rule in err


def test_tables_and_runs_are_not_replayed_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = asked(capsys, "replay", str(TRUTH / "matmul.csv"), str(tmp_path / "rows.jsonl"))
    assert code == 2
    assert "one after the other" in err
    code, _, err = asked(capsys, "replay", str(tmp_path / "none.csv"))
    assert code == 2
    assert "cannot be read" in err


def test_a_fit_finds_the_times_again_that_numbers_made(rows: dict[str, list[KernelRow]]):
    group = next(one for one in grouped(rows["matmul"]) if one.gpu == "h100-sxm-80gb" and one.variant == "bf16")
    some = group.some(np.arange(len(group.places)) % 3 == 0)
    device, other = named("h100-sxm-80gb"), named("a100-sxm-80gb").times.product("bf16")
    made = seconds_of(some, device, other)
    assert fit(some, made).spread < 0.01


def test_a_card_nobody_tabled_takes_for_its_best_product_what_was_published():
    rows = read(TRUTH / "best_products.csv")
    told = {}
    for row, answer in zip(rows, answers(rows), strict=True):
        times = kernel_times(row.gpu)
        assert times is not None and answer.predicted_s is not None and row.measured_s is not None
        if times.products:
            assert times.products[0].n == 1 and times.nearest[0] in times.products[0].source
            told[row.gpu] = answer.predicted_s / row.measured_s
    assert {"rtx-4090-24gb", "rtx-3090-24gb"} < set(told)
    assert all(ratio == pytest.approx(1, rel=1e-3) for ratio in told.values())


def test_a_best_product_gives_the_share_and_the_seconds_of_a_loop_s_begin():
    (row,) = (row for row in read(TRUTH / "best_products.csv") if row.gpu == "rtx-4090-24gb")
    (group,) = grouped([row])
    own, nearest = named("rtx-4090-24gb"), named("l40s-48gb")
    assert own is not None and nearest is not None and row.measured_s is not None
    there = nearest.times.products[0]
    rates = [(one.peak("bf16") or 0) / one.multiprocessors for one in (own, nearest)]

    found = by_best(group, np.array([row.measured_s]), there, "a table")
    assert found is not None and found.gpu == "rtx-4090-24gb" and found.share > 1
    assert found.ramp / rates[0] == pytest.approx(there.ramp / rates[1])
    assert (found.share_4k, found.flop_j, found.tile_s) == (there.share_4k, there.flop_j, there.tile_s)
    assert seconds_of(group, own, found)[0] == pytest.approx(row.measured_s, rel=1e-6)

    assert by_best(group, np.array([row.measured_s / 2]), there, "a table") is None  # twice the rate of its datasheet
    hot = msgspec.structs.replace(there, flop_j=4 * there.flop_j)
    assert by_best(group, np.array([row.measured_s]), hot, "a table") is None  # power decides


def test_a_plan_says_which_experts_were_tuned():
    of_512 = [Case("bfloat16", 4096, 1024, 10, 512, 4, 4, exponent) for exponent in (0.0, 1.01, 1.2)]
    of_256 = [Case("bfloat16", 4096, 2048, 8, 256, 8, 2, exponent) for exponent in (0.0, 1.01, 1.2)]
    assert {case.file for case in of_512 + of_256} == {"bfloat16_4096_256_128"}
    assert 0 < len(untuned() & {*of_512, *of_256}) < 6  # whoever comes first is tuned
    assert not [case for case in untuned() if case.file == "bfloat16_3072_1024_64"]  # which no other shares
    ones = [case for case in untuned() if case.experts == case.expert_ranks]
    assert ones  # "..._1" is how "..._16" begins


def test_the_table_s_column_is_what_the_plan_says():
    with (TRUTH / "experts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert [row["untuned"] for row in rows] == ["1" if is_untuned(row) else "" for row in rows]
    assert sum(row["untuned"] == "1" for row in rows) > 90


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "h200-141gb"])
def test_what_nobody_tuned_took_longer_than_a_tuned_kernel(gpu: str):
    (one,) = measured("experts", only=(gpu,))
    untuned_ = one.group.sizes["tuned"] == 0
    one.group.sizes["tuned"][:] = 1.0
    device = named(gpu)
    factor = one.seconds / seconds_of(one.group, device, device.times.expert("bf16"))
    assert untuned_.sum() > 20
    assert np.median(factor[untuned_]) > 1.5
    assert np.quantile(factor[~untuned_], 0.9) < 1.3


def test_the_process_predicts_what_is_smooth():
    chance = np.random.default_rng(0)
    sizes = chance.uniform(5, 10, (160, 3))
    values = np.sin(sizes).sum(axis=1)
    found = gaussian_process.predicted(sizes[:120], values[:120], sizes[120:])
    assert np.median(np.abs(found - values[120:])) < 0.15 * values.std()


def test_no_pair_of_n_and_k_is_seen_and_asked():
    one = next(iter(measured("matmul", only=("l40s",))))
    fold = judge.pairs_left_out(one)
    pairs = np.stack([one.group.sizes["n"], one.group.sizes["k"]], axis=1)
    for number in range(judge.FOLDS):
        seen, out = ({tuple(pair) for pair in pairs[chosen]} for chosen in (fold != number, fold == number))
        assert out
        assert not seen & out
    assert isinstance(one.some(fold == 0), Measured)
