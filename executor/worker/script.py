"""A person's own script on one rank: run as it would run by itself, watched at its first optimizer step.

There the world and the engine it trains in are read from its live objects (live.py), written to mesh/rank-N.json, and
compared with the plan: a script that is another run than the plan's stops before it changes a weight. Started by
torchrun as `-m executor.worker.script RUN_FOLDER SCRIPT ARGUMENTS...`. Not here: the trainer of our own (train.py).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from executor.backends.launched import launched
from executor.folder.rundir import MESH, write_of_rank
from executor.preflight import contract
from executor.worker.world import cpu, lastwords, states
from executor.worker.world.live import live
from planner.spec.plan import Plan, read_plan

STEPS = "torch.optim.optimizer"
"""The module whose optimizers tell when they step."""
STATE = "accelerate.state"
"""Where Accelerate chooses a transport, and with it how a model is wrapped."""
METERING = "executor.worker.metering"
ARGUMENTS = "transformers.training_args"
OPERATIONS = "deepspeed.ops"
"""DeepSpeed's registry of what it compiles."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; an exception is recorded and re-raised, so that Python prints it."""
    folder, script, *rest = sys.argv[1:] if arguments is None else arguments
    watch = FirstStepCheck(Path(folder), script)
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).parent)  # where Python looks first when it runs a script itself
    with watched(watch):
        runpy.run_path(script, run_name="__main__")
    return 0


@contextmanager
def watched(watch: FirstStepCheck) -> Iterator[None]:
    """Inside, a program that is not ours trains: its process group and its first step are looked at, and its failure,
    or what it measured, is written down."""
    with lastwords.recorded(watch.folder):
        after_import(STEPS, watch.start)
        after_import(states.MODULE, partial(states.watch, watch.folder))
        if watch.plan.cluster.gpu.kind == "cpu":
            _on_a_cpu(watch.plan.layout.engine)
        yield
        watch.ended()
        if METERING in sys.modules:  # the program has entered the meter
            sys.modules[METERING].conclude(watch.folder)


def _on_a_cpu(engine: str) -> None:
    """Let the frameworks that the script imports do what they do on GPUs, and say so: by themselves they would not."""
    after_import(OPERATIONS, cpu.leave_shared_memory_collective_out)
    after_import(ARGUMENTS, cpu.let_trainer_take_16_bits)
    record = launched(engine)
    if record.forced_to_gpus and record.variables.keys() <= os.environ.keys():  # Accelerate is to find it by these
        after_import(STATE, cpu.let_accelerate_take_a_gpus_path)
        if os.environ.get("RANK", "0") == "0":
            print(
                f"note: on CPU Accelerate shards nothing, and shares out no data; it takes {engine}'s GPU path here",
                flush=True,
            )


class FirstStepCheck:
    """Looks once, at the first step of any optimizer of torch's kind."""

    def __init__(self, folder: Path, script: str, option: str = "--script") -> None:
        self.folder, self.script, self._option = folder, script, option
        self.plan: Plan = read_plan(folder / "plan.json")
        self.stepped = False
        self._handle: Any = None

    def start(self, optimizers: ModuleType) -> None:
        """From now on every optimizer of that module is watched, until the first steps."""
        self._handle = optimizers.register_optimizer_step_pre_hook(self._first_step)

    def _first_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self._handle.remove()
        self.stepped = True
        found = live(optimizer)
        self._write(found)
        if (refused := contract.refusal(self.plan.layout, found, self.script, self._option)) is not None:
            raise refused

    def ended(self) -> None:
        """The script has ended well; one that never stepped is recorded too."""
        if not self.stepped:
            self._write(live())

    def _write(self, found: contract.WrappedScript) -> None:
        # By the launcher's number: a script that trains alone takes every rank for the first.
        rank = int(os.environ.get("RANK", "0"))
        record = msgspec.structs.asdict(found) | {
            "schema": "mesh/1",
            "plan_hash": self.plan.content_hash,
            "script": self.script,
            "stepped": self.stepped,
            "rank": rank,
            "node": int(os.environ.get("GROUP_RANK", "0")),
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "host": socket.gethostname(),
        }
        write_of_rank(self.folder, MESH, rank, record)


def after_import(name: str, do: Callable[[ModuleType], object]) -> None:
    """Call `do` with a module once it has been imported, by whomever: nothing is imported before the script."""
    if name in sys.modules:
        do(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, do))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the module as Python would, and lets its loader say when it is there."""

    def __init__(self, name: str, do: Callable[[ModuleType], object]) -> None:
        self.name, self.do = name, do

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, with one more thing to do at its end; None for every other module."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.do(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    sys.exit(main())
