"""The `planner` command: estimate, explore, presets, schema, groups, show.

Each parses, calls one function and prints; the other commands are in modules beside this one, imported when called.
Numbers arrive as text, so that refusals read alike (options.py). Not here: any figure, or how errors end a process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import click

from planner import __version__
from planner.basics import command, completion
from planner.basics.errors import PlannerError
from planner.basics.help_page import SAVE_OPTION, WHY_OPTION, PagedCommand, SectionedOption, option
from planner.basics.output import may_write_each
from planner.basics.saying import say, tells_all, terminal_width
from planner.basics.waiting import searching
from planner.cli.preset_names import kinds, of_kind, preset_names

if TYPE_CHECKING:
    from planner.spec.options import Option

NOTHING_FITS = 3
LONGEST_CHOICES = 60
"""Characters of choices that stand beside an option's name; more of them stand in its help."""

EXAMPLES = """
planner estimate --model 7b --gpus 32               # strategies side by side
planner recommend --model 8b --gpus 16 --seq-len 8192 -o plan.json
planner explain --model 7b --gpus 32 --dp-shard 32  # where bytes come from
"""

LATER = {name: f"planner.cli.study:{name}" for name in ("fit", "sweep", "cost", "compare")} | {
    "recommend": "planner.cli.recommend:recommend",
    "replay": "planner.cli.truth:replay",
    "calibrate": "planner.cli.calibrate:calibrate",
    "explain": "planner.cli.explain:explain",
    "config": "planner.cli.config:config",
    "fix": "planner.cli.fix:fix",
    "timeline": "planner.cli.timeline:show_timeline",
}
"""Commands of other modules, imported when they are called."""

PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "rm", "reward")
REINFORCEMENT = ("grpo", "ppo", "rloo", "rlhf", "gspo", "dapo")
SUPERVISED = "full, lora and qlora plan the supervised training of the same model, which needs less"
NOT_MODELLED = dict.fromkeys(
    PREFERENCES, f"is not modelled: pairs of answers, and mostly a frozen copy of the model beside it. {SUPERVISED}"
) | dict.fromkeys(
    REINFORCEMENT,
    f"is not modelled: answers are generated beside the training, and scored by more models. {SUPERVISED}",
)
"""Ways of training that people ask for by name, and why there is no answer."""

Command = Callable[..., Any]


class Methods(command.OneOf):
    """The methods; one that is known and not modelled is told so."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The choice, or a refusal."""
        if str(value).lower() in NOT_MODELLED:
            rule, fix = NOT_MODELLED[str(value).lower()].split(". ", 1)
            raise PlannerError("method", value, rule, fix)
        return super().convert(value, param, ctx)


class QuestionCommand(PagedCommand):
    """A command that asks the question: its forty options are made only when it runs, since start time counts."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Those of the question, then its own, which replace one of the same name."""
        own = super().get_params(ctx)
        names = {one.name for one in own}
        return [*(one for one in question_params() if one.name not in names), *own]


METAVARS = dict.fromkeys(("whole", "length"), "N") | dict.fromkeys(("real", "share"), "X") | {
    "memory": "SIZE", "wholes": "NUMBERS", "names": "NAMES", "name": "NAME", "file": "FILE", "folder": "DIR",
    "folders": "DIR",
}  # fmt: skip
"""What stands for the value of a kind of option in its help."""


@cache
def question_params() -> tuple[click.Option, ...]:
    """Everything that may be said of the model, the cluster, the job and the layout."""
    from planner.spec.options import TABLE

    return tuple(_param(option) for option in TABLE)


def _param(option: Option) -> click.Option:
    names = (option.flag, option.also) if option.also else (option.flag,)
    add = partial(SectionedOption, section=option.section, often=option.often)
    if option.kind == "switch":
        return add((f"{option.flag}/--no-{option.flag[2:]}",), default=None, help=option.help)
    if option.kind == "flag":
        return add(names, is_flag=True, default=None, help=option.help)
    if option.kind == "choice":
        words = Methods if option.name == "method" else command.OneOf
        if len("|".join(option.choices)) <= LONGEST_CHOICES:
            return add(names, type=words(option.choices), help=option.help)
        told = f"{option.help} One of {', '.join(option.choices)}."
        return add(names, type=words(option.choices), metavar="NAME", help=told)
    if option.presets:
        add = partial(add, shell_complete=preset_names(*option.presets))
    return add(names, metavar=METAVARS[option.kind], multiple=option.kind == "folders", help=option.help)


