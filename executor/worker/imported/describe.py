"""A model's description, of its own code run on fake tensors: which layers there are, a small model of the same code,
and what is recorded of it.

Not here: one recording (record.py), or the programs of units (programs.py).
"""

from __future__ import annotations

import gc
import multiprocessing
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import groupby, takewhile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from msgspec.structs import replace
from torch import nn

from executor.worker.imported.lengths import DYNAMIC, UNIT, RecordedLengths, lengths_of, lengths_on_all, recordings
from executor.worker.imported.operations import UnitProducts
from executor.worker.imported.record import (
    CodeFails,
    NotDescribed,
    common_weights,
    fake_device,
    first_line,
    is_linear,
    layers_of,
    record,
)
from executor.worker.imported.recorded import Recorded
from executor.worker.imported.split import ways_of
from executor.worker.imported.towers import Small, seeing
from executor.worker.model.layers import (
    auto_class,
    can_recompute,
    counts_from_padding,
    decoder_config,
    layer_key,
    of_layers,
    unnumbered,
    without_padding,
)
from executor.worker.model.layers import config_of as read_config
from executor.worker.model.losses import lend_loss
from planner.inventory.units import ENDS
from planner.spec.causal import other_than_causal, sentence
from planner.spec.described import (
    APART,
    DEVICES_RECORDED,
    IMAGES,
    TOWER,
    Described,
    DescribedUnit,
    DescribedWeight,
    Program,
)
from planner.spec.importing import TRUSTED

VARIANTS: dict[str, tuple[torch.dtype, bool]] = {
    "mixed": (torch.float32, True),
    "pure": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "adapted": (torch.bfloat16, True),
}
"""Format of the weights, and whether autocast is at work."""
DEVICES = DEVICES_RECORDED
LISTED = ("layer_types", "layers_block_type", "block_types")
"""Keys of a configuration that name the kind of each layer."""
MOST_LAYERS = 2000
MOST_KINDS = 8
"""Kinds of layers that a description may have."""
NUMBERED = re.compile("^_|training|idx|index|_id$|^layer_number$|^seed$")
"""Settings of modules that say which layer it is."""
Made = TypeVar("Made")


def config_of(raw: dict[str, Any], folder: Path | None = None) -> Any:
    """Transformers' configuration of a decoded config.json, by the code of a `folder` that is trusted; or a refusal."""
    from transformers import AutoConfig

    try:
        if folder is not None:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
        return read_config(raw)
    except Exception as error:
        rule = f"Transformers cannot read its configuration ({raw.get('model_type')})"
        raise NotDescribed(f"{rule}: {first_line(error)}") from None


WITHOUT_TABLE = ("kyutai_speech_to_text", "qwen2_5_omni")
"""Types of models that hear whose class has no one table of tokens (transformers 5.23.0)."""


