"""Presets: a model, GPU, cluster, runtime, ... by name, its TOML file turned into base units.

Not here: the facts (presets/*.toml), or reading a Hugging Face config.json
(huggingface.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

import planner
from planner.basics import reading
from planner.basics.errors import PlannerError, did_you_mean, refusing
from planner.basics.names import check_name, check_texts, name_rule
from planner.basics.quantities import GB, GIB, TERA, Positive
from planner.spec import Cluster, Gpu, Kernels, ModelSpec, Nics, Runtime, StepImplementation
from planner.spec.engines import NOT_SHIPPED, PACKAGED, find_packaged, unknown_engine
from planner.spec.model_rules import check_model
from planner.spec.nodes import (
    Count,
    Node,
    Taper,
    base,
    domains,
    host_link,
    link_of,
    network,
    nics_per_gpu,
    with_network,
)
from planner.spec.options import LARGEST_COUNT
from planner.spec.runtime import LACKING, VERSION_MARK

DESCRIBED = "described"
"""Key of a model preset that names the file of its description."""
KINDS = ("models", "gpus", "nodes", "clusters", "runtimes", "kernels", "calibrations")
ENVIRONMENT = "MESHWRIGHT_PRESETS"
FOR_READERS = ("source", "sources")
"""Keys whose values are sentences; every other text of a preset is a name."""

T = TypeVar("T")
Folders = Sequence[str | os.PathLike[str]]


def names(kind: str, *, folders: Folders = ()) -> list[str]:
    """Every id of one kind, sorted; aliases are not ids."""
    found = {path.stem for folder in search_path(folders) for path in (folder / known_kind(kind)).glob("*.toml")}
    return sorted(check_name(stem, kind, "Rename the file") for stem in found - {"aliases"})


def known_kind(kind: str) -> str:
    """The kind of presets, if there is such a one."""
    if kind not in KINDS:
        raise PlannerError("kind", kind, "is not a kind of preset", did_you_mean(kind, KINDS))
    return kind


@cache
def packaged() -> Path:
    """presets/ inside the package when installed from a wheel, beside it in a source checkout."""
    package = Path(planner.__file__).parent
    inside = package / "presets"
    return inside if inside.is_dir() else package.parent / "presets"


def search_path(folders: Folders) -> list[Path]:
    """Folders in the order in which a name is looked for."""
    given = [("presets", Path(folder)) for folder in folders]
    listed = os.environ.get(ENVIRONMENT, "")
    given += [(ENVIRONMENT, Path(folder)) for folder in listed.split(os.pathsep) if folder]
    for field, folder in given:
        if not folder.is_dir():
            raise PlannerError(field, folder, "is not a folder", "Name a folder laid out like presets/")
    return [*(folder for _, folder in given), packaged(), *(Path(one.presets) for one in PACKAGED.values())]


def by_path(kind: str, name: str, folders: Folders) -> tuple[str, Folders]:
    """A name that a person gave as the path of a preset's file, as the name and the folders that find that file."""
    if not name.endswith(".toml"):
        return name, folders
    path = Path(name)
    one = kind.removesuffix("s")
    if not path.is_file():
        raise PlannerError(one, name, "is not a file", f"Name a preset, or a file {kind}/NAME.toml")
    if path.absolute().parent.name != kind:
        rule = f"must stand in a folder {kind}/ beside the presets it names"
        raise PlannerError(one, name, rule, f"Move it to {kind}/{path.name}")
    return check_name(path.stem, one, "Rename the file"), (path.absolute().parents[1], *folders)


def find_file(kind: str, name: str, folders: Folders) -> Path | None:
    """The file of an id, or else of an alias."""
    wanted = name.lower()
    return _file_of(kind, wanted, folders) or _file_of(kind, merged_aliases(kind, folders).get(wanted, ""), folders)


def _file_of(kind: str, wanted: str, folders: Folders) -> Path | None:
    # A name is never a path: "../secrets" is unknown, not a file elsewhere.
    if not wanted or wanted == "aliases" or name_rule(wanted) or set(wanted) & {"/", "\\"}:
        return None
    paths = (folder / kind / f"{wanted}.toml" for folder in search_path(folders))
    return next((path for path in paths if path.is_file()), None)


