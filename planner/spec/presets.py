"""Presets: a model, GPU, cluster, runtime, ... by name, its TOML file turned into base units.

Not here: where the files are (preset_files.py), the facts (presets/*.toml), or reading a Hugging Face config.json
(huggingface.py).
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.units import GB, GIB, MICRO, TERA
from planner.spec import Cluster, Gpu, Kernels, Link, ModelSpec, Nics, Runtime, Step, Tier
from planner.spec.model_rules import check_model
from planner.spec.options import LARGEST_COUNT
from planner.spec.preset_files import (
    ENVIRONMENT,
    Folders,
    by_path,
    checked,
    find_file,
    found_file,
    known_kind,
    merged_aliases,
    read_toml,
)
from planner.spec.preset_files import KINDS as KINDS  # others ask for both here
from planner.spec.preset_files import names as names

NEAR_DEVICE = 0.7
"""How like a known device a name must be to be taken for a slip of the keyboard: rtx4090 is, m3-max is not."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)]

RATED = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""Number formats that a device may have a peak rate for."""


class _Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A domain that is neither the node nor the cluster: GPUs of a module, or of a rack whose NVLink joins nodes."""

    name: str
    gpus: Annotated[int, msgspec.Meta(ge=2, le=LARGEST_COUNT)]
    link: str
    gb_per_s_per_direction: Positive
    latency_us: NotNegative


class _Taper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a network narrows: beyond so many GPUs each gets its cards' rate over the oversubscription."""

    beyond_gpus: Count
    oversubscription: Annotated[float, msgspec.Meta(ge=1)]
    link: str
    latency_us: NotNegative


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node in a person's units: gigabits of a network card, gigabytes of the links inside."""

    gpus: Count
    intra_link: str
    intra_link_gb_per_s_per_direction: Positive
    intra_link_latency_us: NotNegative
    nics: Count
    nic_gbit_per_s: Positive
    inter_link: str
    inter_link_latency_us: NotNegative
    host_link: str | None = None
    host_link_gb_per_s_per_direction: Positive | None = None
    host_memory_gib: Positive | None = None
    host_memory_gb_per_s: Positive | None = None
    tiers: tuple[_Tier, ...] = ()


