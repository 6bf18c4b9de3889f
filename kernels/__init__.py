"""Fast forms of the few operations that models spend their time in, each next to the formula that defines it."""

from kernels.activations import ACTIVATIONS
from kernels.add_norm import ADD_NORM
from kernels.attention import ATTENTION
from kernels.device import Device
from kernels.experts import EXPERTS
from kernels.gate import GATE
from kernels.glu import GLU
from kernels.layer_norm import LAYER_NORM
from kernels.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from kernels.linear_recurrence import LINEAR_RECURRENCE
from kernels.norm_gate import NORM_GATE
from kernels.op import OPS, Ask, Case, Choice, Implementation, Op, forced, register, select
from kernels.rms_norm import RMS_NORM
from kernels.rotary import ROTARY
from kernels.selective_scan import SELECTIVE_SCAN
from kernels.token_shift import TOKEN_SHIFT
from kernels.wkv4 import WKV4

for _op in (
    GATE, RMS_NORM, LAYER_NORM, ADD_NORM, ROTARY, NORM_GATE, GLU, TOKEN_SHIFT, ATTENTION, LINEAR_RECURRENCE, EXPERTS,
    SELECTIVE_SCAN, WKV4, LINEAR_CROSS_ENTROPY,
):  # fmt: skip
    register(_op)

__all__ = ["ACTIVATIONS", "OPS", "Ask", "Case", "Choice", "Device", "Implementation", "Op", "forced", "select"]
