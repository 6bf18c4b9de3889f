"""Which implementation a node of a model gets, and why."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from archlab.kernels import OPS, Case, Device, Op, select
from archlab.kernels.attention.listed import by_blocks
from archlab.kernels.attention.torch_ops import by_rows, plain, sdpa
from archlab.kernels.op import forced

CPU, H200 = Device("cpu"), Device("cuda", (9, 0))
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("op", "device", "dtype", "options", "implementation", "reason"),
    [
        pytest.param("gate", CPU, FP32, {}, "torch", "interpreter is a thousand times slower", id="cpu"),
        pytest.param("gate", H200, BF16, {"granularity": "headwise"}, "triton", "fused", id="cuda"),
        pytest.param("gate", H200, BF16, {"granularity": "other"}, "torch", "one value per last dim", id="broadcast"),
        pytest.param("gate", H200, BF16, {"activation": "function"}, "torch", "named activations", id="formula"),
        pytest.param("gate", H200, torch.float64, {}, "torch", "computes in float32", id="float64"),
        pytest.param("gate", Device("cuda", (7, 5)), BF16, {}, "torch", "needs sm_80", id="old_card"),
        pytest.param("gate", Device("cuda"), BF16, {}, "triton", "fused", id="cuda_of_unknown_capability"),
        pytest.param("rms_norm", CPU, BF16, {}, "torch", "rms_norm", id="norm_cpu"),
        pytest.param("rms_norm", H200, BF16, {"weight": False}, "triton", "one pass", id="norm_cuda"),
        pytest.param("glu", H200, FP32, {"activation": "gelu"}, "triton", "fused", id="glu_cuda"),
        pytest.param("wkv4", CPU, FP32, {}, "torch", "interpreter is a thousand times slower", id="wkv_cpu"),
        pytest.param("wkv4", H200, FP32, {}, "triton", "one walk through time", id="wkv_cuda"),
        pytest.param("selective_scan", H200, BF16, {}, "triton", "one walk through time", id="scan_cuda"),
        pytest.param("selective_scan", H200, BF16, {"state": 128}, "torch", "at most 64 numbers", id="wide_states"),
        pytest.param("attention", H200, BF16, {"causal": True}, "torch", "scaled_dot_product", id="attention_cuda"),
        pytest.param("attention", H200, BF16, {"bias": True}, "torch", "a matrix already", id="attention_cuda_bias"),
        pytest.param("attention", H200, BF16, {"decay": True}, "triton", "tile by tile", id="attention_cuda_decay"),
        pytest.param("attention", H200, BF16, {"relative": True}, "triton", "tile by tile", id="attention_cuda_alibi"),
        pytest.param("attention", H200, BF16, {"sinks": True, "bias": True}, "triton", "tile", id="attention_sinks"),
        pytest.param("attention", H200, BF16, {"window": True, "wide": True}, "torch", "heads wider", id="wide_heads"),
        pytest.param("attention", H200, BF16, {"window": True, "first": True}, "torch", "first ones", id="first_keys"),
        pytest.param("attention", CPU, BF16, {}, "torch", "plain products", id="attention_cpu_bf16"),
        pytest.param("attention", CPU, FP32, {}, "torch", "scaled_dot_product", id="attention_cpu"),
        pytest.param(
            "attention", CPU, FP32, {"window": True, "first": True}, "torch", "scaled_dot", id="first_keys_cpu"
        ),
        pytest.param("attention", CPU, FP32, {"bias": True}, "torch", "queries at a time", id="attention_cpu_bias"),
        pytest.param("attention", CPU, BF16, {"window": True}, "torch", "queries at a time", id="attention_cpu_window"),
    ],
)
def test_choice_and_its_reason(
    op: str, device: Device, dtype: torch.dtype, options: dict[str, str], implementation: str, reason: str
) -> None:
    choice = select(op, device, dtype, **options)
    assert choice.implementation == implementation
    assert reason in choice.reason


def test_attention_on_the_cpu_is_plain_only_in_bfloat16() -> None:
    assert select("attention", CPU, BF16).call is plain
    assert select("attention", CPU, FP32).call is sdpa
    assert select("attention", H200, BF16).call is sdpa
    assert select("attention", CPU, FP32, documents=True).call is sdpa
    assert select("attention", CPU, FP32, causal=False, relative=True).call is plain, "slower by SDPA with a matrix"


@pytest.mark.parametrize("option", ["window", "strided", "relative", "decay"])
def test_attention_on_the_cpu_is_computed_some_queries_at_a_time(option: str) -> None:
    """Where it gains by it: with masks and biases, in both dtypes, and nowhere where it would read ahead."""
    for dtype in (FP32, BF16):
        assert select("attention", CPU, dtype, **{option: True}).call is by_rows
    assert select("attention", CPU, torch.float16, **{option: True}).call is sdpa
    assert select("attention", CPU, FP32, **{option: True, "documents": True}).call is sdpa
    assert select("attention", CPU, FP32, **{option: True, "causal": False}).call is not by_rows
    assert select("attention", H200, torch.float64, **{option: True}).call is sdpa


def test_attention_of_blocks_is_computed_by_their_lists_on_the_cpu() -> None:
    asked: dict[str, Any] = {"causal": False, "blocks": True}
    for dtype in (FP32, BF16):
        assert select("attention", CPU, dtype, **asked).call is by_blocks
    assert select("attention", CPU, FP32, **asked, relative=True).call is sdpa
    assert select("attention", CPU, FP32, **asked, documents=True).call is sdpa
    assert select("attention", H200, torch.float64, **asked).call is sdpa


@pytest.mark.parametrize("option", ["softcap", "sinks"])
def test_attention_is_plain_where_sdpa_cannot(option: str) -> None:
    assert select("attention", H200, BF16, **{option: True}).implementation == "triton"
    assert select("attention", CPU, FP32, **{option: True}).call is (plain if option == "softcap" else by_rows)
    in_bfloat16 = select("attention", CPU, BF16, **{option: True})
    assert in_bfloat16.call is (plain if option == "softcap" else OPS["attention"].reference)
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="SDPA knows no softcap and no sinks"):
        sdpa(q, q, q, **{option: torch.ones(1)})  # type: ignore[arg-type]


@pytest.mark.parametrize("op", OPS)
def test_reference_can_be_forced_everywhere(op: str) -> None:
    choice = select(op, H200, BF16, force="reference")
    assert (choice.implementation, choice.call) == ("reference", OPS[op].reference)
    assert choice.reason == "forced"
    assert not choice.fallback
    assert select(op, H200, BF16, force="torch").implementation == "torch"


@pytest.mark.parametrize(
    ("word", "op", "device", "implementation"),
    [("torch", "gate", H200, "torch"), ("torch", "attention", CPU, "torch"), ("triton", "glu", H200, "triton")],
)
def test_forced_implementation_is_taken(word: str, op: str, device: Device, implementation: str) -> None:
    assert select(op, device, BF16, force=word).implementation == implementation


@pytest.mark.parametrize("word", ["reference", "torch", "triton", ""])
def test_the_environment_names_what_is_forced(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHLAB_KERNELS", word)
    assert forced() == word
    assert select("gate", H200, BF16).implementation == "triton", "who builds a model asks, not every node"
    monkeypatch.setenv("ARCHLAB_KERNELS", "cuda")
    with pytest.raises(ValueError, match="ARCHLAB_KERNELS must be reference, torch or triton; received 'cuda'"):
        forced()


@pytest.mark.parametrize(
    ("op", "device", "dtype", "options", "fallback"),
    [
        pytest.param("gate", CPU, FP32, {}, False, id="cpu"),
        pytest.param("gate", H200, BF16, {}, False, id="cuda"),
        pytest.param("gate", H200, torch.float64, {}, True, id="float64"),
        pytest.param("gate", H200, BF16, {"granularity": "other"}, True, id="cannot"),
        pytest.param("attention", H200, BF16, {}, False, id="torch_is_faster"),
        pytest.param("attention", CPU, BF16, {"sinks": True}, True, id="formula"),
        pytest.param("selective_scan", CPU, FP32, {}, False, id="scan"),
    ],
)
def test_a_slower_family_than_the_device_allows_is_a_fallback(
    op: str, device: Device, dtype: torch.dtype, options: dict[str, Any], fallback: bool
) -> None:
    assert select(op, device, dtype, **options).fallback is fallback


def test_a_choice_says_what_was_asked_beside_the_defaults() -> None:
    options = {"granularity": "headwise", "activation": "silu"}
    assert select("gate", CPU, FP32, **options).asked == "activation silu, granularity headwise"
    assert select("attention", CPU, FP32, causal=False, bias=True).asked == "no causal, bias"
    assert select("rms_norm", CPU, FP32, weight=False).asked == "no weight"
    assert select("rms_norm", CPU, FP32, weight=True).asked == ""


def test_triton_can_be_forced_where_it_would_only_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select("gate", CPU, FP32, force="triton").implementation == "triton"


@pytest.mark.parametrize(
    ("word", "op", "device", "options", "message"),
    [
        pytest.param("triton", "gate", H200, {"granularity": "other"}, "one value per last dim", id="cannot"),
        pytest.param("triton", "attention", H200, {"wide": True}, "heads wider than 256", id="wide_heads"),
        pytest.param("triton", "gate", CPU, {}, "in the interpreter", id="cpu_without_interpreter"),
        pytest.param("cuda", "gate", H200, {}, "must be reference, torch or triton", id="unknown"),
    ],
)
def test_forced_implementation_that_cannot_serve_says_why(
    word: str, op: str, device: Device, options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        select(op, device, BF16, force=word, **options)


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("gates", {}, "no op 'gates'.*near: gate"),
        ("gate", {"activations": "silu"}, "near: activation"),
        ("gate", {"activation": "swish"}, "activation must be one of .*'swish'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(op: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(op, CPU, FP32, **options)


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", CPU), ("sm_90", H200), ("sm_80", Device("cuda", (8, 0))), ("sm_103", Device("cuda", (10, 3)))],
)
def test_device_is_read_and_written_alike(text: str, device: Device) -> None:
    assert Device.parse(text) == device
    assert str(device) == text


@pytest.mark.parametrize("text", ["gpu", "sm_9", "sm_9x", "cuda:0", ""])
def test_device_refuses_other_names(text: str) -> None:
    with pytest.raises(ValueError, match="a device must be"):
        Device.parse(text)


def test_without_triton_other_machines_can_still_be_asked_about() -> None:
    program = """
