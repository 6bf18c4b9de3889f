"""What earlier layers left in the stream, mixed in again: against the formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from tests.arch_dsl.conformance import TOKENS, build, load


def model(skips: Any, n_layers: int = 4, **more: Any) -> dict[str, Any]:
    block = {"attention": {"heads": 4, "pre": ["rmsnorm"]}, "ffn": {"type": "mlp", "width": 24, "pre": ["rmsnorm"]}}
    sizes = {"d_model": 16, "n_layers": n_layers, "vocab": 19, "max_positions": 12}
    return {**sizes, "block": block, "embed": ["rmsnorm"], "final": ["rmsnorm"], "skips": skips, **more}


@pytest.mark.parametrize("n_layers", [2, 4, 5])
@pytest.mark.parametrize("skips", [["mirror"], ["x0_mix"], ["mirror", "x0_mix"]], ids="+".join)
@pytest.mark.parametrize("n", [0, 3])
def test_mixes_in_what_stood_there_before(skips: list[str], n_layers: int, n: int):
    streams = {"streams": {"type": "hyper", "n": n}} if n else {}
    module: Any = build(load(model(skips, n_layers, **streams)))
    call = Call()
    x = x0 = module.embed(module.embedded(TOKENS), call, iter(()))
    if n:
        x = x0 = torch.stack([x] * n, 2)
    stack = []  # of what the first half of the layers left, the last on top
    for depth in range(n_layers):
        if depth and depth - 1 < n_layers // 2:
            stack.append(x)
        if "mirror" in skips and depth >= n_layers - n_layers // 2:
            x = x + module.skips[str(depth)].mirror.weight * stack.pop()
        if "x0_mix" in skips:
            mix = module.skips[str(depth)].x0_mix
            x = mix.own * x + mix.first * x0
        x = module.block[depth](x, call)
    last = module.final(x.sum(2) if n else x, call, iter(()))
    torch.testing.assert_close(module(TOKENS), module.logits(last), rtol=1e-12, atol=1e-12)
    assert "mirror" not in skips or stack == []


def test_begins_as_the_network_without_it():
    plain = arch_dsl.compile(load(model([])))
    mixed = arch_dsl.compile(load(model(["x0_mix", {"type": "mirror", "start": 0.0}])))
    assert torch.equal(mixed(TOKENS), plain(TOKENS))
    started = arch_dsl.compile(load(model(["mirror", {"type": "x0_mix", "start": 0.1}])))
    starts = {name: value.item() for name, value in started.named_parameters() if name.startswith("skips.3")}
    assert starts == {
        "skips.3.mirror.weight": 1.0,
        "skips.3.x0_mix.own": 1.0,
        "skips.3.x0_mix.first": pytest.approx(0.1),
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model(["x0_mix"], n_layers=1), "skips.0: needs a second layer"),
        (model(["mirror"], n_layers=1), "skips.0: needs a second layer"),
        (model(["mirror", "mirror"]), "skips.1: mirror stands twice; one of each is enough"),
        (model(["shift"]), "skips.0: 'shift' is not a skip"),
        (model([{"type": "mirror", "begin": 1}]), "skips.0.begin: 'begin' is not a key of mirror"),
    ],
)
def test_skips_that_make_no_sense_are_refused(data: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        load(data)
