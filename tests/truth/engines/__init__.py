"""Engines and model code that are not shipped: only published rows ran on them, and no new run does.

Importing this package makes them known, as an entry point does for an installed one. Not here: their code, or who reads
rows in their words (tests/truth/published).
"""

from pathlib import Path

from planner.inventory.packaged import ADAPTERS, PROJECTIONS
from planner.spec.engines import EngineFacts, PackagedEngine, add_engine
from tests.truth.engines.joint import Joint
from tests.truth.engines.llama_adapter import LlamaAdapter

PRESETS = str(Path(__file__).parent / "presets")

add_engine(
    PackagedEngine(
        facts=EngineFacts(
            name="galvatron",
            runtime="galvatron",
            superseded=True,
            zero_stages=(3,),
            splits=("tp", "pp"),
            copies="shards",
            sync=(False, True),
            schedules=(("gpipe", 1), ("1f1b", 1)),
            sequence_parallel=True,
        ),
        code="tests.truth.engines.galvatron:ENGINE",
        presets=PRESETS,
    )
)
add_engine(
    PackagedEngine(
        facts=EngineFacts(
            name="internevo",
            runtime="internevo",
            superseded=True,
            zero_stages=(0, 1),
            splits=("tp", "pp"),
            schedules=(("1f1b", 1), ("interleaved", 2)),
            sequence_parallel=True,
        ),
        code="tests.truth.engines.internevo:ENGINE",
        presets=PRESETS,
    )
)
PROJECTIONS["joint"] = Joint()
ADAPTERS.update({"llama-adapter": LlamaAdapter(False), "llama-adapter-v2": LlamaAdapter(True)})
