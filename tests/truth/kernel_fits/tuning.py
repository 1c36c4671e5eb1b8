"""Which experts of the published tables ran on a kernel tuned for them, by the plan of the program that measured them.

On Hopper the first kernel of the library's list, which runs untuned, takes up to five times as long. Facts are from
aiconfigurator @9dd15f4d2 (Apache-2.0), collector/trtllm/collect_moe.py, collector/case_generator.py and
collector/cases. Not here: times, of which the plan says nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

SOURCES = ("moe_torch_flow_cutlass", "moe_torch_flow_nongated")
"""Kernels, as the tables call them, that this plan's program measured."""
MODELS = (
    (7168, 2048, 8, 256, 32, "fp8_block"),
    (4096, 2048, 6, 256, 32, "fp8_block"),
    (7168, 3072, 6, 384, 32, "fp8_block"),
    (2816, 704, 8, 128, 32, "bfloat16 fp8 fp8_block"),
    (6144, 2048, 8, 256, 32, "bfloat16 fp8 fp8_block"),
    (2880, 2880, 4, 128, 32, "w4a16_mxfp4"),
    (2880, 2880, 4, 32, 32, "w4a16_mxfp4"),
    (7168, 2048, 8, 384, 32, "fp8_block"),
    (5120, 8192, 1, 16, 32, "bfloat16 fp8 fp8_block"),
    (5120, 8192, 1, 128, 32, "bfloat16 fp8 fp8_block"),
    (4096, 2048, 8, 256, 32, "bfloat16 fp8 fp8_block"),
    (3072, 1536, 8, 256, 32, "fp8_block"),
    (4096, 14336, 2, 8, 32, "bfloat16 fp8 fp8_block"),
    (6144, 16384, 2, 8, 32, "bfloat16 fp8 fp8_block"),
    (2688, 1856, 6, 128, 32, "bfloat16"),
    (8192, 5120, 22, 512, 32, "bfloat16"),
    (2048, 5120, 22, 512, 32, "bfloat16"),
    (8192, 5120, 22, 512, 32, "fp8"),
    (2048, 5120, 22, 512, 32, "fp8"),
    (2048, 768, 8, 128, 4, "bfloat16 fp8 fp8_block"),
    (4096, 1536, 8, 128, 32, "bfloat16 fp8 fp8_block"),
    (6144, 2560, 8, 160, 32, "bfloat16 fp8 fp8_block"),
    (2048, 768, 8, 128, 32, "bfloat16 fp8"),
    (2048, 512, 8, 256, 32, "bfloat16 fp8 fp8_block"),
    (3072, 1024, 8, 256, 32, "bfloat16 fp8 fp8_block"),
    (4096, 1024, 10, 512, 32, "bfloat16 fp8 fp8_block"),
)
"""Hidden size, experts' width, experts of a token, experts, most ranks that split an expert, and formats: the plan for
Hopper, in its order."""
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TENSOR = (1, 2, 4, 8, 16, 32)
EXPONENTS = (0.0, 1.01, 1.2)
COLUMNS = {"bfloat16": 16, "fp8": 32, "fp8_block": 128, "w4a16_mxfp4": 64}
"""Columns of a rank are a multiple of this."""
SEED = 42
PARTS = 2
"""Machines that measured a part of the plan each, one after the other in its order, with files of their own. Not said
by the source: with two parts 53 of H100's 56 rows whose file others share are slow or not as the plan has it, and 57 of
H200's 66; with another number up to 32 at most 43 and 49 (docs/decisions/0051-untuned-kernels.md)."""


class Case(NamedTuple):
    """Experts of one rank in a number format, and how skewed their routing is."""

    number_format: str
    hidden: int
    inter: int
    top_k: int
    experts: int
    tensor_ranks: int
    expert_ranks: int
    exponent: float

    @property
    def file(self) -> str:
        """The file in which what was tuned is kept; any file whose name begins so is taken for it."""
        width, here = self.inter // self.tensor_ranks, self.experts // self.expert_ranks
        return f"{self.number_format}_{self.hidden}_{width}_{here}"


@lru_cache(maxsize=1)
def untuned() -> frozenset[Case]:
    """Cases of the plan that came after another with their file's name, whose kernels are kept for other sizes."""
    plan = list(dict.fromkeys(_cases()))
    random.Random(SEED).shuffle(plan)
    size = -(-len(plan) // PARTS)
    found: set[Case] = set()
    for part in (plan[start : start + size] for start in range(0, len(plan), size)):
        files: dict[str, Case] = {}
        begun: set[str] = set()
        for case in part:
            name, alike = case.file, case._replace(exponent=0.0)
            if name not in begun:
                files[name] = alike
                begun.update(name[:length] for length in range(name.rindex("_") + 2, len(name) + 1))
            elif files.get(name) != alike:
                found.add(case)
    return frozenset(found)


def is_untuned(row: Mapping[str, str]) -> bool:
    """Whether the plan has a row of experts.csv as untuned, which its column `untuned` repeats."""
    sizes = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    exponent = float(row["distribution"].removeprefix("power_law_").replace("balanced", "0"))
    case = Case(row["moe_dtype"], *(int(row[name]) for name in sizes), exponent)
    return row["kernel_source"] in SOURCES and case in untuned()


def _cases() -> Iterator[Case]:
    for gpus, model, tensor, exponent in itertools.product(GPUS, MODELS, TENSOR, EXPONENTS):
        hidden, inter, top_k, experts, most, formats = model
        ranks = gpus // tensor
        if tensor > most or tensor * ranks != gpus or ranks > experts or experts % ranks or inter % tensor:
            continue
        for one in formats.split():
            if inter // tensor % COLUMNS[one] == 0:
                yield Case(one, hidden, inter, top_k, experts, tensor, ranks, exponent)