def describe(
    raw: dict[str, Any], devices: Sequence[str] = DEVICES, folder: Path | None = None, *, images: bool = False
) -> Described:
    """The description of a config.json's language model as it trains on text, and on `images` where they are asked
    for, of the code in `folder` where that is trusted."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    if raw.get("quantization_config") is not None:
        raise NotDescribed("its weights are quantized, and those of the model before it was are needed")
    kind = raw.get("model_type")
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    known = (kind in names and kind not in WITHOUT_TABLE) or folder is not None
    if (what := other_than_causal(raw, decodes=known)) is not None:
        raise NotDescribed(sentence(kind, what))
    if not known and "auto_map" in raw:
        raise NotDescribed(f"it is code of its folder; executor import DIR {TRUSTED} runs that")
    configured = partial(config_of, raw, folder)
    config = configured()
    if not known:
        raise NotDescribed(f"{kind} is no causal language model of Transformers")
    text = decoder_config(config)
    count = getattr(text, layer_key(text), None)
    if not isinstance(count, int) or not 0 < count <= MOST_LAYERS:
        raise NotDescribed(f"{layer_key(text)} is {count}, and must be 1 to {MOST_LAYERS}")
    build = partial(built, padded=False, trusted=folder is not None)
    with torch.device("meta"):
        whole = build(config, torch.bfloat16)
        if padded := counts_from_padding(whole):
            build = partial(build, padded=True)
            whole = build(configured(), torch.bfloat16)
    path, layers = layers_of(whole)
    common = common_weights(whole)
    if len(layers) != count:
        raise NotDescribed(f"{layer_key(text)} is {count}, and its longest list of layers has {len(layers)}")
    every_kind = kinds_of(layers, text)
    places = places_of(every_kind)
    idle = frozenset[str]()
    if len({type(layer) for layer in layers}) > 1:
        some = few_layers(configured, build, whole, places)[0]
        with fake_device(cuda=False):
            idle = _idle(build(some, torch.bfloat16))
    kinds = [kind for kind, layer in zip(every_kind, layers, strict=True) if type(layer).__name__ not in idle]
    places = {kind: place for kind, place in places.items() if kind in kinds}
    names = names_of(whole, path, places, idle)
    experts = frozenset(unit for unit in places if any(one.use == "expert" for one in weights_of(whole, names[unit])))
    few, spots = few_layers(configured, build, whole, places)
    with uncollected():
        every = _on_each(devices, partial(recorded_on, partial(build, few), spots, experts, idle))
    first = every[0]
    names["embed"].update({name: names["tail"].pop(name) for name in first.read_first})
    weights = {
        unit: tuple(one for one in weights_of(whole, found) if (unit, one.name) not in first.read_elsewhere)
        for unit, found in names.items()
    }
    if is_tied(whole):
        weights["embed"] = ()
    if common:
        times = {"embed": 1, "tail": 1, TOWER: 1, **Counter(kinds)}
        counted = sum(times[unit] * prod(one.shape) for unit, some in weights.items() for one in some)
        if counted != sum(one.numel() for one in whole.parameters()):
            raise NotDescribed("its layers do not take turns with the weights that several of them have")
    programs = {
        unit: {name: one for made in every for name, one in made.programs[unit].items()} for unit in first.programs
    }
    lengths = lengths_on_all([made.lengths for made in every])
    if not any(step.weight for program in programs["tail"].values() for step in program.steps):
        raise NotDescribed("its head is no linear module that takes all tokens alike")
    units = {
        unit: DescribedUnit(
            weights=_marked(whole, names[unit], weights[unit], every[-1].unused),
            programs=programs[unit],
            attention=first.products[unit].attention,
            products=first.products[unit].others,
            scores=first.products[unit].scores,
            buffers=buffers,
        )
        for unit, buffers in _buffers_of(whole, path, places).items()
    }
    towers, blind = None, ""
    if weights[TOWER]:
        units[TOWER] = DescribedUnit(weights=tuple(replace(one, use="unused") for one in weights[TOWER]), programs={})
    if weights[TOWER] and images:
        build = partial(build, padded=padded or first.padded)
        small = Small(partial(build, few), lengths, spots, partial(_names_by_unit, idle=idle), experts)
        try:
            with uncollected():
                towers, changed = seeing(
                    config, small, lambda layers: partial(build, of_layers(configured(), layers)), VARIANTS,
                    partial(_on_each, devices), units,
                )  # fmt: skip
            units |= {f"{unit}{IMAGES}": one for unit, one in changed.items()}
        except NotDescribed as error:
            blind = str(error)
    return Described(
        config=raw,
        transformers=transformers.__version__,
        units=units,
        layer_class=next(one for layer in layers if (one := type(layer).__name__) not in idle),
        runs=tuple((kind, len(list(group))) for kind, group in groupby(kinds)),
        multiple_of=lengths.multiple,
        shortest=lengths.shortest,
        longest=lengths.longest(text),
        unused=every[-1].unused,
        towers=towers_of(whole, idle),
        seeing=towers,
        blind=blind,
        wide=wide_weights(whole),
        norm_apart=norm_apart(whole),
        shared=shared_weights(whole),
        adapts=all(made.adapts for made in every) and not common,
        recomputes=can_recompute(whole) and not leaves_tensors(programs) and not common,
        padded=padded or first.padded,
        remote_code=folder is not None and kind not in CONFIG_MAPPING,
        unsplit=next((made.unsplit for made in every if made.unsplit), ""),
        undealt=next((made.undealt for made in every if made.undealt), ""),
    )


def wide_weights(whole: Any) -> tuple[str, ...]:
    """The weights that a model which was built in bf16 has in fp32, as `unnumbered` names them."""
    wide = (name for name, weight in whole.named_parameters() if weight.dtype == torch.float32)
    return tuple(dict.fromkeys(unnumbered(whole, name) for name in wide))


def _names_by_unit(model: Any, spots: Mapping[str, int], idle: Collection[str]) -> dict[str, dict[str, str]]:
    return names_of(model, layers_of(model)[0], spots, idle)


def _idle(model: Any) -> frozenset[str]:
    """Classes of the layers that text alone leaves out, such as those of attention to images."""
    try:
        ran = record(model, 2, UNIT, autocast=False, gradients=False).given
    except CodeFails:
        return frozenset()
    classes = [type(layer).__name__ for layer in layers_of(model)[1]]
    return frozenset(classes) - {classes[place] for _, place in ran}


def leaves_tensors(programs: Mapping[str, Mapping[str, Program]]) -> bool:
    """Whether layers read what others left until the end of the forward, such as keys and values. A layer that runs
    again leaves new ones, with the graph behind them and all that it holds."""
    read = {place for found in programs.values() for one in found.values() for place in one.outside}
    return any(_stored(one, place) in one.held for unit, place in read for one in programs[unit].values())


def _stored(program: Program, place: int) -> int:
    """The storage of a place in the graph that a unit made."""
    return [where for step in program.steps for where, _ in step.gives][place - 1]


def _runs(model: Any) -> bool:
    """Whether a model's code runs; some fails without a token of padding."""
    try:
        record(model, 2, UNIT, autocast=False, gradients=False)
    except CodeFails:
        return False
    return True


