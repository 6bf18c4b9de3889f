"""`design:` and `ablate:`: variants generated from components, and what one component does over all else."""
