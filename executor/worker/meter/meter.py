"""The meter: times every step, looks into memory on one step and at collectives on another.

The trainer says when phases begin and end; everything else is seen from here, so a measured run computes what an
unmeasured one does. Not here: how storages are followed (memory.py) or calls read (traffic.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from executor.worker.meter.memory import LiveTensors, StateTensors
from executor.worker.meter.modules import Modules
from executor.worker.meter.traffic import CollectiveCall, TrafficMeter, collectives, sends_activations
from planner.spec.plan import PhaseMemory, Plan
from planner.spec.record import MEMORY_STEP, TRAFFIC_STEP, RankMeasurements


def logits_widths(plan: Plan) -> tuple[int, int]:
    """Last dimensions that logits have: the vocabulary, and a tensor rank's part of it."""
    return plan.model.vocab, -(-plan.model.vocab // plan.layout.tp)


class Meter:
    """Measures one rank. Storages are followed from `load` to the end of `memory_step`, slowly; then not at all.

    Steps count from 0. `result` holds the times of the steps after both measured ones.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        node: int,
        local_rank: int,
        device: torch.device | str,
        memory_step: int = MEMORY_STEP,
        traffic_step: int = TRAFFIC_STEP,
        live: LiveTensors | None = None,
    ) -> None:
        self._layout, self._rank, self._node, self._local_rank = plan.layout, rank, node, local_rank
        self._device = torch.device(device)
        self.memory_step, self._traffic_step = memory_step, traffic_step
        self._step = -1
        self._phase = "step"
        self._live: LiveTensors | None = live or LiveTensors(self._device.type, *logits_widths(plan))
        self._entered = False
        self._modules = Modules()
        self._memory: tuple[PhaseMemory, ...] = ()
        self._allocator: dict[str, float] = {}
        self.calls: list[CollectiveCall] = []
        """The traffic step's collectives so far."""
        self._step_s: list[float] = []

    @classmethod
    def here(cls, plan: Plan, device: torch.device) -> Meter:
        """The meter of this process, by the place in the world that its launcher gave it."""
        rank, node, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "GROUP_RANK", "LOCAL_RANK"))
        return cls(plan, rank, node, local_rank, device)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Around building model, engine and optimizer."""
        assert self._live is not None and not self._entered, "load comes once, before any step"
        self._live.__enter__()
        self._entered = True
        try:
            with self._live.recording("load"), self._allocator_peak("load"):
                yield
        except BaseException:
            self._stop_following()
            raise

    def attach(self, state_tensors: StateTensors) -> None:
        """`state_tensors()` gives what is alive now as "params", "grads", "optimizer" and "buckets".

        "params" are the persistent ones: under FSDP2 the sharded parameters even while they are gathered.
        """
        if self._live is not None:
            self._live.attach(state_tensors)

    @contextmanager
    def step(self, index: int, *, timed: bool = True) -> Iterator[None]:
        """Around one optimizer step, all its micro-batches included; one that is not `timed` is not a steady one."""
        self._step, self._phase = index, "step"
        self._wait()
        if index in (self.memory_step, max(self.memory_step, self._traffic_step) + 1):
            self._note_device("steps")  # before the measured step's phases, and before the steps that are timed
        began = time.perf_counter()
        with ExitStack() as stack:
            if index > self.memory_step and self._entered:
                self._stop_following()  # the measured step was skipped, for instance by a resume
            if index == self.memory_step and self._entered:
                stack.callback(self._conclude)
            if index == self._traffic_step:
                if self._live is None and sends_activations(self._layout):
                    self._modules.install()
                    stack.callback(self._modules.remove)
                traffic = stack.enter_context(TrafficMeter(self._layout, lambda: self._phase, self._path))
                self.calls = traffic.calls
            yield
            self._wait()
            if timed and index > max(self.memory_step, self._traffic_step):
                self._step_s.append(time.perf_counter() - began)

    @contextmanager
    def phase(self, name: str, *, passes: bool = True) -> Iterator[None]:
        """Inside a step: forward, backward (first micro-batch), forward.next, backward.next (later), optimizer. Not
        every phase `passes` a micro-batch: a pipeline's sends are phases too (profile.py asks)."""
        self._phase = name
        self._modules.phase_begins(name)
        with ExitStack() as stack:
            if self._step == self.memory_step and self._live is not None and self._entered:
                stack.enter_context(self._live.recording(name))
                stack.enter_context(self._allocator_peak(name))
            try:
                yield
            finally:
                self._phase = "step"

    def result(self) -> RankMeasurements:
        """The measurements. A run that ends before the measured steps has only those it reached."""
        if self._live is not None and self._entered:
            self._conclude()
        self._note_device("steps")
        data, control = collectives(self.calls, self._layout)
        return RankMeasurements(
            rank=self._rank,
            node=self._node,
            local_rank=self._local_rank,
            memory_source="live-tensors",
            memory=self._memory,
            allocator_peak_bytes=self._allocator,
            collectives=data,
            control=control,
            step_s=tuple(self._step_s),
        )

    def _path(self) -> str:
        """The module under way, as whoever has hooks on the modules sees it."""
        return self._live.path if self._live is not None else self._modules.path()

    def _conclude(self) -> None:
        assert self._live is not None
        self._memory = self._live.conclude()
        self._stop_following()

    def _stop_following(self) -> None:
        assert self._live is not None
        self._live.__exit__(None, None, None)
        self._live, self._entered = None, False

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _allocator_peak(self, phase: str) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self._note_device(phase)

    def _note_device(self, name: str) -> None:
        """Keep what the allocator had at most since the counters last started, and start them anew.

        `name` is the phase, or "steps" for whole steps that nothing followed; "reserved" is what the allocator held,
        "device" what the card shows as used by everybody: that is this rank alone only where it is alone.
        """
        if self._device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self._device)
        peaks = {
            name: torch.cuda.max_memory_allocated(self._device),
            "reserved": torch.cuda.max_memory_reserved(self._device),
            "device": total - free,  # now, not at most: the allocator gives nothing back of what it reserved
        }
        for key, peak in peaks.items():
            self._allocator[key] = max(self._allocator.get(key, 0.0), float(peak))
        torch.cuda.reset_peak_memory_stats(self._device)


class Unmetered:
    """Stands in for `Meter` under --no-meter."""

    def load(self) -> AbstractContextManager[None]:
        """Around building the model and the optimizer."""
        return nullcontext()

    def attach(self, state_tensors: StateTensors) -> None:
        """Nothing to classify."""

    def step(self, index: int, *, timed: bool = True) -> AbstractContextManager[None]:
        """Around one optimizer step."""
        return nullcontext()

    def phase(self, name: str, *, passes: bool = True) -> AbstractContextManager[None]:
        """Around one phase of a step."""
        return nullcontext()

    def result(self) -> None:
        """Nothing was measured."""
        return
