"""Parallel groups: members that read one norm take their products from one plan, to the same bits as one by one."""

from __future__ import annotations

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.layers import merged
from archlab.arch_dsl.primitives.branch import Sublayer
from archlab.arch_dsl.primitives.groups import Group

MEMBERS = [
    pytest.param(name, example, id=f"{name}-{index}")
    for name, kind in Branch.members.items()
    if issubclass(kind, Sublayer) and not issubclass(kind, Group) and name != "cross_attention"
    for index, example in enumerate(kind.examples)
    if not {*getattr(kind, "later", ()), "value_rank"} & {*example}  # which a first layer does not have
]

CONTEXT = BuildContext(
    d_model=16, n_layers=1, vocab=11, max_positions=8, std=0.02, residual_std=0.02, width=16, hidden=16
)  # fmt: skip


def group(first, second=None, pre=("rmsnorm",), **fields):
    """A model of one layer, whose branches are two members of a group; and the group."""
    members = [{"name": "one", **first}, {"name": "two", **(second or {"type": "glu", "width": 20})}]
    parallel = {"pre": list(pre), "branches": members, **fields}
    spec = arch_dsl.load({"d_model": 16, "n_layers": 1, "block": {"parallel": parallel}})
    model = arch_dsl.compile(arch_dsl.resolve(spec, vocab=11, max_positions=8), seed=0)
    return model, model.block[0].parallel


@pytest.mark.parametrize(("name", "example"), MEMBERS)
def test_every_branch_takes_its_products_and_no_others(name, example):
    _, module = group({"type": name, **example, "pre": [], "post": ["gate"]})
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    call = Call(across={"tokens": torch.arange(8).expand(2, 8), "embeddings": hidden})
    update = module.update(hidden, call)
    if module.joined:
        module.joined = False
        assert torch.equal(module.update(hidden, call), update)
    else:
        more = (
            "moe",
            "rwkv4",
            "rwkv7",
            "channel_mix",
            "laurel",
        )  # which do more with what the group reads than to map it
        assert name in more or "concat" in example  # which reads more than the group does


def test_one_product_for_attention_and_feed_forward_where_products_are_merged(monkeypatch):
    model, module = group({"type": "attention", "heads": 4, "kv_heads": 2, "sdpa": ["gate"]})
    tokens = torch.arange(8)[None]
    before = model(tokens)
    linear, shapes = torch.nn.functional.linear, []
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, b=None: shapes.append(tuple(w.shape)) or linear(x, w, b)
    )
    module.products = merged
    for member in module.members.values():
        member.products = merged
    after = model(tokens)
    # query, key, value, the gate and the two inputs of the feed-forward; then what maps back, and the logits
    assert shapes[0] == (16 + 8 + 8 + 16 + 20 + 20, 16)
    assert len(shapes) == 4
    torch.testing.assert_close(after, before)


def test_members_with_a_norm_of_their_own_are_computed_one_by_one():
    _, module = group({"type": "attention", "heads": 4, "pre": ["rmsnorm"]}, pre=())
    assert not module.joined


@pytest.mark.parametrize(("name", "example"), MEMBERS)
def test_one_map_of_a_sum_gives_what_equal_maps_of_the_members_do(name, example):
    free = {key: value for key, value in example.items() if key not in ("bias", "zero", "post")}
    member, post = {"type": name, **free}, ["learned_scale"]
    width = group(member)[0].spec.block["parallel"].branches["one"].output_width(CONTEXT)
    second = {"type": "mlp", "width": width or 16}
    if width is None:
        with pytest.raises(arch_dsl.SpecError, match=f"{name} does not end with one linear map"):
            group(member, second, output="shared")
        return
    model, shared = group(member, second, output="shared", post=post)
    _, each = group(member, second, post=post)
    own = dict(shared.named_parameters())
    with torch.no_grad():
        for path, value in each.named_parameters():
            last = path in ("members.one.output_projection.weight", "members.two.output_projection.weight")
            value.copy_(own["output_projection.weight" if last else path])
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    call = Call(across={"tokens": torch.arange(8).expand(2, 8), "embeddings": hidden})
    torch.testing.assert_close(shared.update(hidden, call), each.update(hidden, call))
    assert arch_dsl.cost(model.spec, tokens=8).parameters == sum(value.numel() for value in model.parameters())
