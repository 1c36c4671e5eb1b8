"""From a probe to presets: rates and curves that a machine was made from are found again, and the planner reads them.

Not here: measuring a real machine (tests/cluster/test_probe.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executor.measure.probe import write
from planner.ask.options import question
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.calibrate import machine
from planner.calibrate.probe import (
    AttentionTiming,
    ElementwiseTiming,
    Exchange,
    Host,
    Overhead,
    OverlapTiming,
    Probe,
    ProbedDevice,
    ProductTiming,
    read_probe,
    write_probe,
)
from planner.cli import planner
from planner.decide.planning import make_plan, plan_of
from planner.decide.strategies import answer
from planner.figures.comm import collective_seconds, leaving_bytes
from planner.figures.passes import attention_seconds, matmul_seconds, memory_seconds
from planner.figures.steptime import step_time
from planner.parallelism.case import Case
from planner.parallelism.collectives import WIRE
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration
from planner.spec.plan import encode_plan
from planner.spec.record import RunRecord

PEAK, HALF, ATTENTION, ADDED, CHAINED = {"fp32": 1e11, "bf16": 3e11}, 20.0, 0.25e11, 40e9, 24e9
OPERATION_S, HIDDEN = 5e-6, 0.4
INSIDE, INSIDE_S = {"all_reduce": 2e9, "all_gather": 4e9, "reduce_scatter": 1e9, "send": 3e9}, 2e-4
BETWEEN, BETWEEN_S = 0.5e9, 9e-4
PAYLOADS = (2.0**12, 2.0**16, 2.0**20, 2.0**24, 2.0**28)


def product_s(m: int, n: int, k: int, dtype: str) -> float:
    return 2 * m * n * k / PEAK[dtype] * (1 + HALF * (1 / m + 1 / n + 1 / k))


def inside_s(op: str, ranks: int, payload: float) -> float:
    steps = 1 if op == "send" else (2 if op == "all_reduce" else 1) * (ranks - 1)
    return float(WIRE["gloo"][op](payload, ranks)) / INSIDE[op] + steps * INSIDE_S


def between_s(op: str, ranks: int, nodes: int, payload: float) -> float:
    steps = 1 if op == "send" else (2 if op == "all_reduce" else 1) * (ranks - 1)
    inside_bytes, left = WIRE["gloo"][op](payload, ranks), leaving_bytes(op, "gloo", payload, ranks, ranks / nodes)
    return max(float(left) / BETWEEN, float(inside_bytes) / INSIDE[op] * (ranks > nodes)) + steps * BETWEEN_S


def make_probe(nodes: int = 1, ranks: int = 4, **changed: object) -> Probe:
    """A probe of a machine that is nothing but the coefficients above."""
    sizes = [(m, n, k) for m in (64, 512, 4096) for n in (128, 1024) for k in (256, 2048)]
    exchanges = [
        Exchange(op=op, ranks=size, nodes=1, payload_bytes=payload, seconds=inside_s(op, size, payload))
        for op in INSIDE for size in (2, ranks) for payload in PAYLOADS
    ]  # fmt: skip
    if nodes > 1:
        groups = [(nodes, nodes), (nodes * ranks, nodes)]  # one rank of each node, and all ranks
        exchanges += [
            Exchange(op=op, ranks=n, nodes=k, payload_bytes=payload, seconds=between_s(op, n, k, payload))
            for op in INSIDE for n, k in groups for payload in PAYLOADS
        ]  # fmt: skip
    probe = Probe(
        name="made-up",
        date="2026-01-02T03:04:05+00:00",
        seconds=1.0,
        device=ProbedDevice(name="Some CPU", kind="cpu", memory_bytes=8e9),
        host=Host(processor="Some CPU", cores=4),
        nodes=nodes,
        ranks_per_node=ranks,
        threads=1,
        transport="gloo",
        launcher="local/loopback",
        products=tuple(
            ProductTiming(form="forward", m=m, n=n, k=k, dtype=dtype, seconds=product_s(m, n, k, dtype))
            for m, n, k in sizes for dtype in PEAK
        ),
        attention=tuple(
            AttentionTiming(sequences=2, heads=4, seq_len=s, head_dim=64, dtype="fp32",
                            forward_s=2 * 8 * s * s * 64 / ATTENTION, backward_s=4 * 8 * s * s * 64 / ATTENTION)
            for s in (256, 1024)
        ),
        sweeps=(
            *(ElementwiseTiming(kind="add", bytes=size, seconds=size / ADDED) for size in (1e6, 1e8)),
            *(
                ElementwiseTiming(kind=kind, bytes=size, seconds=size / CHAINED)
                for kind in ("norm", "gate") for size in (1e8, 1e9)
            ),
        ),
        overheads=tuple(
            Overhead(kind=kind, operations=10, seconds=10 * factor * OPERATION_S)
            for kind, factor in (("plain", 0.5), ("forward", 0.8), ("backward", 1.2), ("optimizer", 8.0))
        ),
        exchanges=tuple(exchanges),
        overlaps=(
            OverlapTiming(ranks=ranks, nodes=nodes, payload_bytes=1e7, compute_s=1.0, comm_s=1.0, both_s=2 - HIDDEN),
        ),
    )  # fmt: skip
    return msgspec.structs.replace(probe, **changed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A probe of two nodes of four ranks, written as presets."""
    for relative, text in machine.preset_files(make_probe(nodes=2)).items():
        (tmp_path / relative).parent.mkdir(exist_ok=True)
        (tmp_path / relative).write_text(text)
    return tmp_path


