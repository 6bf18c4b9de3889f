"""A choice is a frozen spec: one dataclass per choice, registered in its family under the paper's short name.

The annotation of a field says which family may stand there; `type` picks the member. Specs are the IR: they are
parsed, patched, resolved, hashed, costed, drawn, diffed and built, and never change in place.
"""

from __future__ import annotations

import builtins
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, dataclass_transform

from archlab import kernels
from archlab.arch_dsl.language.errors import Mark


@dataclasses.dataclass(frozen=True)
class Range:
    """Limits of a number: `Annotated[int, Range(min=1)]`. `above` and `below` exclude the limit itself."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def complaint(self, value: float) -> str | None:
        """What must hold and does not, or None."""
        if self.min is not None and value < self.min:
            return f"must be at least {self.min:g}"
        if self.max is not None and value > self.max:
            return f"must be at most {self.max:g}"
        if self.above is not None and value <= self.above:
            return f"must be greater than {self.above:g}"
        if self.below is not None and value >= self.below:
            return f"must be less than {self.below:g}"
        return None


Count = typing.Annotated[int, Range(min=1)]
Positive = typing.Annotated[float, Range(above=0)]
NotNegative = typing.Annotated[float, Range(min=0)]
Fraction = typing.Annotated[float, Range(min=0, max=1)]


def added(default: Any) -> Any:
    """A field that a later version brought: at its default it is no part of the identity, so old hashes stay."""
    return dataclasses.field(default=default, metadata={"added": True})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, added))
class Spec:
    """A frozen record of choices. Subclasses become keyword-only frozen dataclasses by being defined."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed; the places of the others are kept."""
        new: Self = dataclasses.replace(self, **changes)  # type: ignore[type-var]
        set_marks(new, {name: mark for name, mark in marks_of(self).items() if name not in changes})
        return new

    def mark(self, name: str = "") -> Mark | None:
        """Where the field (or the spec itself) was written, if it came from a file."""
        marks = marks_of(self)
        return marks.get(name) or marks.get("")


def marks_of(spec: Spec) -> dict[str, Mark]:
    """Field name to place; '' is the spec's own place. No part of equality or identity."""
    found: dict[str, Mark] = spec.__dict__.get("_marks", {})
    return found


def set_marks(spec: Spec, marks: dict[str, Mark]) -> None:
    """Remembers where a spec was written."""
    object.__setattr__(spec, "_marks", marks)


class Family(Spec):
    """A kind of choice (norm, gate, mixer …) whose members are picked by `type`.

    `version` is part of the identity and is raised when a member's numbers change; so is the version of every op
    in `ops` that it computes with.
    """

    type: ClassVar[str] = ""
    version: ClassVar[int] = 1
    plugin: ClassVar[str] = ""  # hash of the source of a member from outside: arch_dsl/language/plugins.py
    ops: ClassVar[tuple[str, ...]] = ()
    members: ClassVar[dict[str, Any]] = {}
    aliases: ClassVar[dict[str, tuple[str, dict[str, Any]]]] = {}  # published name to (member, plain fields)
    noun: ClassVar[str] = ""
    short_forms: ClassVar[tuple[str, ...]] = ()  # knobs that may be written beside the fields
    word: ClassVar[bool] = False  # whether the canonical form of a member without fields is its name alone
    # Fields that the conformance suite starts from: the first what a member needs, the others to reach all of it.
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "noun" in cls.__dict__:
            cls.members, cls.aliases = {}, {}

    @classmethod
    def alias(cls, name: str, **fields: Any) -> None:
        """Lets a published name stand for a member with some fields set; both spellings are one spec.

        `type` names the member. Raises ValueError if the name is taken.
        """
        if name in cls.members or name in cls.aliases:
            raise ValueError(f"'{name}' is already a {cls.noun}")
        cls.aliases[name] = (fields.pop("type"), fields)

    @classmethod
    def numbers(cls) -> int:
        """The version of its numbers, those of its ops included."""
        return cls.version + sum(kernels.OPS[name].version - 1 for name in cls.ops)

    @classmethod
    def register(cls, name: str) -> Callable[[builtins.type[Member]], builtins.type[Member]]:
        """Enters a member under its short name. Raises ValueError if the name is taken."""

        def enter(member: builtins.type[Member]) -> builtins.type[Member]:
            for base in member.__mro__:
                if base.__dict__.get("noun"):
                    if name in base.members or name in base.aliases:  # type: ignore[attr-defined]
                        raise ValueError(f"'{name}' is already a {base.noun}")  # type: ignore[attr-defined]
                    base.members[name] = member  # type: ignore[attr-defined]
            member.type = name
            return member

        return enter


