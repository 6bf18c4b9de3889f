"""What every room may use: one spelling of JSON, files written whole, quantities with units, child processes."""
