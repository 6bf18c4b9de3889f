"""`seeds:`: how many, who gets more, and the noise that a store knows."""
