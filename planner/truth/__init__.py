"""Measured rows held against predictions: the row format, row -> Case, one row's prediction, statistics, the page.

Not here: fitting coefficients to them (planner/calibrate), or measuring (executor/measure.py).
"""
