"""Names of studies that are made of another study."""

from __future__ import annotations

import hashlib

LONGEST = 63  # characters of a study's name


ROUND = ".challenge-"  # before the number of a challenger's study


def with_ending(study: str, ending: str) -> str:
    """The study's name with an ending; of one that is too long the beginning, and a digest of the whole."""
    if len(study) + len(ending) > LONGEST:
        digest = hashlib.sha256(study.encode()).hexdigest()[:6]
        study = f"{study[: LONGEST - len(ending) - 7]}-{digest}"
    return f"{study.rstrip('.')}{ending}"
