"""The model of a plan on one rank: built, filled, adapted, quantized, cut into pieces."""
