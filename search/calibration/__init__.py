"""The recipe that suits a study's model and data, found by trials of as long as its own take.

Its door: `calibrate`.
"""
