"""Options that several commands of `executor` take.

Not here: any command (the modules beside this), or what an option means to a run (badloss.py, checkpoint_policy.py).
"""

from __future__ import annotations

import click

from executor.folder import badloss
from planner.basics import command
from planner.basics.help_page import option
from planner.spec.spans import FIRST_RECORDED

ENV = option(
    "run",
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Environment variable of the ranks; without a value, the caller's. Repeatable.",
)

MASTER = option(
    "question",
    "--master",
    metavar="HOST[:PORT]",
    help="With hosts by ssh: node 0 as the others reach it (default: found).",
)

REMOTE_DIR = option(
    "question",
    "--remote-dir",
    metavar="DIR",
    help="With a host file: where a host that does not see the run folder makes its own (default: ~/.cache).",
)

YES = option("question", "--yes", often=True, is_flag=True, help="Do not ask before starting.")

RANDOM_WEIGHTS = option("run", "--random-weights", is_flag=True, help="Train adapters on random weights.")
DEMO_DATA = option("run", "--demo-data", is_flag=True, help="Train on the demo's text if the plan has no data.")

TRUST_OWNER = option("question", "--trust-owner", is_flag=True, help="Take RUN, or a file of it, from another user.")

CHECK = option(
    "numbers", "--check", "judge", is_flag=True, help="Exit 6 when a measurement is outside the predicted band."
)

MEET_TIMEOUT = option(
    "run",
    "--meet-timeout",
    type=click.FloatRange(min=1),
    callback=command.finite,
    default=600.0,
    show_default=True,
    help="Seconds for all ranks to join the process group.",
)

MAX_RESTARTS = option(
    "run",
    "--max-restarts",
    often=True,
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="Restarts after a rank or a node died or hung. Each resumes from the newest checkpoint.",
)

STALL_TIMEOUT = option(
    "run",
    "--stall-timeout",
    type=click.FloatRange(min=1),
    callback=command.finite,
    default=None,
    help="Seconds without progress after which a run counts as hung (default: 60, or 20 median steps).",
)

CHECKPOINT_EVERY = option(
    "run",
    "--checkpoint-every",
    often=True,
    metavar="WHEN",
    help="When a checkpoint is written. Every 20 steps (20) or 10 minutes (10m), on a signal alone (signal), or never; "
    "on a signal in any case (default: the plan's interval, where it states one, else never).",
)

KEEP_LAST = option("run", "--keep-last", type=int, metavar="K", help="Checkpoints to keep (default: 2).")

KEEP_EVERY = option("run", "--keep-every", type=int, metavar="N", help="Keep the checkpoints of every N-th step, too.")

PROFILE = option(
    "output",
    "--profile",
    type=int,
    is_flag=False,
    flag_value=FIRST_RECORDED,
    metavar="[STEP]",
    help=f"Record this step on every rank, for planner timeline --beside (default: {FIRST_RECORDED}).",
)

DEBUG_NETWORK = option("output", "--debug-network", is_flag=True, help="Enable the debug logs of NCCL and torch.")

ON_BAD_LOSS = option(
    "run",
    "--on-bad-loss",
    type=command.OneOf(badloss.ACTIONS),
    help="When a loss or a gradient norm is not finite, or a loss explodes: stop the run, skip the step, or go back to "
    "the newest checkpoint and leave out the batches since (default: stop).",
)

LOSS_SPIKE = option(
    "run",
    "--loss-spike",
    type=click.FloatRange(min=0),
    callback=command.finite,
    metavar="DEVIATIONS",
    help="Robust deviations above the median from which a loss counts as exploding (default: "
    f"{badloss.FACTOR:g} with skip and rollback; with stop, and with 0, none does).",
)

SPIKE_WINDOW = option(
    "run",
    "--spike-window",
    type=click.IntRange(min=3),
    metavar="STEPS",
    help=f"Good steps whose losses give median and deviation (default: {badloss.WINDOW}).",
)

MAX_SKIPS = option(
    "run",
    "--max-skips",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"With skip: bad steps in a row that are skipped before the run ends (default: {badloss.MAX_SKIPS}).",
)

TOLERANCE = option(
    "numbers",
    "--tolerance",
    multiple=True,
    metavar="NAME=PERCENT",
    help="Band for --check: memory=5, payload=0, time=30. Repeatable.",
)
