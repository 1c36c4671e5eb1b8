"""Pipelines through DeepSpeed's PipelineModule, with ZeRO-1 among the replicas of each stage.

DeepSpeed's own schedule runs; its instructions are put into the meter's phases, and its optimizer step waits for
`step`. Not here: cutting the model (executor/worker/model/stages.py), or ZeRO (deepspeed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from typing_extensions import override

from executor.worker.data.rows import Batch
from executor.worker.engines import deepspeed_views
from executor.worker.engines.deepspeed import DeepSpeedEngine
from executor.worker.engines.deepspeed_autotp import joined, split, split_dimension, split_part
from executor.worker.engines.deepspeed_views import PartitionedPart
from executor.worker.model import loading
from executor.worker.model.adapters import ordinary_name
from executor.worker.model.model import Unfilled
from executor.worker.model.stages import Head, Layers
from executor.worker.world import words
from planner.spec.plan import Plan

FORWARD = (schedule.ForwardPass, schedule.SendActivation, schedule.RecvActivation)
BACKWARD = (schedule.BackwardPass, schedule.SendGrad, schedule.RecvGrad, schedule.ReduceTiedGrads, schedule.ReduceGrads)


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """deepspeed.initialize over a PipelineModule of the model's own parts."""

    def __init__(self, plan: Plan, folder: str) -> None:
        super().__init__(plan, folder)
        layout = plan.layout
        self.topology = PipeModelDataParallelTopology(layout.pp, layout.tp, layout.dp_shard)
        self.stage = self.topology.get_coord(dist.get_rank()).pipe
        # DeepSpeed makes its own with the pipeline, which needs the split layers.
        peers = self.topology.get_axis_comm_lists("model") if layout.tp > 1 else []
        groups = [(ranks, dist.new_group(ranks)) for ranks in peers]
        self.tensor_ranks = next((group for ranks, group in groups if dist.get_rank() in ranks), None)
        self._phase: Callable[..., Any] | None = None
        self._suffix = ""

    @override
    def groups(self) -> dict[str, list[int]]:
        grid = self.engine.grid
        return {"pp": grid.pp_group, "dp_shard": grid.dp_group, "tp": grid.slice_group}

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        counts = self.plan.layout.layers_by_stage(self.plan.model.layers)
        begins = [0, *accumulate(counts)]
        first, last = self.stage == 0, self.stage == len(counts) - 1
        self.at_an_end = first or last
        model = unfilled.model
        if self.tensor_ranks is not None:
            split(unfilled.filled(self._whole_on), self.tensor_ranks)
        self.layers = Layers(model, begins[self.stage], begins[self.stage + 1])
        self.head = Head(model) if last else None
        embedding = model.get_input_embeddings() if first else None
        if self.tensor_ranks is None:
            if self.plan.job.precision == "bf16":
                loading.cast(model, torch.bfloat16)
            parts = [part for part in (embedding, self.layers, self.head) if part is not None]
            mine = [weight for part in parts for weight in part.parameters()]
            loading.fill(model, unfilled.values, self.device, only=mine)
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        pipeline = _Pipeline(self.layers, self.stage, embedding, self.head, self.topology, tied=self.plan.model.tied)
        held = {id(weight) for weight in pipeline.parameters()}
        for weight in model.parameters():  # the caller still holds the whole model, and what splits it may for good
            if id(weight) not in held:
                weight.data = weight.data.new_empty(0)
        self._initialize(pipeline, make_optimizer(pipeline))
        for weight, _ in pipeline.get_tied_weights_and_groups():
            if (
                not weight.requires_grad
            ):  # BF16_Optimizer gives sums to what it trains, and DeepSpeed asks for this one's
                weight._hp_grad = None
        instructions = self.engine._INSTRUCTION_MAP
        self.engine._INSTRUCTION_MAP = {kind: self._measured(kind, do) for kind, do in instructions.items()}

    def _measured(self, kind: type, do: Callable[..., None]) -> Callable[..., None]:
        """One kind of instruction inside its phase. The optimizer's is left to `step`."""

        def in_phase(engine: Any, **arguments: Any) -> None:
            name = "forward" if kind in FORWARD else "backward" if kind in BACKWARD else ""
            if kind is schedule.OptimizerStep:
                return
            if kind is schedule.ForwardPass and not self.at_an_end:
                next(self._feed)  # stages in the middle load nothing
            if not name or self._phase is None:
                do(engine, **arguments)
                return
            with self._phase(name + self._suffix, passes=kind in (schedule.ForwardPass, schedule.BackwardPass)):
                do(engine, **arguments)
            if kind is schedule.BackwardPass:
                self._suffix = ".next"
                if self.head is not None:
                    # DeepSpeed lets go of a stage's output here, but on the last one, whose loss would hold the graph
                    # and with it the received input until the next micro-batch but one.
                    engine.pipe_buffers["outputs"][arguments["buffer_id"]] = None
                    engine.loss = engine.loss.detach()

        return in_phase

    @override
    def run(self, batches: Iterable[Batch], step_tokens: int, meter: Any) -> torch.Tensor:
        items = step_tokens / self.loss_divisor  # whole steps run: forward and backward are never called apart
        self._phase, self._suffix, self._feed = meter.phase, "", self._fed(batches, items)
        self.engine.train_batch(self._feed)
        self._phase = None
        mean: torch.Tensor = self.engine.dp_group_loss  # of this pipeline's micro-batches, known on all its stages
        return mean * (items * self.plan.layout.grad_accum)

    def _fed(self, batches: Iterable[Batch], items: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Micro-batches as the first stage takes them, with no targets: DeepSpeed would keep those of two.

        What a micro-batch says beside its inputs goes past DeepSpeed, straight to this stage's parts.
        """
        no_targets = torch.empty(0, device=self.device)
        for batch in batches:
            placed = batch.to(self.device)
            self.layers.apart = self._apart(placed)
            if self.head is not None:
                self.head.targets, self.head.items = placed.targets, items
            yield placed.inputs, no_targets

    @override
    def _end_step(self) -> None:
        self.engine._exec_optimizer_step()

    @override
    def loss_sum(self, batch: Batch) -> torch.Tensor:
        # The mean over the replicas, on every rank: summed over all ranks it is what they hold, once a stage.
        self._feed = self._fed([batch], 1.0)
        loss: torch.Tensor = self.engine.eval_batch(self._feed, num_micro_batches=1)
        return loss.reshape(())

    @override
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stage by stage; one pipeline's ranks send theirs to rank 0."""
        group = self.engine.grid.pp_group
        for weight in self.engine.module.parameters():
            name, whole = self._names[id(weight)], self._whole(weight)
            if group[0] == 0 and self.stage > 0:
                words.send((name, list(whole.shape), str(whole.dtype).removeprefix("torch.")), 0)
                dist.send(whole.contiguous(), 0)
            yield name, whole
        if group[0] == 0 and self.stage > 0:
            words.send(None, 0)
        if dist.get_rank() != 0:
            return
        for source in group[1:]:
            yield from self._received(source)

    @override
    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for weight in self.engine.module.parameters():
            if weight.requires_grad:
                yield ordinary_name(self._names[id(weight)]), weight

    @override
    def _part(self, weight: nn.Parameter) -> PartitionedPart:
        part = deepspeed_views.whole(weight) if self.tensor_ranks is None else split_part(weight, self.tensor_ranks)
        # A table on two stages is in both stages' states, each cut where that stage's weights end: the first's count.
        tied = any(weight is shared for shared, _ in self.engine.module.get_tied_weights_and_groups())
        return part._replace(written=not tied or self.stage == 0)

    def _received(self, source: int) -> Iterator[tuple[str, torch.Tensor]]:
        while (announced := words.receive(source, tuple[str, tuple[int, ...], str] | None)) is not None:
            name, shape, dtype = announced
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            dist.recv(weight, source)
            yield name, weight

    def _whole(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight of this stage, in fp32 where what the module holds is a bf16 copy of what is trained."""
        from deepspeed.utils import safe_get_full_fp32_param

        held = safe_get_full_fp32_param(weight) if self.plan.job.precision == "bf16" else weight.detach()
        return held if self.tensor_ranks is None else joined(held, split_dimension(weight), self.tensor_ranks)


class _Pipeline(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """The parts of this rank's stage; other stages' are not built."""

    def __init__(
        self,
        layers: nn.Module,
        stage: int,
        embedding: nn.Module | None,
        head: nn.Module | None,
        topology: PipeModelDataParallelTopology,
        *,
        tied: bool,
    ) -> None:
        stages = topology.get_dim("pipe")
        # The first stage has two parts, the embedding and its layers, and so has the last.
        self._parts = [0, *range(2, stages + 1), stages + 2]
        absent = nn.Identity()
        parts: list[Any] = [absent] * (stages + 2)
        parts[stage + 1] = layers
        if tied:
            parts[0] = _Tied(embedding or absent, "weight")
            parts[-1] = _Tied(head or absent, "lm_head.weight")
        else:
            parts[0], parts[-1] = embedding or absent, head or absent
        super().__init__(parts, topology=topology)
        self._layer_specs: list[Any] = []

    @override
    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._parts
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class _Tied(TiedLayerSpec):  # type: ignore[misc]
    """A module that is there already, and that shares its weight with another stage's."""

    def __init__(self, module: nn.Module, weight: str) -> None:
        super().__init__("embedding", type(module), tied_weight_attr=weight)
        self._module = module

    @override
    def build(self, log: bool = False) -> nn.Module:
        return self._module
