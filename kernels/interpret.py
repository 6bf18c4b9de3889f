"""Makes Triton's interpreter compute bfloat16: as it comes, it stores bfloat16 as uint16 and computes on the bits.

The values that it gets wrong are silent (sums, products and comparisons of bit patterns; casts truncate), so every
test of a bfloat16 kernel on the CPU depends on this. Two warnings go with it: of numpy about infinities and NaN, which
a GPU computes in silence, and of Triton 3.6 where a loop's bounds are known at run time only. Applied only under
TRITON_INTERPRET=1, for Triton 3.6 to 3.9.
"""

import os
from typing import Any

import numpy as np

counting = False  # set it before kernels are imported: they take the tiles that they have on a card


def active() -> bool:
    """Whether Triton's kernels run in its interpreter in this process, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def small_tiles() -> bool:
    """Whether kernels take tiles that suit small tests: in the interpreter, but where they are counted as on a card."""
    return active() and not counting


def apply() -> None:
    """Wrap the interpreter's arithmetic, once: bfloat16 operands go up to float32, results are rounded to nearest."""
    if not active():
        return
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    if getattr(InterpreterBuilder, "bfloat16_is_computed", False):
        return
    InterpreterBuilder.bfloat16_is_computed = True
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(InterpreterBuilder, name, _in_float32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.cast_impl = _rounding_cast(InterpreterBuilder.cast_impl)
    dot, patch = InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def indexing(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, _up(a), _up(b), *rest)
    interpreter._patch_lang_tensor = indexing


def _is_bfloat16(handle: Any) -> bool:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not isinstance(handle, TensorHandle):
        return False
    return bool(handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16)


def _up(handle: Any) -> Any:
    """A bfloat16 handle in float32 (its bits are float32's upper half); any other handle as it is."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not _is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _down(values: Any) -> Any:
    """float32 values as a bfloat16 handle, rounded to nearest, ties to even."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(values), np.uint16(0x7FC0), rounded), tl.bfloat16)


def _in_float32(original: Any) -> Any:
    def wrapped(self: Any, *operands: Any) -> Any:
        with np.errstate(all="ignore"):
            result = original(self, *map(_up, operands))
        if not any(map(_is_bfloat16, operands)):
            return result
        return _down(result.data) if result.data.dtype == np.float32 else result

    return wrapped


def _rounding_cast(original: Any) -> Any:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        import triton.language as tl

        source = _up(source)
        if target.scalar == tl.bfloat16:
            return _down(source.data.astype(np.float32))
        return source if source.dtype.scalar == target.scalar else original(self, source, target)

    return cast_impl
