"""Knobs: what researchers turn (`norm`, `join`, `gate`, `positional`, `qk_norm`) as pure setters of sites.

A knob replaces its family's primitives at its sites and leaves the others; it can be read back from the sites, so a
patch may turn one field of it (`block.norm.placement`) whether the model was written with knobs or with sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family, members_of
from archlab.arch_dsl.parts.families import Gate, Norm, Position, Rotary, Score
from archlab.arch_dsl.patching.join_knob import JOIN
from archlab.arch_dsl.patching.norm_knob import NORM
from archlab.arch_dsl.primitives.attention import Attention
from archlab.arch_dsl.primitives.branch import Headed
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.knob import Knob, among, exchanged, inserted, put_at, without
from archlab.arch_dsl.tree.paths import Steps, get

POSITIONS = ("query", "key", "value", "sdpa", "dense")

# gate: {position, granularity, …} on attention


def _site_of(position: str) -> str:
    return "post" if position == "dense" else position


def _read_gate(root: Any, where: Steps) -> Any:
    branch = get(root, where)
    return _plain([_said(p, gate) for p in POSITIONS for gate in among(getattr(branch, _site_of(p)), Gate)])


def _plain(said: list[Any]) -> Any:
    """What a knob says of several primitives, of one, or of none."""
    return said if len(said) > 1 else said[0] if said else "none"


def _said(position: str, gate: Gate) -> dict[str, Any]:
    data = canonical(gate, brief=True)
    fields = {"type": data} if isinstance(data, str) else dict(data)
    if fields["type"] == "gate":
        del fields["type"]
    return {"position": position, **fields}


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
    sites = {}
    for position in POSITIONS:
        site, gates = _site_of(position), [gate for own, gate in value if own == position]
        sites[site] = exchanged(getattr(branch, site), site, Gate, gates)
    return put_at(root, where, branch.replace(**sites))


def _position(node: Node, path: str, problems: list[Problem]) -> tuple[Any, Node]:
    """Where the gate stands, and the node of the gate itself. A bare word is a position."""
    fields = node.value if isinstance(node.value, dict) else {"position": node}
    kept = {name: child for name, child in fields.items() if name != "position"}
    rest = Node({"type": Node("gate", node.mark), **kept}, node.mark, node.key_marks)
    given = fields.get("position")
    if given is None:
        return refuse(problems, f"{path}.position", f"is missing ({', '.join(POSITIONS)})", node.mark), rest
    if given.value in POSITIONS:
        return given.value, rest
    return refuse(problems, f"{path}.position", unknown(given.value, "gate position", POSITIONS), given.mark), rest


def _holding(sites: Sequence[str], kind: type[Family], root: Any, where: Steps) -> str | None:
    """The path of the first of a branch's sites in which a member of a family stands."""
    branch = get(root, where)
    return next((".".join((*where, site)) for site in sites if among(getattr(branch, site), kind)), None)


# positional: rope | alibi | learned | sinusoidal | none on attention; the last two stand at the model's `embed`


def _read_positional(root: Any, where: Steps) -> Any:
    branch = get(root, where)
    query = among(branch.query, Rotary)
    if query != among(branch.key, Rotary):
        return None
    scores = (item for item in branch.scores if item.positional)
    return _plain([canonical(item, brief=True) for item in (*query, *scores, *among(root.embed, Position))])


def encodings() -> list[str]:
    """What may stand for `positional`: rotations, positional scores, encodings of the embeddings, none."""
    members = members_of((Rotary, Score, Position))
    return [*(name for name, kind in members.items() if getattr(kind, "positional", True)), "none"]


def _parse_positional(node: Node, path: str, problems: list[Problem]) -> Any:
    before = len(problems)
    for item in node.value if isinstance(node.value, list) else [node]:
        word = item.value.get("type", item) if isinstance(item.value, dict) else item
        if isinstance(word.value, str) and word.value not in encodings():
            problems.append(Problem(path, unknown(word.value, "positional encoding", encodings()), word.mark))
    if len(problems) > before:
        return INVALID
    return parse_value(tuple[Rotary | Score | Position, ...], node, path, problems)


def _put_positional(root: Any, where: Steps, items: tuple[Any, ...]) -> Any:
    branch = get(root, where)
    query, key = without(branch.query, Rotary), without(branch.key, Rotary)
    for item in items:
        if isinstance(item, Rotary):
            query, key = inserted(query, "query", item), inserted(key, "key", item)
    scores = [item for item in branch.scores if not item.positional]
    last = next((index for index, item in enumerate(scores) if item.kind == "sinks"), len(scores))
    scores[last:last] = among(items, Score)
    root = put_at(root, where, branch.replace(query=query, key=key, scores=tuple(scores)))
    return root.replace(embed=(*among(items, Position), *without(root.embed, Position)))


def _positional_sites(root: Any, where: Steps) -> str | None:
    branch = get(root, where)
    for site in ("query", "key", "scores"):
        if any(isinstance(item, Rotary) or getattr(item, "positional", False) for item in getattr(branch, site)):
            return ".".join((*where, site))
    return "embed" if among(root.embed, Position) else None


# qk_norm: a norm of queries and keys, per head


def _read_qk_norm(root: Any, where: Steps) -> Any:
    branch = get(root, where)
    norms = among(branch.query, Norm)
    if norms != among(branch.key, Norm) or len(norms) > 1:
        return None
    return _plain([canonical(norm, brief=True) for norm in norms])


def _put_qk_norm(root: Any, where: Steps, norms: tuple[Norm, ...]) -> Any:
    branch = get(root, where)
    sites = {name: exchanged(getattr(branch, name), name, Norm, list(norms)) for name in ("query", "key")}
    return put_at(root, where, branch.replace(**sites))


KNOBS = (
    NORM,
    JOIN,
    Knob(
        name="gate",
        holder=Headed,
        doc="a gate in attention and its position",
        reader=_read_gate,
        parse=_parse_gate,
        putter=_put_gate,
        occupies=partial(_holding, [_site_of(position) for position in POSITIONS], Gate),
        fields=(("position", " | ".join(POSITIONS), "required"), ("…", "the fields of gate; or a list of such", "")),
    ),
    Knob(
        name="positional",
        holder=Attention,
        doc="how positions enter",
        reader=_read_positional,
        parse=_parse_positional,
        putter=_put_positional,
        occupies=_positional_sites,
        fields=(
            ("type", "a rotary encoding, a positional score or encoding, or none", "required"),
            ("…", "its fields; or a list of such", ""),
        ),
    ),
    Knob(
        name="qk_norm",
        holder=Headed,
        doc="a norm of queries and keys per head",
        reader=_read_qk_norm,
        parse=partial(parse_value, tuple[Norm, ...]),
        putter=_put_qk_norm,
        occupies=partial(_holding, ("query", "key"), Norm),
        fields=(("type", "a norm, or none", "required"), ("…", "the fields of that norm", "")),
    ),
)


def knobs_of(value: Any) -> dict[str, Knob]:
    """The knobs that a block or a branch has."""
    return {knob.name: knob for knob in KNOBS if isinstance(value, knob.holder)}
