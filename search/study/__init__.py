"""The study file: read, checked, written out, its schema.

Its door: `study`, `load`, `schema`, `scales`, `asked`, `changes`, `files`, `completion`.
"""
