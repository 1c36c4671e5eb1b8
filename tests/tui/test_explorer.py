"""Claims about the screen as a person meets it: keys in, the planner's real answers out."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from drawn import GIVEN, GOLDEN, LARGE, SCREENS, SMALL, drawn, drive, settled, text_of
from textual.widgets import Input

from planner.spec.plan import read_plan
from tui import inputs, state
from tui.app import ExplorerApp
from tui.widgets.fields import Fields

PROJECT = Path(__file__).resolve().parents[2]


def explorer(**given: str) -> ExplorerApp:
    return ExplorerApp(inputs.typed({**GIVEN, **given}))


def test_a_model_is_found_by_typing_a_part_of_its_name():
    app = explorer()

    async def body(pilot):
        await pilot.press("slash", *"3-8b", "enter")
        await settled(pilot)
        return app.main.texts["model"], app.main.planned.shown.headline

    model, headline = drive(app, body)

    assert model == "llama-3-8b"
    assert headline.startswith("llama-3-8b (8.03 B) on")


def test_changed_gpus_change_the_answer_and_the_command():
    app = explorer(gpus="6")

    async def body(pilot):
        app.main.query_one("#gpus", Input).focus()
        await pilot.press("end", "4")
        await settled(pilot)
        return app.main.planned.ranked[0].case.cluster.gpus, text_of(app)

    gpus, screen = drive(app, body)

    assert gpus == 64
    assert "planner recommend --model 7b --gpus 64 -o plan.json" in screen


def test_one_key_ranks_the_layouts_of_all_engines_and_marks_those_that_nothing_launches():
    app = explorer()

    async def body(pilot):
        await pilot.press("a")
        await settled(pilot)
        every = app.main.planned, text_of(app)
        await pilot.press("a")
        await settled(pilot)
        return every, app.main.planned, text_of(app)

    (every, wide), usual, narrow = drive(app, body, LARGE)

    assert any(not one.launchable and one.case.layout.pp > 1 for one in every.ranked)
    for place, one in enumerate(every.ranked):
        mark = " " if one.launchable else "~ "
        assert any(line.startswith(f" {place + 1}") and f" {one.strategy}{mark}" in line for line in wide.splitlines())
    assert "~ nothing that is installed launches it" in wide
    assert "planner recommend --model 7b --gpus 64 --any-runtime" in wide
    assert all(one.launchable for one in usual.ranked)
    assert "--any-runtime" not in narrow


def test_at_80x24_a_count_of_many_layouts_and_a_bar_of_a_terabyte_are_not_cut():
    app = explorer(model="mixtral-8x7b")

    async def body(pilot):
        await pilot.press("a")
        await settled(pilot)
        return app.main.planned, text_of(app).splitlines()

    planned, lines = drive(app, body)
    (ddp,) = (line for line in lines if line.startswith((" ddp ", " ddp~ ")))

    assert f"{planned.shown.considered:,} layouts in {planned.seconds * 1e3:.0f} ms" in lines[0]
    assert ddp.split()[-3:] == [*planned.shown.strategies[0].memory.split(), "no"]


def test_a_picked_layout_is_shown_and_saved_and_reads_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = explorer()

    async def body(pilot):
        await pilot.press("down", "down", "ctrl+s")
        await pilot.press(*"chosen-", "enter")
        await pilot.pause()
        return text_of(app), app.main.planned.ranked[2].case

    screen, case = drive(app, body)

    # The dialog's text is selected when it opens, so typing replaces it.
    plan = read_plan(tmp_path / "chosen-")
    assert (plan.layout, plan.model, plan.cluster) == (case.layout, case.model, case.cluster)
    assert f"--runtime {case.runtime.name}" in " ".join(screen.split())


def test_an_existing_file_is_kept_until_overwriting_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text("mine")
    app = explorer()

    async def body(pilot):
        await pilot.press("ctrl+s", "enter")
        await pilot.pause()
        kept, said = Path("plan.json").read_text(), text_of(app)
        await pilot.press("ctrl+o")
        await pilot.pause()
        return kept, said, app.main.planned.ranked[0].case.layout

    kept, said, layout = drive(app, body)

    assert kept == "mine"
    assert "exists already" in said
    assert read_plan("plan.json").layout == layout


def test_wrong_input_is_refused_beside_its_field_with_rule_and_fix_and_the_last_answer_stays():
    app = explorer(gpus="6")

    async def body(pilot):
        before = app.main.planned
        app.main.query_one("#gpus", Input).focus()
        await pilot.press("end", "3")
        await settled(pilot)
        wrong = text_of(app).splitlines()
        kept = app.main.planned is before
        await pilot.press("backspace")
        await settled(pilot)
        return wrong, kept, text_of(app)

    wrong, kept, right = drive(app, body)
    row = next(place for place, line in enumerate(wrong) if " gpus " in line)

    assert kept
    assert wrong[row + 1].strip().startswith("gpus=63: must be a multiple of the 8 GPUs in a node of dgx-h100.")
    assert "Try gpus = 56 or 64." in " ".join(" ".join(wrong[row + 1 : row + 3]).split())
    assert "must be a multiple" not in right


def test_an_option_without_a_field_is_typed_as_on_the_command_line_and_refused_beside_it():
    app = ExplorerApp({**inputs.typed(GIVEN), inputs.MORE: "--headroom 0.1 --recompute"})

    async def body(pilot):
        refused = text_of(app)
        app.main.query_one(f"#{inputs.MORE}", Input).focus()
        await pilot.press("end", "space", "f", "enter")
        await settled(pilot)
        return refused, {one.case.layout.recompute for one in app.main.planned.ranked}, text_of(app)

    refused, recompute, screen = drive(app, body)

    assert "recompute: is without its value. Add one after --recompute." in refused
    assert recompute == {"full"}
    assert "planner recommend --model 7b --gpus 64 --headroom 0.1 --recompute full" in screen


def test_the_highlighted_strategy_is_the_one_that_is_explained():
    app = explorer()

    async def body(pilot):
        await pilot.press("shift+tab", "end", "d")
        await pilot.pause()
        return app.main.planned.shown.strategies[-1], text_of(app)

    last, screen = drive(app, body, LARGE)

    assert last.layout in screen
    assert last.reasons[0].partition(":")[0] in screen
    assert "COLLECTIVES" in screen


def test_keys_are_answered_while_a_plan_is_made_and_an_old_answer_is_never_shown():
    waiting, go = threading.Event(), threading.Event()
    answered: list[str] = []

    def slow(asked, watch):
        if asked.given["gpus"] == "16":
            waiting.set()
            assert go.wait(30)
        answered.append(asked.given["gpus"])
        return state.plan(asked)

    app = ExplorerApp(inputs.typed({"model": "7b", "gpus": "1"}), slow)

    async def body(pilot):
        field = app.main.query_one("#gpus", Input)
        field.focus()
        await pilot.press("end", "6")
        while not waiting.is_set():
            await pilot.pause(0.01)
        await pilot.press("backspace", "backspace", "8")  # the planner stands still, the field does not
        typed, shown = field.value, app.main.planned.ranked[0].case.cluster.gpus
        go.set()
        await settled(pilot)
        return typed, shown, app.main.planned.ranked[0].case.cluster.gpus

    typed, meanwhile, at_last = drive(app, body)

    assert (typed, meanwhile, at_last) == ("8", 1, 8)
    assert answered == ["1", "16", "8"]  # one at a time, and only the newest of what waited


def test_a_mistake_of_the_planner_is_one_line_and_the_screen_goes_on():
    def broken(asked, watch):
        if asked.given["gpus"] == "8":
            raise ZeroDivisionError("a mistake")
        return state.plan(asked)

    app = ExplorerApp(inputs.typed({"model": "7b", "gpus": ""}), broken)

    async def body(pilot):
        app.main.query_one("#gpus", Input).focus()
        await pilot.press("8")
        await settled(pilot)
        said = text_of(app)
        await pilot.press("backspace")
        await settled(pilot)
        return said, text_of(app)

    said, after = drive(app, body)

    assert "internal error: ZeroDivisionError: a mistake." in said
    assert "internal error" not in after


def test_q_quits_from_the_lists_and_is_a_letter_in_a_field():
    app = explorer()

    async def body(pilot):
        await pilot.press("slash", "q")
        typed = app.main.texts["model"]
        await pilot.press("escape", "escape", "q")
        return typed

    assert drive(app, body) == "q"
    assert app.return_code == 0


def test_tab_reaches_every_field_and_list_and_comes_back():
    app = explorer()

    async def body(pilot):
        seen = []
        while app.focused not in seen:
            seen.append(app.focused)
            await pilot.press("tab")
        return seen, [one for one in app.main.query("FieldInput, Strategies, RankedLayouts") if one not in seen]

    seen, missed = drive(app, body)

    assert missed == []
    assert len(seen) > len(inputs.field_names())


def test_the_command_is_copied_as_it_stands_there():
    app = explorer()

    async def body(pilot):
        await pilot.press("ctrl+y")
        return app.clipboard

    assert drive(app, body) == "planner recommend --model 7b --gpus 64 -o plan.json"


def test_at_80x24_every_field_strategy_and_key_is_on_the_screen():
    app = explorer()

    async def body(pilot):
        cut = [
            one for one in app.main.query("FieldInput, Strategies, RankedLayouts, Footer, #command, #headline")
            if not app.main.region.contains_region(one.region) or not one.region.area
        ]  # fmt: skip
        return cut, text_of(app), app.main.planned.shown

    cut, screen, shown = drive(app, body, SMALL)

    assert cut == []
    lines = screen.splitlines()
    assert len(lines) == SMALL[1]
    assert max(map(len, lines)) <= SMALL[0]
    for one in shown.strategies:
        assert any(line.startswith((f" {one.name} ", f" {one.name}~ ")) for line in lines)
    for key in ("/ Search", "tab Next", "d Details", "^s Save", "^y Copy", "q Quit"):
        assert key in lines[-1]


def test_a_terminal_smaller_than_that_still_works():
    app = explorer()

    async def body(pilot):
        await pilot.press("down", "d", "escape", "tab")
        return text_of(app)

    assert "llama-2-7b" in drive(app, body, (40, 12))


@pytest.mark.parametrize("name", SCREENS)
def test_screens_are_drawn_as_before(name):
    assert drawn(name) == (GOLDEN / f"{name}.txt").read_text(), "python tests/tui/drawn.py draws them anew"


def test_no_golden_screen_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(SCREENS)


def test_the_picture_in_the_explorers_page_is_the_first_screen():
    assert (GOLDEN / "first-80x24.txt").read_text() in (PROJECT / "docs" / "exploring.md").read_text()


def test_fields_show_the_options_of_the_planner_s_own_command_line():
    app = explorer()

    async def body(pilot):
        return [field.id for field in app.main.query_one(Fields).query(Input)]

    assert drive(app, body) == inputs.field_names()
