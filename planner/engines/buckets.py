"""How large DeepSpeed's buckets are made: one answer for the prediction and for the emitted configuration.

DeepSpeed allocates its buckets at the configured size whatever the model, so its default of 5e8 elements costs
gigabytes on a small one. Not here: what lives in a bucket and when (deepspeed_common.py).
"""

from __future__ import annotations

from planner.basics.arith import Number, ceil_div, maximum, minimum
from planner.spec import Layout

LARGEST_BUCKET_ELEMENTS = 50_000_000
SMALLEST_BUCKET_ELEMENTS = 2**20
BUCKETS_PER_MODEL = 16


def reduce_bucket_elements(layout: Layout, parameters: Number) -> Number:
    """Elements of a gradient bucket: the layout's, or one sized to `parameters` trainable elements."""
    return layout.reduce_bucket_elements or _sized(parameters)


def allgather_bucket_elements(layout: Layout, parameters: Number) -> Number:
    """Elements gathered at once after a ZeRO-1 or ZeRO-2 step: the layout's, or sized to `parameters`."""
    return layout.allgather_bucket_elements or _sized(parameters)


def _sized(parameters: Number) -> Number:
    # A sixteenth of the model leaves buckets to overlap with backward; 50 M elements (100 MB in bf16) is long past
    # the size where a link reaches its full rate, and below a million the latency of each call shows (judgement).
    share = maximum(SMALLEST_BUCKET_ELEMENTS, ceil_div(parameters, BUCKETS_PER_MODEL))
    return maximum(1, minimum(minimum(parameters, share), LARGEST_BUCKET_ELEMENTS))
