"""A document: read from files, spelt, drawn at random, kept on disk."""
