"""`planner show`: one plan as a drawing, in the terminal and as SVG.

picture.py says what there is to draw, terminal.py and svg.py draw it. Not here: any prediction, or the full rank map
(`planner groups`).
"""
