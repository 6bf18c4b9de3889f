"""How fast the ops are on this machine: its ceilings, sizes worth measuring, and calls timed in turns.

Nothing is timed that is wrong: `trusted` holds an implementation to the op's cases in float64 first.
"""

import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.attention import Pattern
from archlab.kernels.device import Device
from archlab.kernels.op import OPS, Ask, Case, Op, select

Function = Callable[..., Any]
_Shapes = dict[str, tuple[int, ...]]
SLEEP_CYCLES = 8_000_000  # of the device, some 4 ms: what the host has time to launch meanwhile


@dataclass(frozen=True)
class Ceilings:
    """What the machine does at best: bytes per second of a large copy, FLOPs per second of a large product by dtype."""

    bytes_per_s: float
    flops_per_s: Mapping[torch.dtype, float]


def ceilings(device: Device) -> Ceilings:
    """Measured here, in a second or two."""
    size = 2**28 if device.kind == "cuda" else 2**24
    source = torch.randn(size, device=device.kind)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / in_turns({"copy": lambda: target.copy_(source)}, device)["copy"]
    flops = {}
    side = 8192 if device.kind == "cuda" else 512
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.randn(side, side, device=device.kind, dtype=dtype)
        flops[dtype] = 2 * side**3 / in_turns({"product": lambda x=square: x @ x}, device)["product"]  # type: ignore[misc]
    return Ceilings(copied, flops)


def in_turns(calls: Mapping[str, Callable[[], object]], device: Device, rounds: int = 10) -> dict[str, float]:
    """Seconds of each call: the median of rounds in which all take turns, so that a drift of the machine hits all.

    On CUDA it is the device's time with a cold cache; on the CPU it is processor time.
    """
    for call in calls.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            took[name].append(_seconds(call, device))
    return {name: statistics.median(times) for name, times in took.items()}


def _seconds(call: Callable[[], object], device: Device) -> float:
    if device.kind == "cuda":
        return _device_seconds(call)
    start = time.process_time()
    call()
    return time.process_time() - start


def _device_seconds(call: Callable[[], object], times: int = 5) -> float:
    """The median of calls whose launches all wait for the device, which sleeps meanwhile: what the host needs for them
    is no part of it, as long as it is less than the sleep."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    cycles = max(SLEEP_CYCLES, int(4e9 * (time.perf_counter() - begun)))  # twice what launching takes, at 2 GHz
    scratch = torch.empty(2**26, dtype=torch.float32, device="cuda")  # several times the cache
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for start, end in events:
        scratch.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) / 1e3


def host_seconds(call: Callable[[], object], times: int = 20) -> float:
    """What the host needs to launch a call on CUDA: what bounds a model that is too small for the card."""
    call()
    took = []
    for _ in range(times):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(took)


def inputs(op: Op, case: Case, device: Device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Normal tensors within the op's domains, the same for a case's name on every machine, ready for gradients."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in case.shapes.items()}
    valid = {name: op.domains[name](x) if name in op.domains else x for name, x in drawn.items()}
    return {name: x.to(device.kind, dtype).requires_grad_() for name, x in valid.items()}


def outputs(function: Function, tensors: Mapping[str, Tensor], fixed: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call gives, one or several."""
    found = function(**tensors, **fixed)
    return list(found) if isinstance(found, tuple) else [found]


