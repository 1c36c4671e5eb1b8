"""Weights out: gathered from the ranks, and as a Hugging Face folder."""
