"""What ranks say to each other: values that come back as they were said, and no pickles anywhere in the executor.

Not here: several ranks (tests/cluster: every checkpoint and every pipeline's weights are agreed on by these words).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import executor
from executor.folder.badloss import History
from executor.folder.checkpoints import Complete, File
from executor.worker.checkpoints.shards import ShardPiece
from executor.worker.world import words

PICKLED = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "pickle", "cloudpickle", "dill",
}  # fmt: skip
"""Names of torch.distributed and of modules by which a peer's bytes are unpickled."""


def test_no_module_of_the_executor_unpickles_what_a_peer_sends() -> None:
    files = sorted(Path(executor.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    found = [
        (path.name, name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _names(node)
        if name in PICKLED
    ]
    assert found == []


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [one.name.partition(".")[0] for one in node.names] + [getattr(node, "module", None) or ""]
    if isinstance(node, ast.Call):  # a name that is only written out, getattr(dist, "...")
        return [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return []


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


COMPLETE = Complete(
    step=3, optimizer_step=2, world_size=2, plan_hash="sha256:1", seed=1, global_batch_size=4,
    files={"a": File(size=2**40, sha256="0" * 64)},
)  # fmt: skip
SAID: list[tuple[Any, Any]] = [
    (None, str | None), ("", str), ("a\nb ♥", str), (2**62, int), (0.1 + 0.2, float), (math.inf, float),
    ({"a": "b"}, dict[str, str]), ([], list[str]), (History((1.5, 2.25), ((1, 2),), 7, 1), History),
    (("step-3", COMPLETE), tuple[str | None, Complete | None]), ((None, None), tuple[str | None, Complete | None]),
    ({"f": [ShardPiece("k", "n", "weight", (2, 3), ((0, 2), (0, 3)), (0, 6))]}, dict[str, list[ShardPiece]]),
    (("weight", (2, 3), "bfloat16"), tuple[str, tuple[int, ...], str] | None), ("x" * 2**20, str),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind"), SAID, ids=lambda one: str(one)[:20])
def test_what_is_said_comes_back_as_it_was(alone: None, value: Any, kind: Any) -> None:
    assert words.gathered(value, kind) == [value]
    assert words.of_rank_0(value, kind) == value


def test_a_path_is_said_as_its_name_and_no_number_as_none(alone: None) -> None:
    assert words.of_rank_0((Path("/a b"), float("nan")))[0] == "/a b"
    assert math.isnan(words.gathered(math.nan, float)[0])
