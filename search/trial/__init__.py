"""One trial: its key, and the files that it leaves in its folder."""
