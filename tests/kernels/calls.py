"""Every way to compute every op on this machine: the table that the tests of the ops run over."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab.kernels import OPS, Case, Device, Op, bench
from tests.slow_tests import ALL

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = (Device("cpu"), *([Device.current()] if torch.cuda.is_available() else []))


@dataclass(frozen=True)
class Call:
    """One case of an op, by one implementation, on one device in one dtype."""

    op: Op
    implementation: str
    case: Case
    device: Device
    dtype: torch.dtype

    @property
    def function(self) -> Any:
        if self.implementation == "reference":
            return self.op.reference
        return self.op.implementations[self.implementation].load()

    @property
    def is_triton(self) -> bool:
        return self.implementation == "triton"

    def tensors(self) -> dict[str, Tensor]:
        return bench.inputs(self.op, self.case, self.device, self.dtype)


def _serves(call: Call) -> bool:
    if call.implementation == "reference":
        return True
    return bench.serves(call.op, call.implementation, call.case, call.device, call.dtype) is None


def _every() -> Iterator[Call]:
    for op in OPS.values():
        for name in ("reference", *op.implementations):
            for case in op.cases:
                for device in DEVICES:
                    yield from (Call(op, name, case, device, dtype) for dtype in DTYPES)


# On the CPU all cases run in float32; in half precisions, and by the formula itself, these, which between them ask for
# every option.
SOME = (
    "elementwise_silu", "headwise_multiply", "width_1_add", "odd_add", "heads", "odd", "odd_no_weight", "odd_affine",
    "odd_bare", "added_layer", "added_scaled", "turned_interleaved", "turned_normed_partly", "opened_groups",
    "opened_headwise", "silu", "shifted", "shifted_documents",
    "taps_silu", "taps_documents_last",
    "causal_grouped", "length_1", "cached_keys", "everything", "blocks", "bias_window", "documents_prefix_padding",
    "decay_relative_bias", "relative_shared_window_sinks", "softcap", "sinks", "reach_cached_sinks", "strided",
    "gate_wide_values_decay_sinks",
    "sum_state", "decay_grouped", "decay_long", "channels", "delta_decay", "delta_channels", "delta_long",
    "decay_length_1", "delta_length_1", "uneven", "expert_without_rows", "scan", "scan_long", "scan_length_1", "wkv",
    "wkv_long", "wkv_length_2", "removing", "removing_length_2",
    "loss_rows_everything", "loss_sum_everything", "loss_wide", "loss_rows",
)  # fmt: skip

# A case of attention takes the interpreter half a second: these cover its features by pairs, the rest are slow.
ATTENTION = {
    torch.float32: (
        "wide_values", "strided", "fixed", "padding_blocks", "cross_padding_alone", "relative_full", "everything",
        "documents_prefix_padding", "relative_shared_window_sinks", "relative_cached_softcap", "decay_cached",
        "decay_shared_sinks_window", "decay_relative_bias", "decay_documents_padding", "length_1", "reach_cached_sinks",
        "gate_wide_values_decay_sinks",
    ),
    torch.bfloat16: ("decay_relative_bias", "everything"),
}  # fmt: skip

# One of linear_recurrence takes a second or two: one for each kind of decay and rule.
LINEAR_RECURRENCE = {
    torch.float32: ("sum_state", "decay_grouped", "decay_stateless", "decay_length_1", "channels", "delta_decay"),
    torch.bfloat16: ("decay_grouped", "delta_decay"),
}
# Walks through time are a launch's Python for every token.
SELECTIVE_SCAN = {torch.float32: ("scan_length_1",), torch.bfloat16: ("scan",)}
WKV7 = {torch.float32: ("removing_length_2",), torch.bfloat16: ()}
WKV4 = {torch.float32: ("wkv_length_1", "wkv_plain"), torch.bfloat16: ("wkv",)}
EXPERTS = {
    torch.float32: ("uneven", "expert_without_rows", "width_1"), torch.bfloat16: ("expert_without_rows",),
    torch.float16: ("expert_without_rows",),
}  # fmt: skip
IN_MAKE_TEST = {
    "attention": ATTENTION, "linear_recurrence": LINEAR_RECURRENCE, "experts": EXPERTS,
    "selective_scan": SELECTIVE_SCAN, "wkv4": WKV4, "wkv7": WKV7,
}  # fmt: skip


def _chosen(call: Call) -> bool:
    """In the interpreter float16 differs from bfloat16 by its rounding alone: without ARCHLAB_ALL, what takes long is
    computed in it for the cases that `make test` has of bfloat16."""
    table = IN_MAKE_TEST.get(call.op.name) if call.is_triton and call.device.kind == "cpu" and not ALL else None
    if table is not None and call.dtype == torch.float16:
        return call.case.name in table[torch.bfloat16]
    all_cases = call.dtype == torch.float32 and call.implementation != "reference"
    return call.device.kind == "cuda" or all_cases or call.case.name in SOME


def _marks(call: Call) -> list[Any]:
    if call.device.kind == "cuda":
        return [pytest.mark.gpu]
    table = IN_MAKE_TEST.get(call.op.name) if call.is_triton else None
    slow = table is not None and call.case.name not in table.get(call.dtype, ())
    return [pytest.mark.slow] if slow else []


def calls(dtypes: tuple[torch.dtype, ...] = DTYPES, cases: tuple[str, ...] | None = None) -> list[Any]:
    """pytest parameters for all calls that this machine can serve, those on CUDA marked `gpu`."""
    return [
        pytest.param(
            call,
            id=f"{call.op.name}-{call.implementation}-{call.case.name}-{call.device}-{str(call.dtype)[6:]}",
            marks=_marks(call),
        )
        for call in _every()
        if call.dtype in dtypes and (cases is None or call.case.name in cases) and _chosen(call) and _serves(call)
    ]
