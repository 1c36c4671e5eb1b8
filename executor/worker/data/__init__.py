"""Rows of tokens for one rank: documents, examples, their order."""
