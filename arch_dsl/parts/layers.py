"""Modules that primitives share: parameters with their initial distribution, linear maps, sites, merged products."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from archlab.arch_dsl.parts.context import Call

Initializer = Callable[[Tensor, torch.Generator], object]
Products = Callable[[Tensor, Sequence["Linear"]], list[Tensor]]


def normal(std: float) -> Initializer:
    """Draws from N(0, std^2)."""
    return lambda value, generator: value.normal_(0.0, std, generator=generator)


def constant(number: float) -> Initializer:
    """Fills with one number."""
    return lambda value, generator: value.fill_(number)


def uniform(low: float, high: float) -> Initializer:
    """Draws uniformly from [low, high)."""
    return lambda value, generator: value.uniform_(low, high, generator=generator)


def equal_to(start: Tensor) -> Initializer:
    """Fills with the numbers of a tensor."""
    return lambda value, generator: value.copy_(start)


def steps(low: float, high: float) -> Initializer:
    """Draws b with softplus(b) between two numbers, uniform in its logarithm."""
    ends = math.log(low), math.log(high)
    return lambda value, generator: value.uniform_(*ends, generator=generator).exp_().expm1_().log_()


def parameter(shape: Sequence[int], initializer: Initializer) -> nn.Parameter:
    """An uninitialised parameter that knows its initial distribution."""
    value = nn.Parameter(torch.empty(*shape))
    value.initializer = initializer  # type: ignore[attr-defined]
    return value


def undecayed(shape: Sequence[int], initializer: Initializer) -> nn.Parameter:
    """A parameter that weight decay leaves alone, though its shape may be a matrix's: biases, rates, shares, weights of
    norms (recipe.parameter_groups)."""
    value = parameter(shape, initializer)
    value.decay = False  # type: ignore[attr-defined]
    return value


def table(shape: Sequence[int], initializer: Initializer) -> nn.Parameter:
    """A parameter whose rows are looked up, or are logits of a token: no map of hidden vectors (recipe.optimizers)."""
    value = parameter(shape, initializer)
    value.table = True  # type: ignore[attr-defined]
    return value


_GROUP = re.compile(r"\.[a-z0-9_]+\.members(?=\.)")


def without_groups(paths: Iterable[str]) -> dict[str, str]:
    """What each parameter's path would be if the members of groups stood one after another.

    Where two parameters would have one path, each keeps its own.
    """
    found = {path: _GROUP.sub("", path) for path in paths}
    counts = Counter(found.values())
    return {path: short if counts[short] == 1 else path for path, short in found.items()}


def initialize(module: nn.Module, seed: int, factors: Mapping[str, float] | None = None) -> None:
    """Fills every parameter as a pure function of (seed, its path), so that what two variants share starts equal.

    The name of a group is no part of the path: its members start as they would one after another. `factors`
    multiplies some of them, by path. Modules of torch, such as `nn.Linear`, draw as torch has them do; another
    parameter that knows no distribution keeps the value that it was made with.
    """
    parameters = dict(module.named_parameters())
    names = without_groups(parameters)
    with torch.no_grad():
        for path, value in parameters.items():
            number = _seed_at(seed, names[path])
            if hasattr(value, "initializer"):
                drawn = torch.empty(value.shape)
                value.initializer(drawn, torch.Generator().manual_seed(number))
                value.copy_(drawn)
            elif reset := getattr(owner := module.get_submodule(path.rpartition(".")[0]), "reset_parameters", None):
                kept = {name: item.clone() for name, item in owner.named_parameters(recurse=False)}
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(number)
                    reset()
                for name, item in owner.named_parameters(recurse=False):
                    if item is not value:
                        item.copy_(kept[name])
            if factors is not None and path in factors:
                value.mul_(factors[path])


def is_known(module: nn.Module) -> bool:
    """Whether a module is archlab's or torch's own, and no plug-in's."""
    return type(module).__module__.partition(".")[0] in ("archlab", "torch")


