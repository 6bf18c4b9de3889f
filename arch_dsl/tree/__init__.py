"""A spec as a tree: blocks, paths, overrides of layers, its one spelling and its hash."""
