"""This host: its address, processes, control groups, cards, environment, and the code that runs."""
