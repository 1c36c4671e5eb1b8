"""The extremes that still fit: fewest GPUs, longest sequence, largest micro-batch, largest batch in one pass.

Each is the edge of a quantity in which memory is monotone, found by doubling and bisecting over whole answers of the
recommendation. Not here: what fits (search.py, memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from planner.ask.launchable import ways_out
from planner.ask.question import Question, headroom_of, warnings
from planner.basics.arith import boundary
from planner.basics.display import Displayed
from planner.basics.errors import PlannerError
from planner.basics.progress import Cancelled
from planner.decide.answers import FREE, Constraints, Estimate
from planner.decide.recommendation import recommend
from planner.parallelism.rules import divisors
from planner.spec.options import DEFAULT_SEQ_STEP, LARGEST_BATCH, LARGEST_SEQ
from planner.studies.reply import Reply, Resize, ask, reply_of, summary

SCHEMA = "fit/1"
QUANTITIES = ("gpus", "seq-len", "micro-batch", "global-batch")
DEFAULT_MAX_GPUS = 1024
REFUSALS_IN_A_ROW = 64
"""So many neighbours without a legal layout, and the rest is not tried."""

MOST_VALUES = LARGEST_BATCH

INTERRUPTED = "the search was interrupted, and nothing beyond was looked at"

LayoutSearch = Callable[[Question], Reply]
"""A question's best layout, within the constraints."""


class FitLimit(msgspec.Struct, frozen=True):
    """`value` is the edge and `best` its layout (None: not even the easiest value has one). `limit` says what stops the
    next value, `beyond`, or why there is none to try. `refused`: no value has a layout to look at, so memory is not the
    cause. `offloaded`: nothing fits without states in host memory. `interrupted`: a watcher ended the search
    (progress.py), and `value` is the furthest that was found to fit."""

    quantity: str
    value: int | None
    best: Estimate | None
    beyond: int | None
    limit: str
    refused: bool = False
    offloaded: bool = False
    interrupted: bool = False


class FitLimits(Displayed, msgspec.Struct, frozen=True):
    """The answers asked for, and those that the options leave no choice in, with the reason."""

    question: Question
    found: tuple[FitLimit, ...]
    fixed: dict[str, str]

    @property
    def interrupted(self) -> bool:
        """Whether a watcher ended the search."""
        return any(one.interrupted for one in self.found)


def fit(
    question: Question,
    resize: Resize,
    wanted: Sequence[str] = QUANTITIES,
    *,
    max_gpus: int = DEFAULT_MAX_GPUS,
    seq_step: int = DEFAULT_SEQ_STEP,
    constraints: Constraints = FREE,
    size_option: str = "--max-gpus",
) -> FitLimits:
    """Every quantity of `wanted`; the number of GPUs through `resize`, the others on the question's own cluster.

    States wait in host memory only for a quantity that has no value without. Where a watcher ends the search
    (progress.py), each is as far as it was; Cancelled is raised where nothing was found to fit.
    """
    if question.cluster.gpu.memory_bytes is None:
        rule = "has no known memory, so nothing can be said to fit"
        raise PlannerError("gpu", question.cluster.gpu.name, rule, "Give a GPU whose preset has memory_gib")
    without = msgspec.structs.replace(constraints, offload=False)
    told: Reply | None = None
    if any(quantity != "gpus" for quantity in wanted):  # what is wrong with the question itself is not an edge
        told = reply_of(recommend(question, 1, without))

    def edge(quantity: str, replied: LayoutSearch) -> FitLimit:
        if quantity == "gpus":
            return _fewest_gpus(resize, max_gpus, size_option, replied)
        if told is not None and told.refused:
            return FitLimit(quantity, None, None, None, told.reason, refused=True)
        if quantity == "seq-len":
            return _longest_sequence(question, seq_step, replied)
        return (_largest_micro_batch if quantity == "micro-batch" else _largest_batch)(question, replied)

    found: list[FitLimit] = []
    fixed: dict[str, str] = {}
    for quantity in wanted:
        reason = _fixed(question, quantity)
        if reason:
            fixed[quantity] = reason
            continue
        try:
            one = edge(quantity, partial(ask, constraints=without))
            if one.value is None and not one.refused and constraints.offload and any(ways_out(question)):
                offloaded = edge(quantity, partial(ask, constraints=constraints))
                one = one if offloaded.value is None else msgspec.structs.replace(offloaded, offloaded=True)
        except Cancelled:
            one = FitLimit(quantity, None, None, None, INTERRUPTED, interrupted=True)
        found.append(_as_asked(one, told) if one.interrupted and told is not None else one)
    if found and all(one.value is None for one in found) and any(one.interrupted for one in found):
        raise Cancelled
    return FitLimits(question, tuple(found), fixed)


