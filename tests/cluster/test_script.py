"""A person's own script under a plan: what it really trained in is read from its live objects, and compared.

Ordinary scripts of each framework, as two ranks. Not here: the command's face (tests/executor/test_cli.py), or the
comparison as a table (tests/executor/test_contract.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import TINY, Finished, make_plan, run_warm

from executor.contract import script_differences
from executor.failures import first_failure
from executor.rundir import read_errors, read_mesh
from planner.spec import Layout, TrainingJob

DDP = Layout(engine="ddp", dp_replicate=2)
FSDP2 = Layout(engine="fsdp2", dp_shard=2, zero_stage=3)
ZERO = {stage: Layout(engine="deepspeed", dp_shard=2, zero_stage=stage) for stage in (1, 2, 3)}
TP2 = Layout(engine="transformers-tp", tp=2, zero_stage=3)

MODEL = "import os, torch\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
STEP = (
    "model(torch.ones(2, 8)).sum().backward()\noptimizer.step()\noptimizer.zero_grad()\nprint('stepped', flush=True)\n"
)
ACCELERATE = (
    MODEL + OPTIMIZER + "from accelerate import Accelerator\n"
    "model, optimizer = Accelerator().prepare(model, optimizer)\n" + STEP
)
GLOO = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
PLAIN_DDP = MODEL + GLOO + "model = torch.nn.parallel.DistributedDataParallel(model)\n" + OPTIMIZER + STEP
ALONE = MODEL + OPTIMIZER + STEP
BY_ITSELF = "trains by itself: its model is in no wrapper of torch or DeepSpeed"
NO_WRAPPER = MODEL + GLOO + OPTIMIZER + STEP
FULLY_SHARD = (
    MODEL + "import sys\n" + GLOO + "from torch.distributed.device_mesh import init_device_mesh\n"
    "from torch.distributed.fsdp import fully_shard\n"
    "shape, names = ((1, 2), ('a', 'b')) if sys.argv[1:] == ['hybrid'] else ((2,), ('a',))\n"
    "fully_shard(model, mesh=init_device_mesh('cpu', shape, mesh_dim_names=names))\n" + OPTIMIZER + STEP
)
DEEPSPEED = (
    MODEL + OPTIMIZER + "import deepspeed\n"
    "deepspeed.init_distributed(dist_backend='gloo', auto_mpi_discovery=False, verbose=False)\n"
    "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer,\n"
    "                                  config=os.environ['MESHWRIGHT_DEEPSPEED_CONFIG'])\n"
    "engine.backward(engine(torch.ones(2, 8)).sum())\nengine.step()\nprint('stepped', flush=True)\n"
)
CARELESS = PLAIN_DDP.replace("optimizer.step()", "try:\n    optimizer.step()\nexcept Exception: pass")
NEVER = MODEL + GLOO + "print('no step', flush=True)\n"
ENDED = PLAIN_DDP + "dist.destroy_process_group()\n"
USES_CPU = {"ACCELERATE_USE_CPU": "true"}


def ran(folder: Path, layout: Layout, text: str, *arguments: str, **environment: str) -> Finished:
    """The script as each of the plan's ranks, with the environment that a launch gives it."""
    script = folder / "mine.py"
    script.write_text(text)
    (folder / "run" / "mesh").mkdir(parents=True)
    plan = make_plan(layout, TrainingJob(precision="fp32", seq_len=32), nodes=1, per_node=layout.world_size, model=TINY)
    config = {"MESHWRIGHT_DEEPSPEED_CONFIG": str(folder / "run" / "config" / "deepspeed.json"), "DS_ACCELERATOR": "cpu"}
    config["TORCH_EXTENSIONS_DIR"] = str(folder)  # nothing that was compiled before
    return run_warm(
        plan, folder / "run", str(script), *arguments, module="executor.worker.script", environment=config | environment
    )


