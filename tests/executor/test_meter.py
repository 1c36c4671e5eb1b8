"""Claims about the meter: terms, peaks and payloads it must give for known work. Not here: the planner's figures."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from executor.worker.meter.memory import LiveTensors
from executor.worker.meter.meter import Meter
from executor.worker.meter.traffic import CONTROL_BYTES, group_name
from executor.worker.world import cpu
from planner.spec import Cluster, Gpu, Layout, Link, ModelSpec, Runtime, TrainingJob
from planner.spec.plan import Plan
from planner.spec.record import RankMeasurements

TINY = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 352, "vocab": 512}
SEQ, BATCH = 128, 8
HUNG_AFTER_S = 240
"""Then a rank says where it stands and ends, before the test's own limit."""
ENGINES = ("ddp-view", "ddp-copy", "fsdp2", "hsdp", "fsdp2-keep", "zero1", "zero2", "zero3")


def plan_for(layout: Layout, seq: int = SEQ) -> Plan:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    return Plan(
        model=ModelSpec(name="tiny", **TINY),
        cluster=Cluster(
            name="here",
            gpu=Gpu(name="cpu", kind="cpu"),
            nodes=1,
            gpus_per_node=layout.world_size,
            intra_link=link,
            inter_link=link,
        ),
        job=TrainingJob(precision="fp32", seq_len=seq),
        layout=layout,
        runtime=Runtime(name="test", engine=layout.engine, kernels="transformers-eager"),
    )


# One rank of a real run. `torchrun --nproc-per-node 2 tests/executor/test_meter.py zero3 OUT '{"accum": 2}'`
# is also how the figures of docs/lab/meter.md were made.


