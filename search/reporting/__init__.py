"""The printed forms of a comparison. Its door: `report`, `main_table`, `shape`."""