def may_draw(module: nn.Module) -> bool:
    """Whether a forward pass may take random numbers: a part says so (`draws`), or nobody knows what it does."""
    return any(getattr(part, "draws", False) or not is_known(part) for part in module.modules())


def _seed_at(seed: int, path: str) -> int:
    """The seed of the parameter at a path."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1


class Stepped(nn.Module):
    """A module with buffers or parameters that move after an optimizer step, without a gradient."""

    def after_step(self, measures: Mapping[str, Tensor]) -> None:
        """Called by training when a step is done, with the sums of the measures of the step's micro-batches."""
        raise TypeError(f"{type(self).__name__} has no step")


def after_step(model: nn.Module, measures: Mapping[str, Tensor]) -> None:
    """Tells all `Stepped` modules of a model that an optimizer step is done."""
    for part in model.modules():
        if isinstance(part, Stepped):
            part.after_step(measures)


class Linear(nn.Module):
    """y = x W^T + b with W `[outputs, inputs]`. The product may be merged with others that read the same tensor."""

    def __init__(self, inputs: int, outputs: int, *, std: float, bias: bool = False, start: float = 0.0) -> None:
        """`std` is that of the initial weights, `start` the initial value of the bias."""
        super().__init__()
        self.weight = parameter((outputs, inputs), normal(std))
        self.bias = parameter((outputs,), constant(start)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


M = TypeVar("M", bound=nn.Module)


def writing(item: M) -> M:
    """The same linear map, known as one whose outputs are channels of the stream (model/constraint.py)."""
    item.weight.writes = True  # type: ignore[union-attr]  # of any module with a weight
    return item


class Itself(nn.Module):
    """No map but the tensor itself, where a branch wants its input among the products of its maps."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def separate(x: Tensor, maps: Sequence[Linear]) -> list[Tensor]:
    """Applies several maps to one tensor `[..., inputs]`, one matrix product each."""
    return [item(x) for item in maps]


def merged(x: Tensor, maps: Sequence[Linear]) -> list[Tensor]:
    """Applies several maps to one tensor `[..., inputs]` as a single matrix product.

    Only the product is merged: every map keeps its own parameters and initial values.
    """
    if any(isinstance(item, Itself) for item in maps):
        products = iter(merged(x, [item for item in maps if not isinstance(item, Itself)]))
        return [x if isinstance(item, Itself) else next(products) for item in maps]
    if len(maps) == 1:
        return [maps[0](x)]
    weight = torch.cat([item.weight for item in maps])
    bias = None
    if any(item.bias is not None for item in maps):
        zeros = [item.weight.new_zeros(item.weight.shape[0]) if item.bias is None else item.bias for item in maps]
        bias = torch.cat(zeros)
    return list(nn.functional.linear(x, weight, bias).split([item.weight.shape[0] for item in maps], dim=-1))


def has_projection(item: nn.Module) -> bool:
    """Whether a primitive's module reads a linear map of the branch's input."""
    return getattr(item, "projection", None) is not None


def numbered(names: Iterable[str]) -> list[str]:
    """The names, the second of two alike as `short_conv_2`."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


class Site(nn.Module):
    """An ordered list of primitives at one place, under names of their own. Those with a `projection` receive its
    product as a third argument."""

    def __init__(self, items: Sequence[tuple[str, nn.Module]], path: str = "") -> None:
        super().__init__()
        self.path = path
        for name, item in items:
            self.add_module(name, item)

    def projections(self) -> list[Linear]:
        """The linear maps of the branch's input that this site needs, in order."""
        return [item.projection for item in self.children() if has_projection(item)]  # type: ignore[misc]

    def forward(self, x: Tensor, call: Call, projected: Iterator[Tensor]) -> Tensor:
        for item in self.children():
            x = item(x, call, next(projected)) if has_projection(item) else item(x, call)
        if call.watch is not None:
            self.tell(x, call)
        return x

    def tell(self, x: Tensor, call: Call) -> None:
        """To who watches, what the items made of it."""
        if call.watch is not None and len(self._modules):
            call.watch.tell("site", self.path, call.padding, output=x)
