"""Operations whose kernel is Python: a dispatch mode sees nothing of what they call, unless it runs the kernel itself.

Not here: what a mode does with what it sees (memory.py, traffic.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from executor.worker.model import quantized


class KernelMode(TorchDispatchMode):
    """A dispatch mode that sees inside of such kernels."""

    supports_higher_order_operators = True
    """As compiled code calls attention where its random state is kept for a checkpoint."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled under this mode, which sees what the compiled code calls."""
        return True

    def run(self, func: Any, args: Any, kwargs: Any, device_type: str = "") -> Any:
        """The operation's result."""
        inside = python_kernel(func, device_type)
        if inside is None:
            return func(*args, **kwargs)
        super().__enter__()
        try:
            return inside(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)


def python_kernel(func: Any, device_type: str) -> Callable[..., Any] | None:
    """The function behind `func` on a device, as far as it is one of those."""
    if func.namespace == "deepspeed" and func._opname == "dim_zero_all_to_all":
        from deepspeed.sequence.layer import _dim_zero_all_to_all_op

        kernel: Callable[..., Any] = _dim_zero_all_to_all_op._init_fn
        return kernel
    return quantized.python_kernel(func) if device_type == "cpu" else None
