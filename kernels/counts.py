"""What Triton kernels read, write and compute, counted in the interpreter (TRITON_INTERPRET=1).

Of each launch some programs run, spread evenly over the grid; what they do stands for all of them. What a launch writes
is then incomplete, so nothing is to be compared with it.
"""

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor

from archlab.kernels import interpret


@dataclass
class Launch:
    """One launch of a kernel: `arguments` and `meta` are what it was called with, `grid` its programs along each axis.

    `read_bytes` and `written_bytes` are asked for by all programs, again and again; `touched_bytes` has the size of
    each tensor that is read, and of each that is written, once. `products` has the FLOPs of matrix products (2mnk) by
    how they are computed: `half`, or in float32 `tf32`, `tf32x3`, `ieee`. `elements` are numbers that sums and the like
    give, `functions` those that exponentials and the like give.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    meta: dict[str, Any]
    grid: tuple[int, ...] = ()
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    elements: float = 0.0
    functions: float = 0.0
    products: dict[str, float] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """That of the kernel's function."""
        return str(self.kernel.__name__)

    @property
    def programs(self) -> int:
        """How many there are in all."""
        return prod(self.grid)

    def tensors(self) -> list[Tensor]:
        """Those among the arguments."""
        return [*_tensors((self.arguments, *self.meta.values()))]

    @property
    def touched_bytes(self) -> int:
        """Of tensors that are read, and of those that are written."""
        sizes = [x.nbytes for x in self.tensors()]
        return sum(sizes[place] for places in (self.read, self.written) for place in places)

    def touch(self, addresses: Any, mask: Any, places: set[int]) -> None:
        """Notes to which tensor some addresses belong."""
        some = addresses[np.broadcast_to(mask, addresses.shape)]
        first = int(some[0]) if some.size else 0
        for place, x in enumerate(self.tensors()):
            reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
            if x.data_ptr() <= first < x.data_ptr() + reach * x.itemsize:
                places.add(place)
                return


def _tensors(given: Any) -> Iterator[Tensor]:
    """All that tuples hold."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple):
        for each in given:
            yield from _tensors(each)


@contextmanager
def counted(programs: int = 8) -> Iterator[list[Launch]]:
    """The launches inside it, of which each runs so many programs at most. Raises RuntimeError without the
    interpreter."""
    if not interpret.active():
        raise RuntimeError("TRITON_INTERPRET=1 is not set: kernels are counted in the interpreter alone")
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    interpret.apply()
    found: list[Launch] = []
    wrappers = {"create_masked_load": _load, "create_masked_store": _store, "create_dot": _product}
    wrappers |= {"create_atomic_rmw": _atomic, "unary_op": _results("functions")}
    wrappers |= dict.fromkeys(("binary_op", "ternary_op"), _results("elements"))
    kept = {name: getattr(InterpreterBuilder, name) for name in wrappers}
    call = GridExecutor.__call__
    for name, wrapper in wrappers.items():
        setattr(InterpreterBuilder, name, wrapper(kept[name], found))
    GridExecutor.__call__ = _sampled(call, found, programs)
    try:
        yield found
    finally:
        GridExecutor.__call__ = call
        for name, original in kept.items():
            setattr(InterpreterBuilder, name, original)


def _sampled(call: Any, found: list[Launch], programs: int) -> Any:
    """A launch of some programs; its counts are scaled to all."""
    from triton.runtime import interpreter

    def launch(self: Any, *arguments: Any, **meta: Any) -> None:
        builder, kernel, mine = interpreter.interpreter_builder, self.fn, Launch(self.fn, arguments, meta)
        chosen: set[tuple[int, ...]] = set()

        def runs() -> bool:
            if not mine.grid:
                mine.grid = tuple(int(each) for each in builder.grid_dim)
                chosen.update(_spread(mine.grid, programs))
            return tuple(builder.grid_idx) in chosen

        def some(**given: Any) -> None:  # knows nothing but its closure
            if runs():
                kernel(**given)

        self.fn = _like(some, kernel)
        found.append(mine)
        try:
            with np.errstate(all="ignore"):  # of what other programs would have written
                call(self, *arguments, **meta)
        finally:
            self.fn = kernel
        share = mine.programs / max(len(chosen), 1)
        for name in ("read_bytes", "written_bytes", "elements", "functions"):
            setattr(mine, name, getattr(mine, name) * share)
        mine.products = {how: flops * share for how, flops in mine.products.items()}

    return launch


def _like(function: Any, kernel: Any) -> FunctionType:
    """The function with the globals and the signature of a kernel, which the interpreter looks at."""
    made = FunctionType(function.__code__, kernel.__globals__, kernel.__name__, None, function.__closure__)
    made.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]  # PEP 362; mypy knows no such field
    made.__annotations__ = kernel.__annotations__
    return made


def _spread(grid: tuple[int, ...], programs: int) -> set[tuple[int, ...]]:
    """Programs from all parts of a grid, each with the one as far from the end as it is from the start: where costs
    grow evenly, as those of a causal mask do, the mean of two is that of all. All of a small grid."""
    count, drawn = prod(grid), random.Random(0)
    places = {*range(count)} if count <= programs else set[int]()
    half = max(programs // 2, 1)
    for number in range(0 if places else half):
        place = int((number + drawn.random()) / half * count)
        places |= {place, count - 1 - place}
    return {(place // (grid[1] * grid[2]), place // grid[2] % grid[1], place % grid[2]) for place in places}


def _load(original: Any, found: list[Launch]) -> Any:
    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        mine, size = found[-1], pointers.get_element_ty().primitive_bitwidth // 8
        mine.read_bytes += size * int(np.broadcast_to(mask.data, pointers.data.shape).sum())
        mine.touch(pointers.data, mask.data, mine.read)
        return original(self, pointers, mask, *rest)

    return counted_load


def _store(original: Any, found: list[Launch]) -> Any:
    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mine, size = found[-1], pointers.get_element_ty().primitive_bitwidth // 8
        mine.written_bytes += size * int(np.broadcast_to(mask.data, pointers.data.shape).sum())
        mine.touch(pointers.data, mask.data, mine.written)
        return original(self, pointers, value, mask, *rest)

    return counted_store


def _atomic(original: Any, found: list[Launch]) -> Any:
    def counted_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mine, size = found[-1], pointers.get_element_ty().primitive_bitwidth // 8
        mine.written_bytes += 2 * size * int(np.broadcast_to(mask.data, pointers.data.shape).sum())
        mine.touch(pointers.data, mask.data, mine.written)
        return original(self, operation, pointers, value, mask, *rest)

    return counted_atomic


def _product(original: Any, found: list[Launch]) -> Any:
    def counted_product(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        how, products = "half" if a.dtype.scalar.primitive_bitwidth < 32 else precision.name.lower(), found[-1].products
        products[how] = products.get(how, 0.0) + 2 * a.data.size * b.data.shape[-1]
        return original(self, a, b, d, precision, *rest)

    return counted_product


def _results(of: str) -> Any:
    """Counts the floating-point numbers that an operation gives, under the name of a launch's field."""

    def wrapper(original: Any, found: list[Launch]) -> Any:
        def counted_results(self: Any, *operands: Any) -> Any:
            result = original(self, *operands)
            if result.dtype.scalar.is_floating():
                setattr(found[-1], of, getattr(found[-1], of) + result.data.size)
            return result

        return counted_results

    return wrapper
