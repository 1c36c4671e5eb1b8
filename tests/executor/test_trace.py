"""Claims about traces: they agree with the planner, few layers stand for many, and what cannot be traced is refused.

Not here: traces against real runs of the same layout (tests/cluster/test_trace.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import tomllib
from itertools import product
from random import Random
from typing import Any

import msgspec
import psutil
import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from executor.cli import executor
from executor.measure import trace as traces
from executor.measure import tracekernels
from executor.measure.lines import Tolerances, outside
from executor.measure.report import judged
from executor.worker.trace.trace import trace
from planner.basics.errors import PlannerError
from planner.spec import Cluster, Gpu, Layout, Link, ModelSpec, Runtime, TrainingJob, presets
from planner.spec.job import Precision
from planner.spec.model import Moe
from planner.spec.plan import PhaseMemory, Plan, encode_plan
from scripts.trace_pairs import LARGE, PAIRS, PEAK_PERCENT, TERM_PERCENT, Pair, large_terms, plan_of, planned, traced

EXTRAPOLATED_PERCENT = 0.1


def tiny_plan(layers: int, dense_layers: int | None = None, **layout: object) -> Plan:
    """A tiny dense model; or a mixture, whose layers are far larger than the `dense_layers` before them."""
    moe = None if dense_layers is None else Moe(experts=16, top_k=2, expert_ffn=176, dense_layers=dense_layers)
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    split = Layout(**layout)  # type: ignore[arg-type]
    return Plan(
        model=ModelSpec(
            name="tiny",
            layers=layers,
            hidden=64,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=176,
            vocab=512,
            moe=moe,
        ),
        cluster=Cluster(
            name="here",
            gpu=Gpu(name="h100", kind="cuda"),
            nodes=1,
            gpus_per_node=split.world_size,
            intra_link=link,
            inter_link=link,
        ),
        job=TrainingJob(precision="bf16", seq_len=64),
        layout=split,
        runtime=Runtime(name="test", engine=split.engine, kernels="hf"),
    ).sealed()


IN_CI = (
    "opt-125m-ddp-fp32",
    "gpt2-xl-ddp-bf16",
    "llama-2-7b-fsdp-pure",
    "llama-2-7b-ddp-pure-full",
    "llama-2-7b-fsdp-lora",
    "llama-3-8b-hsdp-fp32",
    "llama-3-8b-fsdp-bf16-full",
    "llama-3-8b-tp-bf16",
    "mixtral-8x7b-fsdp-bf16",
    "llama-3-70b-fsdp-pure",
)
"""Each engine, precision and kind of model; all pairs in `make long`."""


@pytest.mark.parametrize(
    "name", [*IN_CI, *(pytest.param(name, marks=pytest.mark.long) for name in PAIRS if name not in IN_CI)]
)
def test_planner_and_trace_agree_on_peak_and_large_terms(name: str) -> None:
    report = traced(PAIRS[name])

    terms = large_terms(report)
    assert sum(line.measured or 0 for line in terms) > (1 - 8 * LARGE) * (report.memory.peak.measured or 0)
    for line, allowed in ((report.memory.peak, PEAK_PERCENT), *((line, TERM_PERCENT) for line in terms)):
        assert line.error_percent is not None, line
        assert abs(line.error_percent) <= allowed, line
    for line in report.traffic.lines:
        assert line.error_percent == pytest.approx(0, abs=1e-6), line


BACKENDS = {
    "flash": (torch.ops.aten._scaled_dot_product_flash_attention, False),
    "efficient": (torch.ops.aten._scaled_dot_product_efficient_attention, True),
    "cudnn": (torch.ops.aten._scaled_dot_product_cudnn_attention, True),
}
"""The kernels among which torch's scaled_dot_product_attention chooses on a GPU (ATen,
transformers/cuda/sdp_utils.cpp), and whether each takes a mask and whether to keep the rows' sums."""


EVERY_BACKEND = list(product(BACKENDS, ("bf16", "pure-bf16"), (("ddp", 1), ("fsdp2", 8)), ("none", "full")))
BACKENDS_IN_CI = Random(3).sample(EVERY_BACKEND, 4)


