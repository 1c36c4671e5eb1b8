"""Rows that other people published, read in their words: what `make accuracy` and `make calibration` know more than the
planner does. Facts with their sources, the mapping to the planner's questions, and nothing about figures.
"""
