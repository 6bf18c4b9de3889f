"""A patch changes a spec by paths: a value replaces, a list edit edits, a knob turns its sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError, unknown
from archlab.arch_dsl.language.parse import INVALID, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Spec, had_by
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.patching.join_knob import joined_alike
from archlab.arch_dsl.patching.knobs import knobs_of
from archlab.arch_dsl.patching.norm_knob import bare, normed_alike, says_outside
from archlab.arch_dsl.patching.shortform import Found, strip, turn
from archlab.arch_dsl.primitives.branch import Sublayer
from archlab.arch_dsl.tree.block import Block, with_type
from archlab.arch_dsl.tree.knob import Knob
from archlab.arch_dsl.tree.paths import Steps, get, index_of, is_edit, names_at, overrides_at, set_node

S = TypeVar("S", bound=Spec)
Done = dict[Steps, tuple["Setting", Any]]  # the settings made so far, and what each led to


@dataclass(frozen=True)
class Setting:
    """One change of a patch: where, to what, and which component or variant asks for it."""

    path: str
    node: Node
    source: str = ""
    mark: Mark | None = None


def settings_of(node: Node, source: str = "") -> list[Setting]:
    """The changes of a mapping from paths to values."""
    if node.value is None:
        return []
    if not isinstance(node.value, dict):
        raise SpecError.of(source, f"a patch is a mapping from paths to values, found {node.kind}", node.mark)
    return [Setting(path, child, source, node.key_marks.get(path, child.mark)) for path, child in node.value.items()]


def patch(spec: S, changes: Mapping[str, Any] | Node) -> S:
    """A copy of `spec` with these paths changed. Raises SpecError for a path that matches nothing or a value that
    does not fit; `spec` is not touched."""
    return apply(spec, settings_of(Node.of(changes)))


def apply(spec: S, settings: Iterable[Setting]) -> S:
    """A copy of `spec` with these changes made in order.

    List edits compose. Setting one path twice is an error, and so is a setting by which an earlier one is lost.
    """
    problems: list[Problem] = []
    done: Done = {}
    current: Any = spec
    for setting in settings:
        try:
            targets = _expand(current, tuple(setting.path.split(".")), setting)
        except SpecError as error:
            problems.extend(Problem(item.path, item.message, item.mark or setting.mark) for item in error.problems)
            continue
        for steps in targets:
            if clash := _clash(done, steps, setting):
                problems.append(clash)
                continue
            before, new = current, _apply_one(current, steps, setting, problems)
            current = current if new is INVALID else new
            problems.extend(_undone(done, steps, setting, current))
            done[steps] = (setting, _brought(before, current, steps, setting))
    if problems:
        raise SpecError(problems)
    return current  # type: ignore[no-any-return]


def _clash(done: Done, steps: Steps, setting: Setting) -> Problem | None:
    """A path that is set twice, or set after a part of it."""
    for other, (first, _) in done.items():
        if other[: len(steps)] == steps and not is_edit(setting.node):
            what = "is set twice: it was set" if other == steps else f"would undo {'.'.join(other)}, which was set"
            return Problem(".".join(steps), what + _origin(first, setting), setting.mark)
    return None


def _undone(done: Done, steps: Steps, setting: Setting, root: Any) -> list[Problem]:
    """What was set before and is no longer so, by other means than an edit of a list or of a part."""
    found = []
    for other, (first, value) in done.items():
        now = _held(root, other)
        kept = _still(value, now) or _outside_alone(first, value, now)
        if not kept and not is_edit(setting.node) and steps[: len(other)] != other:
            message = f"would undo {'.'.join(other)}, which was set{_origin(first, setting)}"
            found.append(Problem(".".join(steps), message, setting.mark))
        done[other] = (first, value if isinstance(value, _Brought) else now)
    return found


class _Brought(tuple[Any, ...]):
    """What an edit brought to a site, in which others may change what was there."""


def _brought(before: Any, after: Any, steps: Steps, setting: Setting) -> Any:
    """What a setting led to, of which nothing may be undone later."""
    old, new = _held(before, steps), _held(after, steps)
    if not (is_edit(setting.node) and isinstance(old, tuple) and isinstance(new, tuple)):
        return new
    brought = list(new)
    for item in old:
        if item in brought:
            brought.remove(item)
    return _Brought(brought)


def _still(value: Any, now: Any) -> bool:
    """Whether what was set is there; a knob that says several things still says the one."""
    if isinstance(value, _Brought):
        return isinstance(now, tuple) and all(item in now for item in value)
    if isinstance(now, list) and isinstance(value, dict):
        return value in now or (set(value) == {"type"} and value["type"] in now)
    return bool(now == value)


def _outside_alone(first: Setting, value: Any, now: Any) -> bool:
    """Whether a branch that said nothing of its norms and its join has changed in these alone: they are its block's."""
    return (
        isinstance(value, Sublayer)
        and isinstance(now, Sublayer)
        and not says_outside(first.node)
        and getattr(value, "branches", None) == getattr(now, "branches", None)
        and bare(value) == bare(now)
    )


