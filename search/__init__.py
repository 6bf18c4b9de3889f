"""How models are compared: a room for each step from a study's file to its table (docs/developers/architecture.md)."""
