"""Measured rows and probes held against predictions: their formats, row -> Case, one row's prediction, statistics.

Not here: fitting coefficients to them (planner/calibrate), or measuring (executor/measure.py, executor/probe.py).
"""
