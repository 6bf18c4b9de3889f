"""`tune:`: rates of its own for each variant, halving among them, and the curve over the rate."""