def layout_for(engine: str, ranks: int, accum: int, recompute: bool, batch: int = BATCH) -> Layout:
    common = {"micro_batch_size": batch, "grad_accum": accum, "recompute": "full" if recompute else "none"}
    if engine.startswith("ddp"):
        return Layout(engine="ddp", dp_replicate=ranks, gradient_as_bucket_view=engine == "ddp-view", **common)
    if engine == "hsdp":
        return Layout(engine="fsdp2", dp_replicate=2, dp_shard=ranks // 2, zero_stage=3, **common)
    if engine.startswith("fsdp2"):
        return Layout(engine="fsdp2", dp_shard=ranks, zero_stage=3, reshard_after_forward=engine == "fsdp2", **common)
    return Layout(engine="deepspeed", dp_shard=ranks, zero_stage=int(engine[-1]), **common)


def tiny_llama(recompute: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY["vocab"],
        hidden_size=TINY["hidden"],
        intermediate_size=TINY["ffn"],
        num_hidden_layers=TINY["layers"],
        num_attention_heads=TINY["heads"],
        num_key_value_heads=TINY["kv_heads"],
        max_position_embeddings=SEQ,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class Torch:
    """DDP, FSDP2 or HSDP by hand, as Accelerate sets them up."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        if layout.engine == "ddp":
            self.module = nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=layout.gradient_as_bucket_view, broadcast_buffers=False
            )
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
            names = [name for name in sizes if sizes[name] > 1]
            mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=layout.reshard_after_forward)
            fully_shard(model.model.embed_tokens, mesh=mesh, reshard_after_forward=layout.reshard_after_forward)
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
            self.module = fully_shard(model, mesh=mesh, reshard_after_forward=layout.reshard_after_forward)
        self.params = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-3)

    def no_sync(self, last: bool):
        if self.layout.engine == "ddp":
            return nullcontext() if last else self.module.no_sync()
        self.module.set_requires_gradient_sync(last or self.layout.sync_each_micro_batch)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        grads = [parameter.grad for parameter in self.params if parameter.grad is not None]
        return {"params": self.params, "grads": grads, "optimizer": moments, "buckets": []}


class DeepSpeed:
    """ZeRO 1-3 with buckets sized to the model."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        import deepspeed

        bucket = layout.reduce_bucket_elements or sum(parameter.numel() for parameter in model.parameters())
        zero = {
            "stage": layout.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
        self.config = {
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.grad_accum,
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        self.module, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=self.config)

    def no_sync(self, last: bool):
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.module.backward(loss)

    def update(self) -> None:
        self.module.step()

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        zero = self.module.optimizer

        def tensors(*names: str) -> list[torch.Tensor]:
            return _tensors([getattr(zero, name, None) for name in names])

        weights = list(self.module.module.parameters())
        moments = [
            value
            for state in zero.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return {
            "params": [getattr(weight, "ds_tensor", weight) for weight in weights],
            "grads": tensors("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")
            + _tensors([getattr(weight, "grad_accum", None) for weight in weights]),
            "optimizer": moments + tensors("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"),
            "buckets": _tensors([bucket.buffer for bucket in zero.ipg_buckets.values()]),
        }


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def train(
    engine: str,
    out: Path,
    accum: int = 1,
    recompute: bool = False,
    batch: int = BATCH,
    seq: int = SEQ,
    bucket: int = 0,
    profiled: bool = False,
) -> None:
    faulthandler.dump_traceback_later(HUNG_AFTER_S, exit=True)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if engine.startswith("zero"):
        cpu.prepare(layout_for(engine, ranks, accum, recompute))
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    layout = layout_for(engine, ranks, accum, recompute, batch)
    meter = Meter(plan_for(layout, seq), rank, 0, rank, "cpu")
    with meter.load():
        layout = msgspec.structs.replace(layout, reduce_bucket_elements=bucket)
        model = tiny_llama(recompute)
        unit = (DeepSpeed if engine.startswith("zero") else Torch)(model, layout)
    meter.attach(unit.state_tensors)
    torch.manual_seed(rank)
    for index in range(7):
        watch = (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
            if profiled and index == 5
            else nullcontext()
        )
        with meter.step(index), watch as profile:
            for micro in range(accum):
                later = "" if micro == 0 else ".next"
                ids = torch.randint(0, TINY["vocab"], (batch, seq))
                with unit.no_sync(micro == accum - 1):
                    with meter.phase("forward" + later):
                        loss = unit.module(input_ids=ids, labels=ids).loss
                    with meter.phase("backward" + later):
                        unit.backward(loss / accum if not engine.startswith("zero") else loss)
                    if engine.startswith("zero") and micro < accum - 1:
                        unit.update()
                del loss
            with meter.phase("optimizer"):
                unit.update()
        if profiled and index == 5:
            (out / f"profiled-{rank}.json").write_text(json.dumps(profiled_bytes(profile)))
    (out / f"rank-{rank}.json").write_bytes(msgspec.json.encode(meter.result()))
    dist.destroy_process_group()


def live_bytes(live: LiveTensors) -> int:
    return sum(storage.bytes for storage in live._followed())


def profiled_bytes(profile: torch.profiler.profile) -> dict[str, float]:
    """fp32 payload by operation as torch.profiler saw it: a second opinion that shares no code with the meter."""
    seen = {
        "c10d::_allgather_base_": ("all_gather", 0),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
        "gloo:all_reduce": ("all_reduce", 0),
        "gloo:broadcast": ("broadcast", 0),
    }
    sums: dict[str, float] = {}
    for event in profile.events():
        if event.name in seen:
            op, place = seen[event.name]
            payload = 4 * torch.Size(event.input_shapes[place]).numel()
            sums[op] = sums.get(op, 0) + (payload if payload >= CONTROL_BYTES else 0)
    # gloo carries a reduce-scatter out as an all-reduce of its whole input, and the profiler shows both.
    sums["all_reduce"] = sums.get("all_reduce", 0) - sums.get("reduce_scatter", 0)
    return {op: payload for op, payload in sums.items() if payload}


def run(engine: str, ranks: int, out: Path, **options: int | bool) -> list[RankMeasurements]:
    """Train for real on `ranks` gloo processes; what each measured."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, __file__, engine, str(out), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        msgspec.json.decode((out / f"rank-{rank}.json").read_bytes(), type=RankMeasurements) for rank in range(ranks)
    ]


# One process: known work has known bytes.


def test_the_peak_is_the_fullest_moment_not_the_sum_of_what_was_made():
    live = LiveTensors("cpu", 7)
    with live, live.recording("forward"):
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(300)

    assert total(live.conclude(), "forward") == (1000 + 500) * 4
    del second, third


def test_a_view_adds_nothing_and_keeps_its_whole_storage_alive():
    live = LiveTensors("cpu", 7)
    with live:
        whole = torch.empty(1000)
        part = whole.view(10, 100)[2:4].t()
        assert live_bytes(live) == 4000
        del whole
        assert live_bytes(live) == 4000
        del part
        assert live_bytes(live) == 0


def test_storages_freed_and_grown_again_by_resize_are_followed():
    live = LiveTensors("cpu", 7)
    with live:
        weight = torch.empty(1000)
        weight.untyped_storage().resize_(0)
        assert live_bytes(live) == 0
        weight.untyped_storage().resize_(2000)
        assert live_bytes(live) == 2000


def test_the_resize_hook_goes_away_with_the_tracker():
    before = torch.UntypedStorage.resize_
    with LiveTensors("cpu", 7):
        assert torch.UntypedStorage.resize_ is not before

    assert torch.UntypedStorage.resize_ is before


def test_the_peak_is_the_one_the_cpu_allocator_itself_records():
    model = nn.Sequential(nn.Linear(100, 300), nn.GELU(), nn.Linear(300, 100))
    weights = sum(weight.nbytes for weight in model.parameters())
    live = LiveTensors("cpu", 7)
    with live, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        inputs = torch.randn(64, 100)
        with live.recording("forward"):
            loss = model(inputs).square().sum()
        with live.recording("backward"):
            loss.backward()

    allocated = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    assert max(total(live.conclude(), phase) for phase in ("forward", "backward")) == peak + weights


class Head(nn.Module):
    """A two-layer model whose every kept tensor can be counted by hand."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.up, self.lm_head = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, vocab, bias=False)

    def forward(self, inputs: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        if recompute:
            kept = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.up(x)), inputs, use_reentrant=False)
        else:
            kept = torch.tanh(self.up(inputs))
        return nn.functional.cross_entropy(self.lm_head(kept), torch.zeros(len(inputs), dtype=torch.int64))


@pytest.fixture
def head() -> tuple[Head, LiveTensors, torch.Tensor]:
    model, live = Head(hidden=32, vocab=50), LiveTensors("cpu", 50)
    weights = list(model.parameters())
    live.attach(lambda: {"params": weights, "grads": [weight.grad for weight in weights if weight.grad is not None]})
    return model, live, torch.randn(64, 32)


def test_terms_of_a_head_and_its_loss(head):
    model, live, inputs = head
    with live:
        with live.recording("forward"):
            loss = model(inputs)
        with live.recording("backward"):
            loss.backward()
        terms = {phase.phase: phase.terms for phase in live.conclude()}
    (made,) = (changes for phase, _, changes in live.history if phase == "backward")
    born = [(one.storage.term("backward"), one.storage.shape) for one in made if one.delta > 0]

    assert terms["forward"]["params"] == (32 * 32 + 50 * 32) * 4
    assert terms["forward"]["logits"] == 2 * 64 * 50 * 4, "logits and log-softmax"
    kept = 64 * 32 * 4
    assert terms["forward"]["activations"] == 2 * kept + 64 * 8 + 4 + 4, (
        "input, tanh's result, labels, loss and its weight"
    )
    assert [shape for term, shape in born if term == "grads"] == [(50, 32), (32, 32)], "no weight gradient is a logit"
    assert [shape for term, shape in born if term == "logits"] == [(64, 50), (64, 50)], "of the loss and of log-softmax"


def test_recomputed_activations_are_activations_again_in_backward(head):
    model, live, inputs = head
    with live:
        with live.recording("forward"):
            loss = model(inputs.requires_grad_(), recompute=True)
        with live.recording("backward"):
            loss.backward()
        live.conclude()

    made = [
        (phase, one.storage.term(phase))
        for phase, _, changes in live.history
        for one in changes
        if one.op.startswith("aten.tanh.") and one.delta > 0
    ]
    assert made == [("forward", "activations"), ("backward", "activations")]


def test_measuring_changes_no_number():
    losses = {}
    for measured in (False, True):
        torch.manual_seed(0)
        model = tiny_llama(recompute=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        live = LiveTensors("cpu", TINY["vocab"])
        ids = torch.randint(0, TINY["vocab"], (1, 16), generator=torch.Generator().manual_seed(1))
        losses[measured] = []
        with live if measured else nullcontext():
            for _ in range(3):
                with live.recording("forward") if measured else nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                with live.recording("backward") if measured else nullcontext():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[measured].append(loss.item())

    assert losses[True] == losses[False]
    assert losses[True][0] != losses[True][2]


def test_a_run_too_short_for_the_measured_steps_still_reports_load():
    meter = Meter(plan_for(Layout(engine="ddp")), 0, 0, 0, "cpu")
    with meter.load():
        weight = nn.Parameter(torch.ones(100))
    with meter.step(0), meter.phase("forward"):
        weight.sum()
    measured = meter.result()

    assert [(phase.phase, phase.terms["params"]) for phase in measured.memory] == [("load", 400)]
    assert measured.collectives == ()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((0, 1), "dp_shard"),
        ((2, 3), "dp_shard"),
        ((1, 3), "dp_replicate"),
        ((0, 1, 2, 3), "world"),
        ((0, 3), "ranks 0,3"),
    ],
)
def test_a_group_is_named_by_the_axis_its_ranks_form(ranks, expected):
    assert group_name(Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, zero_stage=3), ranks) == expected


# Two processes: real engines, figures known by formula.


def numel() -> int:
    h, f, v = TINY["hidden"], TINY["ffn"], TINY["vocab"]
    return TINY["layers"] * (4 * h * h + 3 * h * f + 2 * h) + h + 2 * v * h


def total(memory, phase: str) -> float:
    return next(entry.total for entry in memory if entry.phase == phase)


def payloads(calls) -> dict[str, float]:
    sums: dict[str, float] = {}
    for call in calls:
        sums[call.op] = sums.get(call.op, 0) + call.payload_bytes
    return sums


P = numel() * 4
STATES = {
    "ddp-view": (P, P, 2 * P),
    "fsdp2": (P / 2, P / 2, P),
    "zero1": (P, None, 1.5 * P),
    "zero3": (P / 2, P / 2, 1.5 * P),
}
TAIL = 4 * (TINY["vocab"] + 1) * TINY["hidden"]  # final norm and lm_head stay gathered from forward to backward
NORMS = 4 * 9 * TINY["hidden"]  # ZeRO-3 gathers weight by weight: those of the norms are under 1 KB, so control
MOVED = {
    "ddp-view": {"all_reduce": P},
    "fsdp2": {"all_gather": 2 * P - TAIL, "reduce_scatter": P},
    "zero1": {"all_reduce": P, "all_gather": P},
    "zero3": {"all_gather": 2 * (P - NORMS), "reduce_scatter": P},
}


PROFILED = [pytest.param(engine, True, marks=pytest.mark.long) for engine in MOVED]


@pytest.mark.parametrize(("engine", "profiled"), [("ddp-view", False), ("fsdp2", False), ("zero3", False), *PROFILED])
def test_states_and_payloads_of_a_real_step_on_two_ranks(engine, profiled, tmp_path):
    ranks = run(engine, 2, tmp_path, batch=1, seq=16, profiled=profiled)
    params, grads, optimizer = STATES[engine]

    for rank, measured in enumerate(ranks):
        phases = {phase.phase: phase.terms for phase in measured.memory}
        assert list(phases) == ["load", "forward", "backward", "optimizer"]
        assert phases["optimizer"]["params"] == params
        # AdamW also keeps one fp32 step counter a tensor: 39 here, or one where ZeRO has made one flat tensor.
        assert optimizer <= phases["optimizer"]["optimizer"] <= optimizer + 39 * 4
        if grads is not None:
            assert phases["optimizer"]["grads"] == grads
        assert phases["forward"]["logits"] in (0, 16 * TINY["vocab"] * 4, 2 * 16 * TINY["vocab"] * 4)

        assert payloads(measured.collectives) == MOVED[engine]
        if profiled:
            assert payloads(measured.collectives) == json.loads((tmp_path / f"profiled-{rank}.json").read_text())
        # DDP clips on its own rank; FSDP2 reduces a norm of each weight, ZeRO-1 one number, ZeRO-3 one in fp64.
        norms = sum(call.payload_bytes for call in measured.control if call.phase == "optimizer")
        assert norms == {"fsdp2": 39 * 4, "zero1": 4, "zero3": 8}.get(engine, 0)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
