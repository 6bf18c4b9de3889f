"""The knob `norm: {type, placement, …}` on a block: the norm of every branch, and where it stands."""

from __future__ import annotations

from typing import Any

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import fields_of
from archlab.arch_dsl.parts.families import Norm, Scale
from archlab.arch_dsl.primitives.branch import OUTER, Sublayer
from archlab.arch_dsl.primitives.carries import Dual
from archlab.arch_dsl.primitives.groups import Group
from archlab.arch_dsl.primitives.joins import Add, AddNorm, DeepNorm, NormJoin, ResidualDual
from archlab.arch_dsl.primitives.scales import DepthScale
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.knob import Knob, among, put_at, without
from archlab.arch_dsl.tree.paths import Steps, get

JOINS: dict[str, type[NormJoin]] = {"post": AddNorm, "residual_dual": ResidualDual, "deepnorm": DeepNorm}
PLACEMENTS = ("pre", "post", "sandwich", "res_post", "peri", "residual_dual", "deepnorm", "depth_scaled")
PRE = ("pre", "sandwich", "peri", "depth_scaled")  # the placements with a norm before the branch
POST = ("sandwich", "res_post", "peri")  # and those with one on its update


def _read_norm(root: Any, where: Steps) -> Any:
    found = {_norm_of(branch) for branch in get(root, where).values() if isinstance(branch, Sublayer)}
    if len(found) != 1 or None in found:
        return None
    placement, norm = found.pop() or ("", None)
    if norm is None:
        return "none"
    if placement == "sandwich" and norm in root.embed:
        placement = "peri"
    data = canonical(norm, brief=True)
    return {**({"type": data} if isinstance(data, str) else data), "placement": placement}


def _norm_of(branch: Sublayer) -> tuple[str, Any] | None:
    """(placement, norm) of a branch, ("none", None) without one, or None where it has what the knob cannot say."""
    if isinstance(branch, Group) and _normed_member(branch):
        return None
    pre, post = among(branch.pre, Norm, DepthScale), among(branch.post, Norm)
    joins = [name for name, kind in JOINS.items() if type(branch.join) is kind]
    if joins:
        return (joins[0], branch.join.norm) if not pre and not post else None  # type: ignore[attr-defined]
    norm: Any = next(iter((*pre, *post)), None)
    sites = {
        "none": ((), ()),
        "pre": ((norm,), ()),
        "res_post": ((), (norm,)),
        "sandwich": ((norm,), (norm,)),
        "depth_scaled": ((norm, DepthScale()), ()),
    }
    found = next((name for name, expected in sites.items() if (pre, post) == expected), None)
    return (found, norm) if found and not isinstance(norm, DepthScale) else None


def _parse_norm(node: Node, path: str, problems: list[Problem]) -> Any:
    """(placement, norms) with at most one norm."""
    placement, norm_node = _placement(node, path, problems)
    if _strange(node, path, problems):
        return INVALID
    norms = parse_value(tuple[Norm, ...], norm_node, path, problems)
    if placement is INVALID or norms is INVALID:
        return INVALID
    if len(norms) > 1:
        return refuse(problems, path, "the knob sets one norm; write the sites for more", node.mark)
    return placement, norms


def _put_norm(root: Any, where: Steps, value: tuple[str, tuple[Norm, ...]]) -> Any:
    placement, norms = value
    before, block = _read_norm(root, where), get(root, where)
    for name, branch in block.items():
        if isinstance(branch, Sublayer):
            block = block.set(name, _normed(branch, norms, placement))
    embed = root.embed
    if isinstance(before, dict) and before["placement"] == "peri":
        old = next(_norm_of(branch) for branch in get(root, where).values() if isinstance(branch, Sublayer))
        embed = tuple(item for item in embed if item != old[1])  # type: ignore[index]
    root = put_at(root, where, block)
    if where != ("block",):
        return root
    final = without(root.final, Norm, Dual)
    if placement == "residual_dual":
        final = (*(Dual(norm=norm) for norm in norms), *final)
    elif placement not in JOINS:
        final = (*norms, *final)
    return root.replace(final=final, embed=(*embed, *norms) if placement == "peri" else embed)


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
    kept = {name: child for name, child in node.value.items() if name != "placement"}
    rest = Node(kept, node.mark, node.key_marks)
    if given.value in PLACEMENTS:
        return given.value, rest
    message = unknown(given.value, "norm placement", PLACEMENTS)
    return refuse(problems, f"{path}.placement", message, given.mark), rest


