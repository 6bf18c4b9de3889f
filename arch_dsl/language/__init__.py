"""How a spec is written, read and refused: YAML with marks, typed specs, formulas, errors."""