def test_a_machine_made_from_coefficients_is_found_again(folder: Path):
    cluster = presets.cluster("made-up", nodes=2, folders=[folder])
    known = calibration("made-up", (str(folder),)).of("accelerate-ddp", cluster.gpu.name, "cpu")
    compute = known.compute

    for dtype in PEAK:
        rate = cluster.gpu.flops_per_s[dtype]
        for m, n, k in ((64, 256, 128), (300, 200, 1000), (8192, 8192, 8192)):
            found_s = matmul_seconds(
                2 * m * n * k, m * k + k * n + m * n, rate, compute.matmul_share, compute.half_size
            )
            assert found_s == pytest.approx(product_s(m, n, k, dtype), rel=1e-3)
    rate = cluster.gpu.flops_per_s["fp32"]
    assert attention_seconds(1e9, rate, compute.attention_share) == pytest.approx(1e9 / ATTENTION, rel=1e-3)
    rate = cluster.gpu.memory_bytes_per_s
    assert rate == pytest.approx(ADDED, rel=1e-3)
    assert memory_seconds(1e9, rate, compute.memory_share) == pytest.approx(1e9 / CHAINED, rel=1e-3)
    assert compute.operation_s == pytest.approx(OPERATION_S, rel=1e-3)
    assert known.overlap.hidden_share == pytest.approx(HIDDEN, rel=1e-3)


@pytest.mark.parametrize("op", sorted(INSIDE))
def test_links_take_as_long_as_the_calls_they_were_measured_by(folder: Path, op: str):
    from planner.figures.comm import Traffic

    cluster = presets.cluster("made-up", nodes=2, folders=[folder])
    known = calibration("made-up", (str(folder),)).of("accelerate-ddp", cluster.gpu.name, "cpu")

    def predicted(ranks: int, inside: int, payload: float) -> float:
        wire = WIRE["gloo"][op](payload, ranks)
        left = leaving_bytes(op, "gloo", payload, ranks, inside)
        call = (op, "dp_shard", "layer", "forward", 1, payload, True)
        one = Traffic(*call, ranks=ranks, inside=(inside,), wire_bytes=wire, leaving=(left,), inter_bytes=left)
        return float(collective_seconds(one, cluster.levels, known))

    for payload in (2.0**14, 2.0**22, 2.0**26):
        for ranks in (2, 4):
            assert predicted(ranks, ranks, payload) == pytest.approx(inside_s(op, ranks, payload), rel=0.01)
        assert predicted(8, 4, payload) == pytest.approx(between_s(op, 8, 2, payload), rel=0.01)


def test_one_node_says_that_its_network_is_a_guess_and_guesses_no_link_inside(tmp_path: Path):
    files = machine.preset_files(make_probe())

    assert 'nic_gbit_per_s = "guess: one node was probed; 10 Gbit/s' in files["nodes/made-up.toml"]
    assert "guess" not in files["gpus/made-up.toml"]
    assert "emulated" not in files["calibrations/made-up.toml"]


