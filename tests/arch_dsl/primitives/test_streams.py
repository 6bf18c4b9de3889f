"""Several residual streams against the papers' formulas written out in float64, and against transformers' module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.primitives.streams import doubly_stochastic
from tests.arch_dsl.conformance import TARGETS, TOKENS, build, load

BLOCK: dict[str, Any] = {
    "attention": {"heads": 4, "kv_heads": 2, "pre": ["rmsnorm"]},
    "ffn": {"type": "mlp", "width": 24, "pre": ["rmsnorm"]},
}


def model(streams: Any, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12}
    last = {"type": "rmsnorm", "eps": 1e-12}  # so that a factor on the stream makes no difference
    return {**sizes, "block": BLOCK, "final": [last], "streams": streams, **more}


def hyper_weights(mix: Any, streams: Tensor, dynamic: bool) -> Tensor:
    """HC `[1 + n, 1 + n]` of one token, from its streams `[n, d_model]`: arXiv:2409.19606, eq. 1 and 10 to 13."""
    n = len(streams)
    found = torch.zeros(1 + n, 1 + n, dtype=torch.float64)
    for i in range(n):
        row = mix.static[i]
        if dynamic:
            centred = streams[i] - streams[i].mean()
            normed = centred / (centred.square().mean() + 1e-5).sqrt() * mix.norm.weight + mix.norm.bias
            made = torch.stack([(mix.projection.weight[c] * normed).sum() for c in range(n + 2)]).tanh()
            row = row + torch.cat([mix.scale[0] * made[:-1], mix.scale[1] * made[-1:]])
        found[1 + i, :] = row[:-1]  # A_m and A_r
        found[0, 1 + i] = row[-1]  # B
    return found


def manifold_weights(mix: Any, streams: Tensor, dynamic: bool) -> Tensor:
    """The same of arXiv:2512.24880, eq. 7 to 9, whose H_res is the transpose of A_r."""
    n = len(streams)
    flat = torch.cat([*streams])
    raw = mix.static
    if dynamic:
        normed = flat / (flat.square().mean() + 1e-6).sqrt()
        made = mix.projection.weight @ normed
        raw = raw + torch.cat([mix.scale[0] * made[:n], mix.scale[1] * made[n : 2 * n], mix.scale[2] * made[2 * n :]])
    matrix = raw[2 * n :].reshape(n, n).exp()
    for _ in range(mix.iterations):
        for j in range(n):
            matrix = torch.stack([matrix[:, k] / (matrix[:, k].sum() if k == j else 1) for k in range(n)], 1)
        for i in range(n):
            matrix = torch.stack([matrix[k] / (matrix[k].sum() if k == i else 1) for k in range(n)])
    found = torch.zeros(1 + n, 1 + n, dtype=torch.float64)
    found[1:, 0] = 1 / (1 + (-raw[:n]).exp())
    found[0, 1:] = 2 / (1 + (-raw[n : 2 * n]).exp())
    found[1:, 1:] = matrix.T
    return found


def written_out(module: Any, tokens: Tensor, weights_of: Any, n: int, dynamic: bool) -> Tensor:
    """Logits, stream by stream and token by token, with the branches as they are."""
    rows, time = tokens.shape
    streams = [[[module.embedding[tokens[b, t]] for _ in range(n)] for t in range(time)] for b in range(rows)]
    for layer in module.block:
        for name in layer.streams:
            mix, branch = layer.streams[name], getattr(layer, name)
            weights = [[weights_of(mix, torch.stack(streams[b][t]), dynamic) for t in range(time)] for b in range(rows)]
            read = [
                [sum(weights[b][t][1 + i, 0] * streams[b][t][i] for i in range(n)) for t in range(time)]
                for b in range(rows)
            ]
            update = branch.update(torch.stack([torch.stack(row) for row in read]), Call())
            for b, t in torch.cartesian_prod(torch.arange(rows), torch.arange(time)).tolist():
                old, w = streams[b][t], weights[b][t]
                streams[b][t] = [
                    w[0, 1 + j] * update[b, t] + sum(w[1 + i, 1 + j] * old[i] for i in range(n)) for j in range(n)
                ]
    last = torch.stack(
        [torch.stack([sum(streams[b][t][1:], streams[b][t][0]) for t in range(time)]) for b in range(rows)]
    )
    return module.logits(module.final(last, Call(), iter(())))


@pytest.mark.parametrize(
    ("streams", "weights_of"),
    [
        ({"type": "hyper", "n": 3}, hyper_weights),
        ({"type": "hyper", "n": 2, "dynamic": False}, hyper_weights),
        ({"type": "manifold", "n": 3, "iterations": 4}, manifold_weights),
        ({"type": "manifold", "n": 2, "dynamic": False}, manifold_weights),
    ],
    ids=["hyper", "static", "manifold", "static manifold"],
)
def test_computes_what_the_paper_says(streams: dict[str, Any], weights_of: Any):
    module, again = (build(load(model(streams))) for _ in range(2))
    tokens, targets = TOKENS[:, :4], TARGETS[:, :4]
    logits = module(tokens)
    expected = written_out(again, tokens, weights_of, streams["n"], streams.get("dynamic", True))
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for found in (logits, expected):
        torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten()).backward()
    for (name, value), other in zip(module.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(value.grad, other.grad, rtol=1e-8, atol=1e-10, msg=name)


def by_layers(module: Any, tokens: Tensor, n: int) -> Tensor:
    """Logits of alternating updates, block by block: arXiv:2301.13310, algorithm 1."""
    blocks = [module.embedding[tokens] for _ in range(n)]
    for depth, layer in enumerate(module.block):
        scalars, active = layer.streams["layer"], depth % n
        predicted = [sum(scalars.predict[i, j] * blocks[j] for j in range(n)) for i in range(n)]
        computed = predicted[active]
        for name in ("attention", "ffn"):
            computed = computed + getattr(layer, name).update(computed, Call())
        blocks = [predicted[i] + scalars.correct[i] * (computed - predicted[active]) for i in range(n)]
    return module.logits(module.final(sum(blocks[1:], blocks[0]), Call(), iter(())))


@pytest.mark.parametrize("n", [2, 3])
def test_altup_computes_what_the_paper_says(n: int):
    module, again = (build(load(model({"type": "altup", "n": n}, n_layers=3))) for _ in range(2))
    logits, expected = module(TOKENS), by_layers(again, TOKENS, n)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for found in (logits, expected):
        torch.nn.functional.cross_entropy(found.flatten(0, 1), TARGETS.flatten()).backward()
    for (name, value), other in zip(module.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(value.grad, other.grad, rtol=1e-8, atol=1e-10, msg=name)


def as_long(vector: Tensor, like: Tensor) -> Tensor:
    """A vector of the root mean square of another: transformers' Gemma3nTextModel.forward."""
    own, wanted = (item.square().mean(-1, keepdim=True) for item in (vector, like))
    return vector * wanted.sqrt() / own.clamp(min=1e-5).sqrt()