def given(found: list[Tensor]) -> list[Tensor]:
    """Random gradients of the outputs of a call, the same for outputs of the same shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(x.shape, generator=generator).to(x) for x in found]


def with_gradients(
    function: Function, tensors: Mapping[str, Tensor], fixed: Mapping[str, Any], douts: list[Tensor] | None = None
) -> list[Tensor]:
    """What a call gives, and the gradients of all its tensors for those of its outputs, by default random ones."""
    found = outputs(function, tensors, fixed)
    douts = given(found) if douts is None else douts
    kept = [(x, dout) for x, dout in zip(found, douts, strict=True) if x.requires_grad]
    of, by = ([pair[i] for pair in kept] for i in (0, 1))
    return [*found, *torch.autograd.grad(of, list(tensors.values()), by, allow_unused=True)]


def call(
    op: Op, name: str, case: Case, device: Device, dtype: torch.dtype, gradients: bool = False
) -> Callable[[], list[Tensor]]:
    """A forward pass of a case by the implementation of that name, ready to be timed; with `gradients` and the backward
    pass, for gradients of its outputs that are drawn here, once."""
    function = op.reference if name == "reference" else op.implementations[name].load()
    tensors, fixed = inputs(op, case, device, dtype), case.fixed(device.kind)
    if not gradients:
        return lambda: outputs(function, tensors, fixed)
    douts = given(outputs(function, tensors, fixed))
    return lambda: with_gradients(function, tensors, fixed, douts)


def least_seconds(op: Op, case: Case, device: Device, dtype: torch.dtype, top: Ceilings) -> float:
    """What a forward pass of a case takes at the machine's ceilings, by the bytes and FLOPs that the op counts."""
    tensors, fixed = inputs(op, case, device, dtype), case.fixed(device.kind)
    return max(op.bytes(**tensors, **fixed) / top.bytes_per_s, op.flops(**tensors, **fixed) / top.flops_per_s[dtype])


def asked(op: Op, case: Case) -> dict[str, Any]:
    """The options that a case asks of its op."""
    meta = {key: torch.empty(shape, device="meta") for key, shape in case.shapes.items()}
    return op.ask(**meta, **case.fixed())


def serves(op: Op, name: str, case: Case, device: Device, dtype: torch.dtype) -> str | None:
    """Why an implementation cannot compute a case here; None if it can."""
    implementation = op.implementations[name]
    return implementation.missing() or implementation.supports(Ask(device, dtype, asked(op, case)))


def tolerance(op: Op, name: str, dtype: torch.dtype) -> float:
    """The relative RMS error that an implementation may have: of kernels of ours that of the op, of what torch computes
    in steps, which it rounds between, twice that in half precision."""
    steps = name == "reference" or op.implementations[name].family == "torch"
    return op.tolerances[dtype] * (2 if steps and dtype.itemsize == 2 else 1)


def trusted(op: Op, name: str, device: Device, dtype: torch.dtype) -> str | None:
    """The first of the op's cases that an implementation gets wrong, with its error; None if it gets all right."""
    function = op.implementations[name].load()
    for case in op.cases:
        if serves(op, name, case, device, dtype):
            continue
        tensors = inputs(op, case, device, dtype)
        exact = {key: x.detach().double().requires_grad_() for key, x in tensors.items()}
        got = with_gradients(function, tensors, case.fixed(device.kind))
        # in the dtype of the outputs first: what rounding them changes is no error of the implementation
        douts = [dout.double() for dout in given(got[: -len(tensors)])]
        want = with_gradients(op.reference, exact, case.fixed(device.kind), douts)
        for a, b in zip(got, want, strict=True):
            if b is None:
                continue
            error = float((a.detach().double() - b.detach()).norm() / b.detach().norm().clamp(min=1e-12))
            if not error <= tolerance(op, name, dtype):
                return f"{case.name}: relative error {error:.1e} beyond {tolerance(op, name, dtype):.0e}"
    return None


def chosen(op: Op, case: Case, device: Device, dtype: torch.dtype) -> str:
    """The name of the implementation that a model gets for a case."""
    choice = select(op.name, device, dtype, **asked(op, case))
    return next((n for n, i in op.implementations.items() if choice.reason.startswith(i.why)), "reference")


def workloads(device: Device, tokens: int | None = None) -> Iterator[tuple[Op, Case]]:
    """Each op at sizes of a training step: on a card those of a 1B model, on a CPU those of a model of a million.
    `tokens` is the length of a sequence in place of theirs."""
    large = device.kind == "cuda"
    batch, time_, heads, width = (4, tokens or 4096, 16, 128) if large else (4, tokens or 512, 4, 32)
    for name, cases in _sizes(batch, time_, heads, width, 32_000 if large else 4_096).items():
        if name in OPS:
            yield from ((OPS[name], case) for case in cases)


