"""A room for each section of a study file: its spec, its decisions, what the report says of it."""
