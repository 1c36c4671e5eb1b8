"""Figures of real runs beside the plan's: reports, traces, matrices of runs, probes."""
