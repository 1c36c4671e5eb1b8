"""One step measured on one rank: bytes held, bytes sent, seconds."""
