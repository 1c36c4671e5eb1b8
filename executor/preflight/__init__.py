"""Checks before anything is started: machine, limits, data, checkpoint, the user's script."""