def found_file(kind: str, name: str, folders: Folders) -> Path:
    """The file of an id or alias, or a refusal that names the nearest."""
    path = find_file(kind, name, folders)
    if path is None and kind in ("runtimes", "kernels"):
        find_packaged()
        path = find_file(kind, name, folders)
    if path is not None:
        return path
    if kind == "runtimes" and name in NOT_SHIPPED:
        raise unknown_engine("runtime", name)
    known = {*names(kind, folders=folders), *merged_aliases(kind, folders)}
    advice = did_you_mean(name, known) if known else f"No {kind} are installed"
    one = kind if kind == "kernels" else kind.removesuffix("s")
    raise PlannerError(one, name, f"is not among the {kind} known here", advice)


def merged_aliases(kind: str, folders: Folders) -> dict[str, str]:
    """Alias -> id over all folders, the first folder winning."""
    merged: dict[str, str] = {}
    for folder in reversed(search_path(folders)):
        if (path := folder / kind / "aliases.toml").is_file():
            merged.update(checked(read_toml(path), dict[str, str], path))
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file whose numbers are all finite."""
    with refusing(OSError, "preset", path, "cannot be read", "Name a TOML file"):
        text = reading.read_bytes(path, reading.SETTINGS_BYTES)
    with refusing(ValueError, str(path), None, "is not TOML", "Copy a neighbouring file and edit it"):
        raw = reading.read_toml(text)
    for key, value in _no_numbers(raw):
        raise PlannerError(f"{path}: {key.removeprefix('.')}", value, "is not a sensible number")
    check_texts(raw, str(path), free=FOR_READERS)
    return raw


def _no_numbers(table: dict[str, Any] | list[Any]) -> Iterator[tuple[str, float]]:
    """(key, value) of what is infinite, as good as infinite, or no number."""
    for name, value in table.items() if isinstance(table, dict) else enumerate(table):
        if isinstance(value, dict | list):
            inner = _no_numbers(value)
        elif isinstance(value, int | float) and not abs(value) < 1e30:  # false for nan as well
            inner = iter([("", value)])
        else:
            continue
        for key, number in inner:
            yield (f".{name}{key}" if isinstance(table, dict) else f"[{name}]{key}"), number


def checked(raw: Any, type_: type[T], path: Path, table: str = "") -> T:
    """`raw` as `type_`, or a refusal that names file, key and rule."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at `$")
        key = ".".join(part for part in (table, place.strip(".`")) if part)
        advice = "presets/README.md says what each key means"
        if unknown := rule.partition("unknown field `")[2].rstrip("`"):
            if not key:
                advice = did_you_mean(unknown, getattr(type_, "__struct_fields__", ()))
            key, rule = f"{key}.{unknown}".strip("."), "is not a key of this kind of preset"
        value = raw
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        raise PlannerError(f"{path}: {key}" if key else str(path), value, rule, advice) from None


# -- Files of presets --------------------------------------------------------------------------------------------------

NEAR_DEVICE = 0.7
"""How like a known device a name must be to be taken for a slip of the keyboard: rtx4090 is, m3-max is not."""

