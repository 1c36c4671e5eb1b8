"""A timeline as text, picture and trace: schedules look as they should, every event is one that trace viewers read, and
large pipelines stay small.

Not here: when anything happens (test_timeline.py).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.figures.timeline import KINDS
from planner.parallelism.makespan import played
from planner.spec.spans import COLLECTIVES, COMPUTE, FOLDER, SENDS, Profile, Span
from planner.views.cells.time import marks, text
from planner.views.scene.time import PREDICTED, Axis, StreamSpans, Track, chosen
from planner.views.svg.time import bars, svg_of
from planner.views.trace import RECORDED_FROM, trace_of

PAGE = Path(__file__).parents[2] / "docs" / "timeline.md"
STAGES, MICRO_BATCHES, COLUMNS = 4, 6, 72
PIPELINE = ["--model", "13b", "--gpus", "32", "--pp", "4", "--tp", "4", "--dp-shard", "2", "--runtime", "torchtitan",
            "--global-batch-size", "24", "--micro-batch-size", "1", "--method", "full"]  # fmt: skip
PLAIN = ["--model", "7b", "--gpus", "8", "--dp-shard", "8", "--method", "full", "--global-batch-size", "16",
         "--micro-batch-size", "1"]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command.exit_code(planner, ["timeline", *arguments], name="planner")
    told = capsys.readouterr()
    return code, told.out, told.err


def even(schedule: str, forward_s: float = 1.0, backward_s: float = 2.0) -> tuple[float, list[StreamSpans]]:
    """A pipeline of even stages that sends at once: its seconds, and what each stage computes."""
    passes = played(schedule, [forward_s] * STAGES, [backward_s] * STAGES, MICRO_BATCHES)
    rows = []
    for rank in range(STAGES):
        own = [one for one in passes if one.rank == rank]
        spans = [Span(COMPUTE, KINDS[one.kind], one.kind, one.start_s, one.end_s, one.micro_batch) for one in own]
        rows.append(StreamSpans(COMPUTE, tuple(spans)))
    return max(one.end_s for one in passes), rows


def drawn(schedule: str) -> str:
    """One column a third of a forward, so that schedules stand side by side."""
    end_s, rows = even(schedule)
    columns = round(end_s * 3)
    return "\n".join(f"stage {place}  {marks(row, end_s, columns)}" for place, row in enumerate(rows))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_page_shows_each_schedule_as_it_is_drawn(schedule):
    blocks = re.findall(rf"^{schedule}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

    assert [block.rstrip("\n") for block in blocks] == [drawn(schedule)]


def test_gpipe_and_1f1b_take_as_long_and_zero_bubble_is_shorter():
    gpipe, one_by_one, zero = (even(schedule)[0] for schedule in ("gpipe", "1f1b", "zb-h1"))

    assert gpipe == one_by_one == MICRO_BATCHES * 3 + (STAGES - 1) * 3  # the bubble of Huang et al. 2019
    assert zero == MICRO_BATCHES * 3 + (STAGES - 1) * 1  # a third of it: Qi et al. 2023, F = I = W


def test_gpipe_ends_all_forwards_first_and_1f1b_alternates_and_zero_bubble_splits_backward():
    first = {schedule: drawn(schedule).splitlines()[-1].split()[-1] for schedule in ("gpipe", "1f1b", "zb-h1")}
    runs = {schedule: re.sub(r"(.)\1*", r"\1", line.strip(".").upper()) for schedule, line in first.items()}

    assert runs == {"gpipe": "FB", "1f1b": "FB" * MICRO_BATCHES, "zb-h1": runs["zb-h1"]}
    assert set(runs["zb-h1"]) == {"F", "I", "W", "."} or set(runs["zb-h1"]) == {"F", "I", "W"}


# -- text ----------------------------------------------------------------------------------------------------------


def test_a_column_shows_what_takes_most_of_it_and_nothing_where_it_is_idle():
    row = StreamSpans(
        COMPUTE, (Span(COMPUTE, "forward", "f", 0.0, 2.0, 0), Span(COMPUTE, "backward", "b", 2.6, 6.0, 1))
    )

    assert marks(row, 8.0, 8) == "FF.bbb.."
    assert marks(row, 8.0, 4) == "Fbb."


def test_a_column_of_many_passes_says_how_many_tenths_of_it_are_busy():
    spans = tuple(Span(COMPUTE, "forward", "f", number + 0.0, number + 0.5, number) for number in range(100))

    assert marks(StreamSpans(COMPUTE, spans), 100.0, 10) == "5" * 10


def test_collectives_that_are_waited_for_look_other_than_hidden_ones():
    waited, hidden = (Span(COLLECTIVES, "collective", "x", at, at + 1, exposed=at == 0) for at in (0.0, 1.0))

    assert marks(StreamSpans(COLLECTIVES, (waited, hidden)), 3.0, 3) == "#= "


def test_a_pipeline_of_many_stages_shows_a_few_and_says_which_are_left_out():
    tracks = [Track(PREDICTED, f"stage {number}", number, number, 1.0, ()) for number in range(64)]
    axis = Axis((), 1.0, tuple(tracks))

    some, left_out = chosen(axis, None)

    assert [track.stage for track in some.tracks] == [0, 1, 2, 3, 60, 61, 62, 63]
    assert "Stages 4-59 are left out: --stages 4 shows it." in text(some, left_out, 100)
    assert [track.stage for track in chosen(axis, (0, 31))[0].tracks] == [0, 31]
    with pytest.raises(PlannerError, match=r"stages=64: is not a stage: they are 0 to 63\. Try 63"):
        chosen(axis, (64,))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_are_as_wide_as_the_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(capsys, *PIPELINE)

    rows = [line for line in out.splitlines() if line.startswith(("stage", "   "))]
    assert len(rows) > 8
    assert max(map(len, rows)) <= max(width, 75)
    assert width <= 75 or max(map(len, rows)) > width - 3


def test_the_text_names_the_step_s_parts_and_each_stage_s_share(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    _, out, _ = run(capsys, *PIPELINE)

    assert re.search(r"A step of 12 micro-batches is predicted to take .* on the first stage: compute .*, bubble ", out)
    assert len(re.findall(r"^stage \d  compute .* \d+% busy$", out, re.MULTILINE)) == 4
    assert "F forward, B backward" in out


# -- trace ---------------------------------------------------------------------------------------------------------

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name",
            "thread_sort_index": "sort_index"}  # fmt: skip


def checked(raw: bytes) -> list[dict]:
    """Every event of a trace, as the Trace Event Format has complete and metadata events."""
    whole = msgspec.json.decode(raw)
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, set] = defaultdict(set)
    lanes: dict[tuple, list] = defaultdict(list)
    for event in whole["traceEvents"]:
        assert set(event) == REQUIRED[event["ph"]], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["args"], dict) and event["name"]
        if event["ph"] == "M":
            value = event["args"][METADATA[event["name"]]]
            assert isinstance(value, str if event["name"].endswith("_name") else int)
            key = (event["pid"], event["tid"]) if event["name"].startswith("thread") else event["pid"]
            assert key not in named[event["name"]], "named twice"
            named[event["name"]].add(key)
        else:
            assert event["ts"] >= -1e-6 and event["dur"] > 0 and math.isfinite(event["ts"] + event["dur"])
            assert isinstance(event["cat"], str) and event["cat"]
            assert set(event["args"]) <= {"micro_batch", "chunk", "calls", "exposed"}
            lanes[event["pid"], event["tid"]].append(event)
    assert set(lanes) <= named["thread_name"] == named["thread_sort_index"]
    assert {pid for pid, _ in lanes} <= named["process_name"] == named["process_sort_index"]
    for events in lanes.values():
        assert all(one["ts"] + one["dur"] <= after["ts"] + 1e-3 for one, after in pairwise(events))  # a nanosecond
    return whole["traceEvents"]


@pytest.mark.parametrize(
    "more",
    [
        (*PIPELINE, "--pp-schedule", "gpipe"),
        PIPELINE,
        (*PIPELINE, "--pp-schedule", "zb-h1"),
        (*PIPELINE, "--pp-schedule", "zb-v", "--virtual-stages", "2", "--recompute", "full"),
        (*PIPELINE, "--pp-schedule", "interleaved", "--virtual-stages", "2"),
        PLAIN,
        (*PLAIN, "--offload-optimizer", "--offload-params"),
    ],
)
def test_every_event_of_a_trace_is_whole_and_the_first_stage_s_last_ends_with_the_step(capsys, tmp_path, more):
    file = tmp_path / "trace.json"
    code, out, err = run(capsys, *more, "--trace", str(file), "--json")
    events = checked(file.read_bytes())

    assert (code, f"wrote {file}" in err) == (0, True)
    found = msgspec.json.decode(out)
    first = [event["ts"] + event["dur"] for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert max(first) / 1e6 == pytest.approx(found["time"]["step_s"], rel=1e-9, abs=0)
    assert sum(event["ph"] == "X" for event in events) == sum(len(stage["spans"]) for stage in found["stages"])


def test_what_was_recorded_is_a_process_of_its_own_and_lanes_are_threads():
    spans = (Span(SENDS, "send", "a", 0.0, 2.0), Span(SENDS, "send", "b", 1.0, 3.0, lane=1))
    tracks = (Track(PREDICTED, "stage 0", 0, 0, 3.0, spans), Track("recorded", "rank 4", 0, 4, 3.0, spans))

    events = checked(trace_of(Axis(("told",), 3.0, tracks)))

    assert {event["pid"] for event in events} == {0, RECORDED_FROM + 4}
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"stage 0, predicted", "rank 4, recorded", "sends", "sends 2"}


# -- picture -------------------------------------------------------------------------------------------------------


def test_a_picture_is_whole_xml_with_a_bar_a_span_inside_of_it(capsys, tmp_path):
    file = tmp_path / "step.svg"
    assert run(capsys, *PIPELINE, "--svg", str(file))[0] == 0

    root = ElementTree.fromstring(file.read_bytes())
    width = float(root.get("width"))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) > 4 * 12 * 2
    for box in boxes[1:]:
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width


def test_bars_too_narrow_to_be_seen_are_drawn_together():
    spans = tuple(Span(COMPUTE, "forward", "f", number * 1e-4, number * 1e-4 + 9e-5, number) for number in range(5000))
    wide = (Span(COMPUTE, "forward", "f", 0.0, 0.5, 0), Span(COMPUTE, "forward", "f", 0.5, 1.0, 1))

    assert len(bars(StreamSpans(COMPUTE, spans), 1.0)) == 1
    assert [word for *_, word in bars(StreamSpans(COMPUTE, wide), 1.0)] == ["0", "1"]


def test_a_picture_says_which_stages_are_left_out():
    track = Track(PREDICTED, "stage 0", 0, 0, 1.0, (Span(COMPUTE, "forward", "f", 0.0, 1.0, 0),))

    assert b"Stages left out: 1-3, 5." in svg_of(Axis(("told",), 1.0, (track,)), (1, 2, 3, 5))


# -- the command ---------------------------------------------------------------------------------------------------


def plan_file(capsys: pytest.CaptureFixture[str], folder: Path, *given: str) -> Path:
    path = folder / "plan.json"
    assert command.exit_code(planner, ["estimate", *given, "-o", str(path)], name="planner") == 0
    capsys.readouterr()
    return path


def test_a_plan_s_timeline_is_that_of_the_options_it_was_made_with(capsys, tmp_path):
    path = plan_file(capsys, tmp_path, *PLAIN)

    assert run(capsys, str(path))[:2] == run(capsys, *PLAIN)[:2]


def test_options_beside_a_plan_are_refused_and_a_calibration_is_taken(capsys, tmp_path):
    path = plan_file(capsys, tmp_path, *PLAIN)

    code, _, err = run(capsys, str(path), "--tp", "2")
    assert (code, "tp=2: changes nothing of a plan" in err) == (2, True)
    code, _, err = run(capsys, str(path), "--calibration", "uncalibrated")
    assert (code, "the plan was made with a step of" in err) == (0, True)
    assert "the plan was made" not in run(capsys, str(path))[2]


def recorded_run(capsys: pytest.CaptureFixture[str], folder: Path, *ranks: int) -> Path:
    run_dir = folder / "run"
    (run_dir / FOLDER).mkdir(parents=True)
    plan_file(capsys, run_dir, *PLAIN)
    for rank in ranks:
        spans = (Span(COMPUTE, "forward", "forward 0", 0.0, 2.0, 0), Span(COLLECTIVES, "collective", "x", 1.0, 3.0))
        one = Profile(rank=rank, stage=0, step=6, device="cpu", step_s=4.0, spans=spans, left_out=3, left_out_s=0.5)
        (run_dir / FOLDER / f"rank-{rank}.json").write_bytes(msgspec.json.encode(one))
    return run_dir


def test_beside_a_run_stands_what_its_ranks_recorded_on_the_same_axis(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    folder, trace = recorded_run(capsys, tmp_path, 0, 1), tmp_path / "trace.json"
    code, out, _ = run(capsys, "--beside", str(folder), "--trace", str(trace))

    assert code == 0
    assert "Step 6 of the run took 4.00 s while it was recorded" in out
    lines = {line.split("  ")[0]: line for line in out.splitlines() if "compute" in line}
    assert {"stage 0", "rank 0"} <= set(lines)  # of each stage, the first rank that recorded
    assert lines["rank 0"].count("F") == pytest.approx(lines["rank 0"].count("."), abs=1)  # half of four seconds
    assert lines["stage 0"].count("F") + lines["stage 0"].count("f") < lines["rank 0"].count("F")
    assert "6 recorded spans, the shortest, are in no file: 1.00 s in all." in out
    assert {event["pid"] for event in checked(trace.read_bytes())} == {0, RECORDED_FROM, RECORDED_FROM + 1}
    found = msgspec.json.decode(run(capsys, "--beside", str(folder), "--json")[1])
    assert [one["rank"] for one in found["recorded"]] == [0, 1]


@pytest.mark.parametrize("left", ["profile", "plan.json"])
def test_a_run_that_recorded_nothing_is_told_how(capsys, tmp_path, left):
    folder = recorded_run(capsys, tmp_path)
    if left == "profile":
        said = "has no recorded step. Run it with executor run --profile"
    else:
        (folder / "plan.json").unlink()
        said = "holds no plan.json, so it is not a run folder. Give a folder made by executor run"

    code, out, err = run(capsys, "--beside", str(folder))

    assert (code, out) == (2, "")
    assert said in err


def test_the_json_has_every_stage_or_those_that_were_asked_for(capsys):
    whole = msgspec.json.decode(run(capsys, *PIPELINE, "--json")[1])
    some = msgspec.json.decode(run(capsys, *PIPELINE, "--json", "--stages", "1,3")[1])

    assert whole["schema"] == "timeline/1"
    assert [stage["stage"] for stage in whole["stages"]] == [0, 1, 2, 3]
    assert [stage["stage"] for stage in some["stages"]] == [1, 3]
    assert some["stages"][0] == whole["stages"][1]
    assert {"time", "layout", "schedule", "micro_batches", "recorded"} < set(whole)


def test_files_that_exist_are_kept_unless_told_otherwise(capsys, tmp_path):
    file = tmp_path / "step.svg"
    file.write_text("mine")

    assert run(capsys, *PLAIN, "--svg", str(file))[0] == 2
    assert file.read_text() == "mine"
    assert run(capsys, *PLAIN, "--svg", str(file), "--force")[0] == 0


def test_where_no_time_is_predicted_there_is_no_timeline(capsys):
    code, out, err = run(capsys, "--model", "gpt2", "--gpu", "v100-32gb", "--gpus", "8", "--precision", "bf16")

    assert (code, out) == (2, "")
    assert "no time is predicted" in err
