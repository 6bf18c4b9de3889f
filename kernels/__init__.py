"""Fast forms of the few operations that models spend their time in, each next to the formula that defines it."""

from kernels.activations import ACTIVATIONS
from kernels.attention import ATTENTION
from kernels.device import Device
from kernels.experts import EXPERTS
from kernels.gate import GATE
from kernels.glu import GLU
from kernels.linear_recurrence import LINEAR_RECURRENCE
from kernels.op import OPS, Ask, Case, Choice, Implementation, Op, register, select
from kernels.rms_norm import RMS_NORM
from kernels.selective_scan import SELECTIVE_SCAN
from kernels.wkv4 import WKV4

for _op in (GATE, RMS_NORM, GLU, ATTENTION, LINEAR_RECURRENCE, EXPERTS, SELECTIVE_SCAN, WKV4):
    register(_op)

__all__ = ["ACTIVATIONS", "OPS", "Ask", "Case", "Choice", "Device", "Implementation", "Op", "select"]
