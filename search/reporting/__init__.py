"""The printed forms of a comparison: `blocks` decides what is said, the others how it looks."""
