"""A loop that tokens exit from: the objective is the paper's, evaluation reads where the gate says, costs are exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.model.exits import Exit, ExitModule
from archlab.arch_dsl.model.model import kept
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.plain import to_python
from tests.arch_dsl.compiler.test_costs import kept as kept_for_backward
from tests.arch_dsl.model.test_prediction import BASE, READ, TARGETS, TIME, VOCAB, WIDTH, layer, normed

TURNS = 3
HOLES = TARGETS.clone()
HOLES[0, 2:5] = HOLES[1, 0] = -100


def model(exit: Any = None, **changes: Any) -> arch_dsl.Model:
    """A small resolved model of two layers, gone through three times."""
    loop = {"turns": TURNS, **({} if exit is None else {"exit": exit}), **changes.pop("loop", {})}
    return arch_dsl.resolve(arch_dsl.load({**BASE, "loop": loop, **changes}))


def built(spec: arch_dsl.Model, **options: Any) -> Any:
    """Its module in float64, in which every parameter is random, and tokens exit after different turns."""
    module: Any = arch_dsl.compile(spec, **{"backend": "reference", **options}).double()
    randomize(module)
    if module.loop is not None and module.loop.exit is not None:
        with torch.no_grad():
            module.loop.exit.gate.weight.mul_(0.05).add_(torch.eye(WIDTH)[1:2])
            module.loop.exit.gate.bias.zero_()
    return module


def total(module: Any, targets: Tensor = HOLES, z_loss: float = 0.0) -> tuple[Tensor, Call]:
    """The loss that training takes, and the call."""
    call = Call()
    loss = module.loss(READ, targets, call, z_loss=z_loss)
    return sum(call.losses.values(), loss), call


# The paper's formulas, a token at a time, in float64


def hidden_of(w: dict[str, Tensor], row: Tensor, handed_on: bool) -> list[Tensor]:
    """What logits are made of after each turn `[time, width]`."""
    h, found = w["embedding"][row], []
    for _ in range(TURNS):
        h = layer(w, "block.1", layer(w, "block.0", h))
        found.append(normed(h, w["final.rmsnorm.weight"]))
        h = found[-1] if handed_on else h
    return found


def exits(w: dict[str, Tensor], hidden: list[Tensor], t: int) -> list[Tensor]:
    """The probabilities with which token t exits after each turn."""
    found, left = [], torch.ones((), dtype=torch.float64)
    for turn, h in enumerate(hidden):
        rate = torch.sigmoid(w["loop.exit.gate.weight"][0] @ h[t] + w["loop.exit.gate.bias"][0])
        found.append(left if turn == TURNS - 1 else rate * left)
        left = left * (1 - rate)
    return found


def objective(w: dict[str, Tensor], entropy: float, handed_on: bool, z_loss: float) -> Tensor:
    """The mean over targets of sum_t p_t (L_t + z log^2 Z_t) - entropy H(p)."""
    sums, count = torch.zeros((), dtype=torch.float64), 0
    for row, targets in zip(READ, HOLES, strict=True):
        hidden = hidden_of(w, row, handed_on)
        for t, target in enumerate(targets.tolist()):
            if target == -100:
                continue
            count += 1
            for h, p in zip(hidden, exits(w, hidden, t), strict=True):
                logits = w["embedding"] @ h[t]
                log_z = logits.exp().sum().log()
                sums = sums + p * (log_z - logits[target] + z_loss * log_z**2) + entropy * p * p.log()
    return sums / count


@pytest.mark.parametrize(("entropy", "final", "z_loss"), [(0.1, "each", 0.0), (0.0, "last", 0.0), (0.7, "each", 0.3)])
def test_loss_and_gradients_are_those_of_the_paper(entropy: float, final: str, z_loss: float):
    module = built(model(entropy, loop={"final": final}))
    weights = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
    expected = objective(weights, entropy, final == "each", z_loss)
    expected.backward()
    loss, _ = total(module, z_loss=z_loss)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=0)
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.grad, weights[name].grad, rtol=1e-8, atol=1e-12, msg=name)


def test_measures_are_the_mean_turn_and_the_loss_after_each():
    module = built(model(0.1))
    w, (_, call) = dict(module.named_parameters()), total(module)
    scored, turn, losses = HOLES != -100, 0.0, [0.0] * TURNS
    for row, targets in zip(READ, HOLES, strict=True):
        hidden = hidden_of(w, row, False)
        for t in (targets != -100).nonzero().flatten().tolist():
            turn += sum(number * p for number, p in enumerate(exits(w, hidden, t), 1)).item()  # type: ignore[union-attr]
            for place, h in enumerate(hidden):
                losses[place] -= (w["embedding"] @ h[t]).log_softmax(0)[targets[t]].item()
    count = scored.sum().item()
    found = {name: value.item() for name, value in call.measures.items()}
    expected = {"loop.exit.turn": turn / count}
    expected |= {f"loop.exit.loss.{number}": loss / count for number, loss in enumerate(losses, 1)}
    assert found == pytest.approx(expected, rel=1e-10)


# Ends of the scale


@pytest.mark.parametrize("turn", range(TURNS))
def test_a_gate_that_opens_after_one_turn_has_the_loss_of_that_turn(turn: int):
    module = ExitModule(Exit(entropy=0.5), model().context()).double()
    with torch.no_grad():
        module.gate.weight.copy_(torch.eye(1, WIDTH))
        module.gate.bias.zero_()
    hidden = [torch.full((2, TIME, WIDTH), 90.0 if place == turn else -90.0).double() for place in range(TURNS)]
    found = [(torch.rand(2, TIME).double(), None) for _ in hidden]
    call = Call()
    loss = module.expected_loss(hidden, found, TARGETS, call, 0.0)
    torch.testing.assert_close(loss, found[turn][0].mean(), rtol=1e-12, atol=1e-12)
    assert call.losses["loop.exit.entropy"].abs() < 1e-12
    assert call.measures["loop.exit.turn"].item() == pytest.approx(turn + 1)


def test_equal_probabilities_have_the_entropy_of_as_many_turns():
    module = ExitModule(Exit(entropy=0.5), model().context()).double()
    with torch.no_grad():
        module.gate.weight.copy_(torch.eye(1, WIDTH))
        module.gate.bias.zero_()
    rates = [1 / (TURNS - place) for place in range(TURNS - 1)]  # of those that are left
    hidden = [torch.full((2, TIME, WIDTH), math.log(rate / (1 - rate))).double() for rate in rates]
    call = Call()
    module.expected_loss([*hidden, hidden[0]], [(torch.ones(2, TIME).double(), None)] * TURNS, TARGETS, call, 0.0)
    assert call.losses["loop.exit.entropy"].item() == pytest.approx(-0.5 * math.log(TURNS), rel=1e-10)


@pytest.mark.parametrize(("bias", "turns"), [(-60.0, TURNS), (60.0, 1)])
def test_a_shut_gate_has_the_loss_of_all_turns_and_an_open_one_that_of_the_first(bias: float, turns: int):
    module = built(model(0.0))
    with torch.no_grad():
        module.loop.exit.gate.weight.zero_()
        module.loop.exit.gate.bias.fill_(bias)
    plain = built(model() if turns > 1 else arch_dsl.resolve(arch_dsl.patch(model(), {"loop": None})))
    torch.testing.assert_close(total(module)[0], plain.loss(READ, HOLES), rtol=1e-12, atol=0)


def test_a_gate_far_out_has_finite_gradients():
    module = built(model(0.1))
    with torch.no_grad():
        module.loop.exit.gate.bias.fill_(1e4)
    total(module)[0].backward()
    assert all(value.grad.isfinite().all() for value in module.parameters())


# Evaluation, decoding, export


@pytest.mark.parametrize("final", ["last", "each"])
def test_a_threshold_reads_each_token_after_its_own_turn(final: str):
    module = built(model({"entropy": 0.1, "threshold": 0.6}, loop={"final": final})).eval()
    w, taken = dict(module.named_parameters()), set()
    for row, logits in zip(READ, module(READ), strict=True):
        hidden = hidden_of(w, row, final == "each")
        for t in range(TIME):
            summed, chances = 0.0, exits(w, hidden, t)
            for turn, p in enumerate(chances):
                summed += p.item()
                if summed >= 0.6 or turn == TURNS - 1:
                    break
            taken.add(turn)
            torch.testing.assert_close(logits[t], w["embedding"] @ hidden[turn][t], rtol=1e-10, atol=1e-10)
    assert taken == set(range(TURNS))


@pytest.mark.parametrize("final", ["last", "each"])
def test_by_default_the_last_turn_is_read_and_the_gate_is_left_out_of_what_is_kept(final: str):
    spec = model(0.1, loop={"final": final})
    module, alone = built(spec).eval(), built(kept(spec)).eval()
    assert kept(spec) == model(loop={"final": final})
    assert torch.equal(module(READ), alone(READ))
    assert torch.equal(module.loss(READ, HOLES), alone.loss(READ, HOLES))
    assert to_python(spec) == to_python(kept(spec))
    assert kept(model({"entropy": 0.1, "threshold": 0.9})) == model({"entropy": 0.1, "threshold": 0.9})


@pytest.mark.parametrize("exit", [0.1, {"entropy": 0.1, "threshold": 0.6}])
@pytest.mark.parametrize("final", ["last", "each"])
def test_decoding_in_pieces_gives_the_same_logits(exit: Any, final: str):
    module, state = built(model(exit, loop={"final": final, "prelude": 1})).eval(), State()
    pieces = [module(part, Call(state=state)) for part in READ.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), module(READ), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("exit", [None, {"entropy": 0.1, "threshold": 0.6}])
def test_a_file_of_plain_pytorch_gives_the_same_bits(exit: Any):
    spec = model(exit, loop={"final": "each"})
    module = arch_dsl.compile(spec, backend="reference").eval()
    randomize(module)
    names: dict[str, Any] = {"__name__": "written"}
    exec(compile(to_python(spec), "written", "exec"), names)
    theirs = names["Model"]()
    theirs.load_state_dict(module.state_dict())
    assert torch.equal(theirs(READ), module(READ))


@pytest.mark.parametrize("exit", [0.1, {"entropy": 0.1, "threshold": 0.6}])
def test_computing_layers_again_changes_no_bit(exit: Any):
    found = []
    for again in (False, True):
        module = built(model(exit))
        module.recompute = again
        loss, _ = total(module)
        loss.backward()
        found.append([loss.detach(), *(value.grad for value in module.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_no_more_logits_are_held_at_a_time_than_for_one_turn(monkeypatch: pytest.MonkeyPatch):
    found = []
    for rows in (10**6, 4):
        monkeypatch.setattr("archlab.arch_dsl.model.model.LOSS_CHUNK", VOCAB * rows)
        module = built(model(0.1), backend="auto")
        loss, _ = total(module, z_loss=0.1)
        loss.backward()
        found.append([loss.detach(), *(value.grad for value in module.parameters())])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.slow
def test_training_is_captured_as_one_graph():
    module = built(model(0.1, n_layers=1, loop={"final": "each"}))
    expected, told = total(module)

    def loss(read: Tensor, targets: Tensor) -> Any:
        call = Call()
        return module.loss(read, targets, call), call.losses, call.measures

    torch._dynamo.reset()
    captured, losses, measures = torch.compile(loss, fullgraph=True, backend="aot_eager")(READ, HOLES)
    torch.testing.assert_close(sum(losses.values(), captured), expected)
    torch.testing.assert_close(measures, told.measures)
    sum(losses.values(), captured).backward()
    assert all(value.grad is not None for value in module.parameters())


# Costs and words


@pytest.mark.parametrize("threshold", [1.0, 0.6])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"unembedding": {"tied": False, "bias": True}, "logits": [{"type": "softcap", "cap": 20.0}, "learned_scale"]},
        {"embedding": {"width": 4}, "loop": {"final": "each"}},
    ],
    ids=["tied", "untied", "factored"],
)
def test_costs_are_those_of_the_module(threshold: float, changes: dict[str, Any]):
    spec = model({"entropy": 0.1, "threshold": threshold}, max_positions=64, **changes)
    cost, alone = arch_dsl.cost(spec, TIME), arch_dsl.cost(model(**changes), TIME)
    module = arch_dsl.compile(spec, backend="reference")
    gate, gates = WIDTH + 1, (TURNS - 1) * 2 * TIME * WIDTH
    read = threshold < 1
    assert cost.parameters == sum(value.numel() for value in module.parameters()) == alone.parameters + gate
    assert (cost.trained_only, cost.cache) == (0 if read else gate, alone.cache)
    work = []
    for mode in (True, False):
        with FlopCounterMode(display=False) as counter:
            module.train(mode).loss(READ[:1], TARGETS[:1])
        work.append(counter.get_total_flops())
    logits = alone.children["unembedding"].flops_matmul
    assert work[1] == cost.flops_matmul == alone.flops_matmul + (gates if read else 0)
    assert work[0] == alone.flops_matmul + gates + (TURNS - 1) * logits
    assert cost.trained_flops == (TURNS - 1) * logits + (0 if read else gates)
    assert cost.figures(TIME)["training_flops_per_token"] == 3 * (cost.flops_model + cost.trained_flops) // TIME
    assert arch_dsl.cost(spec, 48).activations == pytest.approx(kept_for_backward(spec, 48), rel=0.01)


def test_every_field_changes_what_is_trained_or_read():
    def effect(**fields: Any) -> list[Tensor]:
        spec = model(fields.pop("exit", 0.1), loop=fields)
        module = built(spec)
        total(module)[0].backward()
        return [module.eval()(READ).detach(), *(value.grad for value in module.parameters())]

    known = effect()
    for change in ({"exit": 0.2}, {"exit": {"entropy": 0.1, "threshold": 0.5}}, {"final": "each"}):
        found = effect(**change)
        assert any((one - other).abs().max() > 1e-6 for one, other in zip(known, found, strict=True)), change
        exit = change.pop("exit", 0.1)
        assert arch_dsl.identity(model(exit, loop=change)) != arch_dsl.identity(model(0.1))


@pytest.mark.parametrize(
    ("change", "loop"),
    [
        ({"loop.exit": 0.05}, {"turns": 3, "exit": {"entropy": 0.05}}),
        ({"loop.exit.threshold": 0.5}, {"turns": 3, "exit": {"entropy": 0.2, "threshold": 0.5}}),
        ({"loop.exit": None}, 3),
        ({"loop.final": "each"}, {"turns": 3, "final": "each", "exit": 0.2}),
    ],
)
def test_patches_change_it(change: dict[str, Any], loop: Any):
    assert arch_dsl.patch(model(0.2), change) == arch_dsl.patch(model(), {"loop": loop})


def test_without_it_a_loop_keeps_its_identity():
    assert arch_dsl.identity(model(loop={"exit": None, "final": "last"})) == arch_dsl.identity(model())
    assert "exit" not in arch_dsl.dump(model()) and "last" not in arch_dsl.dump(model())
    assert model(0.1) == model({"entropy": 0.1}) == model({"entropy": 0.1, "threshold": 1})


BARE = {"attention": {"heads": 2}}
STREAMS = {"streams": {"type": "hyper", "n": 2}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a word": ({"loop": {"turns": 2, "exit": "soon"}}, r"loop\.exit\.entropy: must be a number, found 'soon'"),
    "no weight": ({"loop": {"turns": 2, "exit": {}}}, r"loop\.exit\.entropy: is missing: exit needs it"),
    "less than none": ({"loop": {"turns": 2, "exit": -1}}, r"loop\.exit\.entropy: must be at least 0, found -1"),
    "no threshold": (
        {"loop": {"turns": 2, "exit": {"entropy": 0.1, "threshold": 0}}},
        r"threshold: must be greater than 0, found 0",
    ),
    "a sure one": (
        {"loop": {"turns": 2, "exit": {"entropy": 0.1, "threshold": 1.5}}},
        r"threshold: must be at most 1, found 1\.5",
    ),
    "a field": ({"loop": {"turns": 2, "exit": {"beta": 0.1}}}, r"'beta' is not a key of exit \(entropy, threshold\)"),
    "a place": ({"loop": {"turns": 2, "final": "all"}}, r"loop\.final: 'all' is not a final \(last, each\)"),
    "coda": ({"loop": {"turns": 2, "coda": 1, "exit": 0.1}}, r"loop\.exit: ends every turn, and coda 1 has layers"),
    "coda and norm": ({"loop": {"turns": 2, "coda": 1, "final": "each"}}, r"loop\.final: ends every turn, and coda 1"),
    "streams": ({"loop": {"turns": 2, "exit": 0.1}, **STREAMS}, r"loop\.exit: cannot stand beside streams"),
    "prompt": ({"loop": {"turns": 2, "exit": 0.1}, "prompt": 2}, r"loop\.exit: cannot stand beside prompt"),
    "norm of streams": ({"loop": {"turns": 2, "final": "each"}, **STREAMS}, r"loop\.final: each acts on one stream"),
    "no norm": ({"loop": {"turns": 2, "final": "each"}, "block": BARE}, r"loop\.final: each has nothing to apply"),
    "heads": ({"loop": {"turns": 2, "exit": 0.1}, "predict": "parallel"}, "loop: stands beside predict"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(changes: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        arch_dsl.resolve(arch_dsl.load({**BASE, **changes}))


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_an_encoder_and_a_decoder_have_none(name: str):
    block = {"attention": {"heads": 2}, "cross_attention": {"heads": 2}}
    stacks = {"encoder": {"n_layers": 1, "block": {"attention": {"heads": 2, "mask": "full"}}}}
    stacks["decoder"] = {"n_layers": 1, "block": block}
    stacks[name]["loop"] = {"turns": 2, "exit": 0.1}
    with pytest.raises(SpecError, match=rf"{name}\.loop\.exit: is for a model of one stack"):
        arch_dsl.resolve(arch_dsl.load({"d_model": 8, "vocab": 19, "max_positions": 9, **stacks}))