def _origin(first: Setting, second: Setting) -> str:
    by = f" by {first.source}" if first.source and first.source != second.source else ""
    return by + (f" on line {first.mark.line}" if first.mark else "")


def _held(root: Any, steps: Steps) -> Any:
    """What stands at a path, or None where the path is gone."""
    try:
        if (start := overrides_at(steps)) is not None:
            return get(root, steps[:start]).at(steps[start], ".".join(steps[start + 1 :]))
        return _value_at(root, steps)
    except SpecError:
        return None


def _expand(root: Any, steps: Steps, setting: Setting) -> list[Steps]:
    """The concrete paths that a path with `*` matches; at least one."""
    if (start := overrides_at(steps)) is not None and _is_stack(root, steps[: start - 1]):
        return [steps]
    found: list[Steps] = [()]
    for place, step in enumerate(steps):
        following = []
        tried: dict[str, None] = {}
        for prefix in found:
            value = _value_at(root, prefix)
            if isinstance(value, list):  # what a knob says of several primitives
                message = f"there are several; set {steps[place - 1]} whole, or the sites that it stands for"
                raise SpecError.of(".".join(prefix), message, setting.mark)
            names = [*names_at(value), *knobs_of(value)]
            tried.update(dict.fromkeys(names))
            if step == "*":
                following += [(*prefix, name) for name in names_at(value)]
            elif step in names or isinstance(value, dict) or index_of(value, step) is not None:
                following.append((*prefix, step))
            elif isinstance(value, Block) and (*prefix, step) == steps and _is_branch(step, setting.node):
                following.append(steps)
            elif "*" not in steps:
                where = ".".join(prefix) or f"the {getattr(root, 'title', 'spec')}"
                message = f"matches nothing: in {where}, {unknown(step, 'name', names)}{had_by(type(value), step)}"
                if not prefix and "block" in names and step in names_at(_value_at(root, ("block",))):
                    message = f"matches nothing; did you mean 'block.{'.'.join(steps)}'?"
                raise SpecError.of(setting.path, message, setting.mark)
        if not following:
            raise SpecError.of(setting.path, f"matches nothing: {unknown(step, 'name there', tried)}", setting.mark)
        found = following
    return found


def _is_branch(name: str, node: Node) -> bool:
    """Whether a node says enough to be a new branch of that name."""
    if node.value is None:
        return False
    typed = with_type(name, node).value
    return "type" in typed if isinstance(typed, dict) else typed in (*Branch.members, *Branch.aliases)


def _value_at(root: Any, steps: Steps) -> Any:
    """What stands at a path; a knob's plain data inside a knob."""
    found = _knob_in(root, steps)
    if found is None:
        return get(root, steps)
    knob, index = found
    data = knob.read(root, steps[:index])
    if data is None:
        raise SpecError.of(".".join(steps), f"the sites hold more than this knob can say; set {knob.name} whole")
    if steps[index + 1 :]:
        return None  # a field of a knob has no parts
    return {"type": data} if isinstance(data, str) else data


def _knob_in(root: Any, steps: Steps) -> tuple[Knob, int] | None:
    value: Any = root
    for index, step in enumerate(steps):
        if knob := knobs_of(value).get(step):
            return knob, index
        if index + 1 < len(steps):
            value = get(value, (step,))
    return None


def _is_stack(root: Any, steps: Steps) -> bool:
    """Whether what stands at a path has overrides."""
    try:
        return "overrides" in names_at(get(root, steps))
    except SpecError:
        return False


def _there(root: Any, steps: Steps) -> Any:
    """What stands at a path; for a branch that is new there, nothing."""
    holder = get(root, steps[:-1])
    return holder.get(steps[-1]) if isinstance(holder, Block) else get(root, steps)


def _apply_one(root: Any, steps: Steps, setting: Setting, problems: list[Problem]) -> Any:
    if overrides_at(steps) is not None:  # whose paths are those of the block and are read when it is resolved
        return set_node(root, steps, setting.node, problems)
    found = _knob_in(root, steps)
    if found is None:
        knobs: Found = []
        node = strip(setting.node, _there(root, steps), steps, knobs)
        new = turn(set_node(root, steps, node, problems), knobs, "", problems)
        return joined_alike(root, normed_alike(root, new, steps, setting.node), steps, setting.node)
    knob, index = found
    where, inside = steps[:index], steps[index + 1 :]
    node = setting.node
    if inside:
        data = knob.read(root, where)
        if data == "none" and knob.name != "gate" and inside != ("type",):
            message = f"there is none whose {inside[0]} could be set; set {knob.name} whole"
            return refuse(problems, ".".join(steps[: index + 1]), message, setting.mark or node.mark)
        word = {} if knob.name == "gate" else {"type": data}
        base = word if isinstance(data, str) else data
        if inside == ("type",):
            base = {name: value for name, value in base.items() if name in ("placement", "position")}
        place = setting.mark or node.mark
        node = Node({**Node.of(base, node.mark).value, inside[0]: node}, node.mark, {inside[0]: place} if place else {})  # type: ignore[dict-item]
    return knob.turn(root, where, node, ".".join(steps[: index + 1]), problems)
