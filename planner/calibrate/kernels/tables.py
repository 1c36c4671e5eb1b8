"""Tables of measured kernels (.csv): which kind a table is by its columns, and each line as the sizes of one kernel.

The format is that of tests/truth/kernels. Not here: a line's prediction (predict.py).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from planner.basics import reading
from planner.basics.errors import PlannerError

MICRO = 1e-6
KINDS: dict[str, tuple[str, ...]] = {
    "product": ("gpu", "dtype", "m", "n", "k"),
    "attention": ("gpu", "dtype", "batch", "seq", "heads", "kv_heads", "head_dim"),
    "experts": (
        *("gpu", "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts"),
        *("moe_tp_size", "moe_ep_size", "distribution"),
    ),
    "collective": ("gpu", "op", "gpus", "elements", "element_bytes"),
    "training": ("gpu", "op", "peak_tflops", "shape"),
}
"""Kind of table -> the columns that it must have; `us`, microseconds measured, may be missing or empty. Of experts
`untuned` is 1 where a kernel ran that was not tuned for them."""
FORMATS = {"bfloat16": "bf16", "float16": "fp16"}
POWER_LAW = re.compile(r"power_law_(\d+(?:\.\d+)?)$")
NOT_GATED = "nongated"
ATTENTION = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
BACKWARD_OF_FORWARD = 2.5


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel: what it is (`kind`, on which `gpu`, its number format or operation in `variant`) and its `sizes`.

    `why_not` is why nothing can be said of it; `line` counts from 1, the head included.
    """

    kind: str
    file: str
    line: int
    gpu: str = ""
    variant: str = ""
    sizes: dict[str, float] = {}
    measured_s: float | None = None
    why_not: str | None = None


def read(path: str | Path) -> list[KernelRow]:
    """The lines of a table, in order (PlannerError for what is not such a table)."""
    path = Path(path)
    try:
        reader = csv.DictReader(io.StringIO(reading.read_text(path, reading.TABLE_BYTES), newline=""))
        columns = tuple(reader.fieldnames or ())
        kind = _kind(path, columns)
        return [_row(kind, path.stem, number, one) for number, one in enumerate(reader, 2)]
    except OSError as error:
        raise PlannerError("rows", path, f"cannot be read ({error.strerror})", "Give a table of kernels") from None
    except csv.Error as error:
        raise PlannerError("rows", path, f"is not a table ({error})", "Give comma-separated values") from None


def _kind(path: Path, columns: tuple[str, ...]) -> str:
    for kind, needed in KINDS.items():
        if set(needed) <= set(columns):
            return kind
    rule = "is not a table of kernels: its columns are those of none"
    told = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in KINDS.items())
    raise PlannerError("rows", path, rule, f"Columns of {told}")


def _row(kind: str, file: str, line: int, told: Mapping[str, str | None]) -> KernelRow:
    known = {key: (value or "").strip() for key, value in told.items() if isinstance(key, str)}
    try:
        variant, sizes, measured_s = _READERS[kind](known)
    except ValueError as error:
        return KernelRow(kind=kind, file=file, line=line, gpu=known.get("gpu", ""), why_not=str(error))
    return KernelRow(
        kind=kind, file=file, line=line, gpu=known["gpu"], variant=variant, sizes=sizes, measured_s=measured_s
    )


Sizes = dict[str, float]
Read = tuple[str, Sizes, float | None]


def _count(known: Mapping[str, str], column: str) -> float:
    try:
        value = float(known[column])
    except (KeyError, ValueError):
        raise ValueError(f"{column} is not a number: {known.get(column)!r}") from None
    if not 1 <= value <= 1e15 or value != int(value):
        raise ValueError(f"{column} is not a count: {known[column]!r}")
    return value


def _measured(known: Mapping[str, str]) -> float | None:
    if not known.get("us"):
        return None
    try:
        value = float(known["us"])
    except ValueError:
        raise ValueError(f"us is not a number: {known['us']!r}") from None
    if not 0 < value < 1e12:
        raise ValueError(f"us is not a time: {known['us']!r}")
    return value * MICRO


def _product(known: Mapping[str, str]) -> Read:
    sizes = {name: _count(known, name) for name in ("m", "n", "k")}
    return FORMATS.get(known["dtype"], known["dtype"]), sizes, _measured(known)


