"""Claims about 4-bit weights whose data others take away and bring back: what the graph holds of them meanwhile."""

from __future__ import annotations

import subprocess
import sys

HELD = """
import sys
import bitsandbytes, torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from executor.worker.model.quantized import let_go_of_gathered_codes

if sys.argv[1] == "ours":
    let_go_of_gathered_codes()
    let_go_of_gathered_codes()
linear = bitsandbytes.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
linear.weight = bitsandbytes.nn.Params4bit(torch.randn(64, 128), requires_grad=False, quant_type="nf4", module=linear)
linear.to("cpu")
x = torch.randn(4, 128, requires_grad=True)
gathered = linear.weight.data.clone()
linear(x).sum().backward()
plain, x.grad = x.grad, None
for run in (linear, lambda x: checkpoint(linear, x, use_reentrant=False)):
    linear.weight.data = gathered.clone()
    there = StorageWeakRef(linear.weight.data.untyped_storage())
    made = run(x)
    linear.weight.data = torch.empty(0, dtype=gathered.dtype)
    print(there.expired())
    linear.weight.data = gathered
    made.sum().backward()
    assert torch.equal(x.grad, plain)
    x.grad = None
"""


def held(which: str) -> list[str]:
    """Whether the codes were let go of, of a product and of one under a checkpoint; in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", HELD, which], capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip


def test_the_graph_holds_no_gathered_codes_and_the_gradients_are_the_same() -> None:
    assert held("theirs") == ["False", "False"]  # why there is a function of ours
    assert held("ours") == ["True", "True"]
