"""One rank of a probe: compute, links, facts."""