RATED = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""Number formats that a device may have a peak rate for."""


class _NodeFile(Node, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpu: str
    sources: dict[str, str] = msgspec.field(default_factory=dict)


class _GpuFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["cuda", "hip", "cpu"]
    memory_gib: Positive | None = None
    memory_gb_per_s: Positive | None = None
    power_w: Positive | None = None
    dense_tflops: dict[str, float] = {}
    node: Node | None = None
    sources: dict[str, str] = {}


class _ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str
    nodes: Count = 1
    tapers: tuple[Taper, ...] = ()
    storage_gb_per_s: Positive | None = None
    failures_per_gpu_hour: Positive | None = None
    sources: dict[str, str] = {}


class _RuntimeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: str
    kernels: str
    backend: str | None = None
    adamw_implementation: StepImplementation = "foreach"
    adapter_units: bool = False
    frozen_fp32: bool = False
    label: str = ""
    version: str = ""
    read_on: str = ""
    lacks: tuple[str, ...] = ()
    versions: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}


def aliases(kind: str, *, folders: Folders = ()) -> dict[str, str]:
    """Short names of one kind, each with the id it stands for."""
    return dict(sorted(merged_aliases(known_kind(kind), folders).items()))


def provenance(kind: str, name: str, *, folders: Folders = ()) -> dict[str, str]:
    """Where each fact of a preset comes from: its [sources] table as written."""
    if known_kind(kind) == "runtimes" and VERSION_MARK in name:
        return _runtime_file(name, folders)[1].sources
    path = found_file(kind, name, folders)
    return checked(read_toml(path).get("sources", {}), dict[str, str], path, "sources")


@contextmanager
def searched_first(folders: Folders) -> Iterator[None]:
    """While it lasts every name is looked for in these folders first: measured rows name presets, not folders."""
    before = os.environ.get(ENVIRONMENT, "")
    os.environ[ENVIRONMENT] = os.pathsep.join([*(str(Path(folder).absolute()) for folder in folders), before])
    try:
        yield
    finally:
        os.environ[ENVIRONMENT] = before


def model(name: str, *, folders: Folders = ()) -> ModelSpec:
    """The model of that name or alias."""
    path = found_file("models", name, folders)
    facts = _facts(read_toml(path))
    if DESCRIBED in facts:
        return _described_model(path, facts)
    spec = checked(facts | {"name": path.stem}, ModelSpec, path)
    check_model(spec, str(path))
    return spec


class _DescribedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model preset whose weights and operations are a file of `executor import` beside it, compressed."""

    described: str
    parameters: int | None = None


def _described_model(path: Path, facts: dict[str, Any]) -> ModelSpec:
    from planner.spec.importing import described_model, uncompressed

    file = checked(facts, _DescribedFile, path)
    if Path(file.described).name != file.described:
        raise PlannerError(f"{path}: {DESCRIBED}", file.described, "must be a file's name", "Put it beside the preset")
    beside = path.parent / file.described
    found = described_model(uncompressed(beside), str(beside))
    return msgspec.structs.replace(found, name=path.stem, parameters=file.parameters)


def gpu(name: str, *, folders: Folders = ()) -> Gpu:
    """The GPU of that name or alias. A CPU's memory is this host's; `cluster` divides it among the ranks."""
    path = found_file("gpus", name, folders)
    return _gpu(path, checked(read_toml(path), _GpuFile, path))


