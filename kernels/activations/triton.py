"""The named activations and their derivatives inside Triton kernels, in float32."""

import triton
import triton.language as tl

from archlab.kernels import interpret

interpret.apply()


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, NAME: tl.constexpr):
    """act(x). NaN stays NaN, as in torch: comparisons are written so that they keep x where x is not a number."""
    if NAME == "sigmoid":
        return tl.sigmoid(x)
    elif NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "tanh":
        return tanh(x)
    elif NAME == "ns_sigmoid":
        return 0.5 + 0.5 * tl.sigmoid(x)
    elif NAME == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif NAME == "relu2":
        return tl.where(x <= 0.0, 0.0, x * x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(NAME == "identity")
        return x


@triton.jit
def slope(x, NAME: tl.constexpr):
    """act'(x)."""
    if NAME == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1.0 - s)
    elif NAME == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif NAME == "tanh":
        t = tanh(x)
        return 1.0 - t * t
    elif NAME == "ns_sigmoid":
        s = tl.sigmoid(x)
        return 0.5 * s * (1.0 - s)
    elif NAME == "relu":
        return tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "relu2":
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif NAME == "gelu":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(NAME == "identity")
        return tl.full(x.shape, 1.0, tl.float32)
