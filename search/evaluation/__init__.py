"""What a measure is, and the job that computes some of a finished trial. Its door: `family`, `measures`, `job`."""
