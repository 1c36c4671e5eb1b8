"""An imported model as it runs on sequences with images: its description at one number of their positions.

Not here: what a description holds (described.py), or how towers are played (inventory/played.py).
"""

from __future__ import annotations

from functools import lru_cache, partial

from msgspec.structs import replace

from planner.basics.errors import PlannerError
from planner.spec.described import (
    BETWEEN,
    IMAGES,
    TOWER,
    AutogradStep,
    ByteCount,
    Described,
    DescribedUnit,
    Make,
    Program,
    Step,
)
from planner.spec.job import TrainingJob
from planner.spec.model import ModelSpec

SEES = 7
"""Terms of a size that grows with images' positions."""


class DescribedWithImages(Described, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """A description with `images` positions of images in each sequence, in which sizes are those of such sequences, and
    towers that are `trained` or frozen. `plain` is the description that it is of."""

    plain: Described
    images: int
    trained: bool

    def __hash__(self) -> int:
        """As that of the description, and by what is done with images."""
        return hash((hash(self.plain), self.images, self.trained))


def with_images(model: ModelSpec, images: int, *, trained: bool = False) -> ModelSpec:
    """A model as it runs where `images` positions of each sequence are images', with its towers frozen or `trained`; as
    it is where it does not see."""
    described = model.described
    if not images or described is None or described.seeing is None or isinstance(described, DescribedWithImages):
        return model
    return _with_images(model, images, trained)


@lru_cache(maxsize=16)
def _with_images(model: ModelSpec, images: int, trained: bool) -> ModelSpec:
    described = model.described
    assert described is not None and described.seeing is not None
    towers, units = described.seeing, dict[str, DescribedUnit]()
    for name, unit in described.units.items():
        plain = name.removesuffix(IMAGES)
        if name == plain:
            units.setdefault(name, unit)
        else:
            units[plain] = _at(described.units.get(plain), unit, images)
    if trained:
        weights = tuple(replace(one, use="other") for one in units[TOWER].weights)
        units[TOWER] = replace(units[TOWER], weights=weights)
    runs = []
    for place, (kind, count) in enumerate(described.runs_of(model.layers)):
        apart = min(towers.between, count) if place == 0 else 0
        runs += [(kind, 1), (BETWEEN, 1)] * apart + [(kind, count - apart)]
    of_plain = {name: getattr(described, name) for name in Described.__struct_fields__}
    changed = {"units": units, "runs": tuple(runs), "shortest": towers.shortest, "longest": towers.longest}
    seen = DescribedWithImages(**of_plain | changed, plain=described, images=images, trained=trained)
    return replace(model, imported=seen)


def without_images(model: ModelSpec) -> ModelSpec:
    """The model as files have it."""
    return replace(model, imported=model.imported.plain) if isinstance(model.imported, DescribedWithImages) else model


def images_refusal(model: ModelSpec, images: int, seq_len: int) -> tuple[str, str] | None:
    """Why a model does not take this number of image positions in a sequence, and what to do; None where it does."""
    described, name = model.described, model.name
    if described is None or not described.towers:
        return f"is for models that see, and {name} has no tower", "Leave it out, or name a vision-language model"
    towers = described.seeing
    if towers is None:
        if described.blind:
            return f"is not planned for {name}: {described.blind}"[:200], "Leave it out"
        rule = f"is not planned for {name}, whose import did not record its towers"
        return rule, "Make it again: executor import CONFIG --images -o model.json, and --model model.json"
    if towers.per_image and images % towers.per_image:
        least = max(1, round(images / towers.per_image)) * towers.per_image
        return f"is no multiple of the {towers.per_image} tokens of an image of {name}", f"Use {least}"
    if images >= seq_len:
        return f"must leave some of the {seq_len} tokens of a sequence to text", f"Use --seq-len {images + seq_len}"
    return None


def towers_refusal(model: ModelSpec, images: int) -> tuple[str, str] | None:
    """Why a model's towers are not trained, and what to do; None where they are."""
    if not images:
        return "is for sequences with images", "Add --image-tokens N, or leave it out"
    towers = None if model.described is None else model.described.seeing
    if towers is not None and all(one.trained is None for one in towers.programs.values()):
        rule = f"is not planned for {model.name}, whose import did not record how its towers train"
        return rule, "Make it again: executor import CONFIG --images -o model.json, and --model model.json"
    return None


def check_images(model: ModelSpec, job: TrainingJob) -> None:
    """Refuse images that a model does not take, and towers that are not trained (PlannerError)."""
    images = job.image_tokens
    if images and (refused := images_refusal(model, images, job.seq_len)) is not None:
        raise PlannerError("image_tokens", images, *refused)
    if job.trains_towers and (refused := towers_refusal(model, images)) is not None:
        raise PlannerError("towers", "trained", *refused)


def _at(plain: DescribedUnit | None, unit: DescribedUnit, images: int) -> DescribedUnit:
    change = partial(_size, images)
    programs = {name: _program(program, images) for name, program in unit.programs.items()}
    products = tuple(replace(one, rows=change(one.rows)) for one in unit.products)
    return replace(unit, weights=plain.weights if plain else (), programs=programs, products=products)


def _size(images: int, of: ByteCount) -> ByteCount:
    """A size of sequences with this number of image positions, which are bytes a sequence then."""
    if isinstance(of, float) or len(of) < SEES:
        return of
    return (*of[:4], of[4] + of[6] * images, of[5])


def _program(program: Program, images: int) -> Program:
    sums = {name: _size(images, getattr(program, name)) for name in ("moved", "moved_back")}
    return replace(program, steps=tuple(_step(step, images) for step in program.steps), **sums)


def _step(step: Step, images: int) -> Step:
    gives = tuple((place, None if part is None else _size(images, part)) for place, part in step.gives)
    new = tuple(_size(images, one) for one in step.new)
    return replace(step, new=new, gives=gives, node=_node(step.node, images), frozen=_node(step.frozen, images))


def _node(node: AutogradStep | None, images: int) -> AutogradStep | None:
    if node is None:
        return None
    return replace(
        node, back=tuple(Make(_size(images, one.size)) if isinstance(one, Make) else one for one in node.back)
    )
