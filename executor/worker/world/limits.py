"""A limit on a rank's memory, and telling an allocation that was refused from any other error.

Not here: what is allocated, or what is done about a refusal (train.py).
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

CPU_REFUSED = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
"""How PyTorch's CPU allocator (c10/core/impl/alloc_cpu.cpp) and C++ itself word it, in a plain RuntimeError."""
CUDA_REFUSED = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC")
"""Refusals outside the caching allocator: the context, cuBLAS's and cuDNN's handles and workspaces."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or the host where it is the device, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in (*CPU_REFUSED, *CUDA_REFUSED))


def limit_memory(device: torch.device, limit_bytes: float) -> None:
    """Limit this process to `limit_bytes`: of the GPU in all, of address space beside its present use on a CPU.

    On a GPU the caching allocator refuses (`set_per_process_memory_fraction`), on CPU the kernel does (RLIMIT_AS).
    The latter counts address space, not memory: a large tensor is refused when it is made, while small ones hide in
    what the process has already mapped.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + int(limit_bytes), hard))
