"""Rows that other people published, read in their words: what `make accuracy` and `make calibration` know more than the
planner does. Facts with their sources, the mapping to the planner's questions, and nothing about figures.
"""

import tests.truth.engines  # noqa: F401 (engines that rows name and the planner does not ship)