class OnDevice(NamedTuple):
    """What is recorded of a model on one kind of device: the lengths; by unit its programs in each number format, and
    attention and products beside linear modules; the weights that no gradient is made of; whether adapters' programs
    are those of frozen weights; whether its code runs with its token of padding alone; the weights that the embedding
    reads though the model registers them after its layers; the weights of several layers that are first read in another
    unit, by unit and name; and why no tensor ranks are described, or none that experts are dealt to, if they are
    not."""

    lengths: RecordedLengths
    programs: dict[str, dict[str, Program]]
    products: dict[str, UnitProducts]
    unused: tuple[str, ...]
    adapts: bool
    padded: bool
    read_first: tuple[str, ...]
    read_elsewhere: frozenset[tuple[str, str]]
    unsplit: str
    undealt: str


def recorded_on(
    build: Callable[..., Any], spots: Mapping[str, int], experts: Collection[str], idle: Collection[str], device: str
) -> OnDevice:
    """Recordings of a small model's units on a kind of device, in each number format that its code takes: of its ends,
    and of the layers at `spots`. `experts` are the units that have weights of experts, `idle` the classes of layers
    that do not run."""
    lengths: RecordedLengths | None = None
    programs: dict[str, dict[str, Program]] = {unit: {} for unit in ("embed", "tail", *spots)}
    products: dict[str, UnitProducts] = {}
    recorded = {unit: ("layer" if unit in spots else unit, spots.get(unit, 0)) for unit in programs}
    unused: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    elsewhere: frozenset[tuple[str, str]] = frozenset()
    adapts, padded, unsplit, undealt = True, False, "", ""
    failed: list[CodeFails] = []
    for variant, (dtype, autocast) in VARIANTS.items():
        with fake_device(cuda=device == "cuda"):
            model = build(dtype)
            if any(type(layer).__name__ in idle for layer in layers_of(model)[1]):
                raise NotDescribed("text leaves out one of its first layers")
            try:
                if lengths is None and not _runs(model):
                    build, padded = partial(build, padded=True), True
                    model = build(dtype)
                if lengths is None:
                    lengths = lengths_of(model)
                    model = build(dtype)  # a forward may have changed it
                runs = recordings(model, lengths, autocast=autocast, experts=bool(experts))
            except CodeFails as error:
                failed.append(error)  # of a number format that its code does not take
                continue
            names = names_of(model, layers_of(model)[0], spots, idle)
            unused = unused_weights(model, runs.every, names[TOWER])
            first = move_first(names, runs.every)
            elsewhere = frozenset(
                (unit, own)
                for unit in spots
                for name, own in names[unit].items()
                if (same := runs.every.base.common.get(name)) and runs.every.first_reader(same) != recorded[unit]
            )
            adapts = adapts and runs.frozen is not None
        for unit in programs:
            made, programs[unit][f"{variant}-{device}"] = runs.program(unit, recorded, names)
            products.setdefault(unit, made.products(experts=unit in experts))
            if unit in experts:
                dealt = runs.programs_apart(recorded[unit], names[unit])
                programs[unit] |= {f"{name}-{device}{APART}": one for name, one in dealt.items()}
        unsplit, undealt = unsplit or runs.every.split.why, undealt or runs.spread.why
    if lengths is None or not products:
        raise failed[0]
    return OnDevice(lengths, programs, products, unused, adapts, padded, first, elsewhere, unsplit, undealt)


