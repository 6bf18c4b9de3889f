"""`recipes:`: every variant is trained under each of several recipes, and a verdict says how far it goes."""
