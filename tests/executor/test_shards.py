"""Pieces of any layout put into views of any other, and files that are refused: without processes or a framework.

Not here: which views an engine has (tests/cluster/test_views.py).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import bitsandbytes
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from executor.backends.common import EXPERT_FAMILIES
from executor.worker.checkpoints import shards
from executor.worker.model import pieces
from executor.worker.model.pieces import StateView
from planner.basics.errors import PlannerError
from planner.spec.formats import FORMATS

SHAPE = (7, 5, 4)


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def views_in(whole: torch.Tensor, cuts: list[list[int]], ranks: int, name: str = "w") -> Iterator[list[StateView]]:
    """A tensor's views: boxes by cuts of every dimension, each in flat ranges of so many ranks."""
    bounds = [[*itertools.pairwise([0, *cut, length])] for cut, length in zip(cuts, whole.shape, strict=True)]
    for box in itertools.product(*bounds):
        part = whole[tuple(slice(*edge) for edge in box)].flatten()
        share = -(-part.numel() // ranks)
        for rank in range(ranks):
            flat = (rank * share, min((rank + 1) * share, part.numel()))
            if flat[0] < flat[1]:
                yield [StateView(name, "weight", tuple(whole.shape), tuple(box), flat, part[flat[0] : flat[1]].clone())]


def written(folder: Path, ranks: list[list[StateView]]) -> list[Path]:
    paths = [folder / f"rank-{rank}.safetensors" for rank in range(len(ranks))]
    for path, views in zip(paths, ranks, strict=True):
        shards.write(path, views, {"step": "3"})
    return paths


@pytest.mark.parametrize("shape", [(), (6,), (4, 5), SHAPE, (1, 3, 1)])
def test_a_flat_range_is_covered_by_few_boxes_in_its_order(shape: tuple[int, ...]) -> None:
    place = numbers(shape)
    for start, stop in itertools.combinations(range(place.numel() + 1), 2):
        found = pieces.boxes(shape, start, stop)
        covered = [place[tuple(slice(*edge) for edge in box)].flatten() for box in found]
        assert torch.equal(torch.cat(covered), torch.arange(start, stop).float())
        assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_one_layout_fill_the_views_of_another(seed: int, tmp_path: Path) -> None:
    drawn, whole = random.Random(seed), numbers(SHAPE)

    def layout() -> list[list[StateView]]:
        cuts = [sorted(drawn.sample(range(1, length), drawn.randrange(3))) for length in SHAPE]
        return list(views_in(whole, cuts, drawn.randrange(1, 6)))

    paths, wanted = written(tmp_path, layout()), layout()
    for (view,) in wanted:
        expected = view.tensor.clone()
        view.tensor.fill_(-1)
        shards.load(paths, [view])
        assert torch.equal(view.tensor, expected)


def test_ranks_that_hold_the_same_share_the_writing(tmp_path: Path) -> None:
    whole = numbers((5, 3))
    ranks = [
        [StateView("w", "exp_avg", (5, 3), ((0, 5), (0, 3)), (0, 15), whole.view(-1), (rank, 4))] for rank in range(4)
    ]

    paths = written(tmp_path, ranks)

    flats = [piece.flat for path in paths for piece in shards.read_pieces(path)]
    assert flats == [(0, 3), (3, 7), (7, 11), (11, 15)]
    view = ranks[0][0]
    view.tensor.zero_()
    shards.load(paths, [view])
    assert torch.equal(view.tensor, numbers((5, 3)).view(-1))


def test_a_file_is_safetensors_own_with_its_digest_and_holds_formats_side_by_side(tmp_path: Path) -> None:
    half = StateView("h", "weight", (3,), ((0, 3),), (0, 3), torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16))
    full = StateView("f", "weight", (2,), ((0, 2),), (0, 2), torch.tensor([0.1, 0.2]))
    path = tmp_path / "rank-0.safetensors"

    found = shards.write(path, [half, full], {"step": "3"})

    assert found == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert [(held.dtype, held.tolist()) for held in load_file(path).values()] == [
        (torch.float32, full.tensor.tolist()),
        (torch.bfloat16, [1.5, 2.5, 3.5]),
    ]


def test_numbers_of_another_format_are_converted(tmp_path: Path) -> None:
    paths = written(tmp_path, [[StateView("w", "weight", (2,), ((0, 2),), (0, 2), torch.tensor([1.5, 2.5]))]])
    view = StateView("w", "weight", (2,), ((0, 2),), (0, 2), torch.zeros(2, dtype=torch.bfloat16))

    shards.load(paths, [view])

    assert view.tensor.tolist() == [1.5, 2.5]


