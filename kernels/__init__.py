"""Fast forms of the few operations that models spend their time in, each next to the formula that defines it."""

from archlab.kernels.activations import ACTIVATIONS
from archlab.kernels.attention import ATTENTION
from archlab.kernels.device import Device
from archlab.kernels.experts import EXPERTS
from archlab.kernels.gate import GATE, GLU
from archlab.kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from archlab.kernels.linear_recurrence import LINEAR_RECURRENCE
from archlab.kernels.norm_gate import NORM_GATE
from archlab.kernels.norms import ADD_NORM, LAYER_NORM, RMS_NORM
from archlab.kernels.op import OPS, Ask, Case, Choice, Implementation, Op, forced, register, select
from archlab.kernels.rotary import ROTARY
from archlab.kernels.selective_scan import SELECTIVE_SCAN
from archlab.kernels.short_conv import SHORT_CONV
from archlab.kernels.slstm import SLSTM
from archlab.kernels.token_shift import TOKEN_SHIFT
from archlab.kernels.wkv4 import WKV4
from archlab.kernels.wkv7 import WKV7

for _op in (
    GATE, RMS_NORM, LAYER_NORM, ADD_NORM, ROTARY, NORM_GATE, GLU, TOKEN_SHIFT, SHORT_CONV, ATTENTION,
    LINEAR_RECURRENCE, EXPERTS, SELECTIVE_SCAN, WKV4, WKV7, SLSTM, LINEAR_CROSS_ENTROPY,
):  # fmt: skip
    register(_op)

__all__ = ["ACTIVATIONS", "OPS", "Ask", "Case", "Choice", "Device", "Implementation", "Op", "forced", "select"]
