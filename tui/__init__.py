"""The terminal explorer: imports planner and executor, and nothing imports it."""
