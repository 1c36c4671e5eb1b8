"""Offload: states and activations wait in the host's memory, and cross the host's link when they are used.

ZeRO-Offload (Ren et al. 2021) moves the optimizer and its step to the host; ZeRO-Infinity (Rajbhandari et al. 2021)
and FSDP's CPUOffloadPolicy move weights as well; saved activations can wait there from forward to backward.
Not here: the buffers that software adds (engines/host.py).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number, in_shape_of, maximum
from planner.basics.formula import formula

STEP_SHARE = 0.14
"""Of a host's memory rate, what optimizers of ranks that step beside each other reach on it. Published of
DeepSpeedCPUAdam: 72.7 B weights of 32 A100 in about 10 s (deepspeedai/DeepSpeed issue 6834, DeepSpeed 0.14.5), of 380
GB/s a node. Alone on a host one process reached three times as much (ZeRO-Offload, Ren et al. 2021, table 4: 10 B
weights in 2.57 s)."""


LAYERS_ON_DEVICE = 1
"""Layers whose saved tensors are on the device beside those of the layer at work: one is on its way out or in."""


class Transfer(msgspec.Struct, frozen=True):
    """What one rank moves over its host link in one phase of a step, both directions, in bytes."""

    phase: str
    to_host_bytes: Number
    to_device_bytes: Number
    overlappable: bool


@formula(unit="layers", source="saved tensors leave when the next layer begins; all but the last have left after it")
def offloaded_layers(layers: Number) -> Number:
    """Layers whose saved tensors are in host memory when `layers` are done and one more is at work."""
    return maximum(layers - LAYERS_ON_DEVICE, in_shape_of(layers))


@formula(unit="s", source="both directions of a full-duplex link at once; the slower decides")
def offload_seconds(to_host_bytes: Number, to_device_bytes: Number, link_bytes_per_s: Number) -> Number:
    """Seconds a rank's host link is busy; `link_bytes_per_s` is its rate in one direction."""
    return maximum(to_host_bytes, to_device_bytes) / link_bytes_per_s


@formula(unit="s", source="an element-wise update is limited by memory; deepspeedai/DeepSpeed issue 6834 has the share")
def host_update_seconds(accessed_bytes: Number, host_bytes_per_s: Number, sharers: Number) -> Number:
    """Seconds of an optimizer step on the host, whose memory's rate `sharers` ranks of the node divide."""
    return accessed_bytes * sharers / (host_bytes_per_s * STEP_SHARE)
