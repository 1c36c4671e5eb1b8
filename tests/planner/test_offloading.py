"""Offload as the way out: looked for where nothing fits without it, said as such, and held against the hosts."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from spaces import layouts_of

from planner.ask.launchable import launches, ways_out
from planner.ask.options import question
from planner.ask.question import case_of, limit_bytes
from planner.basics import command
from planner.cli import planner
from planner.decide.answers import Constraints, seconds_of
from planner.decide.candidates import seconds_per_sequence
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.engines import engine_of
from planner.figures.memory import device_bytes, hosts_hold, peak_bytes
from planner.parallelism.case import Case
from planner.spec import Layout
from planner.spec.engines import OFFLOADS
from planner.views.verdict import answer_text

BOX = {"model": "llama-3-8b", "cluster": "pcie-4x4090", "seq_len": "4096", "method": "full"}
"""W5: the most asked question of those with four cards of 24 GB."""


def offloads(layout: Layout) -> bool:
    return any(getattr(layout, name) for name in OFFLOADS)


def run(name: str, **given: str) -> int:
    options = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    return command.exit_code(planner, [name, *options], name="planner")


def test_estimate_and_recommend_find_the_same_offloaded_layout_and_say_that_nothing_fits_without():
    shown, found = answer(question(BOX)), recommend(question(BOX))
    one = shown.estimates[shown.recommended]

    assert shown.offload_tried and found.offload_tried
    assert one.case.layout == found.estimates[0].case.layout
    assert one.fits and one.launchable and one.time.step_s is not None
    assert not any(other.fits for other in shown.estimates if not offloads(other.case.layout))
    text = answer_text(shown)
    assert "Nothing fits without offload: states wait in host memory." in text
    assert "host/node" in text and "119.66 GiB of 256 GiB" in text


@pytest.mark.parametrize("given", [{"model": "1b", "gpus": "8"}, {"model": "7b", "gpus": "8"}])
def test_what_fits_without_offload_is_never_offloaded(given: dict[str, str]):
    for found in (answer(question(given)), recommend(question(given))):
        assert not found.offload_tried
        assert not any(offloads(one.case.layout) for one in found.estimates)
        assert "host/node" not in answer_text(found)


@pytest.mark.parametrize(("memory", "engines"), [("512GiB", {"deepspeed", "fsdp2"}), ("128GiB", {"fsdp2"})])
def test_the_hosts_memory_that_is_given_decides_what_fits(memory: str, engines: set[str]):
    asked = question(BOX | {"seq_len": "3072", "host_memory": memory})
    found = recommend(asked, 3, Constraints(tie=0)).estimates

    assert {one.case.layout.engine for one in found} == engines
    assert all(one.memory.host_node_bytes <= one.case.cluster.host_memory_bytes for one in found)


@pytest.mark.slow
def test_hosts_that_are_too_small_are_named_with_what_they_would_need(capsys: pytest.CaptureFixture[str]):
    for name in ("estimate", "recommend"):
        assert run(name, **BOX, host_memory="64GiB") == 3
        out, err = capsys.readouterr()
        assert "othing fits, not even with states in host memory" in out
        assert "nothing fits" in err
    assert "of 64 GiB of a node's host memory" in err
    told = r"would hold it; with nothing offloaded it needs ([\d.]+) GiB on the card, of which --\S+ [\w-]* ?saves "
    needs, saves, left = map(float, re.search(told + r"([\d.]+) GiB: ([\d.]+) GiB on the card", out).groups())
    assert re.search(r"Hosts with [\d.]+ GiB \(--host-memory\) would hold it", out)
    assert needs == pytest.approx(saves + left, abs=0.02)
    assert "Host memory limits: " in out


@pytest.mark.slow
def test_an_offloaded_answer_is_what_brute_force_over_both_ways_finds():
    asked = question({"model": "llama-3.2-1b", "gpu": "v100-16gb", "gpus": "2", "gpus_per_node": "2", "method": "full"})
    asked = msgspec.structs.replace(asked, job=msgspec.structs.replace(asked.job, precision="fp32"))
    cards = msgspec.structs.replace(asked.cluster.gpu, memory_bytes=8 * 2.0**30)
    asked = msgspec.structs.replace(asked, cluster=msgspec.structs.replace(asked.cluster, gpu=cards))
    found = recommend(asked)
    fitting = [
        layout
        for way in (asked, *ways_out(asked))
        for layout in layouts_of(way)
        if launches(case := case_of(asked, layout))
        and device_bytes(case, peak_bytes(case)) <= limit_bytes(asked, case)
        and hosts_hold(case) is not False
    ]

    assert found.recommended == 0 and fitting
    assert all(offloads(layout) for layout in fitting)
    best = min(seconds_per_sequence(asked, case_of(asked, layout))[0] for layout in fitting)
    assert seconds_of(found.fastest or found.estimates[0]) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    "given", [{"offload_optimizer": False}, {"runtime": "megatron"}, {"cluster": "localhost", "gpus": "2"}]
)
def test_offload_is_no_way_out_where_it_was_refused_or_is_not_there(given: dict[str, object]):
    assert list(ways_out(question(BOX | given))) == []


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("fsdp2", "--offload-optimizer --offload-params"),
        ("deepspeed", "--offload-optimizer --offload-params"),
        ("megatron", "--tp 2 --dp-shard 2"),
    ],
)
def test_a_layout_that_was_given_names_the_offload_that_its_engine_has(
    engine: str, options: str, capsys: pytest.CaptureFixture[str]
):
    assert run("estimate", **BOX, runtime=engine, dp_shard="4", micro_batch_size="1") == 3
    verdict = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Nothing fits"))

    assert f"{options} saves" in verdict or f"{options} --grad-accum 2 saves" in verdict
    assert ("--offload" in verdict) == ("--offload" in options)


def test_what_nothing_launches_is_not_called_too_large(capsys: pytest.CaptureFixture[str]):
    """A17: "Nothing fits: use more GPUs" below an optimizer that nothing here launches, or that FSDP2 does not take."""
    adam = {"model": "70b", "gpu": "a100-80gb", "gpus": "8", "optimizer": "adafactor", "method": "full"}
    assert run("recommend", **adam) == 3
    out, err = capsys.readouterr()
    assert "Nothing launches it: optimizer=adafactor" in out and "othing fits" not in out
    assert "nothing launches it" in err
    assert run("estimate", **adam, strategy="fsdp") == 3
    out, err = capsys.readouterr()
    assert "adafactor does not work on FSDP2's sharded tensors" in out
    assert "othing fits" not in out and err == "error: no strategy is left to look at.\n"


def test_the_way_out_names_no_method_that_was_asked_already(capsys: pytest.CaptureFixture[str]):
    """D15: "or LoRA" below answers of LoRA and QLoRA."""
    tight = {"model": "405b", "cluster": "pcie-4x4090", "seq_len": "16384"}
    assert run("estimate", **tight, method="qlora") == 3
    assert "--method" not in capsys.readouterr().out.partition("Nothing fits")[2].partition("\n")[0]
    assert run("estimate", **tight, method="full") == 3
    assert "--method qlora saves" in capsys.readouterr().out.partition("Nothing fits")[2]


def test_no_band_is_printed_under_a_time_that_is_not_known(capsys: pytest.CaptureFixture[str]):
    """W5: "expect 0.837 to 1.465 times as long" below a step of n/a."""
    assert run("estimate", model="1b", gpu="t4-16gb", gpus="4", precision="bf16", method="lora") == 0
    out = capsys.readouterr().out

    assert "n/a" in out
    assert "times as long" not in out


@pytest.mark.parametrize("given", [{"model": "7b", "gpus": "1"}, {"model": "13b", "gpus": "1", "seq_len": "4096"}])
def test_the_nearest_to_fit_is_the_one_that_needs_least(given: dict[str, str]):
    """W9: "nearest to it is zero1 ... 145.97 GiB" beside a DDP that needs 132.79."""
    asked = question(given | {"method": "full", "offload_optimizer": False})
    found = recommend(asked, 1, Constraints(any_runtime=True))
    shown = answer(asked)
    least = min(
        float(device_bytes(case, peak_bytes(case)))
        for layout in layouts_of(asked)
        if all_rules_hold(case := case_of(asked, layout))
    )

    assert found.recommended is None
    assert found.estimates[0].memory.device_bytes == least
    assert least <= min(one.memory.device_bytes for one in shown.estimates)


def all_rules_hold(case: Case) -> bool:
    return all(rule.holds(case) for rule in engine_of(case.layout.engine).rules)


def test_json_says_that_offload_was_tried(capsys: pytest.CaptureFixture[str]):
    options = [word for key, value in BOX.items() for word in (f"--{key.replace('_', '-')}", value)]
    assert command.exit_code(planner, ["recommend", *options, "--json"], name="planner") == 0
    found = json.loads(capsys.readouterr().out)
    one = found["estimates"][0]

    assert found["offload_tried"]
    assert one["memory"]["host_node_bytes"] < one["memory"]["host_capacity_bytes"]
