"""`prune:`: trials that end early, and what they are held against."""
