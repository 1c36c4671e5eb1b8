"""Changes of a person's own configuration files that make the run fit, or faster, or cheaper, each asked again.

A change is one of levers.py, written as keys of the files (planner/ask/tofile/theirs.py); the edited files are read and
answered like any others, so a figure here is that of `planner estimate --from`. The best is taken until no other gains
LEAST. Not here: the words (views/fixes.py), or writing the files (planner/cli/fix.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from planner.ask import fromfile, tofile
from planner.ask.fromfile import files, merge
from planner.ask.fromfile.sheet import OptionLine
from planner.ask.options import cluster_of
from planner.ask.question import Pins, Question, limit_bytes
from planner.ask.tofile.fields import FIELDS
from planner.ask.tofile.theirs import TheirFile, edited, read_theirs, sayable
from planner.basics.errors import PlannerError
from planner.decide import strategies
from planner.decide.answers import Estimate
from planner.decide.explanation import chosen
from planner.decide.levers import Change, WhatIf, changes, predicted, speed_ratio
from planner.engines import engine_of
from planner.parallelism.case import Case
from planner.parallelism.rule import broken
from planner.parallelism.rules import JOB
from planner.spec import Layout, TrainingJob
from planner.spec.engines import ENGINES, OFFLOADS
from planner.spec.layout import LIGER

Goal = Literal["fit", "fast", "cheap"]
LEAST = 0.03
"""Share of what the goal counts (memory, tokens/s, tokens/s a GPU) that a change gains at least: less is no better than
the figures are."""
ALONE = 0.01
"""Share of tokens/s that a hunk wins by itself, or loses at most where it saves memory."""
MOST_STEPS = 12
TRIED = 6
"""Candidates that are read and asked in a step, the best predicted first."""
PAIRS = 8
"""Pairs of a faster one that does not fit and one that saves memory that are predicted, the most promising first."""
TRAINING = (("engine", "precision"), ("paged_states",), ("optimizer",), ("method",), ("seq_len",))
"""Changes of what is trained that are offered, one kind after the other where the run fits in no other way."""
SHARDING = "fsdp2"
MovedField = tuple[str, str]
"""A field that a change moves: "layout" or "job", and its name."""


class Trial(msgspec.Struct, frozen=True):
    """What the ordinary estimate answers for the files with these texts (by real path; others as they are). `moved`
    names the fields that differ from the files as they are, `named` the files that these name and that are read too."""

    texts: dict[str, str]
    question: Question
    one: Estimate
    lines: tuple[OptionLine, ...]
    named: tuple[str, ...] = ()
    moved: frozenset[MovedField] = frozenset()

    @property
    def device_bytes(self) -> float:
        """On the card."""
        return float(self.one.memory.device_bytes)

    @property
    def fits(self) -> bool:
        """On the cards and hosts, by the figures."""
        return self.one.fits

    @property
    def may_fit(self) -> bool:
        """Whether it fits, or something that takes memory away is not counted."""
        return self.one.fits or self.question.uncounted.may_fit

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs; None where no time is known."""
        speed = self.one.throughput.tokens_per_s
        return None if speed is None else float(speed)

    @property
    def gpus(self) -> int:
        """Ranks of the layout."""
        return self.one.case.layout.world_size


LayoutPrediction = WhatIf | Estimate
"""What has a case, memory and speed."""


class FixCandidate(NamedTuple):
    """What the files can say, with its figures; `parts` are the fields of the two changes that it is made of."""

    then: LayoutPrediction
    parts: tuple[frozenset[MovedField], ...] = ()


class FixHunk(msgspec.Struct, frozen=True):
    """One change: `alone` are the files with it and nothing else, and what they are then; `together` has the texts of
    those that change with it and all hunks before it. `options` has the planner's names with both values."""

    alone: Trial
    together: dict[str, str]
    options: dict[str, tuple[Any, Any]]
    same_training: bool


class FixedFiles(msgspec.Struct, frozen=True):
    """The answer: the files as they are, the hunks in order of worth, and all of them together."""

    goal: Goal
    theirs: tuple[TheirFile, ...]
    before: Trial
    after: Trial
    hunks: tuple[FixHunk, ...]


