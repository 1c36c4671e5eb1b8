"""The run folder: its files, the starts and checkpoints in it, and what ranks write there."""
