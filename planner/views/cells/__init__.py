"""Scenes as characters of a terminal. Not here: what there is to draw (scene/), or pictures (svg/)."""