def _on_each(devices: Sequence[str], made: Callable[[str], Made]) -> list[Made]:
    """What is made on each kind of device, where there are several in a process for each: they share nothing, and one
    takes half of an import's time."""
    if len(devices) == 1:
        return [made(devices[0])]
    with ProcessPoolExecutor(len(devices), multiprocessing.get_context("fork")) as pool:
        return list(pool.map(made, devices))


@contextmanager
def uncollected() -> Iterator[None]:
    """While entered, Python looks for no cycles: it would walk all recordings each time, for a fifth of an import's
    time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def few_layers(
    configured: Callable[[], Any], build: Callable[..., Any], whole: Any, places: Mapping[str, int]
) -> tuple[Any, dict[str, int]]:
    """The configuration of a small model, and where in it the layers at `places` are: it has the first of the `whole`
    model's layers, these, and one after the last. Where no list of the configuration says what each layer is, it has
    all to that one; where layers, or what is before and after them, are others then too, all."""
    layers = layers_of(whole)[1]
    last = min(max(places.values()) + 1, len(layers) - 1)
    for picked in (sorted({0, *places.values(), last}), list(range(last + 1)), list(range(len(layers)))):
        few = of_layers(configured(), picked)
        try:
            with torch.device("meta"):
                small = build(few, torch.bfloat16)
        except NotDescribed:
            continue
        found = [*map(_signature, layers_of(small)[1])]
        if found == [_signature(layers[place]) for place in picked] and _around(small) == _around(whole):
            break
    return few, {kind: picked.index(place) for kind, place in places.items()}


def _around(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights before and after a model's layers."""
    path = layers_of(model)[0]
    return {name: tuple(weight.shape) for name, weight in model.named_parameters() if not name.startswith(f"{path}.")}


def built(config: Any, dtype: torch.dtype, *, padded: bool = False, trusted: bool = False) -> Any:
    """The model of a configuration, which is left as it is. Nothing fills its weights. It has its token
    of padding where it is `padded`, and its class may be one of its folder's code where that is `trusted`."""
    from transformers.initialization import no_init_weights

    config = deepcopy(config)
    if not padded:
        without_padding(config)
    try:
        with no_init_weights():
            model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trusted)
    except Exception as error:
        raise NotDescribed(f"Transformers cannot build it: {first_line(error)}") from None
    model.tie_weights()
    model.config.use_cache = False
    lend_loss(model)
    for module in model.modules():
        if getattr(module, "rope_type", None) == DYNAMIC:  # it asks at each length whether that is beyond its positions
            module.rope_type = "default"
    return model.train()


