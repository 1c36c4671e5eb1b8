"""`planner timeline`: one step on an axis, as text, as a picture and as a trace that trace viewers open.

axis.py says what there is to draw, terminal.py, picture.py and trace.py draw it. Not here: when anything happens
(figures/timeline.py, spec/spans.py).
"""
