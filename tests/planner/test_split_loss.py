"""Live bytes of torch's loss on logits that tensor ranks share, beside the tape's.

One rank of a fake world: its collectives send nothing, which no byte of its own depends on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.worker.meter.memory import LiveTensors
from planner.inventory import ends, ops
from planner.inventory.tape import LOGITS, Tape
from planner.inventory.tensors import Size

TOKENS, VOCAB, RANKS = 64, 4096, 4
LOCAL = VOCAB // RANKS


@pytest.fixture
def mesh() -> Iterator[object]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def measured(mesh: object) -> dict[str, float]:
    """Bytes a logit at the fullest moment of each pass; torchtitan's loop lets go of the 16-bit logits in between."""
    local = torch.randn(TOKENS, LOCAL, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    tracker = LiveTensors("cpu", LOCAL)
    with tracker, loss_parallel():
        with tracker.recording("forward"):
            logits = DTensor.from_local(local * 1, mesh, [Shard(1)], run_check=False)
            loss = F.cross_entropy(logits.float(), labels)
            del logits
        with tracker.recording("backward"):
            loss.backward()
    return {phase: sum(tracker.fullest[phase].values()) / (TOKENS * LOCAL) for phase in ("forward", "backward")}


def of_tape() -> dict[str, float]:
    """The same of the planner's loss."""
    tape = Tape()
    logits = tape.new(Size(per_token=2.0), needs_grad=True, term=LOGITS)
    wide = ops.cast(tape, logits, 2.0)
    loss = ends.split_cross_entropy(tape, wide)
    tape.drop(wide, logits)
    tape.backward(loss)
    fullest = {}
    for moment in tape.moments:
        bytes_now = sum(size.per_token for size in moment.live)
        fullest[moment.phase] = max(bytes_now, fullest.get(moment.phase, 0.0))
    return fullest


def test_the_split_loss_holds_what_torchs_holds(mesh: object) -> None:
    leaf = 2.0  # what the logits of the measurement are made of, which no model has
    found, expected = measured(mesh), of_tape()

    assert expected == {"forward": 14.0, "backward": 16.0}
    for phase, size in expected.items():
        # Beside the logits: a few figures a token, and the masks of the targets.
        assert found[phase] - leaf == pytest.approx(size, abs=0.05)
