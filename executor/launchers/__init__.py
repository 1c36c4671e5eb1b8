"""Ways to start a plan's processes: one file each."""
