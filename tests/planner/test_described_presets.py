"""Claims about model presets that are described by their own code: they are small and have their modules' parameters,
and are found by their ids on the Hub.

Not here: what is published of them (tests/executor/test_published_models.py), or making them (scripts/described.py).
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from planner.ask.fromfile import hub
from planner.basics.errors import PlannerError
from planner.inventory import parameters
from planner.spec import presets
from planner.spec.described import Described
from planner.spec.importing import uncompressed
from planner.spec.presets import packaged
from scripts import described as making

FOLDER = packaged() / "models"
PRESETS = sorted(path.name.removesuffix(".json.xz") for path in FOLDER.glob("*.json.xz"))
MOST_BYTES, MOST_OF_ALL = 30_000, 3_000_000


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    return making.rows()


@pytest.mark.parametrize("name", PRESETS)
def test_a_described_preset_has_the_parameters_of_its_module(name: str, rows: dict[str, dict[str, object]]) -> None:
    model, row = presets.model(name), rows[name]

    assert isinstance(model.described, Described)
    assert parameters(model) == row["built_parameters"]
    assert model.parameters in (None, row["stated_parameters"])
    assert model.described.config == row["config"]
    assert (FOLDER / f"{name}.toml").read_text() == making.preset(row)
    assert hub.find(str(row["hub"]), "theirs.yaml", ())[0] == name


def test_descriptions_are_small() -> None:
    sizes = [(FOLDER / f"{name}.json.xz").stat().st_size for name in PRESETS]

    assert len(PRESETS) >= 32
    assert max(sizes) <= MOST_BYTES
    assert sum(sizes) <= MOST_OF_ALL


@pytest.mark.parametrize(
    ("content", "named", "rule"),
    [
        (b"no archive", "mine.json.xz", "cannot be read"),
        (b"", "mine.json.xz", "is cut short"),
        (None, "mine.json.xz", "cannot be read"),
        (b"", "../mine.json.xz", "must be a file's name"),
    ],
)
def test_a_description_that_is_no_file_of_ours_is_refused(
    content: bytes | None, named: str, rule: str, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.toml").write_text(f'described = "{named}"\n')
    if content is not None:
        (folder / "mine.json.xz").write_bytes(content)

    with pytest.raises(PlannerError, match=rule):
        presets.model("mine", folders=(tmp_path,))


def test_a_description_of_gzip_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "mine.json.gz").write_bytes(gzip.compress(uncompressed(FOLDER / f"{PRESETS[0]}.json.xz")))

    assert uncompressed(tmp_path / "mine.json.gz") == uncompressed(FOLDER / f"{PRESETS[0]}.json.xz")