OUTPUT_OPTIONS = (
    option(
        "output", "-o", "--output", often=True, metavar="PLAN", help="Write the recommended layout's plan.json here."
    ),
    option("output", "--force", is_flag=True, help="Overwrite existing files."),
)
FROM_OPTION = option(
    "question",
    "--from",
    "from_file",
    metavar="FILE",
    multiple=True,
    help="Read options from an Accelerate, DeepSpeed, torchtitan, Axolotl, LLaMA-Factory or TRL file, or from a "
    "command line in quotes. Repeatable: a launcher's file and a recipe.",
)
EXPLAIN_KEYS_OPTION = option(
    "output", "--explain-keys", is_flag=True, help="With --from: every key of the file and what it became, no estimate."
)
JSON_OPTION = option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
ANY_RUNTIME_OPTION = option(
    "layout", "--any-runtime", is_flag=True, default=None, help="Engines that nothing launches from here, too."
)


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator."""

    def add(function: Command) -> Command:
        for one in reversed(options):
            function = one(function)
        return function

    return add


@click.group(
    cls=command.Commands,
    examples=EXAMPLES,
    later=LATER,
    absent=NOT_MODELLED,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="planner")
def planner() -> None:
    """Plan distributed training: will it fit, how to split it, how fast it is."""


@planner.command(cls=QuestionCommand, example="planner estimate --model 7b --gpus 32")
@with_options(*OUTPUT_OPTIONS, SAVE_OPTION, FROM_OPTION, EXPLAIN_KEYS_OPTION, WHY_OPTION, JSON_OPTION)
def estimate(
    output: str | None, save: str | None, force: bool, from_file: tuple[str, ...], explain_keys: bool, why: bool,
    as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Each strategy at its best layout, or the layout given."""
    from planner.ask import options
    from planner.decide import estimate_json, strategies
    from planner.views.verdict import answer_text

    if explain_keys:
        return _explain_keys(from_file, as_json)
    may_write_each(force, from_file, output=output, save=save)
    if from_file:
        return _estimate_from(from_file, given, output, save, why=why, as_json=as_json)
    question = options.question(given)
    with searching() as waiting:
        found = strategies.answer(question)
    text = estimate_json.as_json(found) if as_json else answer_text(found, terminal_width(), why=tells_all(why))
    return waiting.code(answered(text, found, output, lambda: save_page(save, "answer_page", found)))


def _explain_keys(paths: tuple[str, ...], as_json: bool) -> int:
    """Every key of the files, one by one; nothing is estimated."""
    from planner.ask import fromfile
    from planner.ask.fromfile import explained
    from planner.views.keys import keys_text

    if not paths:
        raise PlannerError("explain-keys", None, "is of a file, and none is given", "Add --from FILE")
    found = fromfile.read(*paths)
    keys = explained.explained(found)
    say(explained.as_json(found, keys) if as_json else keys_text(found, keys, terminal_width()))
    return 0


def _estimate_from(
    paths: tuple[str, ...], given: dict[str, Any], output: str | None, save: str | None, *, why: bool, as_json: bool
) -> int:  # fmt: skip
    """The files' options under the command line's; what was made of it goes to stderr, and into the JSON."""
    import msgspec

    from planner.ask import fromfile
    from planner.ask.fromfile import merge
    from planner.decide import estimate_json, strategies
    from planner.views.verdict import answer_text

    read = merge.merged(fromfile.read(*paths), given)
    question = merge.question_of(read)
    with searching() as waiting:
        found = strategies.answer(question)
    say(merge.as_text(read), err=True)
    whole = estimate_json.answer_dict(found) | {"from": merge.as_json(read)} if as_json else {}
    text = msgspec.json.encode(whole) if as_json else answer_text(found, terminal_width(), why=tells_all(why))
    return waiting.code(answered(text, found, output, lambda: save_page(save, "answer_page", found)))