def _sizes(batch: int, time_: int, heads: int, width: int, vocab: int) -> dict[str, list[Case]]:
    tokens, d_model = batch * time_, heads * width
    qkv = dict.fromkeys("qkv", (batch, heads, time_, width))
    stream = (tokens, d_model)
    rows: _Shapes = {"x": stream}
    both: _Shapes = dict.fromkeys(("stream", "update"), stream)
    weight: _Shapes = {"weight": (d_model,)}
    channels = batch, time_, d_model
    turned: _Shapes = dict.fromkeys("qkv", (batch, time_, heads, width))
    heads_ = batch, time_, heads, width
    narrower = batch, time_, 2 * heads, width // 2
    by_head: _Shapes = {"beta": (batch, time_, heads)}
    tables = dict.fromkeys(("cos", "sin"), torch.full((time_, width // 2), 0.5**0.5))
    opened = {"bias": None, "eps": 1e-6, "kind": "rms", "activation": "silu", "combine": "multiply"}
    summed = {"reduction": "sum", "rows": (4 if heads * width > 1024 else 1) * 2**24 // vocab}  # as models call it
    inner, per_token = 2 * d_model, {"b": (batch, time_, 16), "c": (batch, time_, 16)}
    scanned = dict.fromkeys(("x", "delta"), (batch, time_, inner)) | {"log_a": (inner, 16), **per_token, "d": (inner,)}
    ends = tuple(tokens * (expert + 1) // 8 for expert in range(8))
    return {
        "attention": [
            Case("causal", qkv, {}),
            Case("forget_gate", qkv | {"decay": (batch, heads, time_)}, {}),
            Case("relative", qkv | {"relative": (heads, 2 * time_ - 1)}, {}),
            Case("window", qkv, {"pattern": Pattern(window=time_ // 4)}),
            Case("sinks", qkv | {"sinks": (heads,)}, {}),
        ],
        "rms_norm": [Case("stream", rows | weight, {"eps": 1e-6})],
        "layer_norm": [Case("stream", rows | weight | {"bias": (d_model,)}, {"eps": 1e-5})],
        "add_norm": [Case("stream", both | weight, {"bias": None, "eps": 1e-6, "kind": "rms", "scale": 1.0})],
        "gate": [Case("elementwise", {"y": stream, "g": stream}, {"activation": "sigmoid", "combine": "multiply"})],
        "glu": [Case("swiglu", dict.fromkeys("ab", (tokens, 8 * d_model // 3)), {"activation": "silu"})],
        "rotary": [Case("normed", {"x": heads_, "weight": (width,)}, {**tables, "pairs": "half", "eps": 1e-6})],
        "norm_gate": [Case("heads", {"x": heads_, "g": heads_, "weight": (width,)}, opened)],
        "token_shift": [Case("stream", {"x": (batch, time_, d_model), "mix": (d_model,)}, {"starts": None})],
        "short_conv": [Case("stream", {"x": channels, "weight": (d_model, 4)}, {"activation": "silu"})],
        "linear_recurrence": [
            Case("scalar", turned | {"log_decay": (batch, time_, heads)}, {}),
            Case("channel", dict.fromkeys((*"qkv", "log_decay"), narrower), {}),
            Case("delta", turned | by_head | {"log_decay": (batch, time_, heads)}, {}),
            Case("delta_channel", dict.fromkeys((*"qkv", "log_decay"), (batch, time_, heads, width)) | by_head, {}),
        ],
        "selective_scan": [Case("mamba", scanned, {})],
        "wkv4": [Case("rwkv", dict.fromkeys("kv", channels) | dict.fromkeys(("decay", "bonus"), (d_model,)), {})],
        "wkv7": [Case("rwkv7", dict.fromkeys((*"rkv", "log_decay", "removal", "rate"), narrower), {})],
        "experts": [Case("experts", rows | {"weight": (8, d_model, d_model)}, {}, {"ends": ends})],
        "linear_cross_entropy": [
            Case("loss", {"hidden": stream, "table": (vocab, d_model)}, summed, {"targets": (0,) * tokens})
        ],
    }
