"""Models with an encoder: their paths, knobs and costs, what the encoder reads, and RedLLM against its formulas."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError, zoo
from archlab.arch_dsl.compiler.generation import generate
from archlab.arch_dsl.compiler.modules import EncoderDecoder
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.inspection.slots import settings, slots
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.patching.patch import apply

ATTENTION: dict[str, Any] = {"heads": 4, "positional": "rope"}
CROSS = {"heads": 4, "kv_heads": 2}
FFN = {"type": "glu", "width": 24}
PAIR: dict[str, Any] = {
    "d_model": 16,
    "vocab": 19,
    "max_positions": 12,
    "encoder": {"n_layers": 2, "block": {"norm": "rmsnorm", "attention": {**ATTENTION, "mask": "full"}, "ffn": FFN}},
    "decoder": {
        "n_layers": 3,
        "block": {"norm": "rmsnorm", "attention": ATTENTION, "cross_attention": CROSS, "ffn": FFN},
    },
}
TOKENS = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(1))
SOURCE = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(2))
PADDING = torch.arange(9) >= torch.tensor([[9], [6]])


def model(**changes: Any) -> arch_dsl.Model:
    """The pair with these paths changed; `__` stands for a dot."""
    return arch_dsl.patch(arch_dsl.load(PAIR), {path.replace("__", "."): value for path, value in changes.items()})


def module(**changes: Any) -> EncoderDecoder:
    """Its module in float64 with random parameters."""
    built = arch_dsl.compile(arch_dsl.resolve(model(**changes)), backend="reference").double().eval()
    randomize(built)
    assert isinstance(built, EncoderDecoder)
    return built


def read(**more: Any) -> Call:
    return Call(source_tokens=SOURCE, source_padding=PADDING, **more)


# The spec


def test_knobs_act_in_their_stack_and_paths_lead_through_it():
    changed = model(
        encoder__block__norm__placement="sandwich",
        decoder__block__attention__gate="sdpa",
        **{"*__block__attention__kv_heads": 2, "decoder__overrides__-1__block__attention__kv_heads": 1},
    )
    assert len(changed.encoder.block["ffn"].post) == 1 and changed.decoder.block["ffn"].post == ()
    assert len(changed.decoder.block["attention"].sdpa) == 1 and changed.encoder.block["attention"].sdpa == ()
    layers = [stack.layers() for stack in arch_dsl.resolve(changed).stacks().values()]
    assert [[block["attention"].kv_heads for block in blocks] for blocks in layers] == [[2, 2], [2, 2, 1]]
    before, after = arch_dsl.resolve(model()), arch_dsl.resolve(changed)
    assert {change.path for change in arch_dsl.diff(before, after)} == {
        "encoder.block.attention.kv_heads",
        "encoder.block.attention.post",
        "encoder.block.ffn.post",
        "decoder.block[0-1].attention.kv_heads",
        "decoder.block[2].attention.kv_heads",
        "decoder.block.attention.sdpa",
    }


def test_positions_of_a_knob_stand_in_its_stack():
    learned = model(encoder__block__attention__positional="learned")
    assert [item.type for item in learned.encoder.embed] == ["learned"] and learned.decoder.embed == ()
    assert not learned.encoder.block["attention"].query and learned.decoder.block["attention"].query


def test_one_meaning_has_one_identity():
    sites = arch_dsl.canonical(arch_dsl.resolve(model()))
    assert arch_dsl.identity(arch_dsl.resolve(arch_dsl.load(sites))) == arch_dsl.identity(arch_dsl.resolve(model()))
    dumped = arch_dsl.load(arch_dsl.language.source.read_text(arch_dsl.dump(model())))
    assert dumped == model()
    others = [model(encoder__n_layers=3), model(embedding__shared=False), model(decoder__block__ffn__width=32)]
    assert len({arch_dsl.identity(arch_dsl.resolve(other)) for other in [model(), *others]}) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block.norm": "none"}, "block.norm: matches nothing: in the model, 'block' is not a name (d_model, encoder,"),
        ({"encoder.positions": "own"}, "encoder.positions: matches nothing: in encoder, 'positions' is not a name"),
        ({"decoder.overrides.1.ffn": 1}, "decoder.overrides.1: 'ffn' is not of a layer: a path here begins with block"),
        ({"decoder.overrides.7.block.ffn": None}, "decoder.overrides: '7' names no layer of 3"),
        ({"decoder.block.attention.heads": 3}, "decoder.block.attention.heads: 3 heads do not divide d_model 16"),
        (
            {"encoder.block.attention.scores": ["sinks", {"type": "softcap", "cap": 3.0}]},
            "encoder.block.attention.scores.1: softcap must stand before sinks",
        ),
        (
            {"decoder.positions": "after_source"},
            "decoder.positions: after_source changes nothing here: neither cross-attention nor `embed` sees",
        ),
        (
            {"decoder.positions": "after_source", "decoder.embed": ["learned"]},
            "decoder.positions: after_source leaves the tables of learned positions",
        ),
        ({"init.residual": "deepnorm"}, "init.residual: deepnorm is for one stack"),
        ({"decoder.block.cross_attention": None}, "decoder: has no branch cross_attention, so nothing"),
    ],
)
def test_what_makes_no_sense_is_told_with_its_path(changes: dict[str, Any], said: str):
    with pytest.raises(SpecError) as caught:
        arch_dsl.resolve(arch_dsl.patch(arch_dsl.load(PAIR), changes))
    assert said in str(caught.value)


def test_slots_of_both_stacks_have_their_own_names():
    before, after = zoo.load("t5", "tiny"), zoo.load("t5_v1_1", "tiny")
    found = slots(before, after)
    names = [slot.name for slot in found]
    assert len(set(names)) == len(names) and {"encoder_ffn", "decoder_ffn", "tied"} <= set(" ".join(names).split())
    assert arch_dsl.resolve(apply(before, settings(found))) == arch_dsl.resolve(after)


def test_models_of_two_kinds_differ_in_whole_stacks():
    found = arch_dsl.diff(arch_dsl.resolve(zoo.load("decllm", "tiny")), arch_dsl.resolve(zoo.load("redllm", "tiny")))
    told = {change.path: str(change) for change in found}
    assert {"block", "n_layers", "encoder", "decoder"} <= told.keys()
    assert told["decoder"].startswith("decoder: null → {n_layers: 2, block: {attention: {type: attention,")
    assert told["block"].endswith("→ null")


def test_slots_lead_from_one_to_the_other_and_none_to_a_decoder():
    changes = {"encoder.block.norm": "layernorm", "decoder.block.ffn.width": 32, "decoder.n_layers": 2}
    before, after = model(), arch_dsl.patch(model(), changes)
    found = slots(before, after)
    assert {slot.name for slot in found} == {"encoder_norm", "decoder_ffn_width", "decoder_n_layers"}
    assert arch_dsl.resolve(apply(before, settings(found))) == arch_dsl.resolve(after)
    with pytest.raises(SpecError, match="one of the two has an encoder"):
        slots(before, zoo.load("llama", "tiny"))


# What it computes


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tables_are_one_two_or_three(shared: bool, tied: bool):
    built = module(embedding__shared=shared, unembedding__tied=tied)
    names = {name for name, _ in built.named_parameters() if not name.startswith(("encoder.", "decoder."))}
    expected = {"embedding", *([] if shared else ["source_embedding"]), *([] if tied else ["unembedding.weight"])}
    assert names == expected
    assert arch_dsl.cost(built.spec, 12).parameters == sum(value.numel() for value in built.parameters())
    built.loss(TOKENS, TOKENS, read()).backward()
    assert all(value.grad is not None for value in built.parameters())


def test_padding_of_the_source_is_read_by_nobody():
    built = module()
    other = SOURCE.masked_scatter(PADDING, torch.full_like(SOURCE, 7))
    assert not torch.equal(other, SOURCE)
    assert torch.equal(built(TOKENS, dataclasses.replace(read(), source_tokens=other)), built(TOKENS, read()))
    alone = Call(source_tokens=SOURCE[1:, :6])
    torch.testing.assert_close(built(TOKENS[1:], alone), built(TOKENS, read())[1:], rtol=0, atol=1e-12)
    moved = built(TOKENS, Call(source_tokens=other)) - built(TOKENS, Call(source_tokens=SOURCE))
    assert moved[1].abs().amax(-1).min() > 1e-6, "every target sees every token of the source"


def test_a_source_is_needed_and_may_be_given_encoded():
    built = module()
    with pytest.raises(ValueError, match="the call needs source_tokens"):
        built(TOKENS)
    given = Call(source=built.encode(read()), source_padding=PADDING)
    assert torch.equal(built(TOKENS, given), built(TOKENS, read()))


def test_the_source_is_encoded_once_while_decoding(monkeypatch: pytest.MonkeyPatch):
    built, whole = module(decoder__overrides={"1": {"block.attention.mask": {"type": "window", "size": 4}}}), []
    state = State()
    expected = built(TOKENS, read())
    encode = built.encode
    monkeypatch.setattr(built, "encode", lambda call: whole.append(1) or encode(call))
    first = built(TOKENS[:, :5], read(state=state))
    rest = [built(TOKENS[:, t : t + 1], Call(state=state)) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), expected, rtol=0, atol=1e-10)
    assert len(whole) == 1


def test_what_is_generated_reads_the_source():
    built = module()
    found = generate(built, TOKENS[:, :2], 6, read())
    for t in range(2, 8):
        assert torch.equal(found[:, t], built(found[:, :t], read())[:, -1].argmax(-1))
    assert not torch.equal(found, generate(built, TOKENS[:, :2], 6, Call(source_tokens=SOURCE.flip(1))))


def test_the_encoder_has_a_loss_of_its_own():
    built, targets = module(logits=[{"type": "softcap", "cap": 5.0}]), SOURCE.clone()
    targets[:, ::2] = -100
    call = read(source_targets=targets)
    loss = built.loss(TOKENS, TOKENS, call)
    logits = built.logits(built.encode(read()))
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(call.losses["encoder"], expected)
    torch.testing.assert_close(loss, built.loss(TOKENS, TOKENS, read()))


def test_documents_of_the_source_are_kept_apart_by_the_encoder():
    built = module(encoder__block__attention__mask={"type": "full", "documents": True})
    source = SOURCE.masked_fill(SOURCE == 3, 4)
    source[:, 4] = 3
    whole = built.encode(Call(source_tokens=source))
    built.separator = 3
    apart = built.encode(Call(source_tokens=source))
    torch.testing.assert_close(apart[:, :4], built.encode(Call(source_tokens=source[:, :4])))
    assert (apart - whole).abs().amax() > 1e-3


@pytest.mark.parametrize("source_tokens", [9, 12, 31])
def test_costs_count_a_source_of_any_length(source_tokens: int):
    built = module(decoder__block__attention__kv_heads=2)
    said = arch_dsl.cost(built.spec, 12, source_tokens)
    source = torch.arange(source_tokens)[None] % 19
    with FlopCounterMode(display=False) as counter:
        built(TOKENS[:1], Call(source_tokens=source))
    assert said.flops_matmul == counter.get_total_flops()
    parts = said.children["encoder"], arch_dsl.cost(built.spec, 12, 2 * source_tokens).children["encoder"]
    assert parts[0].flops_matmul < parts[1].flops_matmul and parts[0].cache == 0


def test_costs_are_of_as_long_a_source_by_default():
    spec = arch_dsl.resolve(model())
    assert arch_dsl.cost(spec, 12) == arch_dsl.cost(spec, 12, 12)
    total = arch_dsl.cost(spec, 12)
    assert list(total.children) == ["embedding", "encoder", "decoder", "unembedding"]
    assert total.parameters == sum(part.parameters for part in total.children.values())


# RedLLM, sections 3 of arXiv:2510.26622


def normed(x: Tensor, weight: Tensor | None = None) -> Tensor:
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x if weight is None else x * weight


def turned(x: Tensor, first: int) -> Tensor:
    """x `[time, head_dim]` turned by positions from `first` on, channel i with channel i + head_dim / 2."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        for i in range(half):
            angle = (first + t) * 10_000 ** (-i / half)
            a, b = x[t, i], x[t, i + half]
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


