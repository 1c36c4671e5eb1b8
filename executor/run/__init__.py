"""A run from its preparation to its record: prepared, launched, tried again, resumed, joined, exported."""
