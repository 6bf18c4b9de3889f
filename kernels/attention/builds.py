"""What is compiled ahead of time of the attention kernels: every two features that fit stand together in a set."""

from collections.abc import Iterator

import torch

from archlab.kernels.attention.inputs import Inputs
from archlab.kernels.attention.pattern import Blocks, Pattern
from archlab.kernels.attention.plan import Launch, Plan, delta_launch, forward_launch, keys_launch, queries_launch
from archlab.kernels.attention.tuning import widest
from archlab.kernels.launch import Build, capability, generation

LENGTH = 256
OTHERS = 80, 86, 89  # the last of them also for sm_120
SETS: tuple[tuple[int, str], ...] = (
    (128, "decay"),
    (128, "learned gate"),
    (128, "window sinks"),
    (128, "full softcap bias prefix"),
    (128, "blocks learned prefix padding"),
    (128, "full decay learned documents"),
    (128, "full fixed sinks padding"),
    (64, "blocks learned"),
    (64, "blocks decay sinks bias"),
    (128, "window decay softcap padding"),
    (128, "window prefix documents sinks"),
    (128, "blocks fixed softcap documents"),
    (64, "fixed bias documents padding"),
    (64, "full window learned bias"),
    (64, "window decay fixed prefix"),
    (64, "decay learned softcap sinks"),
    (16, "learned"),
    (256, "decay learned"),
    (128, "decay reach gate"),
    (64, "decay reach sinks headgate"),
)
"""Widths of heads, and what a call has: `fixed` and `learned` are relative biases without and with a gradient, `bias` a
matrix that has one, `gate` one for each element and `headgate` one for each head."""


def builds() -> Iterator[Build]:
    """All sets for sm_90 in bfloat16, one in float32; each of them for one of the other cards, in turn."""
    card = generation()
    for index, (width, names) in enumerate(SETS):
        if width <= widest(capability(), 16) and (card >= 90 or OTHERS[index % len(OTHERS)] == card):
            yield from _of(width, names.split(), torch.bfloat16)
    if card >= 90:
        yield from _of(64, ["decay"], torch.float32)


def _of(width: int, features: list[str], dtype: torch.dtype) -> Iterator[Build]:
    """The launches of a call, forward and backward; those of deltas differ by width alone."""
    q = torch.empty(1, LENGTH, 4, width, dtype=dtype).transpose(1, 2)
    k = torch.empty(1, LENGTH, 2, width, dtype=dtype).transpose(1, 2)
    along = torch.empty(q.shape[:3])
    gate = q if "gate" in features else q[..., :1] if "headgate" in features else None
    has_bias, learned = "bias" in features, "learned" in features
    blocks = Blocks(16, heads=4) if "blocks" in features else None
    window = 128 if "window" in features else None
    plan = Plan(
        Inputs(
            q,
            k,
            k,
            bias=torch.empty(4, LENGTH, LENGTH, dtype=dtype) if has_bias else None,
            relative=torch.empty(4, 2 * LENGTH - 1) if learned or "fixed" in features else None,
            decay=torch.empty(1, 4, LENGTH) if "decay" in features else None,
            reach=torch.empty(1, 4, LENGTH) if "reach" in features else None,
            sinks=torch.empty(4) if "sinks" in features else None,
            gate=gate,
            prefix=torch.zeros(1, dtype=torch.long) if "prefix" in features else None,
            documents=torch.zeros(1, LENGTH, dtype=torch.long) if "documents" in features else None,
            padding=torch.zeros(1, LENGTH, dtype=torch.bool) if "padding" in features else None,
            pattern=Pattern("full" if blocks or "full" in features else "causal", window, blocks=blocks),
            scale=0.1,
            softcap=30.0 if "softcap" in features else None,
        )
    )
    dbias = torch.empty(1, 4, LENGTH, LENGTH, dtype=dtype) if has_bias else None
    dsums = along if "decay" in features else None
    launches: dict[str, Launch] = {
        "forward": forward_launch(plan, q, along),
        "keys": keys_launch(plan, q, along, along, k, k, dsums),
        "queries": queries_launch(plan, q, along, along, q, dbias, learned)[0],
    }
    if features == ["decay"] or gate is not None:
        launches["delta"] = delta_launch(plan, q, q, along, q, gate)
    for kind, one in launches.items():
        label = "-".join(("attention", kind, *features, str(width)))
        yield Build(label + "-float32" * (dtype == torch.float32), one.kernel, one.arguments, one.meta)
