"""What a study may measure of a finished trial: a file per measure, which `evaluate:` names."""

from search.measures.bits_per_byte import BitsPerByte
from search.measures.family import ALL, About, Curve, Found, Grid, Measure, Measures, Subject
from search.measures.loss_by_position import LossByPosition
from search.measures.perplexity import Perplexity
from search.measures.perplexity_by_domain import PerplexityByDomain

__all__ = [
    "ALL",
    "About",
    "BitsPerByte",
    "Curve",
    "Found",
    "Grid",
    "LossByPosition",
    "Measure",
    "Measures",
    "Perplexity",
    "PerplexityByDomain",
    "Subject",
]
