"""`evaluate:`: what is measured, what a finished trial still lacks, and its tables."""
