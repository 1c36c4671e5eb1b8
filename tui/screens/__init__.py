"""The screens: the one where everything is seen, and the question where to save."""
