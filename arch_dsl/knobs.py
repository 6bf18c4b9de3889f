"""Knobs: what researchers turn (`norm`, `gate`, `positional`, `qk_norm`) as pure setters of the sites they stand for.

A knob replaces its family's primitives at its sites and leaves the others; it can be read back from the sites, so a
patch may turn one field of it (`block.norm.placement`) whether the model was written with knobs or with sites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arch_dsl.block import Block
from arch_dsl.errors import Problem, unknown
from arch_dsl.families import Gate, Norm, Position, Rotary, Score
from arch_dsl.identity import canonical
from arch_dsl.parse import INVALID, parse_value
from arch_dsl.paths import Steps, get, update
from arch_dsl.primitives.attention import Attention
from arch_dsl.primitives.branch import Sublayer
from arch_dsl.primitives.joins import Add, AddNorm
from arch_dsl.primitives.parallel import Parallel
from arch_dsl.source import Node
from arch_dsl.spec import Family, Spec, fields_of

# The order in which families stand at a site; a knob inserts its primitive accordingly.
_ORDER: dict[str, tuple[type[Family], ...]] = {
    "query": (Gate, Norm, Rotary),
    "key": (Gate, Norm, Rotary),
    "value": (Gate, Norm),
    "sdpa": (Norm, Gate),
    "post": (Gate, Norm),
    "pre": (Norm,),
}
PLACEMENTS = ("pre", "post", "sandwich")
POSITIONS = ("query", "key", "value", "sdpa", "dense")


@dataclass(frozen=True)
class Knob:
    """`read` gives the knob's value as plain data, or None where the sites say nothing that it could say; `parse`
    makes a value of a node, and `put` sets it; `occupied` names a site that already holds what it stands for."""

    name: str
    holder: type  # Block or a branch class
    doc: str
    read: Callable[[Spec, Steps], Any]
    parse: Callable[[Node, str, list[Problem]], Any]
    put: Callable[[Any, Steps, Any], Any]
    occupied: Callable[[Spec, Steps], str | None]
    fields: tuple[tuple[str, str, str], ...] = ()  # name, what may stand there, default

    def turn(self, root: Any, where: Steps, node: Node, path: str, problems: list[Problem]) -> Any:
        """The root with this knob of what stands at `where` set from a node, or INVALID."""
        value = self.parse(node, path, problems)
        return INVALID if value is INVALID else self.put(root, where, value)


def _without(site: tuple[Any, ...], *kinds: type[Family]) -> tuple[Any, ...]:
    return tuple(item for item in site if not isinstance(item, kinds))


def _inserted(site: tuple[Any, ...], name: str, item: Any) -> tuple[Any, ...]:
    order = _ORDER[name]
    rank = next(index for index, kind in enumerate(order) if isinstance(item, kind))
    later = order[rank + 1 :]
    index = next((i for i, other in enumerate(site) if isinstance(other, later)), len(site)) if later else len(site)
    return (*site[:index], item, *site[index:])


def _set(root: Any, where: Steps, new: Any) -> Any:
    return update(root, type(root), where, lambda old, kind: new)


# norm: {type, placement, …} on a block


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
    root = _set(root, where, block)
    if where == ("block",):
        final = _without(root.final, Norm)
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
        cleared = ((name, member.replace(pre=_without(member.pre, Norm))) for name, member in branch.branches.items())  # type: ignore[attr-defined]
        branch = branch.replace(branches=Block(cleared))
    pre, post = _without(branch.pre, Norm), _without(branch.post, Norm)
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


# gate: {position, granularity, …} on attention


def _site_of(position: str) -> str:
    return "post" if position == "dense" else position


def _read_gate(root: Any, where: Steps) -> Any:
    branch = get(root, where)
    found = [(p, item) for p in POSITIONS for item in getattr(branch, _site_of(p)) if isinstance(item, Gate)]
    if not found:
        return "none"
    if len(found) > 1:
        return None
    data = canonical(found[0][1], brief=True)
    fields = {} if isinstance(data, str) else {name: value for name, value in data.items() if name != "type"}
    return {"position": found[0][0], **fields}


def _parse_gate(node: Node, path: str, problems: list[Problem]) -> Any:
    """Pairs of (position, gate)."""
    items = node.value if isinstance(node.value, list) else [] if node.value in ("none", None) else [node]
    found = []
    for item in items:
        position, rest = _position(item, path, problems)
        found.append((position, parse_value(Gate, rest, path, problems)))
    return INVALID if any(INVALID in pair for pair in found) else found


def _put_gate(root: Any, where: Steps, value: list[tuple[str, Gate]]) -> Any:
    branch = get(root, where)
    sites = {_site_of(p): _without(getattr(branch, _site_of(p)), Gate) for p in POSITIONS}
    for position, gate in value:
        site = _site_of(position)
        sites[site] = _inserted(sites[site], site, gate)
    return _set(root, where, branch.replace(**sites))


def _position(node: Node, path: str, problems: list[Problem]) -> tuple[Any, Node]:
    """Where the gate stands, and the node of the gate itself. A bare word is a position."""
    fields = node.value if isinstance(node.value, dict) else {"position": node}
    if "position" not in fields:
        problems.append(Problem(f"{path}.position", f"is missing ({', '.join(POSITIONS)})", node.mark))
    given = fields.get("position", node)
    kept = {name: child for name, child in fields.items() if name != "position"}
    rest = Node({"type": Node("gate", node.mark), **kept}, node.mark, node.key_marks)
    if given.value in POSITIONS:
        return given.value, rest
    if given is not node or "position" in fields:
        message = unknown(given.value, "gate position", POSITIONS)
        problems.append(Problem(f"{path}.position", message, given.mark))
    return INVALID, rest


def _gate_sites(root: Any, where: Steps) -> str | None:
    branch = get(root, where)
    sites = (_site_of(p) for p in POSITIONS)
    return next((s for s in sites if any(isinstance(item, Gate) for item in getattr(branch, s))), None)


# positional: rope | alibi | learned | sinusoidal | none on attention; the last two stand at the model's `embed`

_POSITIONAL = (Rotary, Score, Position)


def _read_positional(root: Any, where: Steps) -> Any:
    branch = get(root, where)
    query = [item for item in branch.query if isinstance(item, Rotary)]
    key = [item for item in branch.key if isinstance(item, Rotary)]
    if query != key:
        return None
    found = [*query, *branch.scores, *(item for item in root.embed if isinstance(item, Position))]
    if not found:
        return "none"
    return canonical(found[0], brief=True) if len(found) == 1 else None


def _parse_positional(node: Node, path: str, problems: list[Problem]) -> Any:
    return parse_value(tuple[Rotary | Score | Position, ...], node, path, problems)


def _put_positional(root: Any, where: Steps, items: tuple[Any, ...]) -> Any:
    branch = get(root, where)
    query, key = _without(branch.query, Rotary), _without(branch.key, Rotary)
    for item in items:
        if isinstance(item, Rotary):
            query, key = _inserted(query, "query", item), _inserted(key, "key", item)
    scores = tuple(item for item in items if isinstance(item, Score))
    root = _set(root, where, branch.replace(query=query, key=key, scores=scores))
    added = tuple(item for item in items if isinstance(item, Position))
    return root.replace(embed=(*added, *_without(root.embed, Position)))


def _positional_sites(root: Any, where: Steps) -> str | None:
    branch = get(root, where)
    for site in ("query", "key", "scores"):
        if any(isinstance(item, _POSITIONAL) for item in getattr(branch, site)):
            return ".".join((*where, site))
    return "embed" if any(isinstance(item, Position) for item in root.embed) else None


# qk_norm: a norm of queries and keys, per head


def _read_qk_norm(root: Any, where: Steps) -> Any:
    branch = get(root, where)
    query = [item for item in branch.query if isinstance(item, Norm)]
    key = [item for item in branch.key if isinstance(item, Norm)]
    if query != key or len(query) > 1:
        return None
    return canonical(query[0], brief=True) if query else "none"


def _parse_qk_norm(node: Node, path: str, problems: list[Problem]) -> Any:
    return parse_value(tuple[Norm, ...], node, path, problems)


def _put_qk_norm(root: Any, where: Steps, norms: tuple[Norm, ...]) -> Any:
    branch = get(root, where)
    sites = {name: _without(getattr(branch, name), Norm) for name in ("query", "key")}
    for norm in norms:
        sites = {name: _inserted(site, name, norm) for name, site in sites.items()}
    return _set(root, where, branch.replace(**sites))


def _qk_norm_sites(root: Any, where: Steps) -> str | None:
    branch = get(root, where)
    return next((s for s in ("query", "key") if any(isinstance(item, Norm) for item in getattr(branch, s))), None)


_NORM_FIELDS = (
    ("type", "a norm, or none", "required"),
    ("placement", " | ".join(PLACEMENTS), "pre"),
    ("…", "the fields of that norm", ""),
)
_GATE_FIELDS = (("position", " | ".join(POSITIONS), "required"), ("…", "the fields of gate", ""))
_POSITIONAL_FIELDS = (("type", "rope | alibi | learned | sinusoidal | none", "required"), ("…", "its fields", ""))
_QK_FIELDS = (("type", "a norm, or none", "required"), ("…", "the fields of that norm", ""))

KNOBS = (
    Knob(
        name="norm",
        holder=Block,
        doc="the norm of every branch and its placement",
        read=_read_norm,
        parse=_parse_norm,
        put=_put_norm,
        occupied=_norm_sites,
        fields=_NORM_FIELDS,
    ),
    Knob(
        name="gate",
        holder=Attention,
        doc="a gate in attention and its position",
        read=_read_gate,
        parse=_parse_gate,
        put=_put_gate,
        occupied=_gate_sites,
        fields=_GATE_FIELDS,
    ),
    Knob(
        name="positional",
        holder=Attention,
        doc="how positions enter",
        read=_read_positional,
        parse=_parse_positional,
        put=_put_positional,
        occupied=_positional_sites,
        fields=_POSITIONAL_FIELDS,
    ),
    Knob(
        name="qk_norm",
        holder=Attention,
        doc="a norm of queries and keys per head",
        read=_read_qk_norm,
        parse=_parse_qk_norm,
        put=_put_qk_norm,
        occupied=_qk_norm_sites,
        fields=_QK_FIELDS,
    ),
)


def knobs_of(value: Any) -> dict[str, Knob]:
    """The knobs that a block or a branch has."""
    return {knob.name: knob for knob in KNOBS if isinstance(value, knob.holder)}