def by_routers(module: Any, tokens: Tensor, n: int, active: str, clip: float) -> Tensor:
    """Logits of streams whose weights are made of the token, with maps at both ends and the branch ffn beside layers:
    transformers' Gemma3nTextAltUp, Gemma3nTextDecoderLayer and Gemma3nTextModel."""
    x = module.embedding[tokens]
    streams = [x, *(as_long(x @ item.weight.T, x) for item in module.streams.entry.maps)]
    for depth, layer in enumerate(module.block):
        mix, own = layer.streams["layer"], 0 if active == "first" else depth % n

        def routed(h: Tensor, by: Any, mix: Any = mix) -> Tensor:
            normed = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mix.norm.weight
            return torch.tanh(normed @ mix.router.weight.T / 16) @ by.weight.clamp(-clip, clip).T

        made = routed(streams[own], mix.prediction)
        predicted = [streams[i] + sum(made[..., n * i + j, None] * streams[j] for j in range(n)) for i in range(n)]
        computed = predicted[own] + layer.attention.update(predicted[own], Call())
        write = 1 + routed(computed, mix.correction)
        streams = [predicted[i] + write[..., i, None] * (computed - predicted[own]) for i in range(n)]
        beside = layer.ffn.update(streams[own], Call())
        streams = [stream if i == own else stream + beside for i, stream in enumerate(streams)]
    others = zip(streams[1:], module.streams.exit.maps, strict=True)
    ends = [streams[0], *(as_long(other @ item.weight.T, streams[0]) for other, item in others)]
    return module.logits(module.final(sum(ends[1:], ends[0]) / n, Call(), iter(())))


