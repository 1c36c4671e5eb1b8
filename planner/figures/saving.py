"""A checkpoint before it is written: its size, the time to write it, and how often one loses least.

The facts are the plan's model and job, and the cluster's storage and failure rate. Not here: what a whole run loses
(cost.py), or the files of a checkpoint (executor/folder/checkpoints.py).
"""

from __future__ import annotations

import math

from planner.basics.arith import Number, by_value, where
from planner.basics.formula import formula
from planner.basics.quantities import format_bytes, format_duration, format_seconds
from planner.inventory import is_layer, parameters, unit_weights
from planner.inventory.optimizers import TrainedTensor, state_bytes
from planner.inventory.units import repeats
from planner.spec import Cluster, ModelSpec, TrainingJob
from planner.spec.plan import CheckpointAdvice

HOUR_S = 3600.0
ELEMENT_BYTES = 4.0
"""Of a trained weight in fp32. One that is trained in 16 bits takes half, so a size is at most as large as stated."""
DALY = "Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps, \
doi:10.1016/j.future.2004.11.016"


@formula(
    unit="bytes",
    source="docs/checkpoints.md: every trained weight and its optimizer's states once, whatever the layout",
)
def checkpoint_bytes(trained: Number, optimizer_bytes: Number) -> Number:
    """Trained weights in fp32 and their optimizer's states; frozen weights are not written."""
    return ELEMENT_BYTES * trained + optimizer_bytes


@formula(unit="s", source="definition: all ranks write at once, and the storage is the limit")
def checkpoint_seconds(size_bytes: Number, storage_bytes_per_s: Number) -> Number:
    """Time to write one checkpoint to the cluster's storage."""
    return size_bytes / storage_bytes_per_s


@formula(unit="s", source="independent failures at a constant rate: rates add up, and the mean time is the inverse")
def cluster_mtbf_s(devices: Number, failures_per_device_hour: Number) -> Number:
    """Mean time between failures that stop the run, any of the devices failing."""
    return HOUR_S / (devices * failures_per_device_hour)


@formula(unit="s", source="Young 1974, A first order approximation to the optimum checkpoint interval")
def young_interval_s(checkpoint_s: Number, mtbf_s: Number) -> Number:
    """Training between two checkpoints that loses least, to first order: sqrt(2 x checkpoint x MTBF)."""
    return by_value(math.sqrt, 2 * checkpoint_s * mtbf_s)


@formula(unit="s", source=f"{DALY}: the perturbation solution")
def daly_interval_s(checkpoint_s: Number, mtbf_s: Number) -> Number:
    """Training between two checkpoints that loses least; the time of the checkpoint itself comes on top.

    sqrt(2dM) (1 + sqrt(d/2M)/3 + (d/2M)/9) - d for d < 2M, else M; d is the checkpoint's time, M the MTBF.
    """
    ratio = checkpoint_s / (2 * mtbf_s)
    series = young_interval_s(checkpoint_s, mtbf_s) * (1 + by_value(math.sqrt, ratio) / 3 + ratio / 9) - checkpoint_s
    return where(ratio < 1, series, mtbf_s)


def size_of(model: ModelSpec, job: TrainingJob) -> float:
    """Bytes of one checkpoint of a run, at most: the same in every layout."""
    lora = job.adapters
    trained = parameters(model, lora, trainable=lora is not None)
    states = 0.0
    for unit, weights in unit_weights(model, lora).items():
        for weight in weights:
            if weight.adapter or (lora is None and weight.trainable):
                tensor = TrainedTensor(weight.shape, weight.elements, hidden=is_layer(unit))
                states += repeats(model, unit) * float(state_bytes(job.optimizer, tensor, ELEMENT_BYTES))
    return float(checkpoint_bytes(trained, states))


def advice(model: ModelSpec, job: TrainingJob, cluster: Cluster) -> CheckpointAdvice:
    """Size, time and best interval of checkpoints; None for what the cluster's facts do not tell."""
    size, storage, rate = size_of(model, job), cluster.storage_bytes_per_s, cluster.failures_per_gpu_hour
    seconds = None if storage is None else float(checkpoint_seconds(size, storage))
    interval = None
    if seconds and rate:
        interval = float(daly_interval_s(seconds, float(cluster_mtbf_s(cluster.gpus, rate))))
    return CheckpointAdvice(bytes=size, seconds=seconds, interval_s=interval)


def advice_text(found: CheckpointAdvice | None) -> str:
    """Size, time and best interval of checkpoints, or the options that would tell them."""
    if found is None:
        return "the size of a checkpoint is not known"
    size = f"a checkpoint takes {format_bytes(found.bytes)}"
    if found.seconds is None:
        return f"{size} (--storage-gb-per-s gives the time)"
    written = f"{size} and {format_seconds(found.seconds)} to write"
    if found.interval_s is None:
        return f"{written} (--failures-per-gpu-hour gives the best interval)"
    return f"{written}; the best interval is {format_duration(found.interval_s)} of training"