def kinds_of(layers: nn.ModuleList, text: Any) -> list[str]:
    """The kind of each layer, by their modules' classes and settings, by their weights' shapes, and by which weights an
    earlier layer has too. One kind is "layer"; of several each has the configuration's own name (`layer_types`), with
    a number where that stands for two."""
    seen: set[int] = set()
    keys = []
    for layer in layers:
        weights = [id(weight) for weight in layer.parameters()]
        keys.append((_signature(layer), tuple(weight in seen for weight in weights)))
        seen.update(weights)
    order = list(dict.fromkeys(keys))
    if len(order) > MOST_KINDS:
        raise NotDescribed(f"its layers are of {len(order)} kinds, and at most {MOST_KINDS} are described")
    if len(order) == 1:
        return ["layer"] * len(keys)
    own = next((found for key in LISTED if len(found := getattr(text, key, None) or ()) == len(keys)), None)
    names: dict[Any, str] = {}
    for key in order:
        name = re.sub(r"\W", "_", str(own[keys.index(key)])) if own else "layer"
        name = "layer" if name in ENDS else name
        alike = sum(1 for other in names.values() if other.partition("-")[0] == name)
        names[key] = f"{name}-{alike + 1}" if alike else name
    return [names[key] for key in keys]


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    modules = tuple((type(module).__name__, _settings(module)) for module in layer.modules())
    return modules, tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Switches of a module that may differ from layer to layer, and that its weights do not show: NoPE, a window; of
    fractions, whether they are 0."""
    found = ((key, value) for key, value in vars(module).items() if not NUMBERED.search(key))
    known = ((key, value != 0 if isinstance(value, float) else value) for key, value in found)
    return tuple(sorted((key, str(value)) for key, value in known if value is None or isinstance(value, int)))


def places_of(kinds: Sequence[str]) -> dict[str, int]:
    """Which layer of each kind is described: its first, but the model's second where both are of one kind."""
    places = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    return {kind: place + (place == 0 and kinds[1:2] == kinds[:1]) for kind, place in places.items()}


def towers_of(model: Any, idle: Collection[str]) -> dict[str, str]:
    """The modules beside a model's decoder that see or hear, by name, with their classes: whole modules of Transformers
    beside the way from the model to its decoder, and the decoder's layers of classes that are `idle`."""
    from transformers import AutoModelForCausalLM

    path, layers = layers_of(model)
    classes = {f"{path}.{index}": type(layer).__name__ for index, layer in enumerate(layers)}
    found = {name: one for name, one in classes.items() if one in idle}
    if auto_class(model.config) is AutoModelForCausalLM:
        return found
    decoder, head = model.get_decoder(), model.get_output_embeddings()

    def look(within: nn.Module, path: str) -> None:
        for name, module in within.named_children():
            inner = set(module.modules())
            if module is not decoder and (decoder in inner or head in inner):
                look(module, f"{path}{name}.")
            elif module not in (decoder, head) and type(module).__module__.startswith("transformers."):
                found.update({f"{path}{name}": type(module).__name__} if any(True for _ in module.parameters()) else {})

    look(model, "")
    return found


def norm_apart(model: Any) -> bool:
    """Whether no child of a model's body is a norm, where Accelerate looks for the last one (fsdp_utils.py of 1.15,
    _find_final_norm)."""
    body = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else model
    return body is None or not any("Norm" in type(child).__name__ for child in body.children())


def names_of(model: Any, path: str, places: Mapping[str, int], idle: Collection[str]) -> dict[str, dict[str, str]]:
    """By unit, the names of its weights in the small model and in the unit."""
    tied = is_tied(model)
    starts = tuple(f"{tower}." for tower in towers_of(model, idle))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    order = [name for name, _ in model.named_parameters()]
    before = set(takewhile(lambda name: not name.startswith(f"{path}."), order))
    found: dict[str, dict[str, str]] = {unit: {} for unit in ("embed", "tail", *places, TOWER)}
    for name in order:
        own = name.removesuffix(".weight").removeprefix(prefix)
        if name.startswith(starts):
            found[TOWER][name] = own
        elif not name.startswith(f"{path}."):
            found["embed" if name in before and not tied else "tail"][name] = own
    for unit, index in places.items():
        start = f"{path}.{index}."
        for name, _ in layers_of(model)[1][index].named_parameters():
            found[unit][start + name] = name.removesuffix(".weight")
    if tied:
        table = model.get_input_embeddings().weight
        alike = [name for name, weight in model.named_parameters(remove_duplicate=False) if weight is table]
        found["tail"].update(dict.fromkeys(alike, found["tail"][alike[0]]))
        found["embed"] = dict(found["tail"])
    return found