def test_the_planner_answers_with_a_probe_by_its_name_and_by_its_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    def step_s(*arguments: str) -> float:
        asked = ("estimate", "--model", "tiny-llama", "--gpus", "4", "--precision", "fp32", "--json", *arguments)
        assert command.exit_code(planner, asked, name="planner") == 0
        answer = json.loads(capsys.readouterr().out)
        return float(answer["estimates"][answer["recommended"]]["time"]["step_s"])

    by_name = step_s("--presets", str(folder), "--cluster", "made-up", "--calibration", "made-up")
    files = (str(folder / "clusters/made-up.toml"), str(folder / "calibrations/made-up.toml"))
    by_file = step_s("--cluster", files[0], "--calibration", files[1])
    guessed = step_s("--presets", str(folder), "--cluster", "made-up")

    assert by_name == by_file
    assert by_name != guessed


@pytest.mark.parametrize(
    ("path", "words"),
    [("clusters/none.toml", "is not a file"), ("probe.toml", "must stand in a folder clusters/")],
)
def test_a_cluster_file_that_is_not_there_or_stands_alone_is_refused(folder: Path, path: str, words: str):
    (folder / "probe.toml").write_text('node = "made-up"\n')

    with pytest.raises(PlannerError, match=words):
        presets.cluster(str(folder / path))


def test_a_gpu_with_a_preset_keeps_its_datasheet_and_others_are_written_down():
    h100 = ProbedDevice(name="NVIDIA H100 80GB HBM3", kind="cuda", memory_bytes=79.1 * 2**30, link="NVLink 4")
    known = make_probe(transport="nccl", device=h100)
    unknown = make_probe(transport="nccl", device=msgspec.structs.replace(h100, name="Future Card", power_w=450.0))

    assert machine.known_gpu(known) == "h100-sxm-80gb"
    files = machine.preset_files(known)
    assert not any(name.startswith("gpus/") for name in files)
    assert 'gpu = "h100-sxm-80gb"' in files["nodes/made-up.toml"]
    assert machine.known_gpu(unknown) is None
    assert "power_w = 450" in machine.preset_files(unknown)["gpus/made-up.toml"]


def test_a_fit_keeps_costs_above_zero():
    flat = machine.fit_line([(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (4.0, 1.0, 0.9)])
    steep = machine.fit_line([(1.0, 1.0, 1.0), (2.0, 1.0, 3.0), (4.0, 1.0, 9.0)])

    assert (flat.cost, steep.fixed) == (0.0, 0.0)
    assert flat.fixed == pytest.approx(1.0, rel=0.1)
    with pytest.raises(ValueError, match="a point"):
        machine.fit_line([])


# -- probe.json ----------------------------------------------------------------------------------------------------


def test_a_probe_comes_back_from_its_file(tmp_path: Path):
    write_probe(tmp_path / "probe.json", make_probe(nodes=2))

    assert read_probe(tmp_path / "probe.json") == make_probe(nodes=2)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "cannot be read"),
        (b"{", "is not a probe"),
        (b'{"name": 1}', "is not a probe"),
        (make_probe(schema="probe/2"), "this version reads probe/1"),
        (
            make_probe(sweeps=(ElementwiseTiming(kind="add", bytes=1.0, seconds=0.0),)),
            r"sweeps\[0\].seconds=0.0: must be",
        ),
        (make_probe(ranks_per_node=0), "ranks_per_node=0"),
    ],
)
def test_a_file_that_is_no_probe_is_refused_in_one_line(tmp_path: Path, raw: object, words: str):
    path = tmp_path / "probe.json"
    if isinstance(raw, bytes):
        path.write_bytes(raw)
    elif isinstance(raw, Probe):
        path.write_bytes(msgspec.json.encode(raw))

    with pytest.raises(PlannerError, match=words) as caught:
        read_probe(path)
    assert "\n" not in caught.value.sentence


def test_a_probe_without_products_makes_no_presets():
    with pytest.raises(PlannerError, match="no matrix products"):
        machine.preset_files(make_probe(products=()))


def test_a_folder_that_cannot_be_made_is_one_line_of_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match="cannot be made") as refused:
        write(tmp_path / "file" / "machine", make_probe())

    assert refused.value.exit_code == 2


# -- planner calibrate ---------------------------------------------------------------------------------------------


def calibrated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code = command.exit_code(planner, ["calibrate", *map(str, arguments), "--json"], name="planner")
    told = capsys.readouterr()
    assert code == 0, told.err
    return json.loads(told.out)


def run_folder(folder: Path, case: Case, step_s: float) -> Path:
    """A run of a case that took so long."""
    folder.mkdir()
    (folder / "plan.json").write_bytes(encode_plan(make_plan(case, calibration("uncalibrated"))))
    record = RunRecord(
        plan_hash="", status="succeeded", exit_code=0, started="", seconds=1.0, backend="accelerate",
        launcher="local", world_size=2, nodes=1, step_s=step_s,
    )  # fmt: skip
    (folder / "run.json").write_bytes(msgspec.json.encode(record))
    return folder


