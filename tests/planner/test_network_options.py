"""The network is an option of every question: it is what the answer rests on, its header names it, and a guess is said.

Not here: how long a call takes on a link (test_comm.py, test_links.py).
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import planner as library
from planner.ask.options import question
from planner.cli import planner
from planner.spec import presets
from planner.views.render import headline
from tui import inputs

GIVEN = {"model": "1b", "gpu": "a10g-24gb", "nodes": "2", "gpus_per_node": "2"}
NETWORK = {"inter_gbps": "400", "nics": "2", "intra_gbps": "512"}
QUESTIONS = {
    "estimate": (), "explain": (), "recommend": ("--top", "1"), "cost": ("--steps", "10"),
    "fit": ("--what", "micro-batch"), "sweep": ("--gpus", "4,8"),
}  # fmt: skip


def words(given: dict[str, str]) -> list[str]:
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_takes_the_network(name: str) -> None:
    """One number took two TOML files."""
    given = {key: value for key, value in GIVEN.items() if name != "sweep" or key != "nodes"}
    result = CliRunner().invoke(planner, [name, *words(given | NETWORK), *QUESTIONS[name]])
    assert result.exit_code == 0, result.output
    assert "a network of 400 Gbit/s between nodes (400 Gbit/s a GPU)" in result.stdout


def test_two_cards_for_two_gpus_are_a_card_each() -> None:
    cluster = question(GIVEN | NETWORK).cluster
    assert cluster.inter_link.bytes_per_s_per_direction == 50e9
    assert cluster.intra_link.bytes_per_s_per_direction == 64e9
    assert cluster.nics is not None and cluster.nics.per_node == 2


def test_the_library_and_the_explorer_s_fields_take_it_too() -> None:
    found = library.estimate(**GIVEN, **NETWORK)
    assert found.question.cluster.inter_link.bytes_per_s_per_direction == 50e9
    assert set(NETWORK) <= set(inputs.params())
    assert "--inter-gbps 400" in inputs.typed(GIVEN | NETWORK)[inputs.MORE]


@pytest.mark.parametrize(("field", "value"), [("inter_gbps", "0"), ("intra_gbps", "fast"), ("nics", "0")])
def test_a_network_that_is_none_is_refused_by_its_option(field: str, value: str) -> None:
    result = CliRunner().invoke(planner, ["estimate", *words(GIVEN | {field: value})])
    with pytest.raises(library.PlannerError) as refused:
        library.estimate(**GIVEN, **{field: value})
    assert refused.value.field == field and result.exit_code != 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (GIVEN, "100 GbE between nodes (50 Gbit/s a GPU, assumed: --inter-gbps)"),
        (GIVEN | {"inter_gbps": "200"}, "a network of 200 Gbit/s between nodes (100 Gbit/s a GPU)"),
        ({"model": "1b", "cluster": "dgx-h100", "nodes": "2"}, "InfiniBand NDR between nodes (400 Gbit/s a GPU)"),
        ({"model": "1b", "gpus": "16"}, "InfiniBand NDR between nodes (400 Gbit/s a GPU, assumed: --inter-gbps)"),
    ],
)
def test_the_header_names_the_network_and_says_when_it_is_assumed(given: dict[str, str], said: str) -> None:
    assert headline(question(given)).splitlines()[0].endswith(f", {said}")


def test_one_node_has_no_network_to_name() -> None:
    assert "between nodes" not in headline(question(GIVEN | {"nodes": "1"}))


@pytest.mark.parametrize("name", presets.names("clusters"))
def test_what_is_not_given_stays_as_the_preset_has_it(name: str) -> None:
    plain = presets.cluster(name, nodes=2)
    same = presets.cluster(name, nodes=2, nics=plain.nics.per_node if plain.nics else None)
    assert same == plain
    faster = presets.cluster(name, nodes=2, inter_gbps=1e5)
    assert (faster.intra_link, faster.gpus) == (plain.intra_link, plain.gpus)
    assert faster.inter_link.bytes_per_s_per_direction > plain.inter_link.bytes_per_s_per_direction
    assert faster.inter_link.latency_s == plain.inter_link.latency_s


def test_a_line_says_what_the_network_costs() -> None:
    """ "Does InfiniBand matter here?" was answered nowhere but deep in explain."""
    text = CliRunner().invoke(planner, ["estimate", *words(GIVEN)]).stdout
    assert "InfiniBand NDR against 100 GbE: " in text and "% if nothing overlapped." in text


def test_what_is_assumed_of_hosts_stands_under_the_table() -> None:
    """ "119.66 GiB of 512 GiB" of a host that nobody described."""
    tight = ["estimate", "--model", "7b", "--gpu", "4090", "--gpus", "8", "--method", "full"]
    said = "Assumes 512 GiB a host; --host-memory says what there is."
    assert said in CliRunner().invoke(planner, tight).stdout
    assert said not in CliRunner().invoke(planner, [*tight, "--host-memory", "512"]).stdout


@pytest.mark.parametrize(
    ("options", "sent"), [((), "16.78 MB"), (("--no-lora-upcast",), "8.39 MB")], ids=["fp32", "bf16"]
)
def test_lora_s_rows_show_what_ddp_sums(options: tuple[str, ...], sent: str) -> None:
    """Llama-2-7B at rank 8 of q and v: 4,194,304 trained elements."""
    asked = ["estimate", "--model", "llama-2-7b", "--gpus", "8", "--method", "lora", "--lora-rank", "8"]
    text = CliRunner().invoke(planner, [*asked, "--strategy", "ddp", *options]).stdout
    assert f"Under DDP a step sums only the adapters' gradients: {sent} for LoRA." in " ".join(text.split())
