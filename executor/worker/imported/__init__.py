"""A description of a model that its own code gives, on fake tensors."""