@pytest.mark.parametrize(
    ("backend", "precision", "over", "recompute"),
    [pytest.param(*one, marks=() if one in BACKENDS_IN_CI else pytest.mark.long) for one in EVERY_BACKEND],
)
def test_each_kernel_of_torch_s_attention_keeps_what_is_planned(
    backend: str, precision: Precision, over: tuple[str, int], recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel, with_mask), (engine, shards) = BACKENDS[backend], over
    called = []

    def chosen(query: Tensor, key: Tensor, value: Tensor, *args: Any, is_causal: bool, **kwargs: Any) -> Tensor:
        assert not args and kwargs.pop("attn_mask", None) is None and kwargs.pop("dropout_p", 0.0) == 0.0
        called.append(backend)
        if torch.is_autocast_enabled("cpu"):  # which casts what a call of the whole function is given
            query, key, value = (one.to(torch.bfloat16) for one in (query, key, value))
        masked = (None, torch.is_grad_enabled()) if with_mask else ()
        result: Tensor = kernel(query, key, value, *masked, 0.0, is_causal, scale=kwargs["scale"])[0]
        return result

    monkeypatch.setattr(functional, "scaled_dot_product_attention", chosen)
    layout = Layout(
        engine=engine, zero_stage=3 if shards > 1 else 0, dp_shard=shards, dp_replicate=8 // shards,
        micro_batch_size=2, recompute=recompute, attention="sdpa",
    )  # fmt: skip
    # The memory-efficient kernel is never given grouped heads (sdp_utils.cpp, check_batch_size_and_num_heads_dense).
    model = replace(presets.model("tiny-llama"), kv_heads=4 if backend == "efficient" else 2)
    plan = planned(model, TrainingJob(precision=precision, seq_len=1024), layout)
    report = traces.compared(plan, trace(plan, 0))

    assert called and report.memory.peak.error_percent == pytest.approx(0, abs=0.5)


LITE, V3 = presets.model("deepseek-v2-lite"), presets.model("deepseek-v3")
assert V3.moe is not None and V3.mla is not None
SMALL_V3 = replace(
    V3,
    layers=4, hidden=512, heads=8, kv_heads=8, head_dim=96, ffn=1024, vocab=4096,
    moe=replace(V3.moe, experts=16, groups=4, top_groups=2, top_k=4, expert_ffn=128, dense_layers=1),
    mla=replace(V3.mla, q_lora_rank=128, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "recompute"),
    [(replace(LITE, layers=3), "none"), (SMALL_V3, "none"), (SMALL_V3, "full")],  # V2-Lite's full one peaks in the step
    ids=["v2-lite", "v3", "v3-full"],
)
def test_deepseeks_activations_are_those_of_a_trace_of_every_layer(model: ModelSpec, recompute: str) -> None:
    """Values of latent attention are narrower than its keys: a GPU's memory-efficient kernel leaves its result token by
    token, without a copy; rows of experts are weighed in fp32."""
    layout = Layout(engine="fsdp2", zero_stage=3, dp_shard=8, recompute=recompute)
    plan = planned(model, TrainingJob(seq_len=1024), layout)
    report = traces.compared(plan, trace(plan, 0, full=True))
    (activations,) = [one for one in report.memory.lines if one.name == "backward/activations"]

    assert activations.predicted and activations.measured
    assert abs(activations.predicted / activations.measured - 1) < 0.005
    assert abs((report.memory.peak.predicted or 0) / (report.memory.peak.measured or 1) - 1) < 0.025


