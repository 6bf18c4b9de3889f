"""Neighbours that one kernel computes together: a norm with the sum before it, with the rotation or gate after it.

Only where a kernel of ours does it in one pass; everywhere else, as on the CPU, each is computed by itself. What is
fused keeps its parameters, names and initial values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from archlab import kernels
from archlab.arch_dsl.parts.context import BuildContext, Call, NodeChoice
from archlab.arch_dsl.parts.layers import Site, has_projection

HANDED = "normed"  # the copy that the next branch reads, in what a call carries
ALONE = ("rms_norm", "layer_norm", "gate")


class Factors(NamedTuple):
    """What a norm computes: `kind` rms or layer, its weight and bias, and what is added to the variance."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def one_pass(ctx: BuildContext, node: str, op: str, why: str, **ask: Any) -> Callable[..., Any] | None:
    """The kernel that computes the norm or gate at the path `node` with its neighbour, if there is one: then it is what
    the node's choice says."""
    force = "" if ctx.backend == "auto" else ctx.backend
    choice = kernels.select(op, ctx.device, ctx.dtype, force=force, **ask)
    if choice.implementation != "triton":
        return None
    mine = [at for at, found in enumerate(ctx.choices) if found.path == node and found.op in ALONE]
    for at in mine:
        ctx.choices[at] = NodeChoice(node, op, choice.implementation, f"{why}: {choice.reason}", choice.asked)
    return choice.call


def site(items: Sequence[tuple[str, nn.Module]], name: str, ctx: BuildContext) -> Site:
    """A site, in which a rotation or a gate computes the norm before it where it can."""
    joined = set()
    pairs: Iterable[tuple[tuple[str, Any], tuple[str, Any]]] = pairwise(items)
    for index, ((first, norm), (_, item)) in enumerate(pairs):
        if hasattr(norm, "factors") and hasattr(item, "takes") and item.takes(norm, f"{ctx.path}.{name}.{first}", ctx):
            joined.add(index)
    path = f"{ctx.path}.{name}".removeprefix(".")
    return _FusedSite(items, joined, path) if joined else Site(items, path)


class _FusedSite(Site):
    """`joined` are the places of the norms that the item after them computes."""

    def __init__(self, items: Sequence[tuple[str, nn.Module]], joined: set[int], path: str) -> None:
        super().__init__(items, path)
        self.joined = joined

    def forward(self, x: Tensor, call: Call, projected: Iterator[Tensor]) -> Tensor:
        norm: Any = None
        item: Any
        for index, item in enumerate(self.children()):
            given = (next(projected),) if has_projection(item) else ()
            if index in self.joined and call.watch is None:
                norm = item
                continue
            x = item(x, call, *given) if norm is None else item.after(norm.factors(), x, call, *given)
            norm = None
        if call.watch is not None:
            self.tell(x, call)
        return x


def epilogue(items: Site, ctx: BuildContext, **ask: Any) -> bool:
    """Whether attention, asked for this, multiplies its outputs by the sigmoid gate that is all of their site."""
    gates = list(items.children())
    if len(gates) != 1 or not getattr(gates[0], "opens", False):
        return False
    node: Any = gates[0].path
    return one_pass(ctx, node, "attention", "that of the attention before it", **ask, gate=True) is not None


def sums(stack: nn.Module, layers: Iterable[Any], ctx: BuildContext) -> None:
    """Has every sum of stream and update compute the norm with which the next branch, or `final`, begins.

    Branches that several layers share stay as they are: what follows them differs.
    """
    places: list[tuple[str, Any]] = [
        (f"{layer.path}.{name}", part) for layer in layers for name, part in layer.named_children()
    ]
    count = Counter(id(branch) for _, branch in places)
    readers: list[tuple[str, Any, str]] = [(path, branch, "pre") for path, branch in places[1:]]
    readers.append((ctx.path, stack, "final"))
    for (path, branch), (then, owner, name) in zip(places, readers, strict=True):
        found = getattr(owner, name, None)
        if type(found) is not Site or count[id(branch)] > 1 or count[id(owner)] > 1:
            continue
        label, norm = next(found.named_children(), ("", None))
        if norm is None or not getattr(getattr(branch, "join", None), "plain", False):
            continue
        node = f"{then}.{name}.{label}".removeprefix(".")
        if add_norm := sum_with(norm, node, f"with the sum of {path}", ctx):
            branch.join = _SumThenNorm(branch.join, norm, add_norm)
            setattr(owner, name, _HandedSite(list(found.named_children()), found.path))


def sum_with(norm: Any, node: str, why: str, ctx: BuildContext) -> Callable[..., Any] | None:
    """The kernel that computes a sum and then this norm, whose path is `node`, if there is one."""
    if not hasattr(norm, "factors") or norm.per_head or norm.joined:
        return None
    return one_pass(ctx, node, "add_norm", why, **norm.asked())


def part(branch: Any) -> None:
    """Has a branch sum alone again: the norm after it stands in another process."""
    if isinstance(branch.join, _SumThenNorm):
        branch.join = branch.join.alone


class _SumThenNorm(nn.Module):
    """stream + update; its norm, that of the next branch, is handed on in the call."""

    def __init__(self, alone: nn.Module, norm: nn.Module, add_norm: Callable[..., Any]) -> None:
        super().__init__()
        self.alone = alone
        self.norm, self.add_norm = (norm,), add_norm  # in a tuple: it is the next branch's own

    def forward(self, stream: Tensor, update: Tensor, call: Call) -> Tensor:
        factors: Factors = self.norm[0].factors()  # type: ignore[operator]
        if any(hasattr(factor, "device_mesh") for factor in (factors.weight, factors.bias)):
            return self.alone(stream, update, call)  # type: ignore[no-any-return]  # sharded: only its own layer gathers it
        total: Tensor
        kind, weight, bias, eps = factors
        total, call.across[HANDED] = self.add_norm(stream, update, weight, bias, eps, kind, 1.0)
        return total


class _HandedSite(Site):
    """A site whose first norm the sum before it has computed, unless that stood in another process."""

    def forward(self, x: Tensor, call: Call, projected: Iterator[Tensor]) -> Tensor:
        handed = call.across.pop(HANDED, None)
        if handed is None:
            return super().forward(x, call, projected)
        _, *rest = self.children()
        for item in rest:
            handed = item(handed, call)
        if call.watch is not None:
            self.tell(handed, call)
        return handed