def attended(p: dict[str, Tensor], at: str, x: Tensor, other: Tensor, first: int, start: int, causal: bool) -> Tensor:
    """Equations 1 and 2: LN(softmax(LN(Q) LN(K)^T / sqrt(d)) LN(V)), rotated; keys from position `start` on."""
    query, key, value = (
        y @ p[f"{at}.{n}_projection.weight"].T for y, n in ((x, "query"), (other, "key"), (other, "value"))
    )
    outputs = []
    for h in range(2):
        q, k, v = (normed(y[:, h * 16 : (h + 1) * 16]) for y in (query, key, value))
        q, k = turned(q, first), turned(k, start)
        rows = []
        for i in range(len(q)):
            seen = i + 1 if causal else len(k)
            rows.append((k[:seen] @ q[i] / 4).softmax(0) @ v[:seen])
        outputs.append(normed(torch.stack(rows)))
    return torch.cat(outputs, -1) @ p[f"{at}.output_projection.weight"].T


def stack(p: dict[str, Tensor], name: str, x: Tensor, source: Tensor | None) -> Tensor:
    first = 0 if source is None else len(source)
    for layer in range(2):
        at = f"{name}.block.{layer}"
        hidden = normed(x, p[f"{at}.attention.pre.rmsnorm.weight"])
        x = x + attended(p, f"{at}.attention", hidden, hidden, first, first, causal=source is not None)
        if source is not None:
            hidden = normed(x, p[f"{at}.cross_attention.pre.rmsnorm.weight"])
            x = x + attended(p, f"{at}.cross_attention", hidden, source, first, 0, causal=False)
        hidden = normed(x, p[f"{at}.ffn.pre.rmsnorm.weight"])
        gate, up = (hidden @ p[f"{at}.ffn.{n}_projection.weight"].T for n in ("gate", "input"))
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ p[f"{at}.ffn.output_projection.weight"].T
    return normed(x, p[f"{name}.final.rmsnorm.weight"])


def test_redllm_is_what_its_formulas_say():
    spec = arch_dsl.resolve(zoo.load("redllm", "tiny"))
    built = arch_dsl.compile(spec).double()
    randomize(built)
    p = {name: value.detach() for name, value in built.named_parameters()}
    source, tokens = torch.arange(3, 14), torch.arange(40, 49)
    expected = stack(p, "decoder", p["embedding"][tokens], stack(p, "encoder", p["embedding"][source], None))
    found = built(tokens[None], Call(source_tokens=source[None]))[0]
    torch.testing.assert_close(found, expected @ p["embedding"].T, rtol=0, atol=1e-5)  # angles are of float32
    own = arch_dsl.compile(arch_dsl.resolve(arch_dsl.patch(spec, {"decoder.positions": "own"}))).double()
    own.load_state_dict(built.state_dict())
    assert (own(tokens[None], Call(source_tokens=source[None]))[0] - found).abs().max() > 1e-3
