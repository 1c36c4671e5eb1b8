"""`executor export-launch`: a plan as files for Slurm, Kubernetes or SkyPilot, written on any machine.

A folder is written: the run folder that nodes join, and the file that the other tool reads. Not here: what stands in
that file (slurm.py, launchers/), or starting anything.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from executor.folder import joining, rundir
from executor.folder.ownership import owned
from executor.launchers import kubernetes, skypilot, slurm
from executor.launchers.kubernetes import RUNS, Claim
from executor.run import dryrun, slurm_run
from executor.run.prepare import RunOptions
from executor.system.facts import versions
from executor.system.sources import sources
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError
from planner.basics.quoting import for_comment, for_shell, for_yaml
from planner.spec import inputs
from planner.spec.lengths import course
from planner.spec.plan import Plan

Target = Literal["slurm", "kubernetes", "skypilot"]
MANIFEST, TASK, RUN, CODE = "jobset.yaml", "task.yaml", "run", "code"
MOST_CONFIG = 2**20
"""Bytes of a ConfigMap (kubernetes.io/docs/concepts/configuration/configmap: 1 MiB)."""
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export: sbatch's options, the image of a pod, the volumes of every node (NAME=PATH), or SkyPilot's
    name of the GPU."""

    sbatch: tuple[str, ...] = ()
    image: str | None = None
    claims: tuple[str, ...] = ()
    accelerator: str | None = None

    def volumes(self) -> tuple[Claim, ...]:
        """The volumes, as they are named."""
        return tuple(Claim.parse(one) for one in self.claims)

    def keeps_runs(self, to: Target) -> bool:
        """Whether what a run writes outlives its nodes."""
        return to == "slurm" or any(one.path == RUNS for one in self.volumes())


@dataclass(frozen=True)
class Exported:
    """The written files, the command that starts the job, and the steps before it."""

    folder: Path
    files: tuple[str, ...]
    start: str
    notes: tuple[str, ...] = ()


def export(plan: Plan, to: Target, options: RunOptions, asked: ExportOptions, echo: Echo) -> Exported:
    """Write the files into `options.run_dir`, a new folder: all of them, or PlannerError and nothing."""
    folder = options.run_dir.absolute()
    rundir.check_new(folder, "--output")
    _check_asked(to, asked)
    _check_restarts(to, options, asked)
    with owned(folder, "--output", new=True):
        try:
            return _WRITERS[to](plan, replace(options, run_dir=folder), asked, echo)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _slurm(plan: Plan, options: RunOptions, asked: ExportOptions, echo: Echo) -> Exported:
    found, script = slurm_run.dry_run(plan, options, echo, asked.sbatch, read_back=False)
    written = slurm_run.write(found, script, options.run_dir, asked.sbatch)
    notes = ["The folder, and the Python that wrote it, have to be on a disk that all nodes share"]
    if kept_out := _secrets(found):
        notes.append(f"No value of --env is in the folder: set {', '.join(kept_out)} where you call sbatch")
    return Exported(
        options.run_dir, tuple(written), for_shell(["sbatch", options.run_dir / slurm.SCRIPT]), tuple(notes)
    )


def _kubernetes(plan: Plan, options: RunOptions, asked: ExportOptions, echo: Echo) -> Exported:
    claims = asked.volumes()
    found = _dry_run(plan, options, echo)
    folder, secrets = options.run_dir, _secrets(found)
    dryrun.write(found, folder / RUN, {})
    wanted = (rundir.PLAN, joining.JOIN, *found.ready.files)
    files = {name: (folder / RUN / name).read_text() for name in wanted}
    if (size := sum(len(text.encode()) for text in files.values())) > MOST_CONFIG:
        rule = f"has {size:,} bytes, and a ConfigMap holds {MOST_CONFIG:,}"
        raise PlannerError("run folder", folder, rule, exit_code=3)
    assert asked.image is not None
    made = kubernetes.manifests(
        found.ready.plan, files, found.port, asked.image, claims, secrets, _goes_on(found), options.max_restarts
    )
    (folder / MANIFEST).write_text(_said(found) + for_yaml(made))
    name = made[0]["metadata"]["name"]
    notes = [
        f"{asked.image} needs executor on its PATH, of this same code, and JobSet is to be installed in the cluster"
    ]
    if secrets:
        words = " ".join(f"--from-literal={one}=..." for one in secrets)
        notes.append(f"The secrets come first: kubectl create secret generic {name} {words}")
    if not asked.keeps_runs("kubernetes"):
        notes.append(f"The run folder is lost with its pods: to keep it, add --claim NAME={RUNS}")
    if read := [path for path in _inputs(found) if not any(path.is_relative_to(one.path) for one in claims)]:
        notes.append(f"Every pod has to have {', '.join(map(str, read))}: in the image, or by --claim NAME=PATH")
    return Exported(folder, (MANIFEST, RUN), for_shell(["kubectl", "apply", "-f", folder / MANIFEST]), tuple(notes))


