"""A study made concrete: variants built and matched, and the trials that there should be by now.

Its door: `plan`, `builder`, `page`, `edits`, `estimate`, `auto_settings`.
"""
