"""Sixty nasty texts in every field that a plan, a host file or an option carries, written by every writer.

Scripts are run by bash and sh beside programs that write down how they were called; other files are read back by their
own parsers. Each text is refused in one line, or reads back as it was, and none ever makes the file `canary`. Not here:
where a plan or a preset is read (tests/planner/test_names.py).
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import yaml
from msgspec.structs import replace
from test_launch_export import layouts, plan_of

from executor.cli.output import tell
from executor.folder import joining, rundir
from executor.hosts import ssh_session
from executor.hosts.hosts import HostEntry, read_hosts
from executor.launchers import kubernetes, skypilot, slurm
from executor.run import dryrun, slurm_run
from executor.run.launch_export import IMAGE, ExportOptions, _check_asked
from executor.run.prepare import RunOptions
from planner.basics.errors import PlannerError
from planner.basics.names import path_rule
from planner.basics.quoting import for_terminal, for_yaml, identifier
from planner.spec import Tier
from planner.spec.plan import Plan, decode_plan, encode_plan
from planner.views.cells.map import print_plan
from planner.views.svg.map import svg_of
from tests.nasty import TEXTS

PROGRAMS = ("srun", "executor", "python", "python3", "kubectl", "sky")
STUB = "#!/bin/sh\n{{ printf '%s\\0' \"${{0##*/}}\" \"$@\"; printf '\\n\\0'; }} >>'{log}'\n"
DRAWN = 6
"""Texts of each field in CI, others for each; `make long` takes all."""


class Bench:
    """A place where scripts run: `programs` alone are on their PATH beside the system's, and write down their words."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "calls"
        (bin_ := root / "bin").mkdir()
        for name in PROGRAMS:
            (bin_ / name).write_text(STUB.format(log=self.log))
            (bin_ / name).chmod(0o700)
        (root / "work").mkdir()

    def calls(self, *words: str, **environment: str) -> list[list[str]]:
        """How the programs were called by a command line. It may fail: what it may not is to do anything else."""
        self.log.write_bytes(b"")
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            words, env={"PATH": path, "HOME": str(self.root / "work")} | environment,
            cwd=self.root / "work", capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows = self.log.read_bytes().decode().split("\0\n\0")
        return [row.split("\0") for row in rows if row]

    def words(self, line: str) -> list[str]:
        """The words of one line, as bash reads them."""
        said = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, cwd=self.root)
        return said.stdout.decode().split("\0")[:-1]

    def untouched(self) -> bool:
        """Whether nothing but the programs was run."""
        return not list(self.root.rglob("canary*")) and not list((self.root / "work").iterdir())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def base() -> Plan:
    plan = plan_of(2, layouts(2)[1])
    tiers = (Tier(name="rack", gpus=16, link=plan.cluster.intra_link),)
    return replace(plan, cluster=replace(plan.cluster, tiers=tiers)).sealed()


BASE = base()


def of_plan(part: str, field: str) -> Callable[[str], Plan]:
    """A plan read from a file with the text in a field."""

    def made(text: str) -> Plan:
        changed: Any = {
            "model": lambda: {"model": replace(BASE.model, **{field: text})},
            "cluster": lambda: {"cluster": replace(BASE.cluster, **{field: text})},
            "gpu": lambda: {"cluster": replace(BASE.cluster, gpu=replace(BASE.cluster.gpu, **{field: text}))},
            "link": lambda: {"cluster": replace(BASE.cluster, **{field: replace(BASE.cluster.intra_link, name=text)})},
            "tier": lambda: {"cluster": replace(BASE.cluster, tiers=(replace(BASE.cluster.tiers[0], name=text),))},
            "runtime": lambda: {"runtime": replace(BASE.runtime, **{field: text})},
            "recipe": lambda: {"job": replace(BASE.job, recipe=replace(BASE.job.recipe, **{field: text}))},
        }[part]()
        return decode_plan(encode_plan(replace(BASE, **changed)), "plan.json")

    return made


PLAN_FIELDS = {
    "model.name": of_plan("model", "name"),
    "cluster.name": of_plan("cluster", "name"),
    "gpu.name": of_plan("gpu", "name"),
    "intra_link.name": of_plan("link", "intra_link"),
    "inter_link.name": of_plan("link", "inter_link"),
    "tier.name": of_plan("tier", "name"),
    "runtime.name": of_plan("runtime", "name"),
    "runtime.kernels": of_plan("runtime", "kernels"),
    "recipe.data": of_plan("recipe", "data"),
    "recipe.validation_data": of_plan("recipe", "validation_data"),
    "recipe.tokenizer": of_plan("recipe", "tokenizer"),
    "recipe.checkpoint": of_plan("recipe", "checkpoint"),
}


