"""Seconds of single kernels on one GPU, from the numbers of presets/kernel_times: products, attention, experts,
collectives inside a domain and across nodes, and what only moves bytes. One file a kind; all start from `products.py`.

Not here: what a layout asks for (work.py), or how kernels make up a step (steptime.py).
"""
