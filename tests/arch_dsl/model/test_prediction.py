"""Multi-token prediction: heads are what the papers write, train the trunk, and leave no trace in what is kept."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.conformance.effects import differ, effect
from archlab.arch_dsl.model.model import kept
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.plain import to_python
from tests.arch_dsl.compiler.test_costs import kept as kept_for_backward

WIDTH, HEADS, VOCAB, TIME = 8, 2, 19, 9
BASE = {
    "d_model": WIDTH,
    "n_layers": 2,
    "vocab": VOCAB,
    "block": {
        "norm": "rmsnorm",
        "attention": {"heads": HEADS},
        "ffn": {"type": "mlp", "activation": "relu", "width": 12},
    },
}
TOKENS = torch.randint(VOCAB, (2, TIME + 1), generator=torch.Generator().manual_seed(0))
READ, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
KINDS = ("parallel", "sequential")


def model(predict=None, **changes):
    """A small resolved model."""
    return arch_dsl.resolve(arch_dsl.load({**BASE, **({"predict": predict} if predict else {}), **changes}))


def built(spec, **options):
    """Its module, in which every parameter is random."""
    module = arch_dsl.compile(spec, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.4)
    return module


def total(module, read=READ, targets=TARGETS, call=None):
    """The loss that training takes, and what is told beside it."""
    call = call or Call()
    loss = module.loss(read, targets, call)
    return sum(call.losses.values(), loss), call.losses


# The papers' formulas, a token at a time, in float64


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def layer(w, at, h):
    """One layer of a row `[time, width]`: attention of a position over those before it, then the feed-forward."""
    x = normed(h, w[f"{at}.attention.pre.rmsnorm.weight"])
    q, k, v = (x @ w[f"{at}.attention.{name}_projection.weight"].T for name in ("query", "key", "value"))
    size, rows = WIDTH // HEADS, []
    for t in range(len(h)):
        heads = []
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            scores = torch.stack([q[t, part] @ k[s, part] / size**0.5 for s in range(t + 1)]).softmax(0)
            heads.append(sum(scores[s] * v[s, part] for s in range(t + 1)))
        rows.append(h[t] + w[f"{at}.attention.output_projection.weight"] @ torch.cat(heads))
    h = torch.stack(rows)
    x = normed(h, w[f"{at}.ffn.pre.rmsnorm.weight"])
    inner = (x @ w[f"{at}.ffn.input_projection.weight"].T).relu()
    return h + inner @ w[f"{at}.ffn.output_projection.weight"].T


def nats(w, h, target):
    """The cross-entropy of one position."""
    logits = w["embedding"] @ normed(h, w["final.rmsnorm.weight"])
    return logits.logsumexp(0) - logits[target]


def naive(w, kind, n, weight):
    """The mean over the targets of the next token; the heads' sums are divided by the same number."""
    next_, ahead = 0.0, 0.0
    for row in TOKENS:
        read = row[:TIME]
        before = layer(w, "block.0", w["embedding"][read])
        after = layer(w, "block.1", before)
        next_ = next_ + sum(nats(w, after[t], row[t + 1]) for t in range(TIME))
        hidden = after
        for k in range(2, n + 1):
            if kind == "parallel":
                out, share = layer(w, f"predict.{k}", before), weight
            else:
                at, share = f"predict.{k}", weight / (n - 1)
                places = range(TIME - k + 1)
                both = [
                    torch.cat(
                        [
                            normed(hidden[t], w[f"{at}.hidden.rmsnorm.weight"]),
                            normed(w["embedding"][row[t + k - 1]], w[f"{at}.token.rmsnorm.weight"]),
                        ]
                    )
                    for t in places
                ]
                out = hidden = layer(w, f"{at}.block", torch.stack(both) @ w[f"{at}.projection.weight"].T)
            ahead = ahead + share * sum(nats(w, out[t], row[t + k]) for t in range(TIME - k + 1))
    return (next_ + ahead) / TARGETS.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_paper(kind):
    module = built(model({"type": kind, "tokens": 3, "weight": 0.7}), backend="reference").double()
    weights = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
    expected = naive(weights, kind, 3, 0.7)
    expected.backward()
    loss, told = total(module)
    loss.backward()
    assert told.keys() == {"predict.2", "predict.3"}
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=0)
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.grad, weights[name].grad, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_the_model_without_heads(kind):
    spec = model({"type": kind, "tokens": 4})
    module, alone = built(spec).eval(), arch_dsl.compile(kept(spec)).eval()
    held = module.state_dict()
    alone.load_state_dict({name: held[name] for name in alone.state_dict()})
    assert {name.split(".")[0] for name in held.keys() - alone.state_dict().keys()} == {"predict"}
    call = Call()
    assert torch.equal(module.loss(READ, TARGETS, call), alone.loss(READ, TARGETS))
    assert not call.losses
    assert torch.equal(module(READ), alone(READ))
    assert torch.equal(module.loss(READ, TARGETS, reduction="none"), alone.loss(READ, TARGETS, reduction="none"))
    state = State()
    pieces = [module(READ[:, t : t + 1], Call(state=state)) for t in range(TIME)]
    torch.testing.assert_close(torch.cat(pieces, 1), alone(READ), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_know_nothing_of_heads(kind):
    spec = model({"type": kind, "tokens": 2})
    assert to_python(spec) == to_python(kept(spec)) == to_python(model())
    assert kept(spec) == model()
    assert kept(model()) == model()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"unembedding": {"tied": False, "bias": True}, "logits": [{"type": "softcap", "cap": 20.0}, "learned_scale"]},
        {"embedding": {"width": 4}},
    ],
    ids=["tied", "untied", "factored"],
)
def test_costs_are_those_of_the_module(kind, changes):
    spec = model({"type": kind, "tokens": 3}, max_positions=64, **changes)
    cost, alone = arch_dsl.cost(spec, TIME), arch_dsl.cost(kept(spec), TIME)
    module = arch_dsl.compile(spec, backend="reference")
    counts = {name: value.numel() for name, value in module.named_parameters()}
    assert cost.parameters == sum(counts.values())
    heads = sum(count for name, count in counts.items() if name.startswith("predict."))
    assert (cost.trained_only, cost.active) == (heads, alone.parameters)
    assert (cost.flops_matmul, cost.flops_model, cost.cache) == (alone.flops_matmul, alone.flops_model, alone.cache)
    work = []
    for mode in (True, False):
        with FlopCounterMode(display=False) as counter:
            module.train(mode).loss(READ[:1], TARGETS[:1])
        work.append(counter.get_total_flops())
    assert work[1] == alone.flops_matmul
    single = spec.predict.cost(spec, spec.place(spec.context(), ""), TIME)
    losses = sum(arch_dsl.cost(kept(spec), TIME - k).children["unembedding"].flops_matmul for k in (1, 2))
    assert work[0] - work[1] == single.flops_matmul + losses
    assert cost.figures(TIME)["training_flops_per_token"] == 3 * (cost.flops_model + cost.trained_flops) // TIME
    assert cost.trained_flops == single.flops_model + losses
    assert arch_dsl.cost(spec, 48).activations == pytest.approx(kept_for_backward(spec, 48), rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_rows_add_up_over_micro_batches(kind):
    module = built(model({"type": kind, "tokens": 3}))
    whole, _ = total(module)
    parts = [total(module, READ[row : row + 1], TARGETS[row : row + 1])[0] for row in range(2)]
    torch.testing.assert_close(whole, sum(parts) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_logits_are_held_at_a_time_than_for_one_token(kind, monkeypatch):
    found = []
    for rows in (10**6, 4):
        monkeypatch.setattr("archlab.arch_dsl.model.model.LOSS_CHUNK", VOCAB * rows)
        module = built(model({"type": kind, "tokens": 3}))
        loss, _ = total(module)
        loss.backward()
        found.append([loss.detach(), *(value.grad for value in module.parameters())])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_captured_as_one_graph(kind):
    module = built(model({"type": kind, "tokens": 3}, n_layers=1))
    expected, told = total(module)

    def loss(read, targets):
        call = Call()
        return module.loss(read, targets, call), call.losses

    torch._dynamo.reset()
    captured, losses = torch.compile(loss, fullgraph=True, backend="aot_eager")(READ, TARGETS)
    torch.testing.assert_close(sum(losses.values(), captured), expected)
    torch.testing.assert_close(losses, told)
    sum(losses.values(), captured).backward()
    assert all(value.grad is not None for value in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_computing_layers_again_changes_nothing(kind):
    found = []
    for again in (False, True):
        module = built(model({"type": kind, "tokens": 2}))
        module.recompute = again
        loss, _ = total(module)
        loss.backward()
        found.append([loss.detach(), *(value.grad for value in module.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_predicts_no_token_of_another_document(kind):
    attention = {"heads": HEADS, "mask": {"type": "causal", "documents": True}}
    spec = model({"type": kind, "tokens": 3, "weight": 1.0}, block={**BASE["block"], "attention": attention})
    module = built(spec)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 9])
    apart = [total(module, READ[:1, :4], TARGETS[:1, :4])[1], total(module, READ[:1, 4:], TARGETS[:1, 4:])[1]]
    _, one = total(module, READ[:1], TARGETS[:1], Call(documents=documents[:1]))
    for name, value in one.items():
        torch.testing.assert_close(value * 9, apart[0][name] * 4 + apart[1][name] * 5, rtol=1e-4, atol=1e-5)


def test_experts_of_a_head_have_losses_of_their_own():
    moe = {"type": "moe", "experts": 4, "top_k": 2, "width": 4, "balance": "switch"}
    spec = model("sequential", block={**BASE["block"], "ffn": moe})
    _, told = total(arch_dsl.compile(spec))
    assert {"block.1.ffn.balance", "predict.2.ffn.balance", "predict.2"} <= told.keys()


def test_windows_shorter_than_what_is_predicted_have_no_such_loss():
    module = built(model({"type": "parallel", "tokens": 4}))
    assert total(module, READ[:, :2], TARGETS[:, :2])[1].keys() == {"predict.2"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_changes_what_is_trained(kind):
    before = {"type": kind, "tokens": 3, "weight": 0.5}
    known, spec = effect(model(before)), model(before)
    other = "parallel" if kind == "sequential" else "sequential"
    for change in ({"tokens": 2}, {"weight": 1.0}, {"type": other}):
        assert differ(known, effect(model(before | change))), change
        assert arch_dsl.identity(model(before | change)) != arch_dsl.identity(spec)


def test_defaults_are_the_papers():
    assert model("parallel").predict.each() == 1.0 and model("parallel").predict.tokens == 4
    assert model("sequential").predict.each() == 0.3 and model("sequential").predict.tokens == 2
    assert model({"type": "sequential", "tokens": 4}).predict.each() == pytest.approx(0.1)
    assert arch_dsl.identity(model()) == arch_dsl.identity(arch_dsl.resolve(arch_dsl.load({**BASE, "predict": None})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predict": "paralel"}, "did you mean 'parallel'"),
        ({"predict": {"type": "parallel", "tokens": 1}}, r"predict\.tokens: must be at least 2"),
        ({"predict": {"type": "parallel", "weight": 0}}, r"predict\.weight: must be greater than 0"),
        ({"predict": "parallel", "prompt": 2}, "predict: stands beside prompt, which further heads do not read"),
        ({"predict": "parallel", "block.attention.value": ["value_residual"]}, "value_residual carries more"),
        ({"predict": "parallel", "block.attention": {"type": "rwkv7", "head_dim": 8}}, "rwkv7 carries more"),
        (
            {"predict": "sequential", "block.ffn.share": "stack"},
            "predict: has blocks of its own, and layers share their mlp",
        ),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(SpecError, match=message):
        arch_dsl.resolve(arch_dsl.patch(arch_dsl.load(BASE), changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_heads_beside_sums_that_hand_their_norm_on_have_the_same_losses(kind):
    """As on a GPU, where a layer's last sum computes the model's last norm too."""
    block = {"norm": "rmsnorm", "ffn": {"type": "mlp", "width": 12}}
    spec = model({"type": kind, "tokens": 2}, n_layers=1, block=block)
    found = []
    for backend in ("torch", "triton"):
        module = built(spec, backend=backend)
        loss, _ = total(module)
        loss.backward()
        found.append({"loss": loss.detach(), **{name: value.grad for name, value in module.named_parameters()}})
    assert "add_norm" in {choice.op for choice in module.choices if choice.implementation == "triton"}
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