def of_option(**given: Any) -> RunOptions:
    return RunOptions(**{"run_dir": Path("/runs/r"), "nodes": 2, "hosts": "elsewhere"} | given)


OPTIONS: Mapping[str, Callable[[str], RunOptions]] = {
    "--run-dir": lambda text: of_option(run_dir=Path("/runs") / text.replace("/", "_")),
    "--env name": lambda text: of_option(env=(f"{text}=1",)),
    "--env value": lambda text: of_option(env=(f"SOME={text}",)),
    "--script": lambda text: of_option(script=(text, "a")),
    "--script ARGS": lambda text: of_option(script=("/own.py", text)),
}
HOST_FIELDS = ("name", "user", "python", "container")


def asked_texts(field: str, whole: bool) -> list[str]:
    return list(TEXTS) if whole else random.Random(f"2027 {field}").sample(TEXTS, DRAWN)


def shown_only(text: str, but: str = "") -> None:
    """A terminal's or a log's text has nothing that is not printed."""
    left = text.replace(but, "") if but else text
    assert for_terminal(left) == left, ascii(left)[:300]


def refused(error: PlannerError) -> str:
    assert error.sentence.isprintable() and len(error.sentence) < 600, ascii(error.sentence)
    return "refused"


# -- writers of a plan and its options -------------------------------------------------------------------------------


def by_sbatch(bench: Bench, found: dryrun.DryRun) -> None:
    """run.sbatch, run as a job that starts and as one that starts again."""
    ready = found.ready
    folder = ready.options.run_dir
    again = slurm_run.again_words(ready.plan, ready.options)
    text = slurm.script(ready.plan, folder, ("comment=a b",), again, call=("executor",))
    assert again is not None
    (one,) = bench.calls("bash", "-c", text)
    assert one == [*slurm.srun_words(2), "executor", "join", str(folder), "--slurm"]
    made, other = bench.calls("bash", "-c", text, SLURM_RESTART_COUNT="1")
    head = ["executor", "run", f"{folder}/plan.json", "--launcher", "slurm", "--dry-run", "-o", f"{folder}-restart-1"]
    assert made == [*head, *again]
    assert other[-2:] == [f"{folder}-restart-1", "--slurm"]
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert len(directives) == len(slurm.directives(ready.plan, folder, ("comment=a b",)))
    name = identifier(f"{ready.plan.model.name}-{ready.plan.layout.engine}")
    assert f"#SBATCH --job-name={name}" in directives and name.isascii()


def by_nodes(bench: Bench, found: dryrun.DryRun) -> None:
    """The script of a node, and the lines that a dry run shows for each."""
    folder = found.ready.options.run_dir
    place = bench.root / "node-0.sh"
    place.write_text(dryrun.script(0, 2))
    assert bench.calls("sh", str(place)) == [["executor", "join", str(bench.root), "--node-rank", "0"]]
    for node in range(2):
        words = ["executor", "join", str(folder), "--node-rank", str(node), "--master", "HOST"]
        assert bench.words(dryrun.join_command(found, node)) == words
    text = dryrun.as_text(found, {})
    shown_only(for_terminal(text))
    files = "\n".join(content.rstrip() for content in dryrun._files(found).values())
    code = [line for line in text.splitlines() if not line.startswith("#") and line not in files.splitlines()]
    assert {line for line in code if line} == {dryrun.join_command(found, node) for node in range(2)}
    shown = json.loads(dryrun.as_json(found, {}))
    assert shown["run_dir"] == str(folder) and [one["argv"] for one in shown["commands"]] == [
        list(one.argv) for one in found.commands
    ]


def by_jobset(bench: Bench, found: dryrun.DryRun) -> None:
    plan, files = found.ready.plan, {rundir.PLAN: encode_plan(found.ready.plan).decode(), **found.ready.files}
    made = kubernetes.manifests(plan, files, 29500, "team/image:1", secrets=tuple(found.ready.environment))
    assert list(yaml.safe_load_all(for_yaml(made))) == made
    assert all(len(one["metadata"]["name"]) <= kubernetes.LONGEST_NAME for one in made)
    assert all(kubernetes.LABEL.fullmatch(one["metadata"]["name"]) for one in made)
    assert decode_plan(made[0]["data"][rundir.PLAN].encode()) == plan
    (container,) = made[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][2] == kubernetes.START.format(mounted="/launch", resolve_s=kubernetes.RESOLVE_S)
    given = {one["name"] for one in container["env"] if "valueFrom" in one}
    assert given >= set(found.ready.environment)


