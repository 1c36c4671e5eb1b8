"""Fit presets/kernel_times to the tables of measured kernels, or judge the fits by what they did not see.

    python -m scripts.kernels fit                 write presets/kernel_times (make kernels, a minute)
    python -m scripts.kernels judge [--process]   errors on kernels left out; with those of a Gaussian process (minutes)

Not here: what either does (fit.py, judge.py).
"""

from __future__ import annotations

import argparse

from scripts.kernels import fit, judge

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fit", "judge"))
    parser.add_argument("--process", action="store_true", help="also a Gaussian process on the same splits of products")
    parser.add_argument("--gpus", default="", help="only GPUs whose names begin so, separated by commas")
    given = parser.parse_args()
    only = tuple(given.gpus.split(",")) if given.gpus else ("",)
    if given.what == "fit":
        fit.write(only)
    else:
        print(judge.page(only, given.process))
