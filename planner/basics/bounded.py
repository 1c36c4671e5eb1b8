"""Number types with a bound that holds wherever a file with such a field is read.

Not here: bounds of a single field (with the field), or numbers as people type them (quantities.py).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