def test_falcon_repeats_its_one_key_head_without_a_copy_for_one_sequence() -> None:
    peaks = [
        traced(Pair("falcon-7b", "pure-bf16", 1024, Layout(engine="ddp", dp_replicate=8, micro_batch_size=size)))
        for size in (1, 2)
    ]

    # In backward of the fp32 softmax with the product of gradient and result, which a GPU's kernel makes.
    assert [one.memory.peak.error_percent for one in peaks] == pytest.approx([0, 0], abs=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(engine="ddp", dp_replicate=2),
        Layout(engine="ddp", dp_replicate=2, grad_accum=2),
        Layout(engine="ddp", dp_replicate=2, grad_accum=2, gradient_as_bucket_view=False),
        Layout(engine="fsdp2", zero_stage=3, dp_shard=2, grad_accum=2),
        Layout(engine="transformers-tp", zero_stage=3, tp=2, grad_accum=2),
    ],
    ids=lambda one: f"{one.engine}-accum{one.grad_accum}{'' if one.gradient_as_bucket_view else '-no-views'}",
)
def test_a_tied_tables_first_gradient_waits_beside_what_the_engine_keeps(layout: Layout) -> None:
    peak = traced(Pair("tiny-llama-tied", "fp32", 256, replace(layout, micro_batch_size=4, recompute="full")))

    assert peak.memory.peak.error_percent == pytest.approx(0, abs=0.2), peak.memory.peak


@pytest.mark.parametrize("model", ["tiny-llama", "qwen3-0.6b", "phi-2"])
def test_recomputed_attention_keeps_queries_and_keys_as_positions_leave_them(model: str) -> None:
    # fp32 under autocast: it casts them inside attention, which the checkpoint surrounds.
    layout = Layout(engine="ddp", dp_replicate=2, micro_batch_size=4, recompute="attention")

    peak = traced(Pair(model, "bf16", 512, layout)).memory.peak

    assert peak.error_percent == pytest.approx(0, abs=0.5), peak


@pytest.mark.parametrize(
    "layout",
    [
        {"engine": "ddp", "dp_replicate": 4, "grad_accum": 2},
        pytest.param(
            {"engine": "fsdp2", "dp_shard": 4, "zero_stage": 3, "recompute": "full", "micro_batch_size": 2},
            marks=pytest.mark.long,
        ),
        {"engine": "fsdp2", "dp_shard": 2, "dp_replicate": 2, "zero_stage": 3, "reshard_after_forward": False},
        {"engine": "fsdp2", "dp_shard": 4, "zero_stage": 3, "recompute": "full", "dense_layers": 1},
        # Autocast's copies of the weights wait for the end of the forward, not for their layer's backward.
        {"engine": "ddp", "dp_replicate": 4, "recompute": "full", "micro_batch_size": 8},
    ],
    ids=["ddp-accumulating", "fsdp2-recomputing", "hsdp-kept", "fsdp2-dense-first", "ddp-recomputing"],
)
def test_two_and_four_layers_tell_what_seven_hold_and_send(layout: dict[str, Any]) -> None:
    from executor.worker.trace.trace import trace

    plan = tiny_plan(7, **layout)

    few, full = trace(plan, 0), trace(plan, 0, full=True)

    assert few.layers == (2 + layout.get("dense_layers", 0), 4 + layout.get("dense_layers", 0))
    assert full.layers == (7,)
    peak = max(moment.total for moment in full.moments)
    for one, other in zip(few.moments, full.moments, strict=True):
        assert one.phase == other.phase
        assert one.total == pytest.approx(other.total, rel=EXTRAPOLATED_PERCENT / 100), one.phase
        for term, value in other.terms.items():
            assert one.terms[term] == pytest.approx(value, abs=peak * EXTRAPOLATED_PERCENT / 100), (one.phase, term)
    payloads = [{call.key: call.payload_bytes for call in trace.collectives} for trace in (few, full)]
    assert payloads[0] == pytest.approx(payloads[1])


def test_micro_batches_between_the_first_and_the_last_are_counted_though_one_is_run() -> None:
    from executor.worker.trace.trace import trace

    layout = {"engine": "fsdp2", "dp_shard": 2, "zero_stage": 3}
    three, seven = (trace(tiny_plan(2, **layout, grad_accum=accum), 0) for accum in (3, 7))

    assert seven.micro_batches == 3
    gathers, reductions = (
        [sum(call.count for call in one.collectives if call.op == op) for one in (three, seven)]
        for op in ("all_gather", "reduce_scatter")
    )
    assert gathers[1] == gathers[0] / 3 * 7
    assert reductions[1] == reductions[0]