def _attention(known: Mapping[str, str]) -> Read:
    sizes = {name: _count(known, name) for name in ("batch", "seq", "heads", "kv_heads", "head_dim")}
    number_format = FORMATS.get(known["dtype"], known["dtype"])
    if number_format not in ("bf16", "fp16"):
        raise ValueError(f"attention in {number_format} is not known")
    return "forward", {**sizes, "value_dim": sizes["head_dim"]}, _measured(known)


def _experts(known: Mapping[str, str]) -> Read:
    sizes = {name: _count(known, name) for name in KINDS["experts"][2:-1]}
    law = known["distribution"]
    found = POWER_LAW.match(law)
    if law != "balanced" and not found:
        raise ValueError(f"how distribution {law!r} routes is not known")
    if sizes["num_experts"] % sizes["moe_ep_size"]:
        raise ValueError("experts that do not divide among the ranks are not known")
    sizes["exponent"] = float(found[1]) if found else 0.0
    sizes["tuned"] = float(known.get("untuned") != "1")
    sizes["gates"] = 1.0 if NOT_GATED in known.get("kernel_source", "") else 2.0
    return FORMATS.get(known["moe_dtype"], known["moe_dtype"]), sizes, _measured(known)


def _collective(known: Mapping[str, str]) -> Read:
    sizes = {"ranks": _count(known, "gpus"), "bytes": _count(known, "elements") * _count(known, "element_bytes")}
    return known["op"], sizes, _measured(known)


def _training(known: Mapping[str, str]) -> Read:
    """An operator of SimuMax's tables: its share of the peak as seconds, by the FLOP that they count."""
    op = known["op"]
    if op.startswith("bytes:"):
        raise ValueError("a share of the memory's rate without a size is not a kernel")
    told = dict(part.split("=", 1) for part in known["shape"].replace(" ", "").split(",") if "=" in part)
    if op in ("sdp_fwd", "sdp_bwd"):
        sizes = {name: _count(told, name) for name in ATTENTION}
        pairs = sizes["batch"] * sizes["seq_len"] ** 2 * max(sizes["head_num"], sizes["kv_head_num"])
        flops = 2 * pairs * (sizes["qk_head_dim"] + sizes["v_head_dim"])
        flops = flops * (BACKWARD_OF_FORWARD if op == "sdp_bwd" else 1)
        ours = ("batch", "seq", "heads", "kv_heads", "head_dim", "value_dim")
        named = dict(zip(ours, sizes.values(), strict=True))
        return ("backward" if op == "sdp_bwd" else "forward"), named, _of_share(known, flops)
    written = 4.0 if told.get("out_dtype") == "fp32" else 2.0
    if op == "matmul":
        sizes = {name: _count(told, name) for name in ("m", "n", "k")}
        written = 2 * written if told.get("accumulate") == "True" else written
        flops = 2 * sizes["m"] * sizes["n"] * sizes["k"]
        return "product", {**sizes, "output_bytes": written}, _of_share(known, flops)
    if op != "group_matmul":
        raise ValueError(f"op {op!r} is not known")
    sizes = {name: _count(told, name) for name in ("ng", "M", "N", "K")}
    flops = 2 * sizes["ng"] * sizes["M"] * sizes["N"] * sizes["K"]
    weights = told.get("stage") == "bwd_grad_w"
    if weights:  # each expert's gradient: K rows of N, summed over its M tokens
        sizes = {**sizes, "M": sizes["K"], "K": sizes["M"]}
        written = 8.0 if told.get("main_grad_dtype") == "fp32" else 4.0
    return "grouped", {**sizes, "output_bytes": written}, _of_share(known, flops)


def _of_share(known: Mapping[str, str], flops: float) -> float | None:
    if not known.get("share_of_peak"):
        return None
    try:
        share, tflops = float(known["share_of_peak"]), float(known["peak_tflops"])
    except ValueError:
        raise ValueError("share_of_peak or peak_tflops is not a number") from None
    if not (0 < share < 100 and 0 < tflops < 1e9):
        raise ValueError("share_of_peak and peak_tflops must be above 0")
    return flops / (share * tflops * 1e12)


_READERS: dict[str, Callable[[Mapping[str, str]], Read]] = {
    "product": _product,
    "attention": _attention,
    "experts": _experts,
    "collective": _collective,
    "training": _training,
}
