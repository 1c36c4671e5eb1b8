"""The tensors that are alive on this rank at each moment, by their term.

Counts storages, so a view is never counted twice, and says for the fullest moment of each phase how many bytes
belong to which term of `planner.spec.plan.PhaseMemory`. Not here: when phases begin and end (meter.py), which
module is at work (modules.py), collectives (traffic.py), or what a caching allocator adds on top.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from executor.worker.meter import transport
from executor.worker.meter.allocations import Allocations
from executor.worker.meter.kernels import KernelMode
from executor.worker.meter.modules import Modules
from executor.worker.meter.storages import LAYER, STATES, StorageChange, TrackedStorage, by_term, fullest_moment
from executor.worker.meter.traffic import FsdpUnits
from planner.spec.plan import PhaseMemory

COLLECTIVES = ("c10d", "_c10d_functional")
NO_BUFFER = ("all_to_all_single", "alltoall_base_", "wait_tensor", "_wrap_tensor_autograd")
"""Operations whose tensors are not buffers: tokens on their way to experts, heads to the ranks that attend with
them, and waiting for them."""
POINT_TO_POINT = ("send", "recv_", "recv_any_source_")
"""Not waited for where they start: two ranks that send to each other first would wait for ever."""
StateTensors = Callable[[], dict[str, list[Tensor]]]


class LiveTensors(KernelMode):
    """While entered, follows every storage on `device_type`; while recording, remembers each change by phase.

    Enter it before the model is built: what was made earlier is noticed only when first used. Temporaries that a
    kernel allocates inside itself are not seen; the collective library's own buffers are not either.
    """

    storage_type = ""
    """Device type that storages of followed tensors name, where it is not the tensors' own."""
    transports_hold = True
    """Whether a collective library is at work that may hold tensors of its own."""

    def __init__(self, device_type: str, *vocab: int) -> None:
        """`vocab` are the widths that only logits have: the vocabulary, and a rank's part of it."""
        super().__init__()
        self.device_type, self.vocab = device_type, vocab
        self._alive: dict[int, TrackedStorage] = {}
        self._parameters: dict[int, weakref.ref[nn.Parameter]] = {}
        self._scope = Modules()
        self._units = FsdpUnits(self._note_gathered)
        self._allocations = Allocations()
        self._state_tensors: StateTensors | None = None
        self._resize: Any = None
        self.phase = ""
        self._recording = False
        self._start: dict[TrackedStorage, int] = {}
        self._changes: list[StorageChange] = []
        self._recomputed: list[TrackedStorage] = []
        self._newborn: TrackedStorage | None = None
        self._transports: list[TrackedStorage] = []
        self._handed_over: list[weakref.ref[Tensor]] = []
        self._now = ("", "")  # operation and module under way, for changes that happen inside it
        self.fullest: dict[str, dict[TrackedStorage, int]] = {}
        self.history: list[tuple[str, dict[TrackedStorage, int], list[StorageChange]]] = []

    # Following storages.

    def __enter__(self) -> LiveTensors:
        self._resize = torch.UntypedStorage.resize_
        original, tracker = self._resize, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 and ZeRO free gathered weights this way, outside the dispatcher.
            tracker._settle_transports()
            result = original(storage, size)
            tracker._now = ("storage.resize_", tracker._scope.path())
            tracker._look(storage, (size,))
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        self._scope.install()
        self._units.install()
        self._allocations.install()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._units.remove()
        self._allocations.remove()
        self._scope.remove()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for storage in self._followed():
            storage.watch = None
        self._alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and (storage := self._storage_of(_local(leaf))) is not None:
                    storage.was_parameter = True  # its local tensor will not say so
            return NotImplemented  # a DTensor: let it unwrap, then see its local tensors
        self._settle_recompute()
        kwargs = kwargs or {}
        self._now = (str(func), self._scope.path())
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._settle_transports(inputs)
        for tensor in inputs:
            self._storage_of(tensor, adopted=True)
        result = self.run(func, args, kwargs, self.device_type)
        if self._recording and self.transports_hold and self.device_type == "cpu" and func.namespace in COLLECTIVES:
            if func._opname not in POINT_TO_POINT:
                transport.finish(result)
            self._handed_over += [weakref.ref(tensor) for tensor in inputs]
        self._note(func, inputs, result)
        return result

    def _note(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        # What goes to one peer, or comes from it, is no copy made for sending; nor is a token on its way to an expert.
        sent = func.namespace in COLLECTIVES and func._opname not in (*POINT_TO_POINT, *NO_BUFFER)
        for tensor in inputs:
            storage = self._storage_of(tensor)
            if storage is None:
                continue
            storage.was_sent |= sent
            if isinstance(tensor, nn.Parameter):
                storage.was_parameter = True
                self._parameters.setdefault(id(tensor), weakref.ref(tensor))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = self._storage_of(tensor)
            if storage is None:
                continue
            storage.was_sent |= sent
            if storage is self._newborn and tensor.dim() >= 2 and tensor.shape[-1] in self.vocab:
                storage.has_vocab = LAYER.search(self._now[1]) is None  # an ffn may be as wide as the vocabulary
            if func is torch.ops.aten._to_copy.default and inputs and storage.copied_from is None:
                source = self._storage_of(inputs[0])
                storage.copied_from = source if source is not storage else None
        if self._recording and self.phase.startswith(("backward", "optimizer")):
            self._note_grads()

    def _note_gathered(self, weight: Tensor) -> None:
        # Where tensor parallel ranks shard, it is a DTensor: operations see its local tensor, which is not a parameter.
        storage = self._storage_of(_local(weight))
        if storage is not None:
            storage.was_parameter = True

    def _note_grads(self) -> None:
        # Whole gradients of FSDP2 and ZeRO are `.grad` only for a moment, so look after every operation. A gradient
        # that is only a part of its storage lives in a flat buffer: a bucket, unless the engine calls it gradients.
        for key, reference in list(self._parameters.items()):
            parameter = reference()
            if parameter is None:
                del self._parameters[key]
            elif parameter.grad is not None:
                grad = _local(parameter.grad)
                storage = self._storage_of(grad)
                if storage is not None:
                    storage.was_grad |= grad.nbytes == storage.bytes
                    storage.holds_grads |= grad.nbytes < storage.bytes

    def _storage_of(self, tensor: Tensor, adopted: bool = False) -> TrackedStorage | None:
        if tensor.layout is not torch.strided or tensor.device.type != self.device_type:
            return None
        if is_traceable_wrapper_subclass_type(type(tensor)):
            return None  # its own storage is a size without memory; the tensor within is seen by itself
        return self._look(tensor.untyped_storage(), tuple(tensor.shape), adopted)

    def _look(self, raw: torch.UntypedStorage, shape: tuple[int, ...], adopted: bool = False) -> TrackedStorage | None:
        if raw.device.type != (self.storage_type or self.device_type):
            return None
        key = raw._cdata
        storage = self._alive.get(key)
        if storage is None:
            op, path = self._now
            # What no operation made while a phase runs was made by a transport (gloo copies a reduce-scatter's input).
            in_engine = self._units.current() != "" or (adopted and self._recording)
            storage = TrackedStorage(key, op, path, self.phase, shape, in_engine)
            self._alive[key] = self._newborn = storage
            if adopted and self._recording and self.transports_hold and torch.distributed.is_initialized():
                # In one process nothing travels: a view's or a checkpoint's own storage is not worth a wait.
                self._transports.append(storage)
            storage.watch = weakref.ref(raw, lambda _: self._died(key))
            if self._scope.in_recompute:
                self._recomputed.append(storage)
        self._change(storage, raw.nbytes() - storage.bytes)
        return storage

    def _died(self, key: int) -> None:
        storage = self._alive.pop(key, None)
        if storage is not None:
            storage.watch = None
            self._change(storage, -storage.bytes)

    def _change(self, storage: TrackedStorage, delta: int) -> None:
        if delta:
            storage.bytes += delta
            if self._recording:
                self._changes.append(StorageChange(storage, delta, *self._now))

    def _settle_recompute(self) -> None:
        # Asked at the first operation after the recomputed part: what is alive now was recomputed to be used.
        if self._recomputed and not self._scope.in_recompute:
            for storage in self._recomputed:
                storage.was_kept |= storage.bytes > 0
            self._recomputed = []

    def _settle_transports(self, inputs: Sequence[Tensor] = ()) -> None:
        """Before an operation on `inputs`: let gloo end what it made itself, and let go of what it was given."""
        if not self._transports and not self._handed_over:
            return
        used = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.layout is torch.strided}
        made = [storage for storage in self._transports if storage.key not in used]
        self._transports = [storage for storage in self._transports if storage.key in used]
        given, self._handed_over = self._handed_over, []
        transport.settle(lambda: any(one.bytes for one in made) or any(_held_by_others(one()) for one in given))

    def _followed(self) -> list[TrackedStorage]:
        """All storages alive now, as a copy: a transport's thread may end one at any time."""
        return list(self._alive.values())

    # Phases and terms.

    @property
    def path(self) -> str:
        """The module under way, "" between modules."""
        return self._scope.path()

    def attach(self, state_tensors: StateTensors) -> None:
        """Take the engine's word for which tensors are which states."""
        self._state_tensors = state_tensors
        self._mark(STATES)

    def _mark(self, names: tuple[str, ...]) -> None:
        if self._state_tensors is None:
            return
        tensors = self._state_tensors()
        for name in reversed([name for name in STATES if name in names]):  # the first named state wins a shared storage
            for tensor in tensors.get(name, ()):
                storage = self._storage_of(_local(tensor))
                if storage is not None:
                    storage.state = name

    @contextmanager
    def recording(self, phase: str) -> Iterator[None]:
        """Remember the changes of one phase; of a phase that comes again, the fuller one counts."""
        self.phase, self._changes, self._recording = phase, [], True
        self._scope.phase_begins(phase)
        self._start = {storage: storage.bytes for storage in self._followed()}
        try:
            yield
        finally:
            self._settle_recompute()
            self._recording = False
            if phase.startswith("forward"):
                for storage in self._followed():
                    storage.was_kept |= storage.phase == phase and storage not in self._start
            else:
                # Only now: inside forward, engines register gathered weights as the module's parameters.
                self._mark(("grads", "buckets"))
            moment = fullest_moment(self._start, self._changes)
            if sum(moment.values()) > sum(self.fullest.get(phase, {}).values()):
                self.fullest[phase] = moment
            self.history.append((phase, self._start, self._changes))
            self.phase, self._now = "", ("", "")

    def conclude(self) -> tuple[PhaseMemory, ...]:
        """Live bytes by term at the fullest moment of each phase recorded so far."""
        self._mark(STATES)
        return tuple(PhaseMemory(phase=phase, terms=by_term(moment, phase)) for phase, moment in self.fullest.items())


def _held_by_others(tensor: Tensor | None) -> bool:
    """Whether C++ holds a tensor beside its Python object."""
    count: int = 0 if tensor is None else tensor._use_count()  # type: ignore[attr-defined]  # no stub has it
    return count > 1


def _local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local