import sys
sys.modules["triton"] = None
import archlab.kernels.launch
archlab.kernels.launch.find_spec = lambda name: None
from kernels import Device, select
import torch
choice = select("gate", Device.parse("sm_90"), torch.bfloat16)
assert choice.implementation == "triton", choice
assert select("gate", Device("cpu"), torch.bfloat16).implementation == "torch"
try:
    choice.call(torch.ones(1), torch.ones(1), "silu", "multiply")
except RuntimeError as error:
    assert "Triton is not installed" in str(error)
else:
    raise AssertionError("called what is not there")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=240)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_cases_ask_for_what_select_knows(op: Op) -> None:
    assert len({case.name for case in op.cases}) == len(op.cases)
    for case in op.cases:
        meta = {name: torch.empty(shape, device="meta") for name, shape in case.shapes.items()}
        select(op.name, H200, BF16, **op.ask(**meta, **case.fixed()))
        assert op.flops(**meta, **case.fixed()) > 0
        assert op.bytes(**meta, **case.fixed()) > sum(each.nbytes for each in meta.values())


@pytest.mark.parametrize("case", OPS["attention"].cases, ids=lambda case: case.name)
def test_attention_flops_count_visible_pairs(case: Case) -> None:
    op = OPS["attention"]
    q, k, v = (torch.zeros(case.shapes[name]) for name in "qkv")
    seen = case.arguments["pattern"].dense(q.shape[2], k.shape[2], q.device)
    kept = q.shape[2] * k.shape[2] if seen is None else int(seen.sum()) // (len(seen) if seen.ndim == 3 else 1)
    expected = 2 * kept * q.shape[0] * q.shape[1] * (q.shape[3] + v.shape[3])
    assert op.flops(q, k, v, **case.fixed()) == expected


def test_documents_need_as_many_queries_as_keys() -> None:
    q, documents = torch.zeros(1, 1, 4, 8), torch.zeros(1, 4, dtype=torch.long)
    for call in (OPS["attention"].reference, plain, sdpa):
        with pytest.raises(ValueError, match="as many queries as keys; received 3 and 4"):
            call(q[:, :, :3], q, q, documents=documents)