def test_what_no_file_has_is_named_with_its_kind(tmp_path: Path) -> None:
    ranks = list(views_in(numbers((6, 2)), [[3], []], 1, name="layers.0.weight"))
    paths = written(tmp_path, ranks)
    whole = StateView("layers.0.weight", "weight", (6, 2), ((0, 6), (0, 2)), (0, 12), torch.zeros(12))
    moments = StateView("layers.0.weight", "exp_avg", (6, 2), ((0, 6), (0, 2)), (0, 12), torch.zeros(12))

    with pytest.raises(PlannerError, match=r"the weight layers.0.weight: .* 6 of the 12 numbers") as refused:
        shards.load(paths[:1], [whole])
    assert refused.value.exit_code == 3
    with pytest.raises(PlannerError, match=r"exp_avg of the weight layers.0.weight: .* 0 of the 12 numbers"):
        shards.load(paths, [moments])


def test_another_model_is_refused(tmp_path: Path) -> None:
    paths = written(tmp_path, list(views_in(numbers((6, 2)), [[], []], 1)))
    view = StateView("w", "weight", (2, 6), ((0, 2), (0, 6)), (0, 12), torch.zeros(12))

    with pytest.raises(PlannerError, match=r"has w in shape \[6, 2\], the model in \[2, 6\]"):
        shards.load(paths, [view])


def test_foreign_cut_and_lying_files_are_refused_by_name(tmp_path: Path) -> None:
    (good,) = written(tmp_path, [[StateView("w", "weight", (4,), ((0, 4),), (0, 4), torch.ones(4))]])
    view = StateView("w", "weight", (4,), ((0, 4),), (0, 4), torch.zeros(4))
    piece = shards.ShardPiece("k", "w", "weight", (4,), ((0, 4),), (0, 4))
    lies = [
        msgspec.structs.replace(piece, flat=(0, 5)),
        msgspec.structs.replace(piece, box=((0, 5),)),
        msgspec.structs.replace(piece, box=((2, 4),)),
        msgspec.structs.replace(piece, shape=(4, 4)),
        msgspec.structs.replace(piece, key="other"),
        msgspec.structs.replace(piece, flat=(-1, 3)),
    ]
    files = {
        "foreign": (lambda path: save_file({"w": torch.ones(4)}, path), "is not a shard"),
        "cut": (lambda path: path.write_bytes(good.read_bytes()[:-1]), "cannot be read"),
        "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
        "absent": (lambda path: None, "cannot be read"),
        "pickle": (lambda path: torch.save(Touches(tmp_path / "ran"), path), "cannot be read"),
        "list": (lambda path: lying(path, b"[1]"), "list of pieces that cannot be read"),
    } | {
        f"lie-{at}": (lambda path, lie=lie: lying(path, msgspec.json.encode([lie])), "lies outside")
        for at, lie in enumerate(lies)
    }
    for name, (make, rule) in files.items():
        path = tmp_path / name
        make(path)
        with pytest.raises(PlannerError, match=rule) as refused:
            shards.load([path], [view])
        assert str(path)[-20:] in refused.value.sentence
    assert not (tmp_path / "ran").exists()


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def lying(path: Path, said: bytes) -> None:
    save_file({"k": torch.ones(4)}, path, metadata={"schema": shards.SCHEMA, "pieces": said.decode()})


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "sgd-momentum", "AdamW8bit", "Lion8bit"])
def test_states_made_before_the_first_step_are_those_that_it_makes(kind: str, how: dict[str, bool]) -> None:
    def stepped(*, made: bool) -> tuple[torch.Tensor, dict[str, object]]:
        weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        if kind.endswith("8bit"):  # codes of 4096 elements, in one way only
            weight = nn.Parameter(torch.linspace(-1, 1, 4096).reshape(64, 64))
            optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)([weight], lr=0.1, weight_decay=0.1)
        elif kind == "adamw":
            optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1, **how)
        else:
            optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9 if "momentum" in kind else 0, **how)
        if made:
            pieces.make_states(optimizer)
        weight.grad = torch.cos(weight.detach())
        optimizer.step()
        held = {key: value for key, value in optimizer.state[weight].items() if value is not None}
        return weight.detach(), held

    weight, state = stepped(made=True)
    expected_weight, expected = stepped(made=False)

    assert torch.equal(weight, expected_weight)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value))
        if isinstance(value, torch.Tensor):
            assert (state[key].dtype, state[key].device) == (value.dtype, value.device)


def test_the_counter_of_updates_is_set() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    pieces.make_states(optimizer)

    pieces.count_updates(optimizer, 10)

    assert float(optimizer.state[weight]["step"]) == 10
    assert [kind for kind, _ in pieces.states(optimizer, weight)] == ["exp_avg", "exp_avg_sq"]


def test_codes_and_scales_of_8_bit_states_are_saved_and_their_tables_are_not() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = bitsandbytes.optim.AdamW8bit([weight])
    pieces.make_states(optimizer)

    pieces.count_updates(optimizer, 10)

    assert optimizer.state[weight]["step"] == 10
    assert sorted(kind for kind, _ in pieces.states(optimizer, weight)) == ["absmax1", "absmax2", "state1", "state2"]


@pytest.mark.parametrize("family", sorted(FORMATS))
def test_no_model_that_is_launched_keeps_trained_numbers_in_buffers(family: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](num_hidden_layers=2))

    saved = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    launched = not hasattr(model.config, "n_routed_experts") or family in EXPERT_FAMILIES
    assert not (saved and launched), saved
