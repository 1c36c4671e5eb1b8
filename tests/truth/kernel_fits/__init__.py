"""Fits of the numbers of presets/kernel_times to the tables of tests/truth/kernels.

Not here: who writes or judges them (scripts/kernels), or what a kernel takes (planner/figures/kernels).
"""
