"""Hosts beside this one: listed, reached by ssh, checked, and a run on them."""
