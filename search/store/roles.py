"""What a trial is for: the words that stand in the trial table."""

from __future__ import annotations

ROLE = "screen"  # of a probe's row, and of one at a rung of a search: what a section trains for itself