def _skypilot(plan: Plan, options: RunOptions, asked: ExportOptions, echo: Echo) -> Exported:
    import zipfile

    gpu = skypilot.accelerator(plan, asked.accelerator)
    found = _dry_run(plan, options, echo)
    folder, secrets = options.run_dir, _secrets(found)
    dryrun.write(found, folder / RUN, {})
    zipfile.ZipFile(io.BytesIO(sources().packed)).extractall(folder / CODE)
    made = skypilot.task(
        found.ready.plan, folder, found.port, requirements(), _inputs(found), secrets, gpu,
        {one.path: one.name for one in asked.volumes()}, _goes_on(found), options.max_restarts,
    )  # fmt: skip
    (folder / TASK).write_text(_said(found) + for_yaml([made]))
    start = "sky launch" if options.checkpoints is None else "sky jobs launch"  # which recovers
    notes = tuple(f"{name} is a secret: add --secret {name} to {start}" for name in secrets)
    return Exported(folder, (TASK, RUN, CODE), f"{start} {for_shell([folder / TASK])}", notes)


_WRITERS = {"slurm": _slurm, "kubernetes": _kubernetes, "skypilot": _skypilot}


def requirements() -> tuple[str, ...]:
    """Packages that a node has to install: the run dependencies of this package, in the versions that a run records."""
    from importlib import metadata  # takes long to load

    exact = versions()
    try:
        declared = metadata.requires("meshwright") or []
    except metadata.PackageNotFoundError:
        rule = "is not installed, so what it requires is not known"
        raise PlannerError("meshwright", None, rule, "Install it: pip install -e .[run]", exit_code=3) from None
    wanted = [line.partition(";") for line in declared]
    names = [head.strip() for head, _, marker in wanted if not marker or re.search(r"""extra == ['"]run['"]""", marker)]
    found = {}
    for one in names:
        name = re.match(r"[\w.-]+", one)
        assert name is not None
        found[name[0].lower()] = f"{name[0]}=={exact[name[0]].partition('+')[0]}" if name[0] in exact else one
    return tuple(found.values())


def _dry_run(plan: Plan, options: RunOptions, echo: Echo) -> dryrun.DryRun:
    return dryrun.dry_run(plan, replace(options, hosts="elsewhere"), echo, read_back=False)


def _said(found: dryrun.DryRun) -> str:
    """The length of the run, as a comment."""
    made = found.ready.plan
    return for_comment(course(made.job.recipe, made.layout.global_batch_size)) + "\n"


def _goes_on(found: dryrun.DryRun) -> str | None:
    """The run's id where later starts resume the run; None where they have no checkpoint."""
    return found.ready.run_id if found.ready.options.checkpoints is not None else None


def _secrets(found: dryrun.DryRun) -> tuple[str, ...]:
    environment = joining.without_secrets(found.ready.environment)
    return tuple(name for name, value in environment.items() if value is None)


def _inputs(found: dryrun.DryRun) -> tuple[Path, ...]:
    """Files and folders of the plan's that a node reads."""
    return tuple(dict.fromkeys(Path(one.path) for one in inputs.resolved(found.ready.plan).inputs))


def _check_asked(to: Target, asked: ExportOptions) -> None:
    given: Sequence[tuple[str, Target, object]] = (
        ("--sbatch", "slurm", asked.sbatch),
        ("--image", "kubernetes", asked.image),
        ("--accelerator", "skypilot", asked.accelerator),
    )
    for option, of, value in given:
        if value and of != to:
            raise PlannerError(option, None, f"is for --to {of}, and this is --to {to}", "Leave it out")
    if to == "slurm" and asked.claims:
        rule = "applies to --to kubernetes and --to skypilot, not to slurm"
        raise PlannerError("--claim", asked.claims[0], rule, "Leave it out")
    if to == "kubernetes" and (asked.image is None or not IMAGE.fullmatch(asked.image)):
        rule = "must be the name of an image" if asked.image else "is not given, and a pod runs an image"
        raise PlannerError("--image", asked.image, rule, "Give one that has executor: --image registry/name:tag")


def _check_restarts(to: Target, options: RunOptions, asked: ExportOptions) -> None:
    """Refuse checkpoints that are lost with their nodes, and restarts without checkpoints."""
    if options.checkpoints is not None and not asked.keeps_runs(to):
        rule = "writes checkpoints that are lost with the nodes"
        fix = f"Add a volume that all nodes share: --claim NAME={RUNS}"
        raise PlannerError("--checkpoint-every", options.checkpoints.every, rule, fix)
    if options.max_restarts and to == "slurm":
        rule = "does not apply to Slurm, which itself requeues a job that loses a node"
        raise PlannerError("--max-restarts", options.max_restarts, rule, "Leave it out")
    if options.max_restarts and options.checkpoints is None:
        rule = "needs a checkpoint to restart from"
        raise PlannerError("--max-restarts", options.max_restarts, rule, "Add --checkpoint-every 10m")
