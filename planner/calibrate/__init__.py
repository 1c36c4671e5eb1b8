"""From measurements to coefficients: what rows, runs and probes say of software and machines.

Not here: the calibration that they make (planner.calibration), or the formulas that its numbers go into.
"""