def test_a_probe_alone_calibrates_as_the_presets_made_of_it(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_probe(folder / "probe.json", make_probe(nodes=2))
    answer = calibrated(capsys, folder / "probe.json", "-o", folder / "mine.toml")

    assert (answer["probes"], answer["measurements"], answer["calibration"]["based_on"]) == (1, 0, "published")
    mine, own = calibration(str(folder / "mine.toml")), calibration("made-up", (str(folder),))
    for group in ("compute", "overlap", "links"):
        assert getattr(mine, group) == getattr(own, group)


def test_a_plan_says_whether_its_time_rests_on_a_probe(folder: Path):
    def planned(**more: str) -> bool | None:
        asked = question({"model": "tiny-llama", "strategy": "ddp", "presets": (str(folder),), **more})
        return plan_of(answer(asked).estimates[0]).prediction.probed

    assert planned(cluster="made-up", calibration="made-up") is True
    assert planned(cluster="localhost", gpus="2") is False
    assert planned(cluster="localhost", gpus="2", calibration="made-up") is False  # of another device
    assert planned(gpus="8") is False  # an H100 by what others published


def test_runs_on_a_probed_machine_are_judged_over_what_the_probe_says(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_probe(folder / "probe.json", make_probe(nodes=2))
    known = calibration("made-up", (str(folder),))
    cluster = presets.cluster("made-up", gpus=2, folders=[folder])
    runs = []
    for micro in (1, 4):
        layout = Layout(engine="ddp", dp_replicate=2, micro_batch_size=micro)
        job = TrainingJob(seq_len=64, precision="fp32")
        case = Case(presets.model("tiny-llama"), job, layout, cluster, presets.runtime("accelerate-ddp"))
        runs.append(run_folder(tmp_path / f"run-{micro}", case, float(step_time(case, known).step_s)))

    with_probe = calibrated(capsys, folder / "probe.json", *runs, "-o", folder / "mine.toml")
    without = calibrated(capsys, *runs)

    assert with_probe["measurements"] == 2 and "2 measurements of 8 needed" in with_probe["kept_defaults"][0]
    assert with_probe["errors"][0]["before"]["median"] < 1e-4 < 0.1 < without["errors"][0]["before"]["median"]
    again = step_time(case, calibration(str(folder / "mine.toml"))).step_s
    assert again == pytest.approx(step_time(case, known).step_s, rel=1e-4)


def test_a_probed_gpu_is_found_among_presets_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "q9000-40gb.toml").write_text(
        'kind = "cuda"\nmemory_gib = 40\nmemory_gb_per_s = 400\n[dense_tflops]\nfp32 = 1\nbf16 = 3\n'
        '[sources]\n"*" = "made up"\n'
    )
    device = ProbedDevice(name="NVIDIA Q9000", kind="cuda", memory_bytes=39.5 * 2**30)
    write_probe(tmp_path / "probe.json", make_probe(transport="nccl", device=device))

    (own,) = calibrated(capsys, tmp_path / "probe.json", "--presets", tmp_path)["calibration"]["compute"]
    (unknown,) = calibrated(capsys, tmp_path / "probe.json")["calibration"]["compute"]

    assert (own["gpu"], unknown["gpu"]) == ("q9000-40gb", "made-up")
    assert own["memory_share"] == pytest.approx(CHAINED / 400e9, rel=1e-3)


@pytest.mark.parametrize("op", sorted(INSIDE))
def test_a_link_that_carries_large_messages_slower_has_their_rate(op: str):
    def seconds(one: Exchange) -> float:
        return one.seconds * (2 if one.payload_bytes >= machine.LARGE_BYTES else 1)

    probe = make_probe()
    slower = tuple(msgspec.structs.replace(one, seconds=seconds(one)) for one in probe.exchanges)
    rates = machine.MeasuredRates({}, 1.0, {"inside": 1e9})
    entries = machine.link_entries(msgspec.structs.replace(probe, exchanges=slower), "inside", "loopback", rates)
    (found,) = (entry for entry in entries if entry.op == op)
    assert found.share == pytest.approx(INSIDE[op] / 1e9 / 2, rel=0.01)
    assert found.latency_s == pytest.approx(INSIDE_S, rel=0.5)