def normed_alike(before: Any, after: Any, steps: Steps, given: Node) -> Any:
    """The root after a branch at `steps` was set from a node, normed as all branches of its block were before.

    Nothing changes where these are not normed alike, or where the node says `pre`, `post`, `join` or a norm of its own.
    """
    block = get(before, steps[:-1])
    if not isinstance(block, Block) or after is INVALID or says_outside(given):
        return after
    said, branch = NORM.read(before, steps[:-1]), get(after, steps[:-1]).get(steps[-1])
    if not isinstance(said, dict) or not isinstance(branch, Sublayer) or _norm_of(branch) != ("none", None):
        return after
    placement, norms = _parse_norm(Node.of(said), "", [])
    return put_at(after, steps, _normed(branch, norms, placement))


def says_outside(given: Node) -> bool:
    """Whether the node of a branch says `pre`, `post` or `join`."""
    return isinstance(given.value, dict) and any(site in given.value for site in OUTER)


def bare(branch: Sublayer) -> Sublayer:
    """A branch without what the knobs `norm` and `join` of its block set."""
    return _normed(branch, (), "pre").replace(join=Add())


def _normed(branch: Sublayer, norms: tuple[Norm, ...], placement: str) -> Sublayer:
    if isinstance(branch, Group):
        cleared = ((name, _bare(member)) for name, member in branch.branches.items())  # type: ignore[arg-type]
        branch = branch.replace(branches=Block(cleared))
    branch = _bare(branch)
    scale = (DepthScale(),) if placement == "depth_scaled" and norms else ()
    pre = (*norms, *scale, *branch.pre) if placement in PRE else branch.pre
    first = next((index for index, item in enumerate(branch.post) if isinstance(item, Scale)), len(branch.post))
    post = (*branch.post[:first], *norms, *branch.post[first:]) if placement in POST else branch.post
    join = JOINS[placement](norm=norms[0]) if placement in JOINS and norms else branch.join
    return branch.replace(pre=pre, post=post, join=join)


def _bare(branch: Sublayer) -> Sublayer:
    """A branch without all that a placement could have set."""
    join = Add() if isinstance(branch.join, NormJoin) else branch.join
    return branch.replace(pre=without(branch.pre, Norm, DepthScale), post=without(branch.post, Norm), join=join)


def _normed_member(group: Group) -> str | None:
    """The first member of a group that has a norm of its own."""
    return next((name for name, member in group.branches.items() if _norm_of(member) != ("none", None)), None)  # type: ignore[arg-type]


def _norm_sites(root: Any, where: Steps) -> str | None:
    for name, branch in get(root, where).items():
        if isinstance(branch, Group) and (member := _normed_member(branch)):
            return ".".join((*where, name, member, "pre"))
        if isinstance(branch, Sublayer) and _norm_of(branch) != ("none", None):
            return ".".join((*where, name, _site_of(branch)))
    return "final" if among(root.final, Norm, Dual) else None


def _site_of(branch: Sublayer) -> str:
    """The first site of a branch that holds what a placement sets."""
    if isinstance(branch.join, NormJoin):
        return "join"
    return "pre" if among(branch.pre, Norm, DepthScale) else "post"


def _replaced(root: Any, where: Steps, value: tuple[str, tuple[Norm, ...]]) -> str | None:
    """The first join of another kind that a placement which joins would replace."""
    placement, norms = value
    for name, branch in get(root, where).items():
        if placement in JOINS and norms and isinstance(branch, Sublayer) and branch.join != Add():
            return ".".join((*where, name, "join"))
    return None


NORM = Knob(
    name="norm",
    holder=Block,
    doc="the norm of every branch and its placement",
    reader=_read_norm,
    parse=_parse_norm,
    putter=_put_norm,
    occupies=_norm_sites,
    displaces=_replaced,
    fields=(
        ("type", "a norm, or none", "required"),
        ("placement", " | ".join(PLACEMENTS), "pre"),
        ("…", "the fields of that norm", ""),
    ),
)
