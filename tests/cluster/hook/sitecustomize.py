"""Makes a rank of the built-in trainer, or of another tool, one of hanging.py, wherever this folder is on PYTHONPATH:
Python reads a file of this name before it runs anything. For launchers that start these alone, as over ssh."""

import os
import sys
from pathlib import Path

if "RANK" in os.environ and {"executor.worker.train", "executor.worker.tool"} & set(sys.orig_argv):
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.cluster import hanging

    if "executor.worker.tool" in sys.orig_argv:
        hanging.in_a_tool(Path(sys.orig_argv[sys.orig_argv.index("executor.worker.tool") + 1]).absolute())
    else:
        hanging.run(sys.argv[1:])
