"""DeepSpeed's Ulysses: ranks share each sequence, and Transformers' attention is wrapped in exchanges of heads.

`register_with_transformers` wraps the attention function that the model uses, once for the life of the process, and
makes the groups, which `deepspeed.initialize` takes as an `mpu`: ZeRO then works over the ranks of a sequence and the
data-parallel ones together. Read in deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, parallel_state_sp.py,
runtime/zero/stage_1_and_2.py and stage3.py. Not here: ZeRO (deepspeed.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from executor.worker.data.rows import Batch
from executor.worker.engines.deepspeed import DeepSpeedEngine
from executor.worker.model.model import Unfilled
from planner.spec.plan import Plan


class DeepSpeedUlyssesEngine(DeepSpeedEngine):
    """ZeRO's engine over ranks that have parts of sequences."""

    def __init__(self, plan: Plan, folder: str) -> None:
        super().__init__(plan, folder)
        if plan.layout.zero_stage == 3:
            # Stages 1 and 2 divide gradients by the ranks over those that share a sequence (`average_tensor`), stage 3
            # by all ranks.
            self.loss_divisor *= plan.layout.cp

    @override
    def groups(self) -> dict[str, list[int]]:
        sequence = dist.get_process_group_ranks(self._groups.get_sequence_parallel_group())
        alike = super().groups()["dp_shard"][sequence.index(dist.get_rank()) :: len(sequence)]
        return {"dp_shard": alike, "cp": sequence}

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        layout, model = self.plan.layout, unfilled.model
        self._groups = UlyssesSPAttentionHF.register_with_transformers(
            model, model.config._attn_implementation, layout.cp, layout.micro_batch_size, seq_length_is_variable=True
        )
        self._filled(unfilled, mpu=self._groups)  # over all ranks, as that group is
        self._initialize(model, make_optimizer(model), mpu=self._groups)

    @override
    def share(self, batch: Batch) -> Batch:
        width = batch.inputs.shape[1]
        length = width // self.plan.layout.cp
        begin = dist.get_rank(self._groups.get_sequence_parallel_group()) * length
        mine = slice(begin, begin + length)
        positions = torch.arange(width)[None, mine].contiguous()
        return Batch(batch.inputs[:, mine].contiguous(), batch.targets[:, mine].contiguous(), positions)

    @override
    def _apart(self, batch: Batch) -> dict[str, torch.Tensor]:
        assert batch.positions is not None
        return {"position_ids": batch.positions}
