"""Coefficients from measurements: one file a group of a calibration's entries.

Not here: what the coefficients mean (calibration.py), or the rows they are fitted on (truth/).
"""
