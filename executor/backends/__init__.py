"""Training frameworks as the executor launches them: rules, files to write, and reading them back."""
