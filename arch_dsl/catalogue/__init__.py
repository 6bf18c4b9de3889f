"""The language described: the page of primitives and the JSON Schema."""
