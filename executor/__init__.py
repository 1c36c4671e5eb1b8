"""Run a plan for real and compare what happened with what was predicted. Imports planner, never tui."""
