"""One rank's surroundings: its processor, limits, time-outs, state, last words."""
