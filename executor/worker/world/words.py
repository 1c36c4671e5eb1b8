"""Messages between ranks beside tensors: JSON in tensors of bytes, so that nothing a peer sends is unpickled.

Every rank calls `gathered` and `of_rank_0`; `send` and `receive` are between two. Not here: what is said.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

Kind = TypeVar("Kind")


def gathered(value: Any, kind: type[Kind] | Any = Any) -> list[Any]:
    """Every rank's message, by rank, each read as `kind`."""
    own = _packed(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, _size(own))
    longest = max(int(one) for one in sizes)
    parts = [own.new_zeros(longest) for _ in sizes]
    dist.all_gather(parts, torch.cat([own, own.new_zeros(longest - len(own))]))
    return [_read(part[: int(size)], kind) for part, size in zip(parts, sizes, strict=True)]


def of_rank_0(value: Any, kind: type[Kind] | Any = Any) -> Any:
    """Rank 0's message, read as `kind`; those of other ranks are ignored."""
    own = _packed(value)
    size = _size(own)
    dist.broadcast(size, 0)
    said = own if dist.get_rank() == 0 else own.new_zeros(int(size))
    dist.broadcast(said, 0)
    return _read(said, kind)


def send(value: Any, to: int) -> None:
    """Say it to one rank, which receives it."""
    own = _packed(value)
    dist.send(_size(own), to)
    dist.send(own, to)


def receive(source: int, kind: type[Kind] | Any = Any) -> Any:
    """A message of another rank, read as `kind`."""
    size = torch.zeros(1, dtype=torch.int64, device=_device())
    dist.recv(size, source)
    said = torch.zeros(int(size), dtype=torch.uint8, device=size.device)
    dist.recv(said, source)
    return _read(said, kind)


def _device() -> torch.device:
    """The device of the ranks' group."""
    on_cpu = "cpu:" in str(dist.get_backend_config())
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _packed(value: Any) -> Tensor:
    """A value of which a word is made: plain ones, structs and what is a string to a person, as paths are."""
    text = json.dumps(msgspec.to_builtins(value, enc_hook=str)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(_device())


def _size(packed: Tensor) -> Tensor:
    return torch.tensor([len(packed)], dtype=torch.int64, device=packed.device)


def _read(packed: Tensor, kind: Any) -> Any:
    return msgspec.convert(json.loads(packed.cpu().numpy().tobytes()), kind)
