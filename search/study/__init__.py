"""The study file: read, checked, written out, its schema."""