@planner.command(cls=QuestionCommand, example="planner explore --model 7b --gpus 32")
@with_options(ANY_RUNTIME_OPTION, JSON_OPTION)
def explore(as_json: bool, **given: Any) -> int:
    """Ask, compare and choose on one screen. What is given here fills its fields."""
    from planner.cli.explorer import find_explorer

    return find_explorer()(given, as_json)


@planner.command("presets", example="planner presets models 7b")
@click.argument("kind", required=False, shell_complete=completion.names(kinds))
@click.argument("name", required=False, shell_complete=of_kind)
@option("numbers", "--presets", "folders", multiple=True, metavar="DIR", help="Folder of your own presets. Repeatable.")
@JSON_OPTION
def list_presets(kind: str | None, name: str | None, folders: tuple[str, ...], as_json: bool) -> int:
    """List what is known of KIND, or show NAME and its sources. A part of a name lists those that have it."""
    import msgspec

    from planner.views import catalogue

    found, width = catalogue.look_up(kind, name, folders), terminal_width()
    if as_json:
        say(msgspec.json.encode(found))
    elif kind is None and width is not None:
        say(catalogue.kinds_text(found["names"], width))
    elif list(found.get("names", ())) == ["models"]:
        say(catalogue.models_text(found["names"]["models"], folders, width))
    elif list(found.get("names", ())) == ["runtimes"]:
        say(catalogue.runtimes_text(found["names"]["runtimes"], folders, width))
    else:
        say(catalogue.text(found, width))
    return 0


@planner.command("backends", example="planner backends")
@option("output", "--verbose", is_flag=True, help="Every column, also on a narrow terminal.")
@JSON_OPTION
def list_backends(verbose: bool, as_json: bool) -> int:
    """What each engine can be launched with. Everything else is planned, not launched."""
    import msgspec

    from planner.decide import capabilities
    from planner.spec.engines import find_packaged

    find_packaged()
    found = capabilities.capabilities()
    answer = {"schema": capabilities.SCHEMA, "engines": found}
    say(msgspec.json.encode(answer) if as_json else capabilities.as_text(found, terminal_width(), verbose=verbose))
    return 0


@planner.command("schema", example="planner schema plan")
@click.argument("name", required=False, shell_complete=completion.names(lambda _: ("plan", "run", "row")))
@JSON_OPTION
def show_schema(name: str | None, as_json: bool) -> int:
    """The JSON Schema of NAME: plan, run or row. Without NAME, where their files are."""
    from importlib.resources import files

    import msgspec

    from planner.basics.errors import did_you_mean

    found = {one.name.partition("-")[0]: one for one in files("planner").joinpath("spec/schemas").iterdir()}
    if name is None:
        places = {kind: str(found[kind]) for kind in sorted(found)}
        answer = msgspec.json.encode({"schema": "schemas/1", "files": places})
        say(answer if as_json else "\n".join(f"{kind:5} {place}" for kind, place in places.items()))
        return 0
    if name not in found:
        raise PlannerError("name", name, "is not a file that has a schema", did_you_mean(name, found))
    say(found[name].read_text(), nl=False)
    return 0


@planner.command("groups", example="planner groups plan.json")
@click.argument("plan_file", metavar="PLAN", shell_complete=completion.paths)
@JSON_OPTION
def show_groups(plan_file: str, as_json: bool) -> int:
    """Which ranks of PLAN form which group, by node and local rank."""
    import msgspec

    from planner.parallelism.case import MESH_AXES, axis_groups, coordinates, node_of
    from planner.spec.plan import read_plan
    from planner.views import render

    plan = read_plan(plan_file)
    layout, per_node = plan.layout, plan.cluster.gpus_per_node
    rows = []
    for rank in range(layout.world_size):
        node, local = node_of(rank, per_node)
        rows.append({"rank": rank, "node": node, "local_rank": local, **coordinates(layout, rank)})
    groups = {axis: axis_groups(layout, axis) for axis in MESH_AXES if getattr(layout, axis) > 1}
    if as_json:
        say(msgspec.json.encode({"schema": "groups/1", "ranks": rows, "groups": groups}))
    else:
        say(render.rank_map_text(plan, rows, groups))
    return 0