def test_a_term_predicted_twice_as_large_is_seen() -> None:
    from executor.worker.trace.trace import trace

    plan = plan_of(PAIRS["qwen3-4b-ddp-bf16"])
    one = trace(plan, 0, kernels=True)
    wrong = tuple(
        PhaseMemory(phase=phase.phase, terms=phase.terms | {"activations": 2 * phase.terms["activations"]})
        for phase in plan.prediction.memory
    )
    misled = replace(plan, prediction=replace(plan.prediction, memory=wrong))

    right, misled = (traces.compared(made, one) for made in (plan, misled))
    assert outside(judged(right.memory, right.traffic, Tolerances(memory=2))) == ()
    assert "memory peak" in outside(judged(misled.memory, misled.traffic, Tolerances(memory=2)))[0]

    preset = tomllib.loads(tracekernels.as_preset(plan, one.kept))
    parts, _ = tracekernels.parts_of(one.kept, plan.runtime.parts)
    assert preset["norm"], preset["attention"] == ("eager-fp32", "flash")
    assert parts == plan.runtime.parts
    assert set(preset["sources"]) >= set(tracekernels.PARTS)
    assert tracekernels.kept_bytes(plan, parts) == pytest.approx(sum(k.bytes_per_token for k in one.kept if k.path != "loss"))  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"engine": "deepspeed", "dp_shard": 2, "zero_stage": 2}, "engine deepspeed"),
        ({"engine": "fsdp2", "dp_shard": 2, "zero_stage": 3, "cp": 2}, "cp=2"),
        ({"engine": "fsdp2", "dp_shard": 2, "zero_stage": 3, "offload_activations": True}, "offload_activations"),
    ],
)
def test_what_no_process_builds_is_refused_in_a_sentence(layout: dict[str, object], said: str) -> None:
    with pytest.raises(PlannerError, match=said) as raised:
        traces.check(tiny_plan(2, **layout), 0)

    assert raised.value.exit_code == 3


def test_4_bit_weights_are_not_traced() -> None:
    plan = tiny_plan(2, engine="ddp", dp_replicate=2)

    reason = traces.refusal(replace(plan, job=replace(plan.job, method="qlora")))

    assert reason is not None and "bitsandbytes" in reason


def test_a_rank_that_is_not_there_is_one_line_and_exit_code_2(tmp_path, capsys) -> None:
    from planner.basics import command

    plan = tmp_path / "plan.json"
    plan.write_bytes(encode_plan(tiny_plan(2, engine="ddp", dp_replicate=2)))

    code = command.exit_code(executor, ["trace", str(plan), "--rank", "2"])

    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --rank=2: the plan has ranks 0 to 1")


@pytest.mark.cluster
def test_the_command_traces_in_a_process_of_its_own_and_prints_json(tmp_path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(encode_plan(tiny_plan(5, engine="ddp", dp_replicate=2)))

    done = CliRunner().invoke(executor, ["trace", str(plan), "--json"], standalone_mode=False)

    found = msgspec.json.decode(done.stdout)
    assert found["schema"] == "trace/1"
    assert found["traced_layers"] == [2, 4]
    assert {moment["phase"] for moment in found["moments"]} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_trace_and_its_process(tmp_path, received: signal.Signals) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(encode_plan(tiny_plan(2, engine="ddp", dp_replicate=2)))
    code = "import sys; from executor.cli import main; sys.argv = ['executor', 'trace', sys.argv[1]]; main()"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE, text=True) as command:
        parent = psutil.Process(command.pid)
        while not (children := parent.children()):
            assert command.poll() is None
            time.sleep(0.01)
        command.send_signal(received)
        err = command.communicate()[1]

    assert (command.returncode, err) == (128 + received, f"error: trace: stopped by {received.name}.\n")
    assert not any(child.is_running() for child in children)
