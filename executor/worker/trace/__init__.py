"""One rank's step on fake tensors."""
