"""A run while it goes and how it ended: agents, hangs, failures, stragglers, one verdict."""
