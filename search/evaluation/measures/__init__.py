"""What a study may measure of a finished trial: a file per measure, which `evaluate:` names."""

# Members are listed in the order of these imports.
# isort: off
from archlab.search.evaluation.measures.accuracy import Accuracy
from archlab.search.evaluation.measures.inside.activation_norms import ActivationNorms
from archlab.search.evaluation.measures.inside.attention_entropy import AttentionEntropy
from archlab.search.evaluation.measures.bits_per_byte import BitsPerByte
from archlab.search.evaluation.measures.decoding import Decoding
from archlab.search.evaluation.measures.inside.effective_rank import EffectiveRank
from archlab.search.evaluation.family import ALL, About, Curve, Found, Grid, Measure, Measures, Subject
from archlab.search.evaluation.measures.inside.first_token_attention import FirstTokenAttention
from archlab.search.evaluation.measures.inside.forget_gate import ForgetGate
from archlab.search.evaluation.measures.inside.gates import Gates
from archlab.search.evaluation.measures.inside.gradient_norms import GradientNorms
from archlab.search.evaluation.measures.lm_eval import LmEval
from archlab.search.evaluation.measures.inside.local_attention import LocalAttention
from archlab.search.evaluation.measures.loss_by_position import LossByPosition
from archlab.search.evaluation.measures.loss_spikes import LossSpikes
from archlab.search.evaluation.measures.inside.massive_activations import MassiveActivations
from archlab.search.evaluation.measures.memorisation import Memorisation
from archlab.search.evaluation.measures.needle import Needle
from archlab.search.evaluation.measures.perplexity import Perplexity
from archlab.search.evaluation.measures.perplexity_by_domain import PerplexityByDomain
from archlab.search.evaluation.measures.repeated_tokens import Induction, Recall
from archlab.search.evaluation.measures.inside.router_load import RouterLoad
from archlab.search.evaluation.measures.speed import Speed
from archlab.search.evaluation.measures.inside.strong_attention import StrongAttention
# isort: on

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
