"""The frames that the table, the figures and the dashboard read. `compare.load_comparison` makes them."""
