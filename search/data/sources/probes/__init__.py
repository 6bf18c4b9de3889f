"""Probes: generated tasks that ask for one skill of a sequence model each, with a known chance level and ceiling."""

from search.data.probes.copying import Compression, Induction, SelectiveCopy
from search.data.probes.family import Probe
from search.data.probes.recall import AssociativeRecall, ForgettingRecall, KeyValueNeedle, Memorisation

__all__ = [
    "AssociativeRecall",
    "Compression",
    "ForgettingRecall",
    "Induction",
    "KeyValueNeedle",
    "Memorisation",
    "Probe",
    "SelectiveCopy",
]
