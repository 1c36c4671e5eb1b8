"""Claims about what stage 3 gathers of 4-bit weights: no layer's codes wait for another's backward."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask.options import question
from planner.ask.question import case_of, exact_layout
from planner.figures.memory import memory_breakdown

LINEARS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@pytest.mark.parametrize("recompute", ["none", "sac:matmul", "full"])
@pytest.mark.parametrize("targets", ["q_proj,v_proj", LINEARS])
@pytest.mark.parametrize("micro_batch", ["1", "4"])
def test_gathered_codes_do_not_grow_with_layers(recompute: str, targets: str, micro_batch: str):
    asked = {"model": "llama-2-7b", "gpu": "a100-sxm-40gb", "gpus": "2", "gpus_per_node": "2", "seq_len": "512"}
    how = {"runtime": "deepspeed-zero", "zero_stage": "3", "dp_shard": "2", "method": "qlora", "lora_targets": targets}
    found = question(asked | how | {"recompute": recompute, "micro_batch_size": micro_batch})
    case = case_of(found, exact_layout(found))
    limits = msgspec.structs.replace(case.layout, zero3_prefetch_elements=0, zero3_max_reuse_elements=0)
    gathered = []
    for layers in (8, 32):
        model = msgspec.structs.replace(case.model, layers=layers, parameters=None)
        one = msgspec.structs.replace(case, model=model, layout=limits)
        gathered.append(max(phase.terms["gathered"] for phase in memory_breakdown(one).phases))

    # but for norms, which are never released
    assert gathered[1] - gathered[0] <= 24 * 2 * 4096 * 2 + 2 * 24 * 7 * 2 * 8 * 11008
