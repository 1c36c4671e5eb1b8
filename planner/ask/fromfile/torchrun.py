"""The sizes that torchrun and DeepSpeed's launcher are given on a command line: processes a node, and nodes.

Source: torch 2.13 (torch/distributed/run.py), deepspeed 0.19.8 (launcher/runner.py). Not here: reading a command line
(commandline.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile.sheet import Sheet

NAME = "torchrun"
KEYS = "torchrun"
PROCESSES = ("nproc_per_node", "nproc-per-node", "num_gpus")
NODES = ("nnodes", "num_nodes")


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is a launcher's."""
    return any(key in data for key in PROCESSES)


def read(sheet: Sheet) -> None:
    """The whole table."""
    each, hosts = (next((key for key in keys if sheet.has(key)), keys[0]) for keys in (PROCESSES, NODES))
    nodes = sheet.whole(hosts) or 1
    if str(sheet.data.get(each)).lower() in ("gpu", "auto"):
        sheet.ignore(each, "every GPU of a node (--gpus says how many)")
    else:
        sheet.means("gpus", (sheet.whole(each) or 1) * nodes, each, hosts)
    sheet.means("nodes", nodes, hosts, note="" if sheet.has(hosts) else "torchrun's default")
