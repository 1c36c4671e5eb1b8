"""A person's own script under a plan: what it really trained in is read from its live objects, and compared.

Ordinary scripts of each framework, as two ranks. Not here: the command's face (tests/executor/test_cli.py), or the
comparison as a table (tests/executor/test_contract.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agents import TINY, Finished, make_plan, run_warm

import executor
from executor.backends.launched import LAUNCHED
from executor.folder.rundir import read_errors, read_measured, read_mesh
from executor.preflight.contract import script_differences
from executor.run.launch import script_environment
from executor.watch.failures import failures
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
LLAMA = (
    "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    "model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=2,"
    " num_attention_heads=4, num_key_value_heads=2))\n"
)
BY_TRAINER = LLAMA + (
    "from transformers import Trainer, TrainingArguments\n"
    "rows = [{'input_ids': [1, 2, 3, 4], 'labels': [1, 2, 3, 4]}] * 8\n"
    "arguments = TrainingArguments('out', max_steps=2, per_device_train_batch_size=1, report_to=[], save_strategy='no',"
    " disable_tqdm=True)\n"
    "Trainer(model=model, args=arguments, train_dataset=rows).train()\nprint('stepped', flush=True)\n"
)
BY_ACCELERATE = LLAMA + (
    "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    "rows = torch.utils.data.DataLoader([torch.tensor([1, 2, 3, 4])] * 8, batch_size=1)\n"
    "model, optimizer, rows = accelerator.prepare(model, optimizer, rows)\n"
    "for row in rows:\n    accelerator.backward(model(input_ids=row, labels=row).loss)\n"
    "    optimizer.step()\n    optimizer.zero_grad()\nprint('stepped', flush=True)\n"
)
METERED = (
    "import torch\nfrom executor.worker.metering import (enter, held)\nmeter = enter()\n"
    + GLOO
    + "with meter.load():\n"
    "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))\n"
    "    optimizer = torch.optim.AdamW(model.parameters())\n"
    "meter.attach(lambda: held(model, optimizer))\n"
    "for step in range(7):\n"
    "    with meter.step(step):\n"
    "        with meter.phase('forward'):\n            loss = model(torch.ones(2, 64)).sum()\n"
    "        with meter.phase('backward'):\n            loss.backward()\n"
    "        with meter.phase('optimizer'):\n            optimizer.step(); optimizer.zero_grad()\n"
    "print('stepped', flush=True)\n"
)
CARELESS = PLAIN_DDP.replace("optimizer.step()", "try:\n    optimizer.step()\nexcept Exception: pass")
NEVER = MODEL + GLOO + "print('no step', flush=True)\n"
ENDED = PLAIN_DDP + "dist.destroy_process_group()\n"
USES_CPU = LAUNCHED["ddp"].on_cpu


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


ORDINARY = {"ddp": DDP, "fsdp2": FSDP2, **{f"zero{stage}": layout for stage, layout in ZERO.items()}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=f"{name}: {kind}")
        for name in ORDINARY
        for kind, text in (("trainer", BY_TRAINER), ("accelerate", BY_ACCELERATE))
    ],
)
def test_ordinary_scripts_of_trainer_and_accelerate_are_the_plans_run_as_they_stand(tmp_path, name, text):
    layout = ORDINARY[name]
    config = tmp_path / "run" / "config" / "deepspeed.json"
    environment = script_environment(layout.engine, "cpu", str(config) if name.startswith("zero") else None)
    finished = ran(tmp_path, layout, text, **environment)

    assert finished.exit_codes == (0,), finished.output[-3000:]
    mesh = read_mesh(finished.folder)
    assert [(seen["world_size"], seen["stepped"]) for seen in mesh.values()] == [(2, True)] * 2
    assert script_differences(layout, 2, mesh) == []
    assert ("note: on CPU Accelerate" in finished.output) == (name != "ddp")


def test_a_script_that_enters_the_meter_is_measured(tmp_path):
    finished = ran(tmp_path, DDP, METERED, MESHWRIGHT_RUN_DIR=str(tmp_path / "run"))

    assert finished.exit_codes == (0,), finished.output[-3000:]
    weights = 4 * (64 * 64 + 64)
    for one in read_measured(finished.folder):
        phases = {phase.phase: phase.terms for phase in one.memory}
        assert phases["backward"]["params"] == phases["backward"]["grads"] == weights
        assert 2 * weights <= phases["forward"]["optimizer"] <= 2 * weights + 16  # and AdamW's counts of steps
        assert sum(each.payload_bytes for each in one.collectives) == weights
        assert len(one.step_s) == 2
    assert len(read_measured(finished.folder)) == 2


def test_a_script_that_enters_the_meter_runs_by_itself_too(tmp_path):
    (script := tmp_path / "mine.py").write_text(METERED)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "MESHWRIGHT_RUN_DIR"} | alone
    environment["PYTHONPATH"] = str(Path(executor.__file__).parents[1])
    done = subprocess.run([sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "stepped" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


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
    failure = next(iter(failures(finished.folder, 2)), None)
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
