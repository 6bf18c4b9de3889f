"""Which trials stand in a table, and how two variants differ."""
