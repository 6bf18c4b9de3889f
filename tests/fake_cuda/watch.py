"""Looks at every operation that is asked of the card that is not there, and refuses what a real one would."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "histc", "_linalg_check_errors",
}  # fmt: skip
COPIES = {"_to_copy", "copy_"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "convolution", "_grouped_mm"}  # of one dtype
MOST_PROGRAMS = 2**31 - 1, 2**16 - 1, 2**16 - 1
LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}


class Refused(Exception):
    """What a card would refuse, or wait for where nothing may wait."""


class Watched(TorchDispatchMode):
    """Operators of archlab run as on the card, with kernels that are noted and not launched, and must give what their
    fake forms say.

    While the host may wait for the card, what depends on values is as if all were 1.0, True, or an integer that no
    step reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.capturing = True, False  # whether the host may wait; whether a graph is captured
        self.kernels: Counter[str] = Counter()

    @contextmanager
    def nothing_waits(self) -> Iterator[None]:
        """Inside it whatever makes the host wait is refused."""
        before, self.waiting = self.waiting, False
        try:
            yield
        finally:
            self.waiting = before

    @contextmanager
    def graph(self, _: Any) -> Iterator[None]:
        """Inside it a graph is captured."""
        self.capturing = True
        try:
            with self.nothing_waits():
                yield
        finally:
            self.capturing = False

    def generator(self) -> Tensor:
        """The state of the card's generator, which nobody may read while a graph is captured."""
        if self.capturing:
            raise Refused("the state of the generator is read while a graph is captured")
        return torch.zeros(16, dtype=torch.uint8)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, name = func._schema.name.split("::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_card = [x for x in tensors if x.device.type == "cuda"]
        if name in COPIES:
            self.look_at_copy(name, args, kwargs)
        elif on_card and (away := [tuple(x.shape) for x in tensors if x.device.type == "cpu" and x.ndim]):
            raise Refused(f"{func} of tensors on the card and of {away} on the CPU")
        by_mask = name == "index" and any(_is_mask(i) for i in args[1])
        if name in WAITS or by_mask:
            if on_card and not self.waiting:
                raise Refused(f"{func} waits for the card")
            if name in VALUES:
                return VALUES[name](*args, **kwargs)
            if by_mask:
                return func(args[0], [place for i in args[1] for place in _places(i)])
        if name in PRODUCTS and len(kinds := {x.dtype for x in on_card if x.is_floating_point()}) > 1:
            raise Refused(f"{func} of {' and '.join(sorted(map(str, kinds)))}")
        if space == "archlab" and on_card:
            return self.as_on_card(func, args, kwargs)
        return func(*args, **kwargs)

    def look_at_copy(self, name: str, args: Any, kwargs: Any) -> None:
        """Between host and card it is from pinned memory, or waited for."""
        source = args[1] if name == "copy_" else args[0]
        to = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device.type == to.type or self.waiting:
            return
        free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if not free or (source.device.type == "cpu" and not getattr(source, "pinned", False)):
            raise Refused(f"a copy of {tuple(source.shape)} from {source.device.type} to {to.type} waits")

    def as_on_card(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator returns, which must be what its fake form promises."""
        promised = func(*args, **kwargs)
        with self:
            found = OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        for one, other in zip(_leaves(found), _leaves(promised), strict=True):
            if _facts(one) != _facts(other):
                raise Refused(f"{func} returns {_facts(one)}, and its fake form says {_facts(other)}")
        return found

    def launch(self, kernel: Any, args: Any, grid: Any, meta: dict[str, Any]) -> None:
        """A kernel of Triton's: its arguments bind, its tensors are on the card, its grid is one."""
        name = kernel.fn.__name__
        self.kernels[name] += 1
        inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in meta.items() if k not in LAUNCH_OPTIONS})
        for x in tree_leaves((args, meta)):
            if isinstance(x, Tensor) and x.device.type != "cuda":
                raise Refused(f"kernel {name} gets {tuple(x.shape)} on {x.device}")
        programs = tuple(grid(meta)) if callable(grid) else tuple(grid)
        if not all(0 < int(n) <= most for n, most in zip(programs, MOST_PROGRAMS, strict=False)):
            raise Refused(f"kernel {name} has a grid of {programs}")


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _places(index: Any) -> list[Any]:
    """The indices that a mask, all of whose elements are True, stands for."""
    return [*VALUES["nonzero"](index).unbind(1)] if _is_mask(index) else [index]


def _number(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 2**62


VALUES: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": lambda x: _number(x.dtype),
    "nonzero": lambda x: x.new_zeros(x.numel(), x.ndim, dtype=torch.int64),
    "bincount": lambda x, weights=None, minlength=0: x.new_zeros(max(minlength, 1)),
}


def _leaves(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def _facts(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.stride() if x.numel() else (), x.device.type, isinstance(x, FakeTensor)
