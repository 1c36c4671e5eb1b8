"""A run's cost: figures one can check by hand, published ones, and a simulation of failures."""

from __future__ import annotations

import json
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.ask.options import question
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide.planning import plan_of
from planner.decide.recommendation import recommend
from planner.figures.saving import checkpoint_seconds, cluster_mtbf_s, daly_interval_s, size_of, young_interval_s
from planner.spec.plan import CheckpointAdvice
from planner.studies.cost import CostRates, Length, cost, energy_kwh, expected_run_seconds, goodput, steps_needed, work
from planner.studies.reply import reply_of

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
EIGHT_B = {"model": "8b", "gpus": "64", "global_batch_size": "256", "seq_len": "2048"}


def run(*arguments: str) -> int:
    return command.exit_code(planner, arguments, name="planner")


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_two_trillion_tokens_at_four_million_a_step_are_half_a_million_steps():
    assert steps_needed(2 * 10**12, 4 * 10**6) == 500_000
    assert steps_needed(2 * 10**12 + 1, 4 * 10**6) == 500_001


def test_the_time_is_the_tokens_over_the_tokens_a_second():
    found = cost(question(EIGHT_B), Length(tokens=2 * 10**12), CostRates(price_per_gpu_hour=2.5))

    tokens_per_s = found.best.throughput.tokens_per_s
    assert found.training_s == pytest.approx(2e12 / tokens_per_s, rel=1e-5)  # the last step is a whole one
    assert found.gpu_hours == pytest.approx(64 * found.training_s / 3600)
    assert found.money == pytest.approx(2.5 * found.gpu_hours)
    assert found.low_s < found.training_s < found.high_s


def test_samples_are_sequences_and_epochs_multiply_them():
    asked = question(EIGHT_B)

    tokens, steps = work(asked, 256, Length(samples=10**6, epochs=10))

    assert tokens == 10**6 * 2048 * 10
    assert steps == math.ceil(10**7 / 256)
    assert work(asked, 256, Length(tokens=10**9, epochs=3))[0] == 3 * 10**9
    assert work(asked, 256, Length(steps=100)) == (100 * 256 * 2048, 100)


def test_a_thousand_gpus_that_each_fail_every_five_years_fail_every_43_hours():
    hours = 5 * 365 * 24

    assert cluster_mtbf_s(1024, 1 / hours) / HOUR == pytest.approx(42.77, abs=0.01)


def test_llama_3_405b_was_interrupted_every_three_hours():
    """419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024, table 5)."""
    per_gpu_hour = 419 / (54 * 24 * 16_384)

    assert cluster_mtbf_s(16_384, per_gpu_hour) == pytest.approx(54 * DAY / 419)
    assert cluster_mtbf_s(16_384, per_gpu_hour) / HOUR == pytest.approx(3.1, abs=0.05)
    assert cluster_mtbf_s(1024, per_gpu_hour) / HOUR == pytest.approx(16 * 3.093, rel=1e-3)


def test_energy_is_power_times_time_times_pue():
    # 8 GPUs at 700 W and one host at 2 kW for a day at PUE 1.2: 7.6 kW x 1.2 x 24 h
    assert energy_kwh(8, 700, 1, 2000, 1.2, DAY) == pytest.approx(7.6 * 1.2 * 24)


def test_energy_counts_what_is_known_and_names_the_rest():
    asked, length = question(EIGHT_B), Length(tokens=10**11)

    found = cost(asked, length, CostRates(gpu_power_w=700.0))

    assert found.energy_kwh == pytest.approx(64 * 0.7 * found.run_s / HOUR)
    assert any("hosts" in line for line in found.unknown)
    assert any("pue" in line for line in found.unknown)
    whole = cost(asked, length, CostRates(gpu_power_w=700.0, host_power_w=1600.0, pue=1.25))
    assert whole.energy_kwh == pytest.approx((64 * 0.7 + 8 * 1.6) * 1.25 * whole.run_s / HOUR)


def test_power_comes_from_the_preset_unless_it_is_given():
    asked = question(EIGHT_B)
    length = Length(tokens=10**9)

    assert cost(asked, length, CostRates(gpu_power_w=123.0)).rates.gpu_power_w == 123
    assert cost(asked, length, CostRates()).rates.gpu_power_w == asked.cluster.gpu.power_w == 700


def test_power_unknown_is_energy_unknown():
    asked = question(EIGHT_B)
    bare = msgspec.structs.replace(asked.cluster.gpu, power_w=None)
    asked = msgspec.structs.replace(asked, cluster=msgspec.structs.replace(asked.cluster, gpu=bare))

    found = cost(asked, Length(tokens=10**9), CostRates())

    assert found.energy_kwh is None
    assert any(line.startswith("energy:") for line in found.unknown)


