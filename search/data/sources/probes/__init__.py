"""Probes: generated tasks that ask for one skill of a sequence model each, with a known chance level and ceiling."""

from archlab.search.data.sources.probes.copying import Compression, Induction, SelectiveCopy
from archlab.search.data.sources.probes.family import Probe
from archlab.search.data.sources.probes.recall import AssociativeRecall, ForgettingRecall, KeyValueNeedle, Memorisation

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
