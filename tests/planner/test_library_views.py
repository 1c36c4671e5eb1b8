"""Results of the library show themselves as the commands print them, at the prompt and in a notebook."""

from __future__ import annotations

import inspect
from html.parser import HTMLParser

import msgspec
import pytest
from test_api import PROJECT, TINY, printed

import planner
from planner.basics import command
from planner.basics.display import Displayed, Table, as_html, as_text, elements_of
from planner.cli import planner as planner_command
from planner.spec.options import OPTIONS
from planner.studies import compare, cost, fit, sweep

FACES = {
    "estimate": (lambda: planner.estimate(model="7b", gpus=16), "estimate --model 7b --gpus 16"),
    "nothing fits": (lambda: planner.estimate(model="70b", gpus=8), "estimate --model 70b --gpus 8"),
    "cost": (
        lambda: planner.cost(model="7b", gpus=16, tokens=1e9, price_per_gpu_hour=2.5, gpu_power=500, pue="1.2"),
        "cost --model 7b --gpus 16 --tokens 1e9 --price-per-gpu-hour 2.5 --gpu-power 500 --pue 1.2",
    ),
    "sweep": (lambda: planner.sweep([8, 16], model="7b", worth=0.4), "sweep --model 7b --gpus 8,16 --worth 0.4"),
    "fit": (
        lambda: planner.fit(model="7b", gpus=8, what=["gpus", "micro-batch"], max_gpus=8),
        "fit --model 7b --gpus 8 --what gpus,micro-batch --max-gpus 8",
    ),
}
AS_JSON = {"cost": cost.as_json, "sweep": sweep.as_json, "fit": fit.as_json}


class Cells(HTMLParser):
    """The texts of a page's cells and paragraphs, and its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module", params=FACES)
def face(request):
    """A question's name, the library's answer and the command that asks it."""
    ask, line = FACES[request.param]
    return request.param, ask(), line


def test_a_result_prints_what_its_command_prints(face, capfd):
    _, found, line = face

    command.exit_code(planner_command, line.split())

    assert repr(found) == capfd.readouterr().out.rstrip("\n")


def test_a_study_answers_as_its_command(face, capfd):
    name, found, line = face
    if name not in AS_JSON:
        return  # tests/planner/test_api.py asks it

    assert msgspec.json.decode(AS_JSON[name](found)) == printed(capfd, f"{line} --json")


def test_a_notebook_shows_every_cell_and_sentence_of_the_text(face):
    _, found, _ = face
    page = Cells(found._repr_html_())

    shown = " ".join(page.texts).split()
    assert page.elements == {"p", "br", "table", "thead", "tbody", "tr", "th", "td"} - ({"br"} - page.elements)
    assert sorted(shown) == sorted(repr(found).split())


def test_plans_are_compared_by_value_and_by_path_as_the_command_does(tmp_path, capfd):
    plans = [planner.plan_of(planner.estimate(**TINY, micro_batch_size=size).estimates[0]) for size in (1, 2)]
    paths = [tmp_path / f"{place}.json" for place in (1, 2)]
    for plan, path in zip(plans, paths, strict=True):
        planner.write_plan(plan, path)

    by_value, by_path = planner.compare(*plans), planner.compare(*paths)

    assert [one.plan for one in by_value.sides] == [one.plan for one in by_path.sides] == plans
    assert [one.name for one in by_value.sides] == ["plan 1", "plan 2"]
    assert msgspec.json.decode(compare.as_json(by_path)) == printed(capfd, f"compare {paths[0]} {paths[1]} --json")
    assert "layout.micro_batch_size" in repr(by_value)


def test_an_estimate_is_shown_in_a_page_and_not_as_its_fields():
    one = planner.estimate(model="7b", gpus=32).best

    assert len(repr(one)) < 5000
    assert "MemoryBreakdown" not in repr(one)
    assert "<table>" in one._repr_html_()


def test_what_the_library_returns_has_a_view():
    returned = {
        kind
        for name in planner.__all__
        if isinstance(kind := getattr(planner, name), type) and issubclass(kind, Displayed)
    }

    views = {"Answer", "Comparison", "Cost", "Decision", "Estimate", "FitLimits", "Sweep"}
    assert {one.__name__ for one in returned} == views
    assert all(elements_of.dispatch(one) is not elements_of.dispatch(object) for one in returned)


def test_a_value_without_a_view_shows_its_fields():
    class Plain(Displayed, msgspec.Struct):
        size: int

    assert repr(Plain(3)) == "Plain(size=3)"


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", "a & b", '"quoted"', "</td><td>"])
def test_text_of_others_is_no_markup(nasty: str):
    page = Cells(as_html([nasty, Table((nasty, "figure"), ((nasty, "1"),))]))

    assert page.elements == {"p", "table", "thead", "tbody", "tr", "th", "td"}
    assert "".join(page.texts).count(nasty) == 3
    assert as_text([nasty, Table((nasty,), ())]) == f"{nasty}\n{nasty}"


@pytest.mark.parametrize("name", ["estimate", "recommend", "cost", "sweep", "fit"])
def test_a_question_s_signature_and_help_name_every_option(name: str):
    function = getattr(planner, name)

    parameters = inspect.signature(function).parameters
    assert set(OPTIONS) <= set(parameters)
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    own = inspect.signature(function, follow_wrapped=False).parameters
    assert all(f"    {option}: " in (function.__doc__ or "") for option in OPTIONS if option not in _own(function))
    assert list(own) == list(parameters)


def _own(function) -> set[str]:
    code = function.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def test_the_page_of_the_library_names_all_of_it():
    page = (PROJECT / "docs" / "library.md").read_text()

    assert [name for name in planner.__all__ if f"`{name}`" not in page] == []