def fixed_files(paths: Sequence[str], given: Mapping[str, Any], goal: Goal) -> FixedFiles:
    """What to change in the files for a goal (PlannerError where they cannot be read, or edited)."""
    theirs = read_theirs(paths)
    asking = _FixSearch(theirs, given, goal)
    hunks = asking.hunks(asking.steps())
    return FixedFiles(goal, theirs, asking.base, asking.reached if hunks else asking.base, hunks)


class _FixSearch:
    """The files, the question beside them, and what has been asked of them until now."""

    def __init__(self, theirs: tuple[TheirFile, ...], given: Mapping[str, Any], goal: Goal) -> None:
        self.theirs, self.given, self.goal = theirs, given, goal
        self.answers: dict[tuple[tuple[str, str], ...], Trial | None] = {}
        self.base = self.reached = self.asked({})
        named = next((line.value for line in self.base.lines if line.option == "model"), None)
        self.given = {**given, "model": named} if named else given  # found by its id once
        if goal != "fit" and self.base.fits and self.base.tokens_per_s is None:
            known = f"{self.base.one.case.cluster.gpu.name} has no time that is known"
            raise PlannerError("goal", goal, f"needs a predicted time, and {known}", "Use --goal fit")

    # -- asking ----------------------------------------------------------------------------------------------------

    def asked(self, texts: Mapping[str, str]) -> Trial:
        """The ordinary estimate of the files with other texts (PlannerError)."""
        contents = {one.real: one.raw for one in self.theirs} | {path: text.encode() for path, text in texts.items()}
        with files.standing_in(contents) as stand_ins:
            read = merge.merged(fromfile.read(*(one.path for one in self.theirs)), self.given)
            question = _as_said(merge.question_of(read))
            one = chosen(strategies.answer(question))
            return Trial(dict(texts), question, one, read.found.lines, tuple(dict.fromkeys(stand_ins.others)))

    def of(self, wanted: Case) -> Trial | None:
        """The files edited to mean a case; None where they cannot, or mean something else then."""
        moved = _apart(self.base.one.case, wanted)
        try:
            texts = self.texts(wanted)
            key = tuple(sorted(texts.items()))
            if key not in self.answers:
                self.answers[key] = self.asked(texts) if texts else None
        except PlannerError:
            return None
        found = self.answers[key]
        if found is None or not _means(found, wanted, moved, self.base):
            return None
        return replace(found, moved=moved)

    def texts(self, wanted: Case) -> dict[str, str]:
        """The texts that differ, by real path (PlannerError)."""
        return edited(self.theirs, tofile.values(self.base.one.case), tofile.values(wanted), self.base.lines)

    def case_of(self, fields: Iterable[MovedField]) -> Case:
        """The files' own case with these fields as the search left them."""
        base, reached = self.base.one.case, self.reached.one.case
        case = _moved(base, reached, fields)
        shrunk = case.layout.world_size != base.layout.world_size
        return Case(case.model, case.job, case.layout, reached.cluster if shrunk else base.cluster, case.runtime)

    # -- the search ------------------------------------------------------------------------------------------------

    def steps(self) -> list[frozenset[MovedField]]:
        """The best change again and again; each by the fields that it moved."""
        found: list[frozenset[MovedField]] = []
        kinds = iter(((), *TRAINING, None))
        training = next(kinds)
        while training is not None and len(found) < MOST_STEPS and not (self.reached.fits and self.goal == "fit"):
            better = self.best(training)
            if better is not None:
                found += better
            elif self.reached.fits:
                break
            else:
                training = next(kinds)
        return found

    def best(self, training: tuple[str, ...]) -> tuple[frozenset[MovedField], ...] | None:
        """The next change, made of one or two, where one gains enough."""
        now = self.reached.one
        seen = [(self.worth(now, one.then), one) for one in self.candidates(now, training)]
        seen = sorted((pair for pair in seen if pair[0] > 0), key=lambda pair: -pair[0])
        for _, one in seen[:TRIED]:
            trial = self.of(one.then.case)
            if trial is not None and self.worth(now, trial.one) > 0:
                self.reached = trial
                return one.parts or (_apart(now.case, one.then.case),)
        return None

    def candidates(self, now: Estimate, training: tuple[str, ...]) -> Iterator[FixCandidate]:
        """Cases a change away; of those that are faster and do not fit, with a second change that saves memory."""
        known = self.base.question.calibration
        singles = [predicted(one, known) for one in self.near(now.case, training)]
        yield from map(FixCandidate, singles)
        if not now.fits or self.goal == "fit":
            return
        yield from map(FixCandidate, self.on_half(now))
        faster = [one for one in singles if not self.holds(one) and _gain(now, one) > LEAST]
        smaller = [one for one in singles if _saved(now, one) > LEAST]
        pairs = []
        for one, other in product(faster, smaller):
            gain = (1 + _gain(now, one)) * (1 + _gain(now, other)) - 1
            parts = _apart(now.case, one.case), _apart(now.case, other.case)
            if gain > LEAST and not parts[0] & parts[1]:
                larger = (1 - _saved(now, one) - _saved(now, other)) * now.memory.device_bytes
                both = _moved(one.case, other.case, parts[1])
                pairs.append((larger > limit_bytes(self.base.question, both), -gain, both, parts))
        for _, _, both, parts in sorted(pairs, key=lambda pair: pair[:2])[:PAIRS]:
            if _legal(both):
                yield FixCandidate(predicted(both, known), parts)

    def near(self, case: Case, training: tuple[str, ...]) -> Iterator[Case]:
        """Legal cases a change away that the files can say, of the same training but for one kind of change."""
        able = sayable(self.theirs, tofile.values(case))
        for options, job, layout in (*changes(case), *_compounds(case), *_sharded(case)):
            same = same_training(job, case.job) and layout.global_batch_size == case.layout.global_batch_size
            if not set(options) <= able or not (same or set(options) == set(training)):
                continue
            if "optimizer" in options and not options["optimizer"].startswith(case.job.optimizer.name):
                continue  # another optimizer, not the same one with smaller states
            other = Case(case.model, job, layout, case.cluster, self.base.question.runtime(layout.engine))
            if _legal(other):
                yield other

    def on_half(self, now: Estimate) -> Iterator[Estimate]:
        """The same sequences a step on half of the GPUs, where files say how many there are."""
        case, layout = now.case, now.case.layout
        axis = "dp_replicate" if layout.dp_replicate > 1 else "dp_shard"
        said = any(line.option == "gpus" for line in self.base.lines)
        if self.goal != "cheap" or not said or getattr(layout, axis) % 2:
            return
        half = {**self.given, "gpus": str(layout.world_size // 2), "nodes": None}
        cluster = cluster_of(half, self.base.question.folders)
        other = replace(layout, **{axis: getattr(layout, axis) // 2}, grad_accum=layout.grad_accum * 2)
        if (trial := self.of(Case(case.model, case.job, other, cluster, case.runtime))) is not None:
            yield trial.one

    def holds(self, then: LayoutPrediction) -> bool:
        """Whether cards and hosts hold it."""
        limit = limit_bytes(self.base.question, then.case)
        return then.memory.device_bytes <= limit and then.memory.host_fits is not False

    def worth(self, now: Estimate, then: LayoutPrediction) -> float:
        """What a change gains for the goal: 0 where it is less than LEAST, or does not fit while this does."""
        gain, saved = _gain(now, then), _saved(now, then)
        if now.fits:
            if self.goal == "cheap":
                gain = (1 + gain) * now.case.layout.world_size / then.case.layout.world_size - 1
            return gain if self.holds(then) and gain >= LEAST else 0.0
        if self.holds(then):
            return 1e6 * (1 + gain)
        return saved / (LEAST + max(0.0, -gain)) if saved >= LEAST else 0.0

    # -- hunks -----------------------------------------------------------------------------------------------------

    def hunks(self, steps: Sequence[frozenset[MovedField]]) -> tuple[FixHunk, ...]:
        """The steps as changes that stand alone, without those that the others make needless."""
        groups = self.needed(_joined(steps))
        place = 0
        while place < len(groups):
            others = [group for group in groups if group is not groups[place]]
            if self.stands_alone(groups[place]) or not others:
                place += 1
                continue
            joined = [groups[place] | other for other in others]
            partner = next((at for at, group in enumerate(joined) if self.stands_alone(group)), 0)
            groups = [joined[partner], *(group for at, group in enumerate(others) if at != partner)]
            place = 0
        trials = [trial for group in groups if (trial := self.of(self.case_of(group))) is not None]
        trials.sort(key=lambda trial: -self.value(trial))
        moved = [
            frozenset[MovedField]().union(*(trial.moved for trial in trials[: at + 1])) for at in range(len(trials))
        ]
        return tuple(
            self.hunk(trial, self.texts(self.case_of(fields))) for trial, fields in zip(trials, moved, strict=True)
        )

    def needed(self, groups: list[frozenset[MovedField]]) -> list[frozenset[MovedField]]:
        """Without groups that the goal does not need once the others are there."""
        for group in list(groups):
            rest = [other for other in groups if other is not group]
            without = self.of(self.case_of(frozenset[MovedField]().union(*rest))) if rest else None
            if without is None or (self.reached.fits and not without.fits):
                continue
            if self.reached.fits:
                needless = self.speed(without) >= (1 - ALONE) * self.speed(self.reached)
            else:
                needless = without.device_bytes <= (1 + ALONE) * self.reached.device_bytes
            if needless:
                groups, self.reached = rest, without
        return groups

    def stands_alone(self, group: frozenset[MovedField]) -> bool:
        """Whether a change is of use without the others: it can be said, and where the files as they are fit, it fits,
        and wins speed or saves memory."""
        trial = self.of(self.case_of(group))
        if trial is None or not self.base.fits:
            return trial is not None
        won, saved = self.value(trial), 1 - trial.device_bytes / self.base.device_bytes
        return trial.fits and (won >= ALONE or (saved >= LEAST and won >= -ALONE))

    def value(self, trial: Trial) -> float:
        """What a trial is worth beside the files as they are, by the goal; memory where they do not fit."""
        if not self.base.fits or self.goal == "fit":
            return 1 - trial.device_bytes / self.base.device_bytes
        return self.speed(trial) / self.speed(self.base) - 1

    def speed(self, trial: Trial) -> float:
        """Tokens/s, of each GPU where the goal counts them; 1 where no time is known."""
        return (trial.tokens_per_s or 1.0) / (trial.gpus if self.goal == "cheap" else 1)

    def hunk(self, trial: Trial, together: dict[str, str]) -> FixHunk:
        """A change with the planner's names for what it moves."""
        before, after = (tofile.values(one.one.case) for one in (self.base, trial))
        moved = {name: (before.get(name), after.get(name)) for name in FIELDS if before.get(name) != after.get(name)}
        same = same_training(trial.one.case.job, self.base.one.case.job)
        return FixHunk(trial, together, moved, same)


def same_training(job: TrainingJob, other: TrainingJob) -> bool:
    """Whether two jobs train the same: torch's kernels for a step differ in speed alone."""
    step = other.optimizer.implementation
    return replace(job, optimizer=replace(job.optimizer, implementation=step)) == other


def _compounds(case: Case) -> Iterator[Change]:
    """Fields that some files have one key for."""
    layout = case.layout
    fused = {"liger": ",".join(LIGER), "loss": "fused"}
    if layout.liger:
        yield dict.fromkeys(fused, ""), case.job, replace(layout, liger=(), loss="whole")
    else:
        yield fused, case.job, replace(layout, liger=LIGER, loss="fused")
    host = not layout.offload_params
    both = {"offload_optimizer": host, "offload_params": host}
    yield {name: str(host).lower() for name in both}, case.job, replace(layout, **both)


def _sharded(case: Case) -> Iterator[Change]:
    """FSDP2 in the place of copies; some files mean mixed precision then, where copies train in 16 bits alone."""
    layout = case.layout
    if layout.facts.copies != "replicas":
        return
    sizes = {"dp_replicate": 1, "dp_shard": layout.dp_replicate}
    other = replace(layout, engine=SHARDING, zero_stage=ENGINES[SHARDING].usual_stage, **sizes)
    yield {"engine": SHARDING}, case.job, other
    if case.job.precision == "pure-bf16":
        yield {"engine": SHARDING, "precision": "bf16"}, replace(case.job, precision="bf16"), other


def _legal(case: Case) -> bool:
    return broken(case, (*JOB, *engine_of(case.layout.engine).rules)) is None


def _moved(case: Case, other: Case, fields: Iterable[MovedField]) -> Case:
    """A case with some fields as another has them, and its runtime where the engine is one of them."""
    parts: dict[str, dict[str, Any]] = {"layout": {}, "job": {}}
    for part, name in fields:
        parts[part][name] = getattr(getattr(other, part), name)
    runtime = other.runtime if "engine" in parts["layout"] else case.runtime
    return Case(
        case.model, replace(case.job, **parts["job"]), replace(case.layout, **parts["layout"]), case.cluster, runtime
    )


def _apart(case: Case, other: Case) -> frozenset[MovedField]:
    """The fields in which two cases differ."""
    return frozenset(
        (part, name)
        for part, kind in (("layout", Layout), ("job", TrainingJob))
        for name in kind.__struct_fields__
        if getattr(getattr(case, part), name) != getattr(getattr(other, part), name)
    )


def _joined(steps: Iterable[frozenset[MovedField]]) -> list[frozenset[MovedField]]:
    """Steps that moved the same field are one."""
    found: list[frozenset[MovedField]] = []
    for step in steps:
        touching = [group for group in found if group & step]
        found = [group for group in found if not group & step] + [step.union(*touching)]
    return found


def _as_said(question: Question) -> Question:
    """Without the search for states in host memory, which a file that does not fit does not ask for."""
    if any(question.pins.given(name) is not None for name in OFFLOADS):
        return question
    return replace(question, pins=question.pins.fixing(**dict.fromkeys(OFFLOADS, False)))


SEARCHED = tuple(name for name in Pins.__struct_fields__ if name in Layout.__struct_fields__)
"""Fields that a search fills in where a file leaves them open."""


def _means(found: Trial, wanted: Case, moved: Iterable[MovedField], base: Trial) -> bool:
    """Whether edited files mean the case: its job, in its layout what was to change or is searched, and nothing more
    that is not counted."""
    case, now, before = found.one.case, found.question.uncounted, base.question.uncounted
    names = {*SEARCHED, *OFFLOADS, "engine", *(name for part, name in moved if part == "layout")}
    same = all(getattr(case.layout, name) == getattr(wanted.layout, name) for name in names)
    counted = set(now.more) <= set(before.more) and set(now.less) <= set(before.less)
    ranks = case.layout.world_size == wanted.layout.world_size
    return same and counted and ranks and _same_job(case.job, wanted.job, base.one.case.job)


def _same_job(found: TrainingJob, wanted: TrainingJob, base: TrainingJob) -> bool:
    """Whether a job is the wanted one; where that is another than the files', rates that follow from it may differ."""
    if same_training(wanted, base):
        return same_training(found, wanted)
    told = [(one.method, one.seq_len, one.packing, one.optimizer.name, one.optimizer.paged) for one in (found, wanted)]
    return told[0] == told[1] and (found.precision == wanted.precision or wanted.method != base.method)


def _gain(now: LayoutPrediction, then: LayoutPrediction) -> float:
    """Share of tokens/s won; 0 where a time is unknown."""
    ratio = speed_ratio(then.throughput, now.throughput)
    return 0.0 if ratio is None else ratio - 1


def _saved(now: LayoutPrediction, then: LayoutPrediction) -> float:
    """Share of the memory on the card that is saved."""
    return 1 - float(then.memory.device_bytes) / float(now.memory.device_bytes)
