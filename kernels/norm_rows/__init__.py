"""What the norms share: rows normed in one pass (triton.py)."""
