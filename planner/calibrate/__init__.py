"""Fits of a few physical coefficients to measurements: rows, runs and probes in, a calibration and its proof out.

What is fitted (fit.py) is judged on measurements it never saw (holdout.py). Not here: what the coefficients mean
(planner/spec/calibration.py), the formulas they go into, or measuring.
"""