def cluster(
    name: str,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    nodes: int | None = None,
    *,
    inter_gbps: float | None = None,
    intra_gbps: float | None = None,
    nics: int | None = None,
    folders: Folders = (),
) -> Cluster:
    """The cluster of that name, cut to the wanted size; a GPU's name means nodes of its preset's [node] table.

    Any two of `gpus`, `gpus_per_node`, `nodes` give the third; one alone is filled from the preset. On a CPU a
    device is a process, so `gpus` alone puts all of them on one node, and a node's memory is divided among them.
    The path of a file clusters/NAME.toml stands for its name, with its folder of presets searched first.
    `inter_gbps` (Gbit/s of a network card), `nics` (cards of a node) and `intra_gbps` (Gbit/s of a GPU's links inside
    its node) take the place of the preset's, latencies stay; all rates are of one direction.
    """
    name, folders = by_path("clusters", name, folders)
    shape, gpu_path, whole, title = _cluster_parts(name, folders)
    shape = with_network(shape, inter_gbps, intra_gbps, nics)
    gpu_file = checked(read_toml(gpu_path), _GpuFile, gpu_path)
    cpu = gpu_file.kind == "cpu"
    nodes, per_node = _arrange(title, shape.gpus, whole.nodes, cpu, gpus, gpus_per_node, nodes)
    device = _gpu(gpu_path, gpu_file)
    if cpu and device.memory_bytes is not None:
        device = msgspec.structs.replace(device, memory_bytes=device.memory_bytes // per_node)
    inter_link, pods = network(shape, whole.tapers, nodes, per_node)
    return Cluster(
        name=title,
        gpu=device,
        nodes=nodes,
        gpus_per_node=per_node,
        intra_link=link_of(shape.intra_link, shape.intra_link_gb_per_s_per_direction, shape.intra_link_latency_us),
        inter_link=inter_link,
        tiers=(*domains(shape, per_node, nodes), *pods),
        nics=Nics(
            per_node=shape.nics,
            bytes_per_s_per_direction=base(shape.nic_gbit_per_s, GB / 8),
            gpus_sharing=max(1, math.ceil(1 / nics_per_gpu(shape, per_node) - 1e-9)),
        ),
        host_link=host_link(shape),
        host_memory_bytes=None if shape.host_memory_gib is None else shape.host_memory_gib * GIB,
        host_memory_bytes_per_s=None if shape.host_memory_gb_per_s is None else base(shape.host_memory_gb_per_s, GB),
        storage_bytes_per_s=None if whole.storage_gb_per_s is None else base(whole.storage_gb_per_s, GB),
        failures_per_gpu_hour=whole.failures_per_gpu_hour,
    )


def runtime(name: str, *, folders: Folders = ()) -> Runtime:
    """The runtime of that name, or one version of it ("torchtitan@0.3"): engine, kernels and backend. What its
    allocator adds stands in calibrations."""
    path, file, label = _runtime_file(name, folders)
    return Runtime(
        name=f"{path.stem}{VERSION_MARK}{label}" if label else path.stem,
        engine=file.engine,
        kernels=file.kernels,
        parts=kernels(file.kernels, folders=folders),
        backend=file.backend,
        adamw_implementation=file.adamw_implementation,
        adapter_units=file.adapter_units,
        frozen_fp32=file.frozen_fp32,
        version=file.version,
        lacks=file.lacks,
    )


def _runtime_file(name: str, folders: Folders) -> tuple[Path, _RuntimeFile, str]:
    """A runtime's file with what one version changes of it, and that version's label; "" for the default."""
    base, _, label = name.partition(VERSION_MARK)
    path = found_file("runtimes", base, folders)
    raw = read_toml(path)
    file = checked(raw, _RuntimeFile, path)
    if VERSION_MARK not in name or label == file.label != "":
        return path, file, ""
    if label not in file.versions:
        known = [f"{base}{VERSION_MARK}{one}" for one in (file.label, *file.versions) if one]
        advice = did_you_mean(name, known) if known else f"Use {base}, of which one version is known"
        raise PlannerError("runtime", name, f"is not a version known here of {base}", advice)
    one = checked(_of_version(raw, label), _RuntimeFile, path, f"versions.{label}")
    if unread := [text for text in one.lacks if text.partition("=")[0] not in LACKING]:
        rule = f"must be a value of {' or '.join(LACKING)}, such as precision=nvfp4"
        raise PlannerError(f"{path}: versions.{label}.lacks", unread[0], rule)
    return path, one, label


def _of_version(raw: dict[str, Any], label: str) -> dict[str, Any]:
    """A runtime's table as one version has it, its keys over the default's; of no such version the default's alone."""
    changed: dict[str, Any] = raw.get("versions", {}).get(label, {})
    sources = raw.get("sources", {}) | changed.get("sources", {})
    default = {key: value for key, value in raw.items() if key not in ("label", "versions")}
    return default | changed | {"sources": sources}


class VersionFacts(msgspec.Struct, frozen=True):
    """One version of a runtime, as docs/currency.md has it: its name behind the mark, the software that was read, and
    when; "" where a file does not say."""

    name: str
    label: str
    is_default: bool
    engine: str
    kernels: str
    version: str
    read_on: str
    sources: dict[str, str]


def versions(name: str, *, folders: Folders = ()) -> list[VersionFacts]:
    """A runtime's default and its other versions; `sources` of these are their own alone."""
    path, file, _ = _runtime_file(name, folders)
    found = []
    for label in ("", *file.versions):
        _, one, _ = _runtime_file(f"{name}{VERSION_MARK}{label}" if label else name, folders)
        full = f"{path.stem}{VERSION_MARK}{label}" if label else path.stem
        own = file.versions[label].get("sources", {}) if label else file.sources
        found.append(
            VersionFacts(full, label or file.label, not label, one.engine, one.kernels, one.version, one.read_on, own)
        )
    return found


def runtime_names(*, folders: Folders = ()) -> list[str]:
    """Every runtime, and every version of one that is not its default. Of a file that cannot be read, its name."""
    found = []
    for name in names("runtimes", folders=folders):
        found.append(name)
        with suppress(PlannerError):
            found += [one.name for one in versions(name, folders=folders)[1:]]
    return found


def kernels(name: str, *, folders: Folders = ()) -> Kernels:
    """What the model code keeps and computes, by that name."""
    path = found_file("kernels", name, folders)
    return _kernels(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _kernels(path: Path, _: int) -> Kernels:
    """A file of kernels, which several runtimes name, as it was at a time."""
    return checked(_facts(read_toml(path)), Kernels, path)


def calibration(name: str, *, folders: Folders = ()) -> dict[str, Any]:
    """A calibration preset as written: its reader knows what the keys mean. `name` may be a file's path, in any folder:
    it names no other preset but the calibration it is based on."""
    if name.endswith(".toml") and Path(name).absolute().parent.name != "calibrations":
        return read_toml(Path(name))
    name, folders = by_path("calibrations", name, folders)
    return read_toml(found_file("calibrations", name, folders))


def as_written(kind: str, name: str, *, folders: Folders = ()) -> dict[str, Any]:
    """Any preset's file in its own units, [sources] left out; of one version of a runtime what holds of it, of a
    described model the sizes of its description too."""
    if known_kind(kind) == "runtimes" and VERSION_MARK in name:
        path, _, label = _runtime_file(name, folders)
        return _facts(_of_version(read_toml(path), label))
    facts = _facts(read_toml(found_file(kind, name, folders)))
    if DESCRIBED not in facts:
        return facts
    from planner.spec.importing import facts_of

    return facts | {key: value for key, value in facts_of(model(name, folders=folders)).items() if key != "name"}


def _facts(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "sources"}


def _gpu(path: Path, file: _GpuFile) -> Gpu:
    if unknown := sorted(set(file.dense_tflops) - set(RATED)):
        advice = did_you_mean(unknown[0], RATED)
        raise PlannerError(f"{path}: dense_tflops", unknown[0], "is not a number format known here", advice)
    for number_format, tflops in file.dense_tflops.items():
        if tflops <= 0:
            rule = "must be above 0; leave out what the device does not have"
            raise PlannerError(f"{path}: dense_tflops.{number_format}", tflops, rule)
    memory = host_memory_bytes() if file.kind == "cpu" else None
    return Gpu(
        name=path.stem,
        kind=file.kind,
        memory_bytes=memory if file.memory_gib is None else float(round(file.memory_gib * GIB)),
        memory_bytes_per_s=None if file.memory_gb_per_s is None else base(file.memory_gb_per_s, GB),
        flops_per_s={number_format: base(tflops, TERA) for number_format, tflops in file.dense_tflops.items()},
        power_w=file.power_w,
    )


def host_memory_bytes() -> float | None:
    """All memory of this host; None where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not every system says
        return None


def _cluster_parts(name: str, folders: Folders) -> tuple[Node, Path, _ClusterFile, str]:
    """The node, the GPU's file, the facts of the whole (a GPU's name is one node), and the name to show."""
    if path := find_file("clusters", name, folders):
        file = checked(read_toml(path), _ClusterFile, path)
        node_path = found_file("nodes", file.node, folders)
        node = checked(read_toml(node_path), _NodeFile, node_path)
        for place, tier in enumerate(node.tiers):
            _check_domain(f"{node_path}: tiers[{place}].gpus", tier.gpus, node.gpus)
        for place, taper in enumerate(file.tapers):
            _check_domain(f"{path}: tapers[{place}].beyond_gpus", taper.beyond_gpus, node.gpus)
        return node, found_file("gpus", node.gpu, folders), file, path.stem
    if path := find_file("gpus", name, folders):
        gpu_file = checked(read_toml(path), _GpuFile, path)
        if gpu_file.node is None:
            raise PlannerError("cluster", name, f"{path} has no [node] table", "Add one, or name a cluster")
        return gpu_file.node, path, _ClusterFile(node=path.stem), path.stem
    if path := find_file("nodes", name, folders):
        fix = f'Write {path.parents[1] / "clusters" / path.name} with node = "{path.stem}"'
        raise PlannerError("cluster", name, f"is a node ({path}), and a cluster says how many there are of one", fix)
    known = {*names("clusters", folders=folders), *names("gpus", folders=folders), *merged_aliases("gpus", folders)}
    raise PlannerError("cluster", name, "is neither a cluster nor a GPU known here", _other_device(name, known))


def _other_device(name: str, known: set[str]) -> str:
    """A device of nearly that name; what merely shares letters with it is another maker's."""
    from difflib import get_close_matches  # only on the error path

    if near := get_close_matches(name.lower(), sorted(known), n=3, cutoff=NEAR_DEVICE):
        return f"Did you mean {' or '.join(near)}?"
    return "planner presets gpus lists those known, such as h100, a100 or 4090; docs/adding-a-gpu.md adds one"


def _check_domain(field: str, gpus: int, node_gpus: int) -> None:
    """Refuse a domain that cuts nodes, or is a node: `intra_link` says what joins that."""
    if gpus == node_gpus or max(gpus, node_gpus) % min(gpus, node_gpus):
        near = max(2, gpus // node_gpus) * node_gpus
        raise PlannerError(
            field, gpus, f"must be whole nodes of {node_gpus} GPUs, or a part that divides one", f"Try {near}"
        )


def _arrange(
    title: str, node_gpus: int, default_nodes: int, cpu: bool, gpus: int | None, per_node: int | None, nodes: int | None
) -> tuple[int, int]:
    """Nodes, and devices a node, that give the wanted size."""
    for field, value in (("gpus", gpus), ("gpus_per_node", per_node), ("nodes", nodes)):
        if value is not None and (type(value) is not int or not 1 <= value <= LARGEST_COUNT):
            raise PlannerError(field, value, f"must be a whole number from 1 to {LARGEST_COUNT}")
    in_a_node = LARGEST_COUNT if cpu else node_gpus
    if per_node is not None and per_node > in_a_node:
        fix = f"Try gpus_per_node = {node_gpus} and more nodes"
        raise PlannerError("gpus_per_node", per_node, f"a node of {title} has {node_gpus} GPUs", fix)
    if gpus is None:
        nodes, per_node = nodes or default_nodes, per_node or node_gpus
        if nodes * per_node > LARGEST_COUNT:
            raise PlannerError("nodes", nodes, f"with {per_node} GPUs each is more than {LARGEST_COUNT} GPUs")
        return nodes, per_node
    if nodes is not None:
        if gpus % nodes:
            raise PlannerError("gpus", gpus, f"is not a multiple of {nodes} nodes", _multiple_fix("gpus", gpus, nodes))
        if per_node is not None and nodes * per_node != gpus:
            raise PlannerError("gpus", gpus, f"is not {nodes} nodes of {per_node}", f"Try gpus = {nodes * per_node}")
        if gpus // nodes > in_a_node:
            rule = f"a node of {title} has {node_gpus} GPUs, so {gpus} need at least {-(-gpus // node_gpus)} nodes"
            raise PlannerError("nodes", nodes, rule, f"Leave nodes out, or try gpus = {nodes * node_gpus}")
        return nodes, gpus // nodes
    per_node = min(gpus, per_node or (gpus if cpu else node_gpus))
    if gpus % per_node:
        rule = f"must be a multiple of the {per_node} GPUs in a node of {title}"
        raise PlannerError("gpus", gpus, rule, _multiple_fix("gpus", gpus, per_node))
    return gpus // per_node, per_node


def _multiple_fix(field: str, value: int, step: int) -> str:
    below = value // step * step
    near = [below, below + step] if below else [below + step]
    return f"Try {field} = {' or '.join(map(str, near))}"