class _NodeFile(_Node, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gpu: str
    sources: dict[str, str] = {}


class _GpuFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["cuda", "hip", "cpu"]
    memory_gib: Positive | None = None
    memory_gb_per_s: Positive | None = None
    power_w: Positive | None = None
    dense_tflops: dict[str, float] = {}
    node: _Node | None = None
    sources: dict[str, str] = {}


class _ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str
    nodes: Count = 1
    tapers: tuple[_Taper, ...] = ()
    storage_gb_per_s: Positive | None = None
    failures_per_gpu_hour: Positive | None = None
    sources: dict[str, str] = {}


class _RuntimeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: str
    kernels: str
    backend: str | None = None
    adamw_implementation: Step = "foreach"
    adapter_units: bool = False
    frozen_fp32: bool = False
    sources: dict[str, str] = {}


def aliases(kind: str, *, folders: Folders = ()) -> dict[str, str]:
    """Short names of one kind, each with the id it stands for."""
    return dict(sorted(merged_aliases(known_kind(kind), folders).items()))


def provenance(kind: str, name: str, *, folders: Folders = ()) -> dict[str, str]:
    """Where each fact of a preset comes from: its [sources] table as written."""
    path = found_file(known_kind(kind), name, folders)
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
    spec = checked(_facts(path) | {"name": path.stem}, ModelSpec, path)
    check_model(spec, str(path))
    return spec


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
    shape = _with_network(shape, inter_gbps, intra_gbps, nics)
    gpu_file = checked(read_toml(gpu_path), _GpuFile, gpu_path)
    cpu = gpu_file.kind == "cpu"
    nodes, per_node = _arrange(title, shape.gpus, whole.nodes, cpu, gpus, gpus_per_node, nodes)
    device = _gpu(gpu_path, gpu_file)
    if cpu and device.memory_bytes is not None:
        device = msgspec.structs.replace(device, memory_bytes=device.memory_bytes // per_node)
    inter_link, pods = _network(shape, whole.tapers, nodes, per_node)
    return Cluster(
        name=title,
        gpu=device,
        nodes=nodes,
        gpus_per_node=per_node,
        intra_link=_link(shape.intra_link, shape.intra_link_gb_per_s_per_direction, shape.intra_link_latency_us),
        inter_link=inter_link,
        tiers=(*_domains(shape, per_node, nodes), *pods),
        nics=Nics(
            per_node=shape.nics,
            bytes_per_s_per_direction=_base(shape.nic_gbit_per_s, GB / 8),
            gpus_sharing=max(1, math.ceil(1 / _nics_per_gpu(shape, per_node) - 1e-9)),
        ),
        host_link=_host_link(shape),
        host_memory_bytes=None if shape.host_memory_gib is None else shape.host_memory_gib * GIB,
        host_memory_bytes_per_s=None if shape.host_memory_gb_per_s is None else _base(shape.host_memory_gb_per_s, GB),
        storage_bytes_per_s=None if whole.storage_gb_per_s is None else _base(whole.storage_gb_per_s, GB),
        failures_per_gpu_hour=whole.failures_per_gpu_hour,
    )


def runtime(name: str, *, folders: Folders = ()) -> Runtime:
    """The runtime of that name: engine, kernels and backend. What its allocator adds stands in calibrations."""
    path = found_file("runtimes", name, folders)
    file = checked(read_toml(path), _RuntimeFile, path)
    return Runtime(
        name=path.stem,
        engine=file.engine,
        kernels=file.kernels,
        parts=kernels(file.kernels, folders=folders),
        backend=file.backend,
        adamw_implementation=file.adamw_implementation,
        adapter_units=file.adapter_units,
        frozen_fp32=file.frozen_fp32,
    )


def kernels(name: str, *, folders: Folders = ()) -> Kernels:
    """What the model code keeps and computes, by that name."""
    path = found_file("kernels", name, folders)
    return checked(_facts(path), Kernels, path)


def calibration(name: str, *, folders: Folders = ()) -> dict[str, Any]:
    """A calibration preset as written: its reader knows what the keys mean. `name` may be a file's path, in any folder:
    it names no other preset but the calibration it is based on."""
    if name.endswith(".toml") and Path(name).absolute().parent.name != "calibrations":
        return read_toml(Path(name))
    name, folders = by_path("calibrations", name, folders)
    return read_toml(found_file("calibrations", name, folders))


def as_written(kind: str, name: str, *, folders: Folders = ()) -> dict[str, Any]:
    """Any preset's file in its own units, [sources] left out."""
    return _facts(found_file(known_kind(kind), name, folders))


def _facts(path: Path) -> dict[str, Any]:
    return {key: value for key, value in read_toml(path).items() if key != "sources"}


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
        memory_bytes_per_s=None if file.memory_gb_per_s is None else _base(file.memory_gb_per_s, GB),
        flops_per_s={number_format: _base(tflops, TERA) for number_format, tflops in file.dense_tflops.items()},
        power_w=file.power_w,
    )


def _base(value: float, factor: float) -> float:
    """In base units, without the last binary digits of the product: people read them in plan.json."""
    return float(f"{value * factor:.12g}")


def host_memory_bytes() -> float | None:
    """All memory of this host; None where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not every system says
        return None


def _cluster_parts(name: str, folders: Folders) -> tuple[_Node, Path, _ClusterFile, str]:
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


def _link(name: str, gb_per_s: float, latency_us: float) -> Link:
    return Link(name=name, bytes_per_s_per_direction=_base(gb_per_s, GB), latency_s=_base(latency_us, MICRO))


def _host_link(node: _Node) -> Link | None:
    """One GPU's way to host memory. Copies are large, so its latency is not asked for."""
    if node.host_link is None or node.host_link_gb_per_s_per_direction is None:
        return None
    return _link(node.host_link, node.host_link_gb_per_s_per_direction, 0.0)


def _domains(node: _Node, per_node: int, nodes: int = 1) -> Iterator[Tier]:
    """The node file's further tiers, cut to the GPUs in use: a rack of nodes half used holds half as many, and of
    several racks each gives as many."""
    for tier in node.tiers:
        inside = tier.gpus < node.gpus
        gpus = tier.gpus if inside else _dealt(nodes, tier.gpus // node.gpus) * per_node
        if not inside or gpus < per_node:
            yield Tier(name=tier.name, gpus=gpus, link=_link(tier.link, tier.gb_per_s_per_direction, tier.latency_us))


def _dealt(nodes: int, most: int) -> int:
    """Nodes that a job takes of each rack of `most` where it needs several: the most that divide its own."""
    return most if nodes <= most else max(count for count in range(1, most + 1) if nodes % count == 0)


def _with_network(node: _Node, inter_gbps: float | None, intra_gbps: float | None, nics: int | None) -> _Node:
    """The node with what was given of its links. A link of another rate has another name: no curve was measured on it.
    Domains over the same link as a node's GPUs have its new rate too."""
    changed: dict[str, Any] = {} if nics is None else {"nics": nics}
    if inter_gbps is not None and inter_gbps != node.nic_gbit_per_s:
        changed |= {"nic_gbit_per_s": inter_gbps, "inter_link": f"a network of {inter_gbps:g} Gbit/s"}
    gb_per_s = None if intra_gbps is None else intra_gbps / 8
    if gb_per_s is not None and gb_per_s != node.intra_link_gb_per_s_per_direction:
        link = {"link": f"links of {intra_gbps:g} Gbit/s", "gb_per_s_per_direction": gb_per_s}
        changed |= {f"intra_{name}": value for name, value in link.items() if name == "link"}
        changed |= {
            "intra_link_gb_per_s_per_direction": gb_per_s,
            "tiers": tuple(
                msgspec.structs.replace(tier, **link) if tier.link == node.intra_link else tier for tier in node.tiers
            ),
        }
    return msgspec.structs.replace(node, **changed)


def _network(node: _Node, tapers: Sequence[_Taper], nodes: int, per_node: int) -> tuple[Link, list[Tier]]:
    """One GPU's share of what lies outside nodes: the widest link that this many nodes need, and the pods before it."""
    full = _nics_per_gpu(node, per_node) * node.nic_gbit_per_s / 8
    link = _link(node.inter_link, full, node.inter_link_latency_us)
    pods: list[Tier] = []
    for taper in sorted(tapers, key=lambda taper: taper.beyond_gpus):
        pod = taper.beyond_gpus * per_node // node.gpus
        if per_node < pod < nodes * per_node:
            pods.append(Tier(name=f"pod of {pod}", gpus=pod, link=link))
            link = _link(taper.link, full / taper.oversubscription, taper.latency_us)
    return link, pods


def _nics_per_gpu(node: _Node, per_node: int) -> float:
    """One GPU's share of its node's network cards.

    Idle neighbours free the cards that are shared, not those that stand next to another GPU.
    """
    return min(node.nics / per_node, max(1.0, node.nics / node.gpus))


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
