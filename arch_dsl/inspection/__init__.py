"""A model shown, drawn, and compared with another one slot by slot."""
