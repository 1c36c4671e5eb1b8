"""Scenes as SVG. Not here: what there is to draw (scene/), or characters (cells/)."""
