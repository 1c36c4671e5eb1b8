"""A rank that loses the others unless NCCL's and torch's debugging is on, and then finishes. Not here: any network."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from executor.worker.world import lastwords


def main(folder: Path) -> None:
    """One rank."""
    with lastwords.recorded(folder):
        if (os.environ.get("TORCH_DISTRIBUTED_DEBUG"), os.environ.get("NCCL_DEBUG")) != ("DETAIL", "INFO"):
            raise ConnectionResetError("the other is gone")
        world = json.loads((folder / "plan.json").read_text())["layout"]["dp_replicate"]
        (folder / "mesh" / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"world_size": world}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
