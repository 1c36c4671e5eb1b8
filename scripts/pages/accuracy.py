"""docs/accuracy.md and its pictures: layouts and combinations that were run, a replay of the rows in tests/truth, and
what was written by hand.

The records of the runs and the hand-written parts stand in docs/accuracy/. Not here: any figure.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import median

from planner.calibrate.predict import Replayed, replay
from planner.calibrate.score import FitScore, RankScore, Summary, summary
from planner.calibrate.tables import NO, ScoreTable, share_text, tables
from planner.spec.calibration import Calibration, calibration
from scripts.pages import combinations, layouts, scatter
from tests.truth.published.reader import each

HEAD = """# Accuracy

Predictions compared with {predicted} of {rows} measurements (tests/truth), with the calibration `{calibration}`.
All but those of `own_*` were published by other people.
`make docs` writes this page, `make accuracy` prints it for what the code says now, and a test compares the two.
Your own rows are replayed the same way: `planner replay rows.jsonl`.
"""

CHARTS = """## Predicted against measured

The figures behind the tables below, a point each.
Blue discs are of rows that the calibration `{calibration}` was fitted to, orange rings of rows that were left out.
The charts have every figure that was both measured and predicted.

![{memory}](accuracy/{memory_file})

![{time}](accuracy/{time_file})
"""

CHART_WORDS = (
    "Scatter plots of predicted against measured {what}, one a source, with the diagonal and lines at a factor of two"
)

DRAWN = {scatter.MEMORY: scatter.memory_picture, scatter.TIME: scatter.time_picture}
"""The pictures of the page, in its folder."""

PARTS = ("fitted.md", "causes.md")
"""Hand-written or calibrate's: rows that coefficients were fitted on against those left out; causes of error."""

AFTER = "Which layout is best"
"""The table behind which the parts stand: what follows is detail."""

ABOUT = {
    "By source": (
        "Memory is the median and the 90th percentile of |predicted / measured - 1|, time those of the factor "
        "between the two (bandwidth for collectives), then again after one scale for the whole source. Failures "
        "recognised are runs that ended out of memory, or in a crash that the source lists with those, and were "
        "predicted not to fit or refused. Rank correlation is Spearman's, the median over groups of equal work; a "
        "first choice is the fastest layout of a group among those predicted to fit."
    ),
    "Peak memory": (
        "Errors are predicted / measured - 1: median and 90th percentile of their size, and the signed median "
        "(bias). The kind is what the source measured: live tensors (allocated), the allocator's hold (reserved), "
        "or the whole device."
    ),
    "Step time, and bandwidth of collectives": (
        "Factors are the larger of predicted / measured and its inverse: 1 is right. Bias is the median ratio "
        "(above 1: predicted too slow; of bandwidth, too fast)."
    ),
    "What fits": (
        "How runs ended, against what planner estimate says of them: yes and likely are held with a probability of "
        "at least 80 %, close and no are not; the memory's band tells the words apart. "
        "Refused: a rule of the engine forbids the layout."
    ),
    "The largest that fits": (
        "Micro-batches and lengths that ran where the next did not, against the largest that planner fit finds with "
        "all of the card's memory: factors as of times, and bias above 1 where more is predicted to fit than did."
    ),
    "Which layout is best": (
        "Layouts of equal work that ran, at least five: Spearman's correlation of predicted and measured speed, "
        "and what the first choice costs against the best that ran (0 %: it is the best)."
    ),
    "Largest errors of memory": "Terms are those of live tensors at the predicted peak.",
    "Largest errors of time, and of the largest that fits": "Seconds a step; GB/s of bus bandwidth for collectives.",
    "What was assumed": "Facts that a source does not state, and that a prediction needs.",
    "Rows without a prediction": "And why.",
}
"""What the columns of each table mean, by its title."""


