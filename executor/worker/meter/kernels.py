"""Operations whose kernel is Python: a dispatch mode sees nothing of what they call, unless it runs the kernel itself.

Not here: what a mode does with what it sees (memory.py, traffic.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.worker.model import quantized


def python_kernel(func: Any, device_type: str) -> Callable[..., Any] | None:
    """The function behind `func` on a device, as far as it is one of those."""
    if func.namespace == "deepspeed" and func._opname == "dim_zero_all_to_all":
        from deepspeed.sequence.layer import _dim_zero_all_to_all_op

        kernel: Callable[..., Any] = _dim_zero_all_to_all_op._init_fn
        return kernel
    return quantized.python_kernel(func) if device_type == "cpu" else None
