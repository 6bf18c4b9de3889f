"""How a spec is changed: patches by path, and knobs."""
