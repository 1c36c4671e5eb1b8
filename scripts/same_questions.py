"""The 3,000 questions of `make same`, drawn by chance from what may be asked: engines, families, precisions, methods;
and the plan of every run that is recorded.

    python scripts/same_questions.py SEED > QUESTIONS

About a third breaks a rule: refusals are answers too. Not here: asking them (same.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]

ENGINES = {
    "single": ((1,), ()),
    "ddp": ((2, 8, 64), ("--ddp-bucket-bytes 1000000",)),
    "fsdp2": (
        (2, 8, 64),
        ("--dp-replicate 2", "--cp 2", "--no-reshard-after-forward", "--offload-optimizer", "--sync-each-micro-batch"),
    ),
    "deepspeed": (
        (2, 8, 64),
        (
            "--zero-stage 1",
            "--zero-stage 2",
            "--offload-optimizer",
            "--offload-params",
            "--no-overlap-comm",
            "--zero3-prefetch-elements 0",
            "--zero-secondary-shard 8",
            "--reduce-bucket-elements 1000000",
        ),
    ),
    "deepspeed-autotp": ((8, 64), ("--tp 2", "--tp 4 --zero-stage 3", "--tp 2 --zero-stage 2")),
    "deepspeed-pipeline": ((8, 64), ("--pp 2", "--pp 4 --grad-accum 8", "--pp 2 --tp 2", "--pp 2 --zero-stage 0")),
    "deepspeed-ulysses": ((8, 64), ("--cp 2", "--cp 4 --zero-stage 2", "--cp 8")),
    "transformers-tp": ((8, 64), ("--tp 2", "--tp 4", "--tp 2 --dp-replicate 2")),
    "torchtitan": (
        (8, 256),
        (
            "--tp 4",
            "--pp 2 --grad-accum 8",
            "--cp 2",
            "--tp 2 --pp 4 --grad-accum 16",
            "--tp 2 --no-sequence-parallel",
            "--pp 2 --grad-accum 8 --pp-schedule zb-h1",
            "--pp 4 --virtual-stages 2 --grad-accum 8 --pp-schedule interleaved",
        ),
    ),
    "megatron": (
        (64, 512),
        (
            "--tp 8 --pp 2 --grad-accum 16",
            "--tp 4 --pp 4 --virtual-stages 2 --grad-accum 8 --pp-schedule interleaved",
            "--cp 2",
            "--tp 2 --zero-stage 0",
            "--pp 8 --grad-accum 32",
            "--tp 4 --no-sequence-parallel",
        ),
    ),
    "nanotron": ((64, 256), ("--tp 8", "--pp 4 --grad-accum 32", "--tp 4 --ep 2", "--tp 2 --pp 2 --zero-stage 0")),
}
"""For each engine: numbers of GPUs, and choices that are its own. A choice that breaks a rule is a question too."""
FAMILIES = (
    "llama-2-7b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.2-1b",
    "bloom-3b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "falcon-7b",
    "gemma-2-9b",
    "gemma-3-1b",
    "gpt-oss-20b",
    "gpt2-medium",
    "gpt3-175b",
    "mistral-7b",
    "mixtral-8x7b",
    "opt-13b",
    "phi-2",
    "phi-3-mini",
    "pythia-6.9b",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-30b-a3b",
)
"""A model of every family, and a few more sizes."""
PRECISIONS = (*("bf16",) * 6, "fp32", "pure-bf16", "fp16", "fp8")
METHODS = ("full", "full", "full", "lora", "qlora")
RECOMPUTED = ("none", "none", "full", "full", "attention", "sac:matmul")
CLUSTERS = (
    "",
    "",
    "",
    "",
    "--cluster dgx-a100",
    "--cluster dgx-h200",
    "--cluster gb200-nvl72",
    "--cluster llama-3-24k",
    "--gpu rtx-4090",
    "--gpu a10g",
    "--gpu v100-32gb",
)
MORE = (
    *("",) * 12,
    "--seq-len 8192",
    "--seq-len 512 --micro-batch-size 4",
    "--global-batch-size 256",
    "--packing packed --mean-seq-len 600",
    "--optimizer sgd",
    "--optimizer adamw-8bit",
    "--optimizer adafactor",
    "--optimizer-implementation foreach",
    "--micro-batch-size 2 --grad-accum 4",
    "--headroom 5%",
    "--calibration uncalibrated",
    "--offload-optimizer",
    "--offload-activations",
    "--optimizer muon",
)
SEARCHES = (
    "recommend --json",
    "recommend --json --any-runtime",
    "recommend",
    "recommend --top 5 --any-runtime",
    "recommend --pareto 5 --json",
    "recommend --json --objective largest-context",
    "recommend --why-not dp_shard=8",
    "recommend --why-not zero_stage=1,tp=2",
    "recommend --json --tokens 300B --deadline 20d",
    "recommend --objective fewest-gpus",
    "plan",
)
STUDIES = (
    "fit --json --what micro-batch",
    "fit --what gpus --max-gpus 64",
    "fit --what seq-len --seq-step 1024",
    *("cost --json --tokens 1T", "cost --steps 1000") * 3,
)
SHARES = {"estimate": 1850, "explain": 500, "search": 250, "study": 100, "compared": 250, "truth": 60}
"""Questions of each kind."""


def drawn(seed: int) -> Iterator[str]:
    """Questions by chance, each once."""
    chance, seen = Random(seed), set[str]()
    for kind, count in SHARES.items():
        for _ in range(count):
            line = " ".join(KINDS[kind](chance).split())
            if line not in seen:
                seen.add(line)
                yield line
    yield from (f"recorded {path.stem}" for path in sorted((ROOT / "tests" / "recorded").glob("*.json")))


def _job(chance: Random) -> str:
    return (
        f"--model {chance.choice(FAMILIES)} --precision {chance.choice(PRECISIONS)} --method {chance.choice(METHODS)} "
        f"--recompute {chance.choice(RECOMPUTED)}"
    )


def _layout(chance: Random) -> str:
    engine = chance.choice(list(ENGINES))
    gpus, own = ENGINES[engine]
    choice = chance.choice(("", *own))
    size = "" if "--gpus" in choice else f"--gpus {chance.choice(gpus)}"
    return f"{_job(chance)} --runtime {engine} {size} {choice} {chance.choice(CLUSTERS)} {chance.choice(MORE)}"


def _estimate(chance: Random) -> str:
    return f"estimate {chance.choice(('--json', '--json', ''))} {_layout(chance)}"


def _explain(chance: Random) -> str:
    return f"explain {chance.choice(('--json', ''))} {_layout(chance)}"


def _open_question(chance: Random) -> str:
    given = [f"--model {chance.choice(FAMILIES)} --gpus {chance.choice((1, 4, 8, 32, 64, 256))}"]
    options = [("--method", METHODS), ("--precision", PRECISIONS), ("--recompute", RECOMPUTED)]
    given += [f"{name} {chance.choice(values)}" for name, values in chance.sample(options, chance.randint(0, 2))]
    return " ".join([*given, chance.choice(CLUSTERS), chance.choice(MORE)])


def _search(chance: Random) -> str:
    return f"{chance.choice(SEARCHES)} {_open_question(chance)}"


def _study(chance: Random) -> str:
    return f"{chance.choice(STUDIES)} {_open_question(chance)}"


def _compared(chance: Random) -> str:
    return f"estimate {chance.choice(('--json', ''))} {_open_question(chance)}"


def _truth(chance: Random) -> str:
    files = sorted(path.name for path in (ROOT / "tests" / "truth").glob("*.jsonl"))
    return f"replay --json tests/truth/{chance.choice(files)} {chance.choice(('', '--calibration uncalibrated'))}"


KINDS = {
    "estimate": _estimate,
    "explain": _explain,
    "search": _search,
    "study": _study,
    "compared": _compared,
    "truth": _truth,
}


if __name__ == "__main__":
    print("\n".join(drawn(int(sys.argv[1]))))
