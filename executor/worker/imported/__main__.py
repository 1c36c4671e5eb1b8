"""Describe the model of a config.json, in a process of its own: `python -m executor.worker.imported CONFIG OUT NAME`.

Writes a model/1 file, or one line on stderr and exit code 2. Not here: who starts it, and for how long it may run
(planner/spec/importing.py, executor/cli/importing.py).
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

MOST_BYTES = 4 * 2**30
"""Memory that a description may take."""


def main() -> int:
    """Describe, write, and say what was wrong."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    from executor.worker.imported.describe import NotDescribed, config_of, describe, first_line
    from executor.worker.imported.facts import spec_of
    from planner.basics import reading
    from planner.basics.errors import PlannerError
    from planner.spec.huggingface import decoded
    from planner.spec.importing import TRUSTED, WITH_IMAGES, write_described

    config, out, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    folder = config.parent.resolve() if TRUSTED in sys.argv[4:] else None
    try:
        raw = decoded(reading.read_bytes(config), str(config))
        described = describe(raw, folder=folder, images=WITH_IMAGES in sys.argv[4:])
        write_described(spec_of(name, raw, config_of(raw, folder), described), out)
    except PlannerError as error:
        print(error.sentence, file=sys.stderr)
        return error.exit_code
    except NotDescribed as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:  # of a stranger's configuration, in code that is not ours
        if os.environ.get("MESHWRIGHT_DEBUG"):
            raise
        print(f"its code fails with {first_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