def of_rows(project: Path) -> str:
    """The page as it is for today's predictions of the rows in tests/truth."""
    replayed, known = _rows(project)
    return page(summary(replayed), known.name, project / "docs" / "accuracy")


def picture(project: Path, name: str) -> str:
    """One of DRAWN, of the same predictions of the same rows."""
    return DRAWN[name](_rows(project)[0]).decode()


@cache
def _rows(project: Path) -> tuple[list[Replayed], Calibration]:
    known = calibration()
    return replay(each(sorted((project / "tests" / "truth").glob("*.jsonl"))), known), known


def page(found: Summary, calibration: str, parts: Path) -> str:
    """The whole page; `parts` is the folder of what is not replayed, of which a file may be missing."""
    rows, predicted = (sum(counts[place] for counts in found.rows.values()) for place in (0, 1))
    written = [HEAD.format(rows=rows, predicted=predicted, calibration=calibration)]
    written.append(_charts(calibration))
    if (record := parts / layouts.FILE).is_file():
        written.append(layouts.section(layouts.read_record(record)))
    if (record := parts / combinations.FILE).is_file():
        written.append(combinations.section(combinations.read_combinations(record)))
    own = [(parts / name).read_text() for name in PARTS if (parts / name).is_file()]
    for table in (_overview(found), *tables(found)):
        written.append(_markdown(table))
        if table.title == AFTER:
            written += own
            own = []
    return "\n".join([*written, *own])


def _charts(calibration: str) -> str:
    memory, time = (CHART_WORDS.format(what=what) for what in ("peak memory", "step time"))
    files = {"memory_file": scatter.MEMORY, "time_file": scatter.TIME}
    return CHARTS.format(calibration=calibration, memory=memory, time=time, **files)


def _overview(found: Summary) -> ScoreTable:
    rows = []
    for source, (count, predicted) in found.rows.items():
        memory = [
            f"{one.kind} {share_text(one.errors.median)} / {share_text(one.errors.p90)}"
            for one in found.memory
            if one.source == source and one.model is None
        ]
        speed = next((one.factors for one in found.speed if one.source == source and one.model is None), None)
        fit = [one for one in found.fit if one.source == source]
        ranks = [one for one in found.ranks if one.source == source]
        rows.append(
            (
                source,
                str(count),
                str(predicted),
                ", ".join(memory) or NO,
                NO if speed is None else f"{speed.median:.2f} / {speed.p90:.2f}",
                NO if speed is None else f"{speed.scaled_median:.2f} / {speed.scaled_p90:.2f}",
                _recognised(fit),
                _correlation(ranks),
                _failed_first(ranks),
            )
        )
    return ScoreTable(
        "By source",
        (
            "source", "rows", "predicted", "memory median / p90", "time factor", "after one scale",
            "failures recognised", "rank correlation", "first choice failed",
        ),
        tuple(rows),
        1,
    )  # fmt: skip


def _recognised(fit: list[FitScore]) -> str:
    failed = [one for one in fit if one.outcome != "ran"]
    known = sum(one.does_not_fit + one.refused for one in failed)
    count = sum(one.fits for one in failed) + known
    return f"{known} of {count}" if count else NO


def _correlation(ranks: list[RankScore]) -> str:
    known = [one.spearman for one in ranks if one.spearman is not None]
    return f"{median(known):.2f}" if known else NO


def _failed_first(ranks: list[RankScore]) -> str:
    chosen = [one for one in ranks if one.chosen is not None]
    return f"{sum(one.regret is None for one in chosen)} of {len(chosen)}" if chosen else NO


def _markdown(table: ScoreTable) -> str:
    head = [
        f"| {' | '.join(table.head)} |",
        "|" + "".join(_rule(place < table.left) for place in range(len(table.head))),
    ]
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.rows]
    return "\n".join([f"## {table.title}\n", f"{ABOUT[table.title]}\n", *head, *rows, ""])


def _rule(words: bool) -> str:
    return "---|" if words else "---:|"