@planner.command(example="planner show plan.json --svg plan.svg")
@click.argument("plan_file", metavar="PLAN", shell_complete=completion.paths)
@option("output", "--svg", often=True, metavar="FILE", help="Write the drawing as a picture, too.")
@option("output", "--force", is_flag=True, help="Overwrite an existing picture.")
@JSON_OPTION
def show(plan_file: str, svg: str | None, force: bool, as_json: bool) -> int:
    """Draw PLAN: nodes, GPUs, groups, bytes on the links, stages."""
    from planner.spec.plan import read_plan, write_whole

    plan = read_plan(plan_file)
    may_write_each(force, (plan_file,), svg=svg)
    if svg is not None:
        from planner.views.svg.map import svg_of

        write_whole(svg, svg_of(plan))
        say(f"wrote {svg}", err=True)
    if as_json:
        import msgspec

        from planner.views.scene.map import as_json_object

        say(msgspec.json.encode(as_json_object(plan)))
    else:
        from planner.views.cells.map import print_plan

        print_plan(plan)
    return 0


def tell(notes: Iterable[str]) -> None:
    """Sentences that a reader of the answer has to know."""
    for sentence in notes:
        say(f"note: {sentence}.", err=True)


def save_page(path: str | None, page: str, *answer: Any) -> None:
    """Write the page of an answer where one is asked for; `page` names its function in views/pages.py."""
    if path is None:
        return
    from planner.basics.output import write_whole
    from planner.views import pages

    write_whole(path, getattr(pages, page)(*answer, command.as_typed()))
    say(f"wrote {path}", err=True)


def answered(text: str | bytes, found: Any, output: str | None, also: Callable[[], None] = lambda: None) -> int:
    """Print the answer and `finish`: a plan and the page that `also` writes are written even where stdout took not all
    of the answer."""
    try:
        say(text)
    finally:
        try:
            code = finish(found, output)
        finally:
            also()
    return code


def said(text: str | bytes, path: str | None, page: str, *answer: Any) -> None:
    """Print an answer and write its page, even where stdout took not all of the answer."""
    try:
        say(text)
    finally:
        save_page(path, page, *answer)


def finish(found: Any, output: str | None) -> int:
    """Write the recommended plan; exit code 3 when there is none."""
    tell(found.notes)
    place = found.recommended
    if place is None and found.question.pins.exact and found.estimates[0].fits:
        place = 0  # asked for by name: a plan to look at, which executor run refuses
        say(f"note: no backend launches it: {found.estimates[0].refusal}.", err=True)
    elif place is not None and output is not None and not found.question.launching:
        tell([f"no backend launches it: {found.estimates[place].refusal}"] if found.estimates[place].refusal else [])
    if place is None and output is None and found.estimates and found.question.uncounted.may_fit:
        return 0  # what is left out may make it fit: that is not a refusal
    if place is None:
        unwritten = "" if output is None else f" {output} is not written."
        told = "nothing is known to fit" if found.question.uncounted.may_fit else "nothing fits"
        told = told if found.estimates else "no strategy is left to look at"
        told = "what fits cannot be launched from here" if any(one.fits for one in found.estimates) else told
        say(f"error: {told}.{unwritten}", err=True)
        return NOTHING_FITS
    if output is not None:
        from planner.decide.answers import training
        from planner.decide.planning import plan_of
        from planner.spec import inputs
        from planner.spec.plan import encode_plan, write_whole

        if found.question.job.recipe.data is None:
            tell([training(found.estimates[place])])
        plan = inputs.resolved(plan_of(found.estimates[place]))
        write_whole(output, encode_plan(plan))
        tell(inputs.unknown(plan))
        say(f"wrote {output}", err=True)
    return 0


def main() -> None:
    """Console script."""
    # A command lives for a tenth of a second; looking for cycles takes a tenth of that.
    gc.disable()
    try:
        command.main(planner, name="planner")
    finally:
        gc.freeze()  # or the interpreter, as it ends, looks for cycles after all: another tenth


if __name__ == "__main__":
    main()
