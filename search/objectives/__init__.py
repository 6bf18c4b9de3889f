"""What a model is asked of a text: a family of objectives that turn windows of the stream into batches."""

from archlab.search.objectives.denoising import Denoiser, Denoisers, SpanCorruption, corrupted_lengths
from archlab.search.objectives.examples import Answers, Targets
from archlab.search.objectives.family import Causal, Lengths, Objective, Paired, has_encoder
from archlab.search.objectives.masking import Masked, MaskedEncoder, Prefix

__all__ = [
    "Answers",
    "Causal",
    "Denoiser",
    "Denoisers",
    "Lengths",
    "Masked",
    "MaskedEncoder",
    "Objective",
    "Paired",
    "Prefix",
    "SpanCorruption",
    "Targets",
    "corrupted_lengths",
    "has_encoder",
]