def _as_asked(one: FitLimit, told: Reply) -> FitLimit:
    """The value of the question itself, where it fits and an interrupted search had not come further."""
    if told.best is None:
        return one
    case = told.best.case
    value = {
        "gpus": case.cluster.gpus,
        "seq-len": case.job.seq_len,
        "micro-batch": case.layout.micro_batch_size,
        "global-batch": case.layout.global_batch_size,
    }[one.quantity]
    further = one.value is not None and (one.value < value if one.quantity == "gpus" else one.value > value)
    return one if further else msgspec.structs.replace(one, value=value, best=told.best)


def _fixed(question: Question, quantity: str) -> str:
    if quantity == "micro-batch" and question.pins.micro_batch_size is not None:
        return f"it is given: {question.pins.micro_batch_size}"
    if quantity == "global-batch" and question.job.global_batch_size is not None:
        return f"it is given: {question.job.global_batch_size}"
    return ""


# -- the four quantities -------------------------------------------------------------------------------------------


def _fewest_gpus(resize: Resize, max_gpus: int, size_option: str, replied: LayoutSearch) -> FitLimit:
    sizes = gpu_sizes(resize(None).cluster.gpus_per_node, max_gpus)
    own = replied(resize(None))
    if own.unlaunched and replied(resize(sizes[0])).unlaunched:  # whatever the size: hundreds of searches would say so
        return FitLimit("gpus", None, None, None, own.reason, refused=True)
    end = f"more than {max_gpus} GPUs are not searched ({size_option})"
    return _smallest("gpus", sizes, lambda gpus: replied(resize(gpus)), end)


def gpu_sizes(per_node: int, most: int) -> list[int]:
    """Parts of a node that divide it, then whole nodes."""
    return [*(size for size in divisors(per_node)[:-1] if size <= most), *range(per_node, most + 1, per_node)]


def _longest_sequence(question: Question, step: int, replied: LayoutSearch) -> FitLimit:
    """Up to the model's own length, or beyond it where the question is beyond it already (rotary positions, ALiBi)."""
    own = question.model.max_seq_len
    further = question.job.seq_len > own
    lengths = range(step, LARGEST_SEQ + 1, step) if further else [*range(step, own, step), own]
    hint = "" if question.model.positions == "learned" else "; a longer --seq-len looks beyond"
    end = (
        f"more than {lengths[-1]} tokens are not searched"
        if further
        else (f"{question.model.name} was made for at most {own} tokens{hint}")
    )

    def at(seq_len: int) -> Reply:
        job = msgspec.structs.replace(question.job, seq_len=seq_len)
        return replied(msgspec.structs.replace(question, job=job))

    return _largest("seq-len", lengths, at, end)


def _largest_micro_batch(question: Question, replied: LayoutSearch) -> FitLimit:
    batch = question.job.global_batch_size
    sizes: Sequence[int] = range(1, MOST_VALUES + 1) if batch is None else divisors(batch)

    def at(micro: int) -> Reply:
        pins = msgspec.structs.replace(question.pins, micro_batch_size=micro)
        return replied(msgspec.structs.replace(question, pins=pins))

    end = f"it is the whole global batch of {batch}" if batch else f"more than {MOST_VALUES} are not searched"
    # Which degrees divide what is left of a global batch goes up and down with the size, and so does what fits.
    return _largest("micro-batch", sizes, at, end, every=batch is not None)


def _largest_batch(question: Question, replied: LayoutSearch) -> FitLimit:
    """Accumulation makes any multiple of a batch that fits, so the question is what goes through in one pass.

    Fewer sequences than GPUs leave only layouts in which several ranks share one: they are asked about last, since
    they may need more memory than the others.
    """
    gpus, passes, micro = question.cluster.gpus, question.pins.grad_accum or 1, question.pins.micro_batch_size
    each = passes * (micro or 1)
    most = gpus * each if micro else min(MOST_VALUES, gpus * each * 2**16)  # a given micro-batch leaves one size
    sizes = range(gpus * each, most + 1, gpus * each)
    parts = [part * each for part in divisors(gpus)[:-1]]

    def at(batch: int) -> Reply:
        job = msgspec.structs.replace(question.job, global_batch_size=batch)
        pins = msgspec.structs.replace(question.pins, grad_accum=passes)
        return replied(msgspec.structs.replace(question, job=job, pins=pins))

    end = f"more than {sizes[-1]} are not searched" if micro is None else f"the micro-batch is given: {micro}"
    whole = _largest("global-batch", sizes, at, end)
    if whole.value is not None or not parts:
        return whole
    part = _largest("global-batch", parts, at, whole.limit)
    return part if part.beyond else msgspec.structs.replace(part, beyond=whole.beyond)