# -- checkpoints and failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_dalys_interval_is_the_one_he_prints(mtbf_s: float, minutes: float):
    """Captions of figures 3, 4 and 5: a checkpoint of 5 min."""
    assert daly_interval_s(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_youngs_interval_by_hand():
    assert young_interval_s(2.0, 10_000.0) == pytest.approx(200.0)


@given(st.floats(1, 600), st.floats(2 * HOUR, 1000 * HOUR), st.floats(0, 3600), st.floats(0.5, 2))
def test_no_other_interval_is_much_better_than_dalys(checkpoint_s: float, mtbf_s: float, restart_s: float, off: float):
    best = daly_interval_s(checkpoint_s, mtbf_s)

    at_best, elsewhere = (
        expected_run_seconds(1e6, interval, checkpoint_s, restart_s, mtbf_s) for interval in (best, off * best)
    )

    assert at_best <= elsewhere * (1 + 1e-4)


@given(st.floats(1, 600), st.floats(HOUR, 1000 * HOUR), st.floats(1.01, 10))
def test_rarer_failures_never_take_longer(checkpoint_s: float, mtbf_s: float, rarer: float):
    often, seldom = (expected_run_seconds(1e6, HOUR, checkpoint_s, 60, mtbf) for mtbf in (mtbf_s, rarer * mtbf_s))

    assert 1e6 * (1 + checkpoint_s / HOUR) <= seldom * (1 + 1e-12)
    assert seldom <= often
    assert 0 < goodput(1e6, often) <= 1


def test_the_expected_time_is_what_simulated_failures_take():
    """Play failures at random times against whole intervals; restarts and checkpoints may fail too."""
    interval_s, checkpoint_s, restart_s, mtbf_s, intervals = 1800.0, 120.0, 300.0, 4000.0, 40_000
    chance = random.Random(7)
    clock = 0.0
    for _ in range(intervals):
        while True:
            failure = chance.expovariate(1 / mtbf_s)
            if failure >= interval_s + checkpoint_s:
                clock += interval_s + checkpoint_s
                break
            clock += failure
            while (again := chance.expovariate(1 / mtbf_s)) < restart_s:
                clock += again
            clock += restart_s

    expected = expected_run_seconds(interval_s * intervals, interval_s, checkpoint_s, restart_s, mtbf_s)

    assert clock == pytest.approx(expected, rel=0.02)


def test_an_interval_that_never_completes_never_ends():
    assert expected_run_seconds(1e6, 1e6, 60, 60, 100) == math.inf

    found = cost(
        question(EIGHT_B),
        Length(tokens=10**12),
        CostRates(checkpoint_s=60, interval_s=DAY * 100, restart_s=60, failures_per_gpu_hour=1.0),
    )

    assert (found.run_s, found.gpu_hours, found.goodput) == (None, None, 0.0)
    assert any("never completes" in line for line in found.unknown)


def test_a_checkpoint_is_twelve_bytes_a_weight_under_adamw_and_adapters_alone_under_lora():
    def size(**words: str) -> float:
        asked = question(EIGHT_B | words)
        return size_of(asked.model, asked.job)

    weights = 8_030_261_248  # of Llama 3 8B's model card
    assert size() == 12 * weights
    assert size(optimizer="sgd") == 4 * weights
    rank, layers = 16, 32
    pairs = 4096 + 4096 + 4096 + 1024  # in and out of the projections of queries and values
    assert size(method="lora", lora_rank="16", lora_targets="q_proj,v_proj") == 12 * rank * layers * pairs


def test_a_cluster_that_was_watched_fails_as_often_as_was_published():
    """The Llama 3 paper: 419 unexpected interruptions in 54 days, one in three hours, more than 90 % goodput."""
    asked = question(EIGHT_B | {"model": "405b", "cluster": "llama-3-24k", "gpus": "16384", "global_batch_size": "2048",
                                "seq_len": "8192"})  # fmt: skip
    rate = asked.cluster.failures_per_gpu_hour

    assert rate is not None and cluster_mtbf_s(16384, rate) == pytest.approx(54 * DAY / 419, rel=1e-3)
    assert checkpoint_seconds(size_of(asked.model, asked.job), 2e12) == pytest.approx(405.85e9 * 12 / 2e12, rel=1e-3)


def test_cost_takes_failures_and_storage_from_the_cluster_and_says_what_it_lacks():
    watched = question(EIGHT_B | {"cluster": "llama-3-24k", "gpus": "1024", "global_batch_size": "1024"})
    found = cost(watched, Length(tokens=10**12), CostRates())
    other = cost(question(EIGHT_B), Length(tokens=10**12), CostRates())

    assert found.rates.checkpoint_s == pytest.approx(8_030_261_248 * 12 / 2e12)
    best = daly_interval_s(found.rates.checkpoint_s, found.reliability.mtbf_s)
    assert found.reliability.checkpoint_interval_s == best
    assert found.goodput is not None and 0.99 < found.goodput < 1
    assert any(line.startswith("restarts:") for line in found.unknown)
    assert (other.rates.checkpoint_s, other.reliability.mtbf_s, other.goodput) == (None, None, None)
    assert any(line.startswith("failures:") for line in other.unknown)
    with pytest.raises(PlannerError, match="has no best interval"):
        cost(watched, Length(tokens=10**12), CostRates(checkpoint_s=0.0))
    given = CostRates(restart_s=600, failures_per_gpu_hour=2e-5, storage_bytes_per_s=10e9)
    assert cost(question(EIGHT_B), Length(tokens=10**12), given).rates.checkpoint_s == pytest.approx(
        8_030_261_248 * 12 / 10e9
    )


def test_an_interval_without_failures_takes_the_time_that_a_checkpoint_takes_on_the_storage():
    """12 bytes of each of 8.03e9 weights at 10 GB/s."""
    rates = CostRates(interval_s=3600, storage_bytes_per_s=10e9)

    assert cost(question(EIGHT_B), Length(tokens=10**11), rates).rates.checkpoint_s == pytest.approx(9.636, rel=1e-3)
    assert cost(question(EIGHT_B), Length(tokens=10**11), replace(rates, interval_s=None)).rates.checkpoint_s is None


def test_a_plan_states_its_checkpoint_and_none_where_the_cluster_does_not_tell():
    watched = question(EIGHT_B | {"cluster": "llama-3-24k", "gpus": "1024", "global_batch_size": "1024"})
    told, untold = (
        plan_of(reply_of(recommend(one, 1)).best).prediction.checkpoint for one in (watched, question(EIGHT_B))
    )

    assert told is not None and told.bytes == 8_030_261_248 * 12
    assert told.interval_s == daly_interval_s(told.seconds, cluster_mtbf_s(1024, watched.cluster.failures_per_gpu_hour))
    assert untold == CheckpointAdvice(bytes=told.bytes)


def test_checkpoints_without_failures_only_add_their_own_time():
    found = cost(question(EIGHT_B), Length(tokens=10**11), CostRates(checkpoint_s=60, interval_s=3600))

    assert found.run_s == pytest.approx(found.training_s * (1 + 60 / 3600))
    assert found.goodput == pytest.approx(3600 / 3660)
    assert any(line.startswith("failures:") for line in found.unknown)


def test_failures_a_node_and_failures_a_gpu_say_the_same():
    def with_rate(**rate: float) -> float | None:
        rates = CostRates(checkpoint_s=60, restart_s=600, **rate)
        return cost(question(EIGHT_B), Length(tokens=10**12), rates).run_s

    assert with_rate(failures_per_gpu_hour=1e-4) == pytest.approx(with_rate(failures_per_node_hour=8e-4))


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_figures_and_what_it_did_not_count(capsys: pytest.CaptureFixture[str]):
    asked = ["cost", "--model", "8b", "--gpus", "64", "--tokens", "2T"]
    assert run(*asked) == 0
    out = capsys.readouterr().out
    assert "2,000,000,000,000 in" in out
    assert "not counted: money" in out

    assert run(*asked, "--price-per-gpu-hour", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "cost/1"
    assert found["money"] == pytest.approx(2 * found["gpu_hours"])
    assert found["run_s"] == pytest.approx(found["steps"] * found["best"]["step_s"])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "tokens"),
        (["--tokens", "1B", "--samples", "1M", "--seq-len", "128"], "samples"),
        (["--samples", "1M"], "seq_len"),
        (["--steps", "10", "--epochs", "2"], "epochs"),
        (["--tokens", "1Q"], "tokens"),
        (["--tokens", "1B", "--failures-per-gpu-hour", "1e-5"], "checkpoint_time"),
        (["--tokens", "1B", "--failures-per-gpu-hour", "1e-5", "--checkpoint-time", "60"], "restart_time"),
        (["--tokens", "1B", "--checkpoint-time", "60"], "checkpoint_time"),
        (["--tokens", "1B", "--checkpoint-interval", "1h"], "checkpoint_interval"),
        (["--tokens", "1B", "--restart-time", "60"], "restart_time"),
        (["--tokens", "1B", "--pue", "0.5"], "pue"),
        (["--tokens", "1B", "--gpu-power", "0"], "gpu_power"),
        (["--tokens", "1B", "--failures-per-gpu-hour", "1", "--failures-per-node-hour", "1"], "failures_per_node_hour"),
        (["--tokens", "1B", "--tp", "1", "--pp", "1", "--global-batch-size", "100"], "global_batch_size"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str], field: str):
    assert run("cost", "--model", "8b", "--gpus", "64", *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {field}")
    assert err.count("\n") == 1


def test_what_does_not_fit_has_exit_code_3(capsys: pytest.CaptureFixture[str]):
    assert run("cost", "--model", "405b", "--gpus", "1", "--method", "full", "--tokens", "1B") == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_contradictions_are_refused_without_the_command_line():
    with pytest.raises(PlannerError):
        cost(question(EIGHT_B), Length(), CostRates())
