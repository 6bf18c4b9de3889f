"""What an operation is (its formula, its fast implementations, its cases and costs) and which one a model gets."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from archlab.kernels.device import Device

Family = Literal["torch", "triton"]
Call = Callable[..., Any]
T = TypeVar("T")
FORCE = "ARCHLAB_KERNELS"
FAMILIES = ("reference", "torch", "triton")


@dataclass(frozen=True)
class Ask:
    """What a node of a model needs: where, in which compute dtype, and the options that its op lists."""

    device: Device
    dtype: torch.dtype
    options: Mapping[str, Any]


def _no_objection(ask: Ask) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    `load` imports and returns the callable, so that Triton is imported only where it is used. `supports` says why an
    ask cannot be served, `declines` why another implementation is faster for it; both return None if all is well.
    `why` is the reason that a choice of it carries.
    """

    family: Family
    load: Callable[[], Call]
    why: str
    supports: Callable[[Ask], str | None] = _no_objection
    declines: Callable[[Ask], str | None] = _no_objection
    missing: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Case:
    """A call to check: shapes of the tensors by argument name, then the arguments that are not tensors.

    `integers` holds tensors of integers by their values; they have no gradient.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    arguments: Mapping[str, Any]
    integers: Mapping[str, tuple[int | tuple[int, ...], ...]] = field(default_factory=dict)

    def fixed(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """All arguments but the tensors that have a shape alone."""
        own = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.arguments.items()}
        return {**own, **{name: torch.tensor(rows, device=device) for name, rows in self.integers.items()}}


@dataclass(frozen=True)
class Op:
    """An operation and everything that is known about it.

    `version` is raised when its numbers change, and is part of every identity that depends on the op. Of `add_norm`,
    `norm_gate` and `linear_cross_entropy` it is part of none: but for rounding they compute what the joined ops do.
    `implementations` are in order of preference; `reference` is the formula in plain torch, for any floating dtype.
    `domains` turn normal numbers into valid values of the arguments that they name, for the checks.
    `options` lists what `select` may be asked for with the values allowed, the first of which is the default; `ask`
    derives them from the arguments of a call. `flops` and `bytes` take these by name, tensors maybe on the meta device,
    and count the floating-point operations of the forward pass and the bytes that it must move if it reads and writes
    everything once. `tolerances` bound the relative RMS error of outputs and gradients against float64. `wide` are the
    outputs that are in at least float32, where others have the dtype of the call: None for all after the first.
    """

    name: str
    reference: Call
    implementations: Mapping[str, Implementation]
    cases: tuple[Case, ...]
    options: Mapping[str, tuple[Any, ...]]
    ask: Callable[..., dict[str, Any]]
    flops: Callable[..., int]
    bytes: Callable[..., int]
    tolerances: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}
    )
    domains: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    wide: tuple[int, ...] | None = None
    version: int = 1


def nbytes(*tensors: Tensor | None) -> int:
    """The bytes of all tensors that are there."""
    return sum(x.nbytes for x in tensors if x is not None)


def check_shapes(of: str, x: Tensor, wanted: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Raises ValueError for a tensor that has not the shape that it must have beside x, which is the argument `of`."""
    for name, (given, shape) in wanted.items():
        if given is not None and given.shape != shape:
            raise ValueError(f"{name} must be {shape} beside {of} {tuple(x.shape)}; received {tuple(given.shape)}")


@dataclass(frozen=True)
class Choice:
    """What a node gets: `implementation` is reference, torch or triton; `call` takes the arguments of the op.

    `asked` are the options that are not the defaults. `fallback` says that the op has a faster family for this device
    which cannot serve what was asked; one that is slower for it is none.
    """

    implementation: str
    call: Call
    reason: str
    asked: str = ""
    fallback: bool = False


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an op to OPS, once. Raises ValueError if another one has its name."""
    if OPS.get(op.name, op) is not op:
        raise ValueError(f"there is an op {op.name!r} already")
    OPS[op.name] = op
    return op


def forced() -> str:
    """The implementation that ARCHLAB_KERNELS names, or ''. Raises ValueError for a word that is none of them."""
    found = os.environ.get(FORCE, "")
    if found not in ("", *FAMILIES):
        raise ValueError(f"{FORCE} must be reference, torch or triton; received {found!r}")
    return found


def select(op_name: str, device: Device, dtype: torch.dtype, *, force: str = "", **options: Any) -> Choice:
    """The implementation of an op for a device (which need not be present), a compute dtype and the op's options.

    `force` names one: reference, torch or triton. Raises ValueError for an unknown op, option or value, and for a
    forced implementation that cannot serve.
    """
    op = _named(op_name, OPS, "op")
    ask = Ask(device, dtype, _checked(op, options))
    if force not in ("", *FAMILIES):
        raise ValueError(f"an implementation must be reference, torch or triton; received {force!r}")
    if force == "reference":
        return Choice("reference", op.reference, "forced", _asked(op, ask))
    notes = ["forced"] if force else []
    able: list[Implementation] = []
    for name, implementation in op.implementations.items():
        if force not in ("", implementation.family):
            continue
        # A device that is only asked about (`show --device sm_90`) may have what this machine lacks.
        absent = implementation.missing() if device == Device.current() else None
        objection = absent or implementation.supports(ask)
        if objection is None:
            able.append(implementation)
            objection = implementation.declines(ask)
        if objection is None:
            return _choice(implementation, notes, _asked(op, ask), not force and _falls_back(op, device, able))
        notes.append(f"{name}: {objection}")
    if force and able:
        return _choice(able[0], notes, _asked(op, ask))
    if force:
        why = f"{force} is forced, but there is no {force} implementation of {op_name} that serves"
        raise ValueError("; ".join([why, *notes[1:]]))
    reason = "; ".join(["the formula", *notes])
    return Choice("reference", op.reference, reason, _asked(op, ask), _falls_back(op, device, able))


def _falls_back(op: Op, device: Device, able: list[Implementation]) -> bool:
    """Whether none of those that are able is of the fastest family that the op has for a kind of device."""
    families = {implementation.family for implementation in op.implementations.values()}
    wanted = ("triton", "torch") if device.kind == "cuda" else ("torch",)
    fast = next((family for family in wanted if family in families), None)
    return fast is not None and all(implementation.family != fast for implementation in able)


def _asked(op: Op, ask: Ask) -> str:
    given = {name: value for name, value in ask.options.items() if value != op.options[name][0]}
    said = {True: "", False: "no "}
    return ", ".join(f"{said[v]}{name}" if isinstance(v, bool) else f"{name} {v}" for name, v in given.items())


def _choice(implementation: Implementation, notes: list[str], asked: str, fallback: bool = False) -> Choice:
    absent = implementation.missing()
    call = _unavailable(absent) if absent else implementation.load()
    return Choice(implementation.family, call, "; ".join([implementation.why, *notes]), asked, fallback)


def _unavailable(absent: str) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"this implementation was selected for another machine; on this one: {absent}")

    return call


def _checked(op: Op, options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in options.items():
        allowed = _named(name, op.options, f"option of {op.name}")
        if value not in allowed:
            raise ValueError(f"{op.name} {name} must be one of {allowed}; received {value!r}")
    return {name: options.get(name, allowed[0]) for name, allowed in op.options.items()}


def _named(name: str, table: Mapping[str, T], what: str) -> T:
    if name not in table:
        near = get_close_matches(name, table, 1)
        raise ValueError(f"no {what} {name!r}; there are {', '.join(table)}" + (f"; near: {near[0]}" if near else ""))
    return table[name]
