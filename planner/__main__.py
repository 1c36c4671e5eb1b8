"""`python -m planner`."""

from planner.basics.start import planner

planner()
