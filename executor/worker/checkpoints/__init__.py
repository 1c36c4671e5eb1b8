"""Checkpoints of one rank: saved, found, fetched, loaded."""
