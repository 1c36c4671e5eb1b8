"""Claims about traces of few layers and their extrapolation, on fake tensors in this process. Not here: real runs of the
same layouts (tests/cluster/test_trace.py)."""
