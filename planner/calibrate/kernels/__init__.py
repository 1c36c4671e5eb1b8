"""Tables of measured kernels: read, predicted, and fitted.

Not here: measured training steps (rows.py and what reads them), or the formulas (figures/kernels/).
"""