def by_skypilot(bench: Bench, found: dryrun.DryRun) -> None:
    ready, secret = found.ready, tuple(found.ready.environment)
    made = skypilot.task(ready.plan, ready.options.run_dir, 29500, ["a>=1", "b==2"], secrets=secret)
    read = yaml.safe_load(for_yaml([made]))
    assert read == made and read["name"].isascii()
    (one,) = bench.calls("bash", "-c", read["run"], SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2")
    assert one[-2:] == ["--master", "10.0.0.1:29500"]
    assert bench.calls("bash", "-c", read["setup"]) == [["python", "-m", "pip", "install", "--quiet", "a>=1", "b==2"]]


def by_accelerate(bench: Bench, found: dryrun.DryRun) -> None:
    (name,) = (name for name in found.ready.files if name.startswith("config/"))
    read = yaml.safe_load(found.ready.files[name])
    assert read["num_processes"] == 16 and read["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"].isidentifier()
    assert set(read) == set(yaml.safe_load(BASE_FILES[name]))


def by_files(bench: Bench, found: dryrun.DryRun) -> None:
    """What is written in JSON, and no value of --env in it."""
    joined = dryrun.joining_of(found.ready, 29500)
    assert msgspec.json.decode(msgspec.json.encode(joined), type=joining.Joining) == joined
    assert set(joined.environment.values()) <= {None}
    assert all("SOME" not in one.env or one.env["SOME"] == "***" for one in found.commands)


def by_picture(bench: Bench, found: dryrun.DryRun) -> None:
    plan = found.ready.plan
    root = ElementTree.fromstring(svg_of(plan))
    said = [one.text or "" for one in root.iter() if one.text]
    assert any(for_terminal(plan.model.name)[:40] in text for text in said), said[:3]
    assert {one.tag.partition("}")[2] for one in root.iter()} <= {"svg", "rect", "text", "title", "desc", "g", "line",
                                                                 "path", "polyline"}  # fmt: skip


WRITERS = (by_sbatch, by_nodes, by_jobset, by_skypilot, by_accelerate, by_files, by_picture)
BASE_FILES = dryrun.dry_run(BASE, of_option(), lambda _: None, read_back=False).ready.files


def written(bench: Bench, plan: Plan, options: RunOptions, counted: Counter[str]) -> None:
    try:
        found = dryrun.dry_run(plan, options, tell, read_back=False)
        for sentence in found.unchecked.values():
            shown_only(sentence)
        assert path_rule(str(options.run_dir)) is None
    except PlannerError as error:
        counted[refused(error)] += 1
        return
    for writer in WRITERS:
        try:
            writer(bench, found)
        except PlannerError as error:
            counted[refused(error)] += 1
        else:
            counted[writer.__name__] += 1
    assert bench.untouched()


SIZES = [pytest.param(False, id="drawn"), pytest.param(True, id="whole", marks=pytest.mark.long)]


@pytest.mark.parametrize("whole", SIZES)
@pytest.mark.parametrize("field", [*PLAN_FIELDS, *OPTIONS])
def test_a_nasty_text_in_a_plan_or_an_option_is_refused_or_read_back(
    bench: Bench, field: str, whole: bool, capsys: pytest.CaptureFixture[str], record_property: Any
) -> None:
    counted: Counter[str] = Counter()
    for text in asked_texts(field, whole):
        try:
            plan = PLAN_FIELDS[field](text) if field in PLAN_FIELDS else BASE
        except PlannerError as error:
            counted[refused(error)] += 1
            continue
        options = OPTIONS[field](text) if field in OPTIONS else of_option()
        written(bench, plan, options, counted)
        if field in PLAN_FIELDS and not counted["drawn"] % 5:
            print_plan(plan)
            shown_only(capsys.readouterr().out)
        counted["drawn"] += 1
    tell(f"{field}: {dict(counted)}")
    said = capsys.readouterr()
    shown_only(said.out + said.err)
    record_property("counted", dict(counted))
    assert counted["refused"] + counted["by_files"] > 0


# -- host files, and ssh ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", HOST_FIELDS)
def test_a_nasty_text_in_a_host_file_is_refused_or_one_word_of_a_remote_command(bench: Bench, field: str) -> None:
    counted: Counter[str] = Counter()
    for text in TEXTS:
        path = bench.root / "hosts.txt"
        quoted = shlex.quote(text)
        path.write_text(f"{quoted} slots=2\n" if field == "name" else f"red slots=2 {field}={quoted}\n", newline="")
        try:
            machines = read_hosts(path)
        except PlannerError as error:
            counted[refused(error)] += 1
            continue
        for machine in machines:
            check_ssh(bench, machine, field, text)
        counted["kept"] += 1
    assert counted["refused"] > 15 and bench.untouched(), counted


def check_ssh(bench: Bench, machine: HostEntry, field: str, text: str) -> None:
    """ssh is given the text as a value alone, and the host's shell as the words that it was."""
    words = ssh_session.words(machine)
    options, end, host, command = words[:-3], *words[-3:]
    assert (end, command) == ("--", ssh_session.COMMAND) and not host.startswith("-")
    assert host == (text if field == "name" and "[" not in text else machine.name)
    if machine.user is not None:
        assert options[-2:] == ["-l", text] and not text.startswith("-")
    line = ssh_session.first_line(machine)
    assert "\n" not in line
    if field == "python":
        said = words_of(bench, line)
        home = str(bench.root / "work")
        assert said == [text.replace("~", home, 1) if text.startswith("~/") else text, "-u", "-c", ssh_session.BOOT]
    if field == "container":
        assert words_of(bench, line) == [*shlex.split(text), "python3", "-u", "-c", ssh_session.BOOT]


def words_of(bench: Bench, line: str) -> list[str]:
    """What a host's sh would start, word by word."""
    shown = line.replace("exec ", "printf '%s\\0' ", 1)
    done = subprocess.run(
        ["sh", "-c", 'IFS= read -r line && eval "$line"'], input=f"{shown}\n".encode(), capture_output=True,
        check=True, cwd=bench.root / "work", env={"PATH": os.environ["PATH"], "HOME": str(bench.root / "work")},
    )  # fmt: skip
    return done.stdout.decode().split("\0")[:-1]


# -- options of an export ---------------------------------------------------------------------------------------------


def as_directive(text: str) -> None:
    made, plain = (slurm.script(BASE, Path("/runs/r"), (f"comment={one}",), call=("executor",)) for one in (text, "x"))
    (line,) = (line for line in made.split("\n") if line.startswith("#SBATCH --comment="))
    assert line.removeprefix("#SBATCH --comment=").strip('"') == text.strip('"')
    assert len(made.split("\n")) == len(plain.split("\n"))


def as_option_name(text: str) -> None:
    slurm.script(BASE, Path("/runs/r"), (text,))
    assert slurm.OPTION_NAME.fullmatch(text.removeprefix("--").partition("=")[0])


def as_image(text: str) -> None:
    _check_asked("kubernetes", ExportOptions(image=text))
    assert IMAGE.fullmatch(text)


def as_claim(text: str) -> None:
    (claim,) = ExportOptions(claims=(f"data=/{text}",)).volumes()
    made = kubernetes.manifests(BASE, {}, 29500, "i:1", (claim,))
    assert list(yaml.safe_load_all(for_yaml(made))) == made and path_rule(claim.path) is None


def as_claim_name(text: str) -> None:
    (claim,) = ExportOptions(claims=(f"{text}=/data",)).volumes()
    assert kubernetes.LABEL.fullmatch(claim.name)


def as_accelerator(text: str) -> None:
    name = skypilot.accelerator(BASE, text)
    made = skypilot.task(BASE, Path("/runs/r"), 29500, ["a"], gpu=name)
    assert yaml.safe_load(for_yaml([made])) == made


@pytest.mark.parametrize("way", [as_directive, as_option_name, as_image, as_claim, as_claim_name, as_accelerator])
def test_a_nasty_option_of_an_export_is_refused_or_read_back(way: Callable[[str], None]) -> None:
    counted: Counter[str] = Counter()
    for text in TEXTS:
        try:
            way(text)
        except PlannerError as error:
            counted[refused(error)] += 1
        else:
            counted["kept"] += 1
    assert counted["refused"] >= 10, counted


# -- lines of a log on a terminal ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:20])
def test_a_line_and_an_error_show_a_nasty_text_and_do_nothing_to_the_terminal(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(f"rank 0  {text}")
    tell(PlannerError(text, text, text, text).sentence)
    said = capsys.readouterr()
    shown_only(said.err)
    assert (said.out == "" and text.split()[:1] == []) or text.isprintable() <= (text[:50] in said.err)
