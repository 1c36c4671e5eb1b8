"""Host memory by hand: what a node's ranks need together, which layers' tensors wait, and how long they travel.

Not here: whole offloads (test_offload.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planner.figures import host
from planner.inventory import TERMS, Moment
from planner.inventory.tape import ACTIVATIONS
from planner.inventory.tensors import Size
from planner.parallelism.offload import Transfer


def live(size: float) -> tuple[Size, ...]:
    place = TERMS.index(ACTIVATIONS)
    return tuple(Size(per_token=size if at == place else 99.0) for at in range(len(TERMS)))


WALKED: Any = SimpleNamespace(layer={"dense": live(10.0), "layer": live(7.0)})
"""A dense layer keeps 10 bytes a token, another 7."""


def on(**cluster: Any) -> Any:
    return SimpleNamespace(cluster=SimpleNamespace(**cluster))


@pytest.mark.parametrize(
    ("rank", "node", "fits"),
    [(10.0, 40.0, True), (10.0, 39.9, False), (0.0, 1.0, True), (0.0, None, True), (1.0, None, None)],
)
def test_a_node_s_memory_holds_all_of_its_ranks_or_nobody_knows(rank: float, node: float | None, fits: Any) -> None:
    case = on(gpus_per_node=4, host_memory_bytes=node)
    assert host.host_fits(case, rank) is fits
    assert host.host_node_bytes(case, rank) == 4 * rank


@pytest.mark.parametrize(
    ("unit", "layer", "waits"),
    [
        ("embed", -1, 0.0), ("tail", -1, 48.0), ("loss", -1, 48.0), ("dense", 0, 0.0), ("dense", 1, 0.0),
        ("layer", 2, 10.0), ("layer", 3, 20.0), ("layer", 6, 41.0),
    ],
)  # fmt: skip
def test_layers_before_the_one_at_work_wait(unit: str, layer: int, waits: float) -> None:
    """Of two dense layers and five others."""
    case: Any = SimpleNamespace(kind_by_layer=("dense",) * 2 + ("layer",) * 5)
    moment = Moment("forward", unit, layer, live(100.0), 0, 0)

    found = host.on_device(case, moment, WALKED, 0.0)

    assert found.live[TERMS.index(ACTIVATIONS)].per_token == 100.0 - waits


@pytest.mark.parametrize(
    ("kinds", "waits"),
    [("", 0.0), ("d", 0.0), ("ddd", 20.0), ("ddl", 20.0), ("ddllll", 20.0 + 3 * 7.0), ("dldl", 2 * 10.0 + 7.0)],
)
def test_the_layer_finished_last_is_still_on_its_way(kinds: str, waits: float) -> None:
    names = ["dense" if one == "d" else "layer" for one in kinds]

    assert host._waiting(WALKED, names).per_token == waits


def test_a_size_below_nothing_is_nothing() -> None:
    case: Any = SimpleNamespace(layout=SimpleNamespace(micro_batch_size=2), rank_seq_len=3)
    assert host._at(case, Size(per_token=0.05)) == pytest.approx(0.3)
    assert host._at(case, Size(per_token=-1.0)) == 0.0


def test_what_travels_takes_its_bytes_over_the_link_and_an_unknown_link_is_none() -> None:
    link = SimpleNamespace(bytes_per_s_per_direction=10.0)
    there = host.transfer_seconds(on(host_link=link), Transfer("forward", 30.0, 0.0, True))
    assert there == 3.0 == host.transfer_seconds(on(host_link=link), Transfer("backward", 0.0, 30.0, True))
    assert host.transfer_seconds(on(host_link=None), Transfer("forward", 30.0, 0.0, True)) is None


@pytest.mark.parametrize(
    ("offloads", "apart", "there"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_step_is_on_the_host_where_its_states_wait_in_another_memory(
    offloads: bool, apart: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "update_accesses_bytes", lambda case: 80.0)
    case = on(host_memory_bytes_per_s=40.0, gpus_per_node=4)
    case.layout, case.host_apart = SimpleNamespace(offload_optimizer=offloads), apart
    assert host.steps_on_host(case) is there
    # ranks of a node share what steps reach of its memory's rate
    assert host.update_seconds(case) == pytest.approx(80.0 * 4 / (0.14 * 40.0) if there else 0.0)
    case.cluster.host_memory_bytes_per_s = None
    assert host.update_seconds(case) == (None if there else 0.0)
