"""What a person asks: a question checked value by value, read from options or from a file, and who launches it."""
