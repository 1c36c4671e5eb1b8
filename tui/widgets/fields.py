"""The fields: a label and a line of text each, a list that completes as one types, and the refusal beside its field.

Not here: what the options are and what they complete to (tui/inputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Offset
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from tui import inputs
from tui.messages import Changed, Submitted


class FieldInput(Input):
    """One line of text whose completions are moved through without leaving it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Next match", show=False),
        Binding("up", "move(-1)", "Previous match", show=False),
        Binding("enter,ctrl+j", "take", "Take", show=False),  # an enter typed before the terminal is ours is ctrl+j
    ]

    def __init__(self, field: inputs.Field, text: str) -> None:
        super().__init__(text, placeholder=field.hint, id=field.name, compact=True)

    @property
    def owner(self) -> Fields:
        """The fields this one is among."""
        return next(one for one in self.ancestors if isinstance(one, Fields))

    def action_move(self, by: int) -> None:
        """To another completion; opens the list when it is closed."""
        self.owner.move(self, by)

    def action_take(self) -> None:
        """Take the highlighted completion, or the text as it is, and go on to the next field."""
        if not self.owner.take(self):
            self.post_message(Submitted())
            self.screen.focus_next()

    def on_blur(self) -> None:
        """A list belongs to the field that is typed in."""
        if self.is_attached and self.owner.is_attached:
            self.owner.close()


class Completions(OptionList):
    """What a field's text may become."""

    can_focus = False  # keys stay in the field

    def __init__(self) -> None:
        super().__init__(compact=True, markup=False)
        self.texts: list[str] = []

    def fill(self, found: list[inputs.Suggestion]) -> None:
        """Show these, best first."""
        self.texts = [one.text for one in found]
        widest = max((len(one.shown) for one in found), default=0)
        self.set_options(
            Option(Content.assemble(one.shown.ljust(widest), (f"  {one.about}" if one.about else "", "$text-muted")))
            for one in found
        )


class Fields(Vertical):
    """All fields, row by row."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        super().__init__()
        self.texts = texts
        self._refused: tuple[str | None, str] = (None, "")

    def compose(self) -> ComposeResult:
        """A row of fields, then the line where their refusal is said."""
        found = inputs.rows()
        columns = max(len(row) for row in found)
        widths = [max(len(row[place].label) for row in found if len(row) == columns) for place in range(columns)]
        for row in found:
            with Horizontal(classes="row"):
                for place, field in enumerate(row):
                    label = Static(field.label, classes="label", markup=False)
                    label.styles.width = (widths[place] if len(row) == columns else len(field.label)) + 1
                    with Horizontal(classes=f"field column{place if len(row) == columns else ''}"):
                        yield label
                        yield FieldInput(field, self.texts.get(field.name, ""))
            yield Static(classes="refusal", markup=False)
        yield Completions()

    @property
    def completions(self) -> Completions:
        """The one list, shown under the field that is typed in."""
        return self.query_one(Completions)

    def search(self, text: str | None = None) -> None:
        """Into the field people look for a model in, with its list open, or that of a text put there."""
        field = self.query_one(f"#{inputs.SEARCH}", FieldInput)
        self.screen.set_focus(field)
        if text is None:
            self.open(field, "")
        else:
            field.value = text
            field.cursor_position = len(text)

    def refuse(self, name: str | None, sentence: str = "") -> None:
        """Say a refusal under the row of its field; None takes away the last one."""
        self._refused = (name, sentence)
        self._say()

    def _say(self) -> None:
        """The refusal as it is now. While a list is open its field is half typed, and nothing is said of it."""
        name, sentence = self._refused
        focused = self.screen.focused
        if self.completions.display and focused is not None and focused.id == name:
            name = None
        for field in self.query(FieldInput):
            field.set_class(field.id == name, "wrong")
        for row, line in zip(inputs.rows(), self.query(".refusal").results(Static), strict=True):
            here = any(field.name == name for field in row)
            line.set_class(here, "said")
            line.update(sentence if here else "")

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        field = event.input
        if isinstance(field, FieldInput) and field.id is not None:
            if field.id == self._refused[0]:
                self.refuse(None)  # what was refused is no longer there
            if field.has_focus:
                self.open(field, event.value)
            self.post_message(Changed(field.id, event.value))

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if isinstance(field := self.screen.focused, FieldInput):
            self.completions.highlighted = event.option_index
            self.take(field)

    # -- the list ------------------------------------------------------------------------------------------------

    def open(self, field: FieldInput, text: str) -> None:
        """Show what the text may become, unless that is nothing or only itself."""
        found = inputs.suggestions(str(field.id), text)
        if not found or [one.text.strip() for one in found] == [text.strip()]:
            self.close()
            return
        shown = self.completions
        shown.fill(found)
        # Enter takes the best match, unless what stands there is a value already.
        known = [one.text.strip() for one in found]
        shown.highlighted = 0 if text.strip() and text.strip() not in known else None
        # A list under the last columns would be cut by the edge of the screen; `constrain` moves it inside.
        shown.absolute_offset = Offset(field.region.x, field.region.y + 1)
        shown.display = True
        self._say()

    def close(self) -> None:
        """Hide the list."""
        if self.completions.display:
            self.completions.display = False
            self._say()

    def move(self, field: FieldInput, by: int) -> None:
        """Highlight the next or previous completion."""
        shown = self.completions
        if not shown.display:
            self.open(field, "" if field.id != inputs.MORE else field.value)
        if not shown.display:
            return
        if by > 0:
            shown.action_cursor_down()
        else:
            shown.action_cursor_up()

    def take(self, field: FieldInput) -> bool:
        """Put the highlighted completion into the field; False when there is none."""
        shown = self.completions
        if not shown.display or shown.highlighted is None:
            return False
        text = shown.texts[shown.highlighted]
        self.close()
        with field.prevent(Input.Changed):
            field.value = text
        field.cursor_position = len(text)
        self.post_message(Changed(str(field.id), text))
        return True
