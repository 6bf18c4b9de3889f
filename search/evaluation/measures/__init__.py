"""What a study may measure of a finished trial: a file per measure, which `evaluate:` names."""

from search.measures.accuracy import Accuracy
from search.measures.activation_norms import ActivationNorms
from search.measures.attention_entropy import AttentionEntropy
from search.measures.bits_per_byte import BitsPerByte
from search.measures.decoding import Decoding
from search.measures.effective_rank import EffectiveRank
from search.measures.family import ALL, About, Curve, Found, Grid, Measure, Measures, Subject
from search.measures.first_token_attention import FirstTokenAttention
from search.measures.forget_gate import ForgetGate
from search.measures.gates import Gates
from search.measures.gradient_norms import GradientNorms
from search.measures.lm_eval import LmEval
from search.measures.local_attention import LocalAttention
from search.measures.loss_by_position import LossByPosition
from search.measures.loss_spikes import LossSpikes
from search.measures.massive_activations import MassiveActivations
from search.measures.memorisation import Memorisation
from search.measures.needle import Needle
from search.measures.perplexity import Perplexity
from search.measures.perplexity_by_domain import PerplexityByDomain
from search.measures.repeated import Induction, Recall
from search.measures.router_load import RouterLoad
from search.measures.speed import Speed
from search.measures.strong_attention import StrongAttention

__all__ = [
    "ALL",
    "About",
    "Accuracy",
    "ActivationNorms",
    "AttentionEntropy",
    "BitsPerByte",
    "Curve",
    "Decoding",
    "EffectiveRank",
    "FirstTokenAttention",
    "ForgetGate",
    "Found",
    "Gates",
    "GradientNorms",
    "Grid",
    "Induction",
    "LmEval",
    "LocalAttention",
    "LossByPosition",
    "LossSpikes",
    "MassiveActivations",
    "Measure",
    "Measures",
    "Memorisation",
    "Needle",
    "Perplexity",
    "PerplexityByDomain",
    "Recall",
    "RouterLoad",
    "Speed",
    "StrongAttention",
    "Subject",
]
