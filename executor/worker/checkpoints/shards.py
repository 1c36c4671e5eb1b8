"""One safetensors file a rank with its pieces of weights and optimizer states, and pieces of any layout put into views.

A file is safetensors' own format (8 bytes of the header's length, the header, numbers), so whoever reads safetensors
reads it, and reading runs no code. Its metadata says where each piece lies. Not here: which files make a whole
checkpoint (executor/folder/checkpoints.py), or when one is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from executor.worker.model.pieces import Box, StateView, blocks, copy_shared
from executor.worker.world import words
from planner.basics.errors import PlannerError

SCHEMA = "shard/1"
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""safetensors' names of the formats that weights and states are trained in."""
ANOTHER = "Resume from another checkpoint of the run"


class ShardPiece(msgspec.Struct, frozen=True):
    """The position of a file's tensor `key` in a parameter's state, as in `pieces.StateView`."""

    key: str
    name: str
    kind: str
    shape: tuple[int, ...]
    box: Box
    flat: tuple[int, int]


class WrittenFile(NamedTuple):
    """A file's bytes and the SHA-256 of them, as hexadecimal digits."""

    size: int
    sha256: str


def write(path: Path, views: Iterable[StateView], metadata: Mapping[str, str]) -> WrittenFile:
    """Write this rank's share of its views into one file and fsync it; an OSError leaves a part of a file behind.

    The views are read one after the other, and each is copied to the host by itself.
    """
    shares = [share for view in views if (share := view.share()) is not None]
    shares.sort(key=lambda share: -share.tensor.itemsize)  # so that every number is aligned
    header: dict[str, Any] = {}
    pieces, at = [], 0
    for place, share in enumerate(shares):
        key, size = f"{place}:{share.kind}:{share.name}", share.tensor.nbytes
        header[key] = {
            "dtype": NAMES[share.tensor.dtype],
            "shape": [share.tensor.numel()],
            "data_offsets": [at, at + size],
        }
        pieces.append(ShardPiece(key, share.name, share.kind, share.shape, share.box, share.flat))
        at += size
    said = {"format": "pt", "schema": SCHEMA, "pieces": msgspec.json.encode(pieces).decode()}
    header = {"__metadata__": dict(metadata) | said} | header
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in _parts(text, shares):
            write_all(file, part)
            digest.update(part)
            size += part.nbytes
        os.fsync(file.fileno())
    return WrittenFile(size, digest.hexdigest())


def _parts(header: bytes, shares: Sequence[StateView]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for share in shares:
        numbers = share.tensor.cpu().as_strided((share.tensor.numel(),), (1,))  # of one number any stride is contiguous
        data: Any = numbers.view(torch.uint8).numpy()
        yield memoryview(data)


def write_all(file: Any, part: memoryview) -> None:
    """Write all of it."""
    while part.nbytes:  # a full disk takes a part of it before it refuses
        part = part[file.write(part) :]


def load(paths: Iterable[Path], views: Iterable[StateView]) -> None:
    """Fill views from files of any layout; numbers of another format are converted to the view's.

    Files are mapped and read one after the other, and only what the views need of them. A file that is not such a
    shard, a parameter of another shape and numbers that no file has raise PlannerError (exit code 3); views may have
    been changed by then.
    """
    wanted: dict[tuple[str, str], list[StateView]] = {}
    for view in views:
        wanted.setdefault((view.name, view.kind), []).append(view)
    found = {key: [0] * len(some) for key, some in wanted.items()}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                for piece in _pieces(path, opened):
                    some = wanted.get((piece.name, piece.kind), [])
                    for place, view in enumerate(some):
                        found[piece.name, piece.kind][place] += _take(path, opened, piece, view)
        except (OSError, SafetensorError) as error:
            raise _broken(path, f"cannot be read ({str(error).splitlines()[0]})") from None
    for key, some in wanted.items():
        for view, count in zip(some, found[key], strict=True):
            _check_whole(view, count)


def _take(path: Path, opened: Any, piece: ShardPiece, view: StateView) -> int:
    """Numbers of a piece that were copied into a view."""
    if piece.shape != view.shape:
        rule = f"has {piece.name} in shape {list(piece.shape)}, the model in {list(view.shape)}"
        raise PlannerError("checkpoint", str(path), rule, "Resume with the model that was trained", exit_code=3)
    if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(piece.box, view.box, strict=True)):
        numbers = opened.get_tensor(piece.key)
        return copy_shared(blocks(view.box, view.flat, view.tensor), blocks(piece.box, piece.flat, numbers))
    return 0


def _check_whole(view: StateView, count: int) -> None:
    needed = view.tensor.numel()
    if count != needed:
        state = "the weight" if view.kind == "weight" else f"{view.kind} of the weight"
        rule = f"has {count} of the {needed} numbers that this rank holds of it"
        raise PlannerError("checkpoint", f"{state} {view.name}", rule, ANOTHER, exit_code=3)


def read_pieces(path: Path) -> list[ShardPiece]:
    """The pieces of a file; PlannerError (exit code 3) where it is not a shard of a checkpoint."""
    try:
        with safe_open(path, framework="pt") as opened:
            return _pieces(path, opened)
    except (OSError, SafetensorError) as error:
        raise _broken(path, f"cannot be read ({str(error).splitlines()[0]})") from None


def _pieces(path: Path, opened: Any) -> list[ShardPiece]:
    metadata = opened.metadata() or {}
    if metadata.get("schema") != SCHEMA:
        raise _broken(path, f"is not a shard of a checkpoint ({SCHEMA})")
    try:
        pieces = msgspec.json.decode(metadata.get("pieces", ""), type=list[ShardPiece])
    except msgspec.MsgspecError as error:
        raise _broken(path, f"has a list of pieces that cannot be read ({error})") from None
    keys = set(opened.keys())
    for piece in pieces:
        lies = len(piece.box) == len(piece.shape)
        lies &= all(0 <= low < high <= n for (low, high), n in zip(piece.box, piece.shape, strict=False))
        volume = math.prod(high - low for low, high in piece.box)
        lies &= 0 <= piece.flat[0] < piece.flat[1] <= volume and piece.key in keys
        if not lies or opened.get_slice(piece.key).get_shape() != [piece.flat[1] - piece.flat[0]]:
            raise _broken(path, f"has a piece of {piece.name} that lies outside of it")
    return pieces


def _broken(path: Path, rule: str) -> PlannerError:
    return PlannerError("checkpoint", str(path), rule, ANOTHER, exit_code=3)


def restore(engine: Any, paths: Sequence[Path], updates: int) -> None:
    """Put a checkpoint of any layout into a prepared engine (worker.engines.base) that made `updates` updates.

    Every rank must call it. All end alike: what befalls one rank is raised on all of them, with that rank's sentence.
    """
    refused: PlannerError | None = None
    try:
        load(paths, engine.views())
    except PlannerError as error:
        refused = error
    except Exception as error:  # the others wait for this rank's word
        traceback.print_exc()
        rule = f"cannot be loaded ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
        refused = PlannerError("checkpoint", None, rule, ANOTHER, exit_code=3)
    agree(refused)
    engine.restored(updates)


def agree(refused: PlannerError | None) -> None:
    """Raise on all ranks what one of them refuses, in its words and with its number. Every rank must call it."""
    said = words.gathered(refused and (refused.field, refused.value, refused.rule, refused.fix))
    first = next(((rank, facts) for rank, facts in enumerate(said) if facts is not None), None)
    if first is not None:
        rank, (field, value, rule, fix) = first
        raise PlannerError(field, value, f"{rule} (rank {rank})", fix, exit_code=3)