@pytest.mark.parametrize(("n", "active"), [(3, "alternating"), (2, "first")])
def test_altup_of_a_router_computes_what_gemma_3n_does(n: int, active: str):
    ends = {"entry": "projected", "exit": "projected"}
    fields = {"router": "rmsnorm", "clip": 0.3, "stream": active, "others": ["ffn"], **ends}
    module, again = (build(load(model({"type": "altup", "n": n, **fields}, n_layers=3))) for _ in range(2))
    logits, expected = module(TOKENS), by_routers(again, TOKENS, n, active, 0.3)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for found in (logits, expected):
        torch.nn.functional.cross_entropy(found.flatten(0, 1), TARGETS.flatten()).backward()
    for (name, value), other in zip(module.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(value.grad, other[1].grad, rtol=1e-8, atol=1e-10, msg=name)


def test_altup_of_a_router_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch):
    """In training, which clips its maps of coefficients to altup_coef_clip."""
    reference = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # in which its norm and tanh compute
    config = reference.Gemma3nTextConfig(hidden_size=16, altup_num_inputs=3, altup_coef_clip=0.3, rms_norm_eps=1e-6)
    theirs = reference.Gemma3nTextAltUp(config).double().train()
    fields = {"router": "rmsnorm", "clip": 0.3, "stream": "first"}
    mix: Any = build(load(model({"type": "altup", "n": 3, **fields}))).block[1].streams["layer"]
    pairs = {"router_norm": mix.norm, "modality_router": mix.router}
    pairs |= {"prediction_coefs": mix.prediction, "correction_coefs": mix.correction}
    with torch.no_grad():
        for name, ours in pairs.items():
            theirs.get_submodule(name).weight.copy_(ours.weight)
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(2, 5, 3, 16, dtype=torch.float64, generator=generator)
    result = torch.randn(2, 5, 16, dtype=torch.float64, generator=generator)
    predicted = theirs.predict(streams.movedim(2, 0))
    corrected = theirs.correct(predicted, result).movedim(0, 2)
    _, mixed = mix(streams, Call())
    kept = mixed @ streams
    found = kept + mix.written(result, Call())[..., None] * (result - kept[:, :, 0])[:, :, None]
    torch.testing.assert_close(kept, predicted.movedim(0, 2), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, corrected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(corrected.shape, dtype=torch.float64, generator=generator)
    (corrected * weights).sum().backward()
    (found * weights).sum().backward()
    for name, ours in pairs.items():
        wanted = theirs.get_submodule(name).weight.grad
        if name == "prediction_coefs":  # theirs moves the weight back instead, and so has a gradient beyond the clip
            wanted = wanted * (ours.weight.abs() <= 0.3)
        torch.testing.assert_close(ours.weight.grad, wanted, rtol=1e-8, atol=1e-8, msg=name)


def test_altup_leaves_a_layer_its_joins():
    block = {name: {**branch, "pre": [], "join": "add_norm"} for name, branch in BLOCK.items()}
    plain, several = (arch_dsl.compile(load(model(each, block=block))).double() for each in (None, "altup"))
    torch.testing.assert_close(several(TOKENS), plain(TOKENS), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_manifold_is_that_of_deepseek_v4():
    """But for its eps on weights, which is no part of the paper; its matrix is the transpose of ours."""
    reference = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = reference.DeepseekV4Config(hidden_size=16, hc_mult=3, hc_eps=0.0, rms_norm_eps=1e-6)
    theirs = reference.DeepseekV4HyperConnection(config).double()
    mix: Any = build(load(model({"type": "manifold", "n": 3}))).block[0].streams["ffn"]
    order = [*range(6), *(6 + 3 * i + j for j in range(3) for i in range(3))]
    with torch.no_grad():
        theirs.fn.copy_(mix.projection.weight[order])
        theirs.base.copy_(mix.static[order])
        theirs.scale.copy_(mix.scale)
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(2, 5, 3, 16, dtype=torch.float64, generator=generator)
    write, mixed, stream = theirs(streams)
    got = mix(streams, Call())
    # in which the weights are made in float32
    torch.testing.assert_close(got[2], write, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].mT, mixed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((got[0][..., None] * streams).sum(2), stream, rtol=1e-5, atol=1e-6)


ROUTED = {"type": "altup", "n": 3, "router": "rmsnorm", "stream": "first"}


@pytest.mark.parametrize("streams", ["hyper", {"type": "hyper", "n": 3, "dynamic": False}, "manifold", "altup", ROUTED])
def test_begins_as_a_network_with_one_stream(streams: Any):
    plain, several = (arch_dsl.compile(load(model(each))).double() for each in (None, streams))
    shared = dict(several.named_parameters())
    for name, value in plain.named_parameters():
        assert torch.equal(value, shared[name]), name
    torch.testing.assert_close(several(TOKENS), plain(TOKENS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("streams", ["hyper", "manifold"])
def test_streams_do_not_stay_alike(streams: str):
    module = arch_dsl.compile(load(model({"type": streams, "n": 3}))).double()
    module.loss(TOKENS, TARGETS).backward()
    grad = module.block[0].streams["ffn"].static.grad  # type: ignore[index]
    written = grad[:, -1] if streams == "hyper" else grad[3:6]
    assert len({round(value, 9) for value in written.tolist()}) == 3


def test_a_doubly_stochastic_matrix_sums_to_one_both_ways():
    logits = 3 * torch.randn(7, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = doubly_stochastic(logits, 1000)
    for dim in (-1, -2):
        torch.testing.assert_close(matrix.sum(dim), torch.ones(7, 4, dtype=torch.float64))
    large = doubly_stochastic(1e4 + 3 * torch.randn(4, 4), 20)
    assert large.isfinite().all()


def test_weight_decay_leaves_what_is_static_alone():
    module = arch_dsl.compile(load(model("hyper")))
    assert {getattr(value, "decay", None) for name, value in module.named_parameters() if "static" in name} == {False}


def test_a_shared_branch_has_weights_of_its_own_in_each_layer():
    shared = {"attention": BLOCK["attention"], "ffn": {**BLOCK["ffn"], "share": "stack"}}
    module = build(load(model("hyper", block=shared)))
    assert module.block[0].ffn is module.block[1].ffn
    assert module.block[0].streams["ffn"] is not module.block[1].streams["ffn"]
    assert module(TOKENS).isfinite().all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model({"type": "manifold", "n": 1}), "streams.n: one stream leaves nothing to mix"),
        (model({"type": "hyper", "n": 0}), "streams.n: must be at least 1"),
        (model({"type": "hyper", "iterations": 3}), "streams.iterations: 'iterations' is not a key of hyper"),
        (model("mirror"), "streams.*'mirror' is not a stream connection"),
        (
            model("hyper", block={"attention": {"heads": 4, "join": "highway"}}),
            "block.attention.join: must be add, as hyper streams mix the update in themselves; found highway",
        ),
        (
            model("manifold", block={"streams": {"type": "mlp"}}),
            "block.streams: is the name of what mixes the streams; name the branch otherwise",
        ),
        (model({"type": "hyper", "n": 1, "entry": "projected"}), "streams.entry: maps all streams but the first"),
        (model({"type": "altup", "clip": 2.0}), "streams.clip: bounds the maps of a router"),
        (model({"type": "altup", "others": ["fnn"]}), "streams.others: 'fnn' is not a branch.*did you mean 'ffn'"),
        (
            model({"type": "altup", "others": ["attention"]}),
            "streams.others: must be the last branches of a block.*found attention, ffn",
        ),
        (
            model(
                {"type": "altup", "others": ["ffn"]},
                block={**BLOCK, "ffn": {**BLOCK["ffn"], "join": "highway"}},
            ),
            "streams.others: add, and so their join must be add; that of ffn is highway",
        ),
        (
            model({"type": "altup", "router": {"type": "rmsnorm", "share": "stack"}}),
            "streams.router: is one of each layer; leave out its share",
        ),
    ],
)
def test_streams_that_make_no_sense_are_refused(data: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        load(data)
