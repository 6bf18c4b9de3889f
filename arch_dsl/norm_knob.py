"""The knob `norm: {type, placement, …}` on a block: the norm of every branch, and where it stands."""

from __future__ import annotations

from typing import Any

from arch_dsl.block import Block
from arch_dsl.errors import Problem, unknown
from arch_dsl.families import Norm
from arch_dsl.identity import canonical
from arch_dsl.knob import Knob, put_at, without
from arch_dsl.parse import INVALID, parse_value
from arch_dsl.paths import Steps, get
from arch_dsl.primitives.branch import Sublayer
from arch_dsl.primitives.joins import Add, AddNorm
from arch_dsl.primitives.parallel import Parallel
from arch_dsl.source import Node
from arch_dsl.spec import fields_of

PLACEMENTS = ("pre", "post", "sandwich")


def _read_norm(root: Any, where: Steps) -> Any:
    found = {_norm_of(branch) for branch in get(root, where).values() if isinstance(branch, Sublayer)}
    if len(found) != 1 or None in found:
        return None
    placement, norm = found.pop() or ("", None)
    if norm is None:
        return "none"
    data = canonical(norm, brief=True)
    return {**({"type": data} if isinstance(data, str) else data), "placement": placement}


def _norm_of(branch: Sublayer) -> tuple[str, Any] | None:
    if isinstance(branch, Parallel) and _normed_member(branch):
        return None
    pre = [item for item in branch.pre if isinstance(item, Norm)]
    post = [item for item in branch.post if isinstance(item, Norm)]
    if isinstance(branch.join, AddNorm):
        return ("post", branch.join.norm) if not pre and not post else None
    if len(pre) == 1 and not post:
        return ("pre", pre[0])
    if len(pre) == 1 and pre == post:
        return ("sandwich", pre[0])
    return ("none", None) if not pre and not post else None


def _parse_norm(node: Node, path: str, problems: list[Problem]) -> Any:
    """(placement, norms) with at most one norm."""
    placement, norm_node = _placement(node, path, problems)
    if _strange(node, path, problems):
        return INVALID
    norms = parse_value(tuple[Norm, ...], norm_node, path, problems)
    if placement is INVALID or norms is INVALID:
        return INVALID
    if len(norms) > 1:
        problems.append(Problem(path, "the knob sets one norm; write the sites for more", node.mark))
        return INVALID
    return placement, norms


def _put_norm(root: Any, where: Steps, value: tuple[str, tuple[Norm, ...]]) -> Any:
    placement, norms = value
    block: Block = get(root, where)
    for name, branch in block.items():
        if isinstance(branch, Sublayer):
            block = block.set(name, _normed(branch, norms, placement))
    root = put_at(root, where, block)
    if where == ("block",):
        final = without(root.final, Norm)
        root = root.replace(final=final if placement == "post" else (*final, *norms))
    return root


def _strange(node: Node, path: str, problems: list[Problem]) -> bool:
    """Notes the keys of a `norm:` that neither it nor its norm has."""
    if not isinstance(node.value, dict):
        return False
    named = node.value.get("type")
    member = Norm.members.get(str(named.value)) if named else None
    if member is None:
        return False
    keys = ("type", "placement", *fields_of(member))
    strange = [name for name in node.value if name not in keys]
    for name in strange:
        message = unknown(name, "key of norm", keys)
        problems.append(Problem(f"{path}.{name}", message, node.key_marks.get(name, node.mark)))
    return bool(strange)


def _placement(node: Node, path: str, problems: list[Problem]) -> tuple[Any, Node]:
    """The placement (default pre) and the node of the norm itself."""
    if not isinstance(node.value, dict) or "placement" not in node.value:
        return "pre", node
    given = node.value["placement"]
    rest = {name: child for name, child in node.value.items() if name != "placement"}
    if given.value not in PLACEMENTS:
        message = unknown(given.value, "norm placement", PLACEMENTS)
        problems.append(Problem(f"{path}.placement", message, given.mark))
        return INVALID, Node(rest, node.mark, node.key_marks)
    return given.value, Node(rest, node.mark, node.key_marks)


def _normed(branch: Sublayer, norms: tuple[Norm, ...], placement: str) -> Sublayer:
    if isinstance(branch, Parallel):
        cleared = ((name, member.replace(pre=without(member.pre, Norm))) for name, member in branch.branches.items())  # type: ignore[attr-defined]
        branch = branch.replace(branches=Block(cleared))
    pre, post = without(branch.pre, Norm), without(branch.post, Norm)
    if placement in ("pre", "sandwich"):
        pre = (*pre, *norms)
    if placement == "sandwich":
        post = (*post, *norms)
    if placement == "post" and norms:
        return branch.replace(pre=pre, post=post, join=AddNorm(norm=norms[0]))
    return branch.replace(pre=pre, post=post, join=Add() if isinstance(branch.join, AddNorm) else branch.join)


def _normed_member(group: Parallel) -> str | None:
    """The first member of a group that has a norm of its own."""
    return next((name for name, member in group.branches.items() if _norm_of(member) != ("none", None)), None)  # type: ignore[arg-type]


def _norm_sites(root: Any, where: Steps) -> str | None:
    for name, branch in get(root, where).items():
        if isinstance(branch, Parallel) and (member := _normed_member(branch)):
            return ".".join((*where, name, member, "pre"))
        if isinstance(branch, Sublayer) and _norm_of(branch) != ("none", None):
            return ".".join((*where, name, "join" if isinstance(branch.join, AddNorm) else "pre"))
    return "final" if root.final else None


_NORM_FIELDS = (
    ("type", "a norm, or none", "required"),
    ("placement", " | ".join(PLACEMENTS), "pre"),
    ("…", "the fields of that norm", ""),
)

NORM = Knob(
    name="norm",
    holder=Block,
    doc="the norm of every branch and its placement",
    read=_read_norm,
    parse=_parse_norm,
    put=_put_norm,
    occupied=_norm_sites,
    fields=_NORM_FIELDS,
)
