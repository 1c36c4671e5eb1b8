"""Measured facts and how predictions stand against them: rows that others published, and probes of one's own machine.

Not here: fitting coefficients to them (planner.calibrate).
"""
