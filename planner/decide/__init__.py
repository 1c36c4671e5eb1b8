"""Which layout: the space, the search, one estimate, one recommendation, and the reasons."""
