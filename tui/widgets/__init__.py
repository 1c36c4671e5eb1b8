"""The parts of the screen. A widget shows values and posts messages; it computes nothing of the planner's."""
