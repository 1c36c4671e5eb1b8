"""Stages of Megatron-LM's pipeline: layers of each by the flags that deal them, and chunks where ranks hold several.

Flags: Megatron-LM d98e8a64 (megatron/training/arguments.py, core/transformer/pipeline_parallel_layer_layout.py). Not
here: other flags (megatron.py).
"""

from __future__ import annotations

import re

from planner.ask.fromfile.sheet import Sheet

KEYS = (
    "pipeline-model-parallel-layout", "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
)  # fmt: skip
LAYERS = {"E": 0, "L": 0, "m": 0, "t": 1}
"""Letters of a pipeline's layout, and the layers that they count as (pipeline_parallel_layer_layout.py)."""
REPEATED = re.compile(r"\(([EtmL|]{1,999})\)\*(\d{1,3})|([EtmL|])\*(\d{1,3})")
MOST_LETTERS = 20_000


def read(sheet: Sheet, layers: int) -> None:
    """Layers of each stage, or chunk where ranks hold several; 0 where the model is not known."""
    pp = sheet.says("pp")
    layout, chunk, chunks, first, last, *ends = KEYS
    counted = [end for end, key in zip(("embedding", "head"), ends, strict=True) if sheet.flag(key)]
    virtual = 1
    if sheet.has(layout):
        counts = staged(sheet, layout)
        if len(counts) % pp or (layers and sum(counts) != layers):
            raise sheet.wrong(layout, f"is {len(counts)} stages of {sum(counts)} layers, not of {pp} ranks, {layers}")
        sheet.means("stage_layers", ",".join(map(str, counts)), layout)
        virtual = len(counts) // pp
    elif sheet.has(first) or sheet.has(last):
        _unequal(sheet, layers, sheet.whole(first), sheet.whole(last))
    elif counted:
        sheet.means("counted_ends", "both" if len(counted) > 1 else counted[0], *ends)
    if sheet.has(chunks):
        virtual = sheet.whole(chunks) or 1
    elif sheet.has(chunk) and not layers:
        why = "chunks a rank follow from the model's layers"
        sheet.decides(chunk, why, "Add --virtual-stages", "virtual_stages")
    elif sheet.has(chunk):
        each = sheet.whole(chunk) or 0
        if each < 1 or (layers + len(counted)) % (pp * each):
            raise sheet.wrong(chunk, f"does not divide the {layers + len(counted)} layers of {pp} ranks")
        virtual = (layers + len(counted)) // (pp * each)
    if virtual > 1:
        sheet.means("pp_schedule", "interleaved", chunk, chunks, layout)
        sheet.means("virtual_stages", virtual, chunk, chunks, layout)
    else:
        sheet.means("pp_schedule", "1f1b", note="one chunk a rank")


def _unequal(sheet: Sheet, layers: int, first: int | None, last: int | None) -> None:
    """The first and last stage as said; the others share what is left."""
    _, _, chunks, *keys = KEYS[:5]
    pp = sheet.says("pp")
    left, between = layers - (first or 0) - (last or 0), pp - (first is not None) - (last is not None)
    if sheet.has(chunks):
        sheet.decides(keys[0] if sheet.has(keys[0]) else keys[1], "stages of several unequal chunks are not planned",
                      "Add --stage-layers", "stage_layers")  # fmt: skip
        return
    if left < 0 or (left % between if between else left):
        raise sheet.wrong(keys[0] if first is not None else keys[1], f"leaves {left} layers to {between} stages")
    counts = [*([first] if first is not None else []), *[left // max(between, 1)] * between]
    sheet.means("stage_layers", ",".join(map(str, [*counts, *([last] if last is not None else [])])), *keys)


def staged(sheet: Sheet, key: str) -> list[int]:
    """Layers of each stage of a layout such as `Et*3|(tt|)*29m|L`."""
    text = "".join(str(sheet.data[key]).replace(",", "").split())
    while len(text) <= MOST_LETTERS and (found := REPEATED.search(text)):
        letters, times = (found[1], found[2]) if found[1] else (found[3], found[4])
        text = text[: found.start()] + letters * int(times) + text[found.end() :]
    if len(text) > MOST_LETTERS or set(text) - {*LAYERS, "|"}:
        raise sheet.wrong(key, "is no layout of stages", "Letters are E, t, m and L, with | between stages")
    return [sum(LAYERS[letter] for letter in stage) for stage in text.split("|")]