def move_first(names: dict[str, dict[str, str]], every: Recorded) -> tuple[str, ...]:
    """Give the embedding the weights that it reads, and that the model registers after its layers; their names."""
    found: dict[str, None] = {}
    for node in every.base.nodes.values():
        index = every.first_operation.get(node.number)
        if index is not None and every.base.operations[index].unit == ("embed", 0):
            found |= {edge: None for edge in node.edges if isinstance(edge, str) and edge not in names["embed"]}
    names["embed"].update({edge: names["tail"].pop(edge) for edge in found})
    return tuple(found)


def shared_weights(model: Any) -> tuple[str, ...]:
    """The weights that several modules hold, beside the token table."""
    table = model.get_input_embeddings().weight
    names = {name for name, _ in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    found = (unnumbered(model, name) for name, weight in every if name not in names and weight is not table)
    return tuple(dict.fromkeys(found))


def is_tied(model: Any) -> bool:
    """Whether the head's weight is the token table."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _buffers_of(model: Any, path: str, places: Mapping[str, int]) -> dict[str, int]:
    """Bytes of buffers of 4 kB or more (rotary frequencies are less) of a layer of each kind, and beside all layers."""
    sizes = [(name, one.nbytes) for name, one in model.named_buffers() if one.nbytes >= 4096]
    starts = {"": "", "all": f"{path}."} | {unit: f"{path}.{index}." for unit, index in places.items()}
    found = {unit: sum(size for name, size in sizes if name.startswith(start)) for unit, start in starts.items()}
    return {"embed": 0, "tail": found.pop("") - found.pop("all")} | found


def weights_of(model: Any, names: dict[str, str]) -> tuple[DescribedWeight, ...]:
    """The weights of a unit with their shapes and uses."""
    modules = dict(model.named_modules())
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    ways, common = ways_of(model), common_weights(model)
    found = []
    for name, own in names.items():
        if name not in shapes and name not in common:
            continue  # another name of the tied table
        module, _, _ = name.rpartition(".")
        use = "other"
        if name in common:
            pass  # which the planner's own linear does not know
        elif is_linear(modules[module]) or modules[module] is model.get_input_embeddings():
            use = "linear"
        elif _is_experts(modules[module], shapes[name]):
            use = "expert"
        split, gathers = ways.get(name, (None, False))
        found.append(
            DescribedWeight(
                name=own,
                shape=shapes[common.get(name, name)],
                use=use,
                split=split,
                gathers=gathers,
                transposed=type(modules[module]).__name__ == "Conv1D",
            )
        )
    return tuple(found)


def _is_experts(module: nn.Module, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and hasattr(module, "num_experts") and shape[0] == module.num_experts


def unused_weights(model: Any, every: Recorded, towers: Collection[str]) -> tuple[str, ...]:
    """The weights that no gradient is made of, as `unnumbered` names them, but for those of `towers`."""
    edges = {edge for node in every.base.nodes.values() for edge in node.edges if isinstance(edge, str)}
    weights = dict(model.named_parameters())
    if some := next((name for name in towers if name in edges), None):
        raise NotDescribed(f"{some} takes part in the loss of text, beside its decoder")
    used = {unnumbered(model, name) for name in weights if name in edges}
    counted = {*edges, *towers, *every.base.common}
    found = dict.fromkeys(unnumbered(model, name) for name in weights if name not in counted)
    if some := next((name for name in found if name in used), None):
        raise NotDescribed(f"{some} takes part in the loss in some of its layers alone")
    return tuple(found)


def _marked(
    model: Any, names: dict[str, str], weights: tuple[DescribedWeight, ...], unused: Collection[str]
) -> tuple[DescribedWeight, ...]:
    """Weights of a unit, those that are `unused` with that use."""
    idle = {own for name, own in names.items() if unnumbered(model, name) in unused}
    return tuple(replace(one, use="unused") if one.name in idle else one for one in weights)