@pytest.mark.parametrize(
    ("layout", "text", "environment"),
    [
        pytest.param(DDP, ACCELERATE, USES_CPU, id="ddp: accelerate"),
        pytest.param(DDP, ENDED, {}, id="ddp: torch"),
        pytest.param(FSDP2, FULLY_SHARD, {}, id="fsdp2: torch"),
        pytest.param(ZERO[2], DEEPSPEED, {}, id="zero2: deepspeed"),
        pytest.param(ZERO[1], DEEPSPEED, {}, id="zero1: deepspeed", marks=pytest.mark.long),
        pytest.param(ZERO[3], DEEPSPEED, {}, id="zero3: deepspeed"),
    ],
)
def test_a_script_that_trains_in_the_plans_world_and_engine_is_the_plans_run(tmp_path, layout, text, environment):
    finished = ran(tmp_path, layout, text, **environment)

    assert finished.exit_codes == (0,), finished.output[-3000:]
    mesh = read_mesh(finished.folder)
    assert [(seen["world_size"], seen["stepped"]) for seen in mesh.values()] == [(2, True)] * 2
    assert script_differences(layout, 2, mesh) == []


@pytest.mark.parametrize(
    ("layout", "text", "arguments", "environment", "words"),
    [
        pytest.param(ZERO[2], ACCELERATE, (), {}, f"{BY_ITSELF}, the plan has Deep", id="zero2: no device"),
        pytest.param(DDP, ALONE, (), {}, "trains alone, the plan has 2 ranks", id="ddp: no process group"),
        pytest.param(
            ZERO[2], ACCELERATE, (), USES_CPU,
            "trains in DistributedDataParallel, the plan has DeepSpeed with ZeRO stage 2", id="zero2: plain DDP"),
        pytest.param(
            ZERO[3], DEEPSPEED.replace("os.environ['MESHWRIGHT_DEEPSPEED_CONFIG']",
                "{'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 2}}"), (), {},
            "trains in DeepSpeedEngine with ZeRO stage 2, the plan has DeepSpeed with ZeRO stage 3",
            id="zero3: stage 2"),
        pytest.param(DDP, FULLY_SHARD, (), {}, "trains in FSDPModule, the plan has Distr", id="ddp: fsdp2"),
        pytest.param(
            Layout(engine="fsdp2", dp_replicate=2, dp_shard=1, zero_stage=3), FULLY_SHARD, ("hybrid",), {},
            "divides its weights by 2, the plan by dp_shard=1", id="hsdp: other shards"),
        pytest.param(FSDP2, NO_WRAPPER, (), {}, f"{BY_ITSELF}, the plan has FSDP2", id="fsdp2: nothing"),
        pytest.param(TP2, PLAIN_DDP, (), {}, "the plan has tensor parallelism (DTensor weights)", id="tp: DDP"),
    ],
)  # fmt: skip
def test_a_script_that_is_another_run_than_the_plans_stops_before_its_first_step(
    tmp_path, layout, text, arguments, environment, words
):
    finished = ran(tmp_path, layout, text, *arguments, **environment)

    assert finished.exit_codes != (0,) and "stepped" not in finished.output
    error = read_errors(finished.folder)[0]
    assert (error.exit_code, error.refusal, error.cause) == (4, True, "another world")
    assert words in error.message and "mine.py: " in error.message
    failure = first_failure(finished.folder, 2)
    assert failure is not None and failure.record is not None and failure.record.refusal


def test_a_script_that_catches_its_refusal_and_one_that_never_steps_are_found_at_the_end(tmp_path):
    for name, text, words in (
        ("careless", CARELESS, "rank 0 trains in DistributedDataParallel, the plan has FSDP2 (fully_shard)"),
        ("never", NEVER, "ranks [0, 1] took no optimizer step"),
    ):
        (tmp_path / name).mkdir()
        finished = ran(tmp_path / name, FSDP2, text)
        assert finished.exit_codes == (0,), finished.output[-3000:]
        assert script_differences(FSDP2, 2, read_mesh(finished.folder)) == [words]
