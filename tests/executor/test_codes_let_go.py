"""Claims about 4-bit weights whose data others take away and bring back: what the graph holds of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import bitsandbytes
import pytest
import torch
from bitsandbytes.autograd import _functions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from executor.worker.model.quantized import let_go_of_gathered_codes

Run = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
RUNS: dict[str, Run] = {
    "plain": lambda linear, x: linear(x),
    "checkpointed": lambda linear, x: checkpoint(linear, x, use_reentrant=False),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("double", [False, True])
def test_the_graph_holds_no_gathered_codes_and_the_gradients_are_the_same(
    run: Run, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_functions, "MatMul4Bit", _functions.MatMul4Bit)  # put back at the end
    linear = bitsandbytes.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    linear.weight = bitsandbytes.nn.Params4bit(
        torch.randn(64, 128), requires_grad=False, quant_type="nf4", compress_statistics=double, module=linear
    )
    linear.to("cpu")
    gathered = linear.weight.data.clone()
    x = torch.randn(4, 128, requires_grad=True)

    def let_go() -> tuple[bool, torch.Tensor]:
        linear.weight.data = gathered.clone()
        there = StorageWeakRef(linear.weight.data.untyped_storage())
        made = run(linear, x)
        linear.weight.data = torch.empty(0, dtype=gathered.dtype)
        gone = bool(there.expired())
        linear.weight.data = gathered
        (grad,) = torch.autograd.grad(made.sum(), x)
        return gone, grad

    theirs, expected = let_go()
    let_go_of_gathered_codes()
    let_go_of_gathered_codes()
    ours, found = let_go()

    assert (theirs, ours) == (False, True)  # the first is why there is a function of ours
    assert torch.equal(found, expected)
