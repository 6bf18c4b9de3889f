"""What every primitive is tried in: a small model in which it stands at every place that takes it.

A member joins by being registered. What it needs, and other fields to start from so that those that matter only
together are reached, stand beside its spec in `examples`; a new family gets a function in HOSTS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.spec import Family
from archlab.arch_dsl.model import model as models
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts import families
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.primitives.balance import Balance
from archlab.arch_dsl.primitives.injections import Injection
from archlab.arch_dsl.primitives.low_rank import LowRank
from archlab.arch_dsl.primitives.rope_scaling import RopeScaling
from archlab.arch_dsl.primitives.skips import Skip
from archlab.arch_dsl.primitives.streams import Streams
from archlab.arch_dsl.primitives.switch import Switch

VOCAB, LENGTH = 19, 12
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [18, 7, 18, 2, 8, 1, 8, 2, 8, 4, 5, 9]])
TARGETS = TOKENS.roll(-1, 1)
SOURCE = TOKENS.flip(1)  # what encoders read
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [9]])
CALL = Call(
    documents=(torch.arange(LENGTH) >= torch.tensor([[5], [9]])).long(),
    prefix=torch.tensor([3, 7]),
    source_tokens=SOURCE,
    source_padding=PADDING,
)

Data = dict[str, Any]

# What layers cannot share: it stands once, has parameters from the second layer on, or tells of each layer.
UNSHARED = (
    "differential_attention", "dual", "value_residual", "lightning_indexer", "lower_bounded", "moe", "ngram_embedding",
    "rwkv7", "slstm",
)  # fmt: skip
ATTENTION: Data = {"type": "attention", "heads": 4, "kv_heads": 2}
CROSS: Data = {**ATTENTION, "type": "cross_attention"}
LINEAR: Data = {"type": "linear_attention", "heads": 4, "pre": ["rmsnorm"]}  # cubic: several would overflow
FFN: Data = {"type": "mlp", "width": 24}


def _model(block: Data, **fields: Any) -> Data:
    return {"d_model": 16, "n_layers": 2, "vocab": VOCAB, "max_positions": LENGTH, "block": block, **fields}


def _pair(block: Data, **fields: Any) -> Data:
    """A decoder of that block beside an encoder."""
    encoder = {"n_layers": 2, "block": {"attention": {**ATTENTION, "mask": "full"}, "ffn": FFN}}
    decoder = {"n_layers": 2, "block": block}
    sizes = {"d_model": 16, "vocab": VOCAB, "max_positions": LENGTH}
    return {**sizes, "encoder": encoder, "decoder": decoder, **fields}


def _branch(x: Data) -> Data:
    """A field that no first layer takes is set in the last one alone."""
    names = getattr(families.Branch.members[x["type"]], "later", ())
    later = {f"block.branch.{name}": x[name] for name in names if name in x}
    block = {"ffn": FFN, "branch": {name: value for name, value in x.items() if name not in names}}
    if later:
        return _model(block, overrides={"-1": later})
    return _pair(block) if x["type"] == "cross_attention" else _model(block)


def _norm(x: Data) -> Data:
    # A norm takes back the scale of one before it: not all places in one branch, or `eps` would cancel out.
    outer = [] if x.get("per_head") or x.get("over") == "heads" else [x]
    join = {"type": "add_norm", "norm": x} if outer else "add"
    block = {
        "attention": {**ATTENTION, "pre": outer, "query": [x], "key": [x], "join": join},
        "attention_2": {**ATTENTION, "value": [x], "sdpa": [x], "post": outer},
        "ffn": {**FFN, "pre": outer, "inner": outer},
    }
    return _model(block, embed=outer, final=outer)


def _gate(x: Data) -> Data:
    without_heads = x.get("granularity") != "headwise" and x.get("heads") != "shared"
    post = [x] if without_heads else []
    # With rotation, as softmax does not see a constant that is added to all keys.
    per_head = {"query": [x, "rope"], "key": [x, "rope"], "value": [x], "sdpa": [x]}
    return _model({"attention": {**ATTENTION, **per_head, "post": post}, "ffn": {**FFN, "post": post}})


def _scale(x: Data) -> Data:
    top = [] if x["type"] == "depth_scale" else [x]  # needs the depth of a layer
    attention = {**ATTENTION, "pre": [x], "query": [x], "value": [x], "sdpa": [x], "post": [x]}
    block = {"attention": attention, "ffn": {**FFN, "pre": [x], "inner": [x], "post": [x]}}
    return _model(block, embed=top, final=top, logits=[] if x["type"] == "dropout" else top)


def _carry(x: Data) -> Data:
    # All in models with two streams, so that the members fit into one model.
    ends = x["type"] == "dual"
    places = {} if ends else {"pre": [x], "query": [x], "key": [x], "value": [x]}
    attention = {**ATTENTION, **places, "join": "residual_dual"}
    return _model({"attention": attention}, embed=[] if ends else [x], final=[x if ends else {"type": "dual"}])


def _join(x: Data) -> Data:
    final = [{"type": "dual"}] if x["type"] == "residual_dual" else []
    return _model({"attention": {**ATTENTION, "join": x}}, final=final)


def _rotary(x: Data) -> Data:
    return _model({"attention": {**ATTENTION, "head_dim": 8, "query": [x], "key": [x]}})


def _score(x: Data) -> Data:
    latent = {"type": "latent_attention", "heads": 4, "kv_latent": 6, "query_latent": 5, "query_inner": ["rmsnorm"]}
    return _model({"attention": {**(latent if x.get("queries") == "latent" else ATTENTION), "scores": [x]}})


def _low_rank(x: Data) -> Data:
    attention = {**ATTENTION, "pre": ["rmsnorm"], "query": ["rope"], "key": ["rope"], "lora": [x]}
    return _model({"attention": attention, "ffn": {**FFN, "type": "glu", "pre": ["rmsnorm"], "lora": [x]}})


def _on_streams(fields: Data) -> Data:
    block = {"attention": {**ATTENTION, "pre": ["rmsnorm"]}, "ffn": {**FFN, "pre": ["rmsnorm"]}}
    return _model(block, final=["rmsnorm"], **fields)


HOSTS: dict[type[Family], Callable[[Data], Data]] = {
    families.Adapter: lambda x: _model({"attention": {**ATTENTION, "post": [x]}, "ffn": {**FFN, "post": [x]}}),
    families.Norm: _norm,
    families.Gate: _gate,
    families.Scale: _scale,
    families.Carry: _carry,
    families.Position: lambda x: _model({"attention": ATTENTION}, embed=[x]),
    families.Rotary: _rotary,
    RopeScaling: lambda x: _rotary({"type": "rope", "scaling": x}),
    families.Score: _score,
    families.Weights: lambda x: _model({"attention": {**ATTENTION, "weights": x}}),
    families.Mask: lambda x: _model({"attention": {**ATTENTION, "mask": x}}),
    families.Join: _join,
    families.Decay: lambda x: _model({"branch": {**LINEAR, "decay": x}}),
    Balance: lambda x: _model({"attention": ATTENTION, "ffn": {"type": "moe", "width": 12, "balance": x}}),
    Switch: lambda x: _model({"attention": {**ATTENTION, "query": ["rope"], "key": ["rope"], "switch": [x]}}),
    LowRank: _low_rank,
    Streams: lambda x: _on_streams({"streams": x}),
    Skip: lambda x: _on_streams({"skips": [x]}),
    Injection: lambda x: _on_streams({"loop": {"turns": 2, "inject": x}}),
    families.Branch: _branch,
}


@dataclass(frozen=True)
class Case:
    """A model, and the types of the specs in it that are on trial."""

    id: str
    model: Model = field(repr=False)
    tried: tuple[str, ...]
    plain: bool
    member: type[Family] | None = None

    def others(self) -> list[Case]:
        """The other starting points of what is on trial."""
        found = cases_of(self.member) if self.member else model_cases()
        return [case for case in found if case.id != self.id]


def member_data(member: type[Family]) -> Data:
    """The plain data of a member with what it needs."""
    return {"type": member.type, **member.examples[0]}


def cases() -> Iterator[Case]:
    """Every registered member of every family from each of its starting points, and the model around them."""
    for family in HOSTS:
        for member in family.members.values():
            yield from cases_of(member)
    yield from model_cases()


def cases_of(member: type[Family]) -> Iterator[Case]:
    """A member from each of its starting points. Raises SpecError where no place takes it."""
    for index, fields in enumerate(member.examples):
        yield case_of(member, fields, index)


def case_of(member: type[Family], fields: Data, index: int = 0) -> Case:
    """A member with these fields, its `index`-th starting point. Raises SpecError where no place takes it."""
    host = next(host for family, host in HOSTS.items() if issubclass(member, family))
    label = "-".join([member.type, *(str(value) for value in fields.values() if not isinstance(value, dict))])
    data = {"type": member.type, **fields}
    return Case(label if index else member.type, load(_fitting(host(data), data)), (member.type,), not index, member)


def model_cases() -> Iterator[Case]:
    """The model itself, one whose layers differ, and such with an encoder."""
    tops = ("", "init", "embedding", "unembedding", "encoder", "decoder")
    yield Case("model", load(whole_model()), tops, plain=True)
    layers = {"1::2": {"block.attention.mask": {"type": "window", "size": 3}}, "-1": {"block.ffn": "none"}}
    factored = {**whole_model(), "n_layers": 3, "overrides": layers, "embedding": {"width": 6, "std": 0.1}}
    yield Case("layers", load(factored), tops, plain=False)
    looped = {**whole_model(), "n_layers": 4, "overrides": {"2": {"block.ffn.width": 20}}}
    middle = {"turns": 3, "prelude": 1, "coda": 1, "inject": "concat"}
    yield Case("loop", load({**looped, "loop": middle}), (*tops, "loop"), plain=False)
    rotated = {**ATTENTION, "pre": ["rmsnorm"], "query": ["rope"], "key": ["rope"]}
    chosen = {**looped, "overrides": {}, "block": {**looped["block"], "attention": rotated}}
    yield Case("depths", load({**chosen, "depths": 0.4}), (*tops, "depths"), plain=False)
    yield Case("encoder_decoder", load(whole_pair()), tops, plain=True)
    pair = whole_pair()
    crossed = {"cross_attention": {**CROSS, "query": ["rope"], "key": ["rope"]}, "ffn": FFN}
    later = {**pair["decoder"], "positions": "after_source", "embed": ["sinusoidal"], "block": crossed}
    apart = {"embedding": {"shared": False, "width": 6, "std": 0.1}, "unembedding": {"tied": False}}
    yield Case("positions_after_source", load({**pair, "decoder": later, **apart}), tops, plain=False)


def _fitting(host: Data, item: Data) -> Data:
    """The host without the places that refuse the item. Raises SpecError if all do, or for another reason."""
    try:
        load(host)
    except SpecError as error:
        smaller = host
        for problem in error.problems:
            smaller = _without(smaller, problem.path.split("."), item)
        if smaller == host or str(item) not in str(smaller):
            raise
        return _fitting(smaller, item)
    return host


def _without(host: Data, path: list[str], item: Data) -> Data:
    """A host whose site at the beginning of a path does not hold the item."""
    if not path or path[0] not in host:
        return host
    held = host[path[0]]
    if isinstance(held, dict) and held != item:
        return {**host, path[0]: _without(held, path[1:], item)}
    if held == item:
        return {name: value for name, value in host.items() if name != path[0]}
    return {**host, path[0]: [each for each in held if each != item]} if isinstance(held, list) else host


def whole_model() -> Data:
    """A decoder in which every field of the model itself matters."""
    block = {"attention": {**ATTENTION, "pre": ["rmsnorm"]}, "ffn": {**FFN, "type": "glu", "pre": ["rmsnorm"]}}
    return _model(block, embed=["learned"], final=["rmsnorm"], max_positions=LENGTH + 8)  # with room for prompts


def whole_pair() -> Data:
    """An encoder and a decoder in which every field of the model and of its stacks matters."""
    ends = {"embed": ["learned"], "final": ["rmsnorm"], "n_layers": 2}
    crossed = {"attention": {**ATTENTION, "pre": ["rmsnorm"]}, "cross_attention": CROSS}
    pair = _pair(crossed)
    return {**pair, "encoder": {**pair["encoder"], **ends}, "decoder": {"block": {**crossed, "ffn": FFN}, **ends}}


def gallery(family: type[Family]) -> Model:
    """A model with all members of a family, to be captured at once: the first at all its places, others at some."""
    # residual_dual stands in all branches: see Carry.
    members = [member_data(member) for name, member in family.members.items() if name != "residual_dual"]
    pairs = [(HOSTS[family](data), data) for data in members]
    hosts = [_fitting(host, data) for host, data in pairs if "block" in host]  # others are captured with an encoder
    branches = dict(hosts[0]["block"])
    for index, host in enumerate(hosts[1:], 2):
        name, branch = list(host["block"].items())[-1]
        branches[f"{name}_{index + 1}"] = branch
    top: dict[str, list[Data]] = {site: [] for site in ("embed", "final", "logits", "skips")}
    for site, items in top.items():
        for host in hosts:
            items += [item for item in host.get(site, []) if item not in items]
    return load({**hosts[0], **top, "n_layers": 2 if family in (families.Carry, Skip) else 1, "block": branches})


def load(data: Data) -> Model:
    """A resolved model."""
    return resolve(parse(Model, data))


def resolve(model: Model) -> Model:
    """Resolved for the tokens of these models."""
    return models.resolve(model, vocab=VOCAB, max_positions=LENGTH)