# -- the edge ------------------------------------------------------------------------------------------------------


class _Replies:
    """Replies by place, each asked once. A value that no layout can have takes its nearest neighbour's reply."""

    def __init__(self, values: Sequence[int], at: Callable[[int], Reply]) -> None:
        self.values, self.at = values, at
        self.seen: dict[int, Reply] = {}

    def __call__(self, place: int) -> Reply:
        if place not in self.seen:
            self.seen[place] = self.at(self.values[place])
            if self.seen[place].interrupted:
                raise Cancelled
        return self.seen[place]

    def so_far(self, quantity: str, furthest: Callable[[Iterable[int]], int]) -> FitLimit:
        """The furthest value that was found to fit until a watcher ended the search; Cancelled where none was."""
        places = [place for place, reply in self.seen.items() if reply.best is not None]
        if not places:
            raise Cancelled
        place = furthest(places)
        return FitLimit(quantity, self.values[place], self.seen[place].best, None, INTERRUPTED, interrupted=True)

    def legal(self, place: int, direction: int) -> int | None:
        """The first place from here, up (1) or down (-1), at which there is a layout to look at."""
        for _ in range(REFUSALS_IN_A_ROW):
            if not 0 <= place < len(self.values):
                return None
            if not self(place).refused:
                return place
            place += direction
        return None


def _smallest(quantity: str, values: Sequence[int], at: Callable[[int], Reply], end: str) -> FitLimit:
    replies = _Replies(values, at)

    def too_small(place: int) -> bool:
        legal = replies.legal(place, 1)
        return legal is None or replies(legal).best is None

    try:
        edge = boundary(len(values), too_small)
    except Cancelled:
        return replies.so_far(quantity, min)
    answer = replies.legal(edge, 1) if edge < len(values) else None
    if answer is None:
        last = replies.legal(len(values) - 1, -1)
        reply = replies(len(values) - 1 if last is None else last)
        at_most = "" if last is None else f"{values[last]}: "
        limit = f"{at_most}{reply.reason.rstrip('.')}; {end}"
        return FitLimit(quantity, None, None, None, limit, refused=last is None)
    below = replies.legal(edge - 1, -1)
    if below is None:
        return FitLimit(quantity, values[answer], replies(answer).best, None, "nothing smaller can be asked for")
    return FitLimit(quantity, values[answer], replies(answer).best, values[below], replies(below).reason)


def _largest(
    quantity: str, values: Sequence[int], at: Callable[[int], Reply], end: str, *, every: bool = False
) -> FitLimit:
    """`every` asks about each value from the largest down, where what fits has gaps."""
    replies = _Replies(values, at)

    def fits(place: int) -> bool:
        legal = replies.legal(place, -1)
        return legal is None or replies(legal).best is not None

    try:
        if every:
            edge = next((place + 1 for place in reversed(range(len(values))) if fits(place)), 0)
        else:
            edge = boundary(len(values), fits)
        beyond = replies.legal(edge, 1) if edge < len(values) else None
    except Cancelled:
        return replies.so_far(quantity, max)
    answer = replies.legal(edge - 1, -1)
    if answer is None:
        first = replies(0 if beyond is None else beyond)
        smallest = None if beyond is None else values[beyond]
        return FitLimit(quantity, None, None, smallest, first.reason, refused=beyond is None)
    limit = end if beyond is None else replies(beyond).reason
    return FitLimit(quantity, values[answer], replies(answer).best, None if beyond is None else values[beyond], limit)


# -- fit/1 ---------------------------------------------------------------------------------------------------------


def as_json(found: FitLimits) -> bytes:
    """One object: the question's nouns, then one answer a quantity."""
    question = found.question
    answers = []
    for one in found.found:
        told = msgspec.structs.asdict(one)
        del told["refused"], told["best"]  # its limit says so, and the layout comes last
        answers.append(told | {"best": None if one.best is None else summary(one.best)})
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "model": question.model,
            "cluster": question.cluster,
            "job": question.job,
            "warnings": warnings(question),
            "headroom": headroom_of(question, [one.best.case for one in found.found if one.best is not None]),
            "answers": answers,
            "interrupted": found.interrupted,
            "fixed": found.fixed,
        }
    )