Member = typing.TypeVar("Member", bound=Family)


@dataclasses.dataclass(frozen=True)
class FieldType:
    """The annotation of one field, taken apart once per class."""

    name: str
    annotation: Any
    required: bool
    default: Any
    added: bool = False  # left out of the identity at its default


_FIELDS: dict[type, dict[str, FieldType]] = {}


def fields_of(cls: type[Spec]) -> dict[str, FieldType]:
    """The fields of a spec class with their resolved annotations, in the order of definition (`share`, which all
    families have, last), without private ones, which no file can write; read once per class."""
    if cls not in _FIELDS:
        _FIELDS[cls] = _read_fields(cls)
    return _FIELDS[cls]


def _read_fields(cls: type[Spec]) -> dict[str, FieldType]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {}
    order = [*getattr(cls, "order", ())]  # where inheritance would give another
    for item in sorted(
        (each for each in dataclasses.fields(cls) if not each.name.startswith("_")),  # type: ignore[arg-type]
        key=lambda field: (order.index(field.name) if field.name in order else len(order), field.name == "share"),
    ):
        missing = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        since = bool(item.metadata.get("added"))
        found[item.name] = FieldType(item.name, hints[item.name], missing, None if missing else default, since)
    return found


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself as a single alternative. Annotated is looked through."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def families(annotation: Any) -> tuple[type[Family], ...]:
    """The families that an annotation names, through tuples and unions."""
    if typing.get_origin(annotation) is tuple:
        return families(typing.get_args(annotation)[0])
    return tuple(item for item in alternatives(annotation) if isinstance(item, type) and issubclass(item, Family))


def members_of(kinds: tuple[type[Family], ...]) -> dict[str, type[Family]]:
    """Short name to class for all members of these families."""
    return {name: member for kind in kinds for name, member in kind.members.items()}


def aliases_of(kinds: tuple[type[Family], ...]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Published name to (member, fields) for all aliases of these families."""
    return {name: meant for kind in kinds for name, meant in kind.aliases.items()}


def had_by(cls: type[Spec], name: str) -> str:
    """`; window and strided have it`: the one or two other members of a family that have a field, or nothing."""
    members = cls.members.values() if issubclass(cls, Family) else ()
    found = [member.type for member in members if name in fields_of(member)]
    if not found or len(found) > 2:
        return ""
    return f"; {' and '.join(found)} {'has' if len(found) == 1 else 'have'} it"


def section_with(cls: type[Spec], name: str) -> str | None:
    """The field of a spec that is a section with a key of that name, such as `block` of a model for `ffn`."""
    for section, item in fields_of(cls).items():
        annotated = typing.get_origin(item.annotation) is typing.Annotated
        for kind in alternatives(typing.get_args(item.annotation)[0] if annotated else item.annotation):
            if isinstance(kind, type) and not issubclass(kind, Family):
                keys = fields_of(kind) if issubclass(kind, Spec) else ()
                if name in (*keys, *getattr(kind, "short_forms", ()), *getattr(kind, "other_keys", ())):
                    return section
    return None


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Spec]]:
    """Every spec inside a value with its dotted path, parents first."""
    if isinstance(value, Spec):
        yield path, value
        for name in fields_of(type(value)):
            yield from walk(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from walk(item, f"{path}.{name}" if path else name)
