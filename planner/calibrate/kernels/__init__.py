"""Tables of measured kernels, which `planner replay` compares with predictions.

Not here: measured training steps (rows.py and what reads them), the formulas (figures/kernels/), or fits to tables
(tests/truth/kernel_fits).
"""
