"""Plan distributed training: will it fit, how to split it, how fast will it be."""

__version__ = "0.1.0"
