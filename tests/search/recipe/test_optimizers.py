"""Optimizers: each update is its formula or torch's own, groups are obeyed, and a continuation gives the same bits."""

import io

import pytest
import torch
from torch import nn

from archlab import arch_dsl
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.search.recipe import muon
from archlab.search.recipe.muon import orthogonalised
from archlab.search.recipe.optimizers import SOAP, Adafactor, Adam, AdamW, Lion, Muon, Optimizer, ScheduleFree
from archlab.search.recipe.parameter_groups import Group, decay_groups, unmatched
from archlab.search.recipe.recipe import load_recipe
from archlab.search.recipe.schedule_free import average, averaged


def model(seed=0):
    """A table, two matrices, a stack of matrices, a vector; called `embedding`, `up`, `down`, `experts`, `scale`."""
    generator = torch.Generator().manual_seed(seed)
    found = nn.ParameterDict(
        {
            "embedding": torch.randn(9, 4, generator=generator),
            "up": torch.randn(4, 8, generator=generator),
            "down": torch.randn(8, 4, generator=generator),
            "experts": torch.randn(2, 4, 8, generator=generator),
            "scale": torch.randn(4, generator=generator),
        }
    )
    found.embedding.table = True
    return found


def loss(module, step):
    tokens = torch.arange(6) * (step + 2) % 9
    hidden = module.embedding[tokens] * module.scale
    hidden = torch.tanh(hidden @ module.up) @ module.down + (hidden @ module.experts).tanh().mean((0, 2))[:, None]
    return hidden.square().sum()


def train(module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss(module, step).backward()
        optimizer.step()


def assert_same(a, b, **tolerance):
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], **tolerance)


def built(spec, module, lr=0.01):
    return spec.build(module.named_parameters(), lr)


OTHER_FORMS = [
    AdamW(cautious=True),
    Lion(cautious=True, independent_decay=True),
    SOAP(frequency=2),
    SOAP(frequency=1, one_sided=True),
    SOAP(frequency=2, max_dimension=6),
]


@pytest.mark.parametrize(
    "spec", [kind() for kind in Optimizer.members.values()] + OTHER_FORMS, ids=lambda spec: spec.type
)
def test_a_continuation_gives_the_same_bits(spec):
    whole, part, again = model(), model(), model(1)
    train(whole, built(spec, whole), range(6))
    optimizer = built(spec, part)
    train(part, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": part.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again.load_state_dict(state["model"])
    optimizer = built(spec, again)
    optimizer.load_state_dict(state["optimizer"])
    train(again, optimizer, range(3, 6))
    assert_same(again, whole, rtol=0, atol=0)
    assert not torch.equal(whole["up"], part["up"])


def test_adafactor_is_torchs_where_torch_has_it():
    ours, theirs = model(), model()
    spec = Adafactor(weight_decay=0.1)
    train(ours, built(spec, ours), range(5))
    # Theirs bounds the rate by 1 / sqrt(step), which a rate of 0.01 does not reach, and decays vectors too.
    groups = decay_groups(theirs.named_parameters(), 0.1)
    train(theirs, torch.optim.Adafactor(groups, lr=0.01, eps=(1e-15, 1e-3)), range(5))
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_unfactored_adafactor_is_its_formula(relative, beta1):
    module = model()
    value, expected = module["up"], module["up"].detach().double()
    optimizer = built(Adafactor(factored=False, relative=relative, beta1=beta1, threshold=0.7), module)
    square, mean = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        optimizer.zero_grad()
        loss(module, step).backward()
        grad = value.grad.double()
        kept = 1 - step**-0.8
        square = kept * square + (1 - kept) * (grad**2 + 1e-30)
        update = grad / square.sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()) / 0.7)
        mean = beta1 * mean + (1 - beta1) * update
        size = max(1e-3, float(expected.square().mean().sqrt())) if relative else 1.0
        expected = expected - 0.01 * size * mean
        optimizer.step()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_lion_is_its_formula():
    module = model()
    value, expected = module["up"], module["up"].detach().clone()
    optimizer = built(Lion(betas=(0.8, 0.6), weight_decay=0.5), module)
    mean = torch.zeros_like(expected)
    for step in range(3):
        optimizer.zero_grad()
        loss(module, step).backward()
        grad = value.grad
        expected = expected - 0.01 * ((0.8 * mean + 0.2 * grad).sign() + 0.5 * expected)
        mean = 0.6 * mean + 0.4 * grad
        optimizer.step()
    torch.testing.assert_close(value, expected)


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    ours, adamw = model(), model()
    train(ours, built(Muon(), ours), range(1))
    train(adamw, built(AdamW(), adamw), range(1))
    for name in ours:
        assert torch.equal(ours[name], adamw[name]) == (name not in {"up", "down"}), name


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        (Muon(), {"adjust_lr_fn": "match_rms_adamw"}),
        (Muon(scaling="original"), {"adjust_lr_fn": "original"}),
        (Muon(nesterov=False), {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
        (Muon(ns_steps=2), {"ns_steps": 2, "adjust_lr_fn": "match_rms_adamw"}),
    ],
)
def test_muon_is_that_of_torch_but_for_its_rounding(spec, asked):
    """Which is bfloat16's, and grows where a singular value is small."""
    start, ours, theirs = (model() for _ in range(3))
    train(ours, built(spec, ours), range(2))
    train(theirs, torch.optim.Muon([theirs["up"], theirs["down"]], lr=0.01, **asked), range(2))
    for name in ("up", "down"):
        apart, wanted = (ours[name] - theirs[name]).detach(), (theirs[name] - start[name]).detach()
        assert float(apart.norm()) <= 0.1 * float(wanted.norm()), name


def test_muon_orthogonalises_each_matrix_of_a_stack_whatever_its_shape():
    """By its singular values, in float64: the same polynomial of each, U and V stay."""
    for rows, columns in ((4, 7), (7, 4), (5, 5)):
        stack = torch.randn(3, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for found, matrix in zip(orthogonalised(stack, 4), stack, strict=True):
            left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
            sizes = sizes / sizes.square().sum().sqrt()
            for _ in range(4):
                sizes = 3.4445 * sizes - 4.7750 * sizes**3 + 2.0315 * sizes**5
            torch.testing.assert_close(found, left @ sizes.diag() @ right)


def test_muon_divides_a_stack_that_is_too_large(monkeypatch):
    """Where it is cut changes nothing but rounding."""
    whole, cut = (nn.ParameterDict({str(i): torch.ones(4, 4) for i in range(5)}) for _ in range(2))
    for module, most in ((whole, 2**26), (cut, 32)):
        monkeypatch.setattr(muon, "MOST", most)
        for i, value in enumerate(module.values()):
            value.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(i))
        built(Muon(), module).step()
    assert_same(whole, cut)


def test_muon_mixes_the_gradient_in_once_more_with_nesterov():
    """A first gradient g and a second h: 0.95 (0.0475 g + 0.05 h) + 0.05 h, and without it the first bracket."""
    g, h = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    mean = 0.0475 * g + 0.05 * h
    for nesterov, mixed in ((True, 0.95 * mean + 0.05 * h), (False, mean)):
        module = nn.ParameterDict({"up": torch.zeros(4, 8)})
        optimizer = built(Muon(nesterov=nesterov), module, lr=1.0)
        for gradient in (g, h):
            before = module["up"].detach().clone()
            module["up"].grad = gradient
            optimizer.step()
        moved = module["up"] - before * (1 - 0.1)
        torch.testing.assert_close(moved, -0.2 * 8**0.5 * orthogonalised(mixed[None], 5)[0], rtol=1e-4, atol=1e-5)


def test_muon_scalings_differ_by_the_shape_alone():
    moves = []
    for scaling in ("match_rms_adamw", "original"):
        module = model()
        before = module["down"].detach().clone()
        train(module, built(Muon(scaling=scaling, weight_decay=0), module), range(1))
        moves.append(before - module["down"].detach())
    torch.testing.assert_close(moves[0] / (0.2 * 8**0.5), moves[1] / 2**0.5, rtol=1e-4, atol=1e-7)  # [8, 4]


def stepped(spec, steps=5, lr=0.01):
    """Gradients that a model in float64 had on its way, and where each step left it."""
    module = model().double()
    optimizer = built(spec, module, lr)
    grads, after = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss(module, step).backward()
        grads.append({name: value.grad.clone() for name, value in module.items()})
        optimizer.step()
        after.append({name: value.detach().clone() for name, value in module.items()})
    return grads, after, optimizer, module


def test_cautious_adamw_moves_only_where_moment_and_gradient_agree():
    decay, lr, (b1, b2), eps = 0.3, 0.01, (0.9, 0.95), 1e-8
    grads, after, _, _ = stepped(AdamW(cautious=True, weight_decay=decay), lr=lr)
    for name in after[0]:
        w = model()[name].detach().double().flatten().tolist()
        m, v = [0.0] * len(w), [0.0] * len(w)
        left_out = 0
        for t, (grad, found) in enumerate(zip(grads, after, strict=True), 1):
            g = grad[name].flatten().tolist()
            m = [b1 * a + (1 - b1) * b for a, b in zip(m, g, strict=True)]
            v = [b2 * a + (1 - b2) * b * b for a, b in zip(v, g, strict=True)]
            keep = [a * b > 0 for a, b in zip(m, g, strict=True)]
            left_out += keep.count(False)
            scale = len(w) / (sum(keep) + 1)
            for i in range(len(w)):
                u = (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)) ** 0.5 + eps)
                w[i] -= lr * (keep[i] * scale * u + decay * (name != "scale") * w[i])
            torch.testing.assert_close(found[name].flatten(), torch.tensor(w, dtype=torch.float64))
        assert left_out, name


def test_cautious_lion_keeps_the_signs_of_the_gradient():
    grads, after, _, _ = stepped(Lion(cautious=True, weight_decay=0.0, betas=(0.9, 0.99)))
    mean, w = torch.zeros(8, 4).double(), model()["down"].detach().double()
    for grad, found in zip(grads, after, strict=True):
        g = grad["down"]
        sign = (0.9 * mean + 0.1 * g).sign()
        keep = sign == g.sign()
        w = w - 0.01 * sign * keep * (32 / (int(keep.sum()) + 1))
        mean = 0.99 * mean + 0.01 * g
        torch.testing.assert_close(found["down"], w)


@pytest.mark.parametrize("kind", [AdamW, Lion])
def test_independent_decay_is_the_same_at_every_rate(kind):
    groups = (Group(parameters=("up",), lr_factor=0.5), Group(parameters=("down",), weight_decay=0.02))
    for lr in (0.01, 0.1):
        module = model()
        before = {name: value.detach().clone() for name, value in module.items()}
        optimizer = built(kind(weight_decay=0.01, independent_decay=True, groups=groups), module, lr)
        for group in optimizer.param_groups:  # as the loop does
            group["lr"] = lr * group.get("lr_factor", 1.0)
        for value in module.values():
            value.grad = torch.zeros_like(value)
        optimizer.step()
        kept = {"embedding": 0.99, "up": 0.99, "down": 0.98, "experts": 0.99, "scale": 1.0}
        assert_same(module, {name: before[name] * share for name, share in kept.items()})


SIDES = [(SOAP(frequency=2), "square"), (SOAP(one_sided=True, frequency=1), "down"), (SOAP(max_dimension=6), "up")]


@pytest.mark.parametrize(("spec", "name"), SIDES, ids=["both sides", "the shorter side", "no long side"])
def test_soap_is_adam_in_the_eigenbasis_of_shampoo(spec, name):
    """Read from arXiv:2409.11321, algorithms 3 and 4, on gradients that are given."""
    spec = spec.replace(weight_decay=0.2, betas=(0.9, 0.8))
    generator = torch.Generator().manual_seed(3)
    shape = {"square": (5, 5), "down": (8, 4), "up": (4, 8)}[name]
    value = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    optimizer = spec.build([(name, value)], 0.01)
    eye_l, eye_r = (torch.eye(size, dtype=torch.float64) for size in shape)
    left, right = name != "down", name != "up"  # which sides are rotated
    w, m, v = value.detach().clone(), torch.zeros(shape).double(), torch.zeros(shape).double()
    gram_l, gram_r = torch.zeros_like(eye_l), torch.zeros_like(eye_r)
    for step in range(6):
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        value.grad = g
        optimizer.step()
        if step == 0:
            gram_l, gram_r = 0.2 * g @ g.T, 0.2 * g.T @ g
            q_l = torch.linalg.eigh(gram_l)[1] if left else eye_l
            q_r = torch.linalg.eigh(gram_r)[1] if right else eye_r
            torch.testing.assert_close(value.detach(), w)  # the first step only begins
            continue
        rotated = q_l.T @ g @ q_r
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * rotated**2
        unit = (q_l.T @ m @ q_r / (1 - 0.9**step)) / ((v / (1 - 0.8**step)).sqrt() + 1e-8)
        w = w - 0.01 * (q_l @ unit @ q_r.T + 0.2 * w)
        torch.testing.assert_close(value.detach(), w, rtol=1e-9, atol=1e-12)
        gram_l, gram_r = 0.8 * gram_l + 0.2 * g @ g.T, 0.8 * gram_r + 0.2 * g.T @ g
        if step % spec.frequency == 0:
            q_l, v = power_step(gram_l, q_l, v) if left else (q_l, v)
            q_r, turned = power_step(gram_r, q_r, v.T) if right else (q_r, v.T)
            v = turned.T


def power_step(gram, basis, v):
    """S <- P Q, Q <- QR(S), columns by eigenvalue, the largest first; the rows of v go with them."""
    values = [float(basis[:, i] @ gram @ basis[:, i]) for i in range(len(basis))]
    order = sorted(range(len(basis)), key=lambda i: -values[i])
    return torch.linalg.qr((gram @ basis)[:, order])[0], v[order]


def test_soap_takes_hidden_matrices_and_counts_what_it_keeps():
    spec = SOAP(max_dimension=6)
    _, _, optimizer, module = stepped(spec)
    soap, adamw = optimizer.parts
    assert {id(value) for value in soap.state} == {id(module["up"]), id(module["down"])}
    kept = {name: value.numel() for name, value in soap.state[module["up"]].items() if name != "step"}
    assert kept == {"mean": 32, "square": 32, "left": 16, "left_basis": 16}
    assert spec.rotated(4, 8) == (4, 0) and spec.rotated(7, 8) == (0, 0)
    assert SOAP(one_sided=True).rotated(8, 4) == (0, 4) and SOAP(one_sided=True).rotated(4, 4) == (4, 0)
    assert len(adamw.state) == 3


def test_soap_counts_the_memory_of_a_model():
    spec = arch_dsl.resolve(arch_dsl.load(read_text(MODEL)))
    module = arch_dsl.compile(spec)
    for optimizer in (SOAP(), SOAP(one_sided=True), SOAP(max_dimension=10), AdamW(), ScheduleFree()):
        made = optimizer.build(module.named_parameters(), 0.01)
        module.loss(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
        made.step()
        made.step()
        states = [state for part in getattr(made, "parts", [made]) for state in part.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        count = sum(value.numel() for value in module.parameters())
        assert sum(value.numel() for value in tensors if value.ndim) == optimizer.kept(spec, count), optimizer


MODEL = "{d_model: 16, n_layers: 1, vocab: 11, block: {norm: rmsnorm, attention: {heads: 2}, ffn: {type: mlp}}}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_soap_lets_a_gradient_that_is_not_finite_be_seen(bad):
    value = nn.Parameter(torch.ones(3, 3))
    optimizer = SOAP(frequency=1).build([("up", value)], 0.01)
    for number in (bad, 1.0, 1.0):
        value.grad = torch.full((3, 3), number)
        optimizer.step()
    assert not value.isfinite().all()


def test_schedule_free_is_its_algorithm():
    """arXiv:2405.15682, algorithm 1, number by number: x is kept there, here it follows from y and z."""
    b1, b2, decay, eps, rates = 0.8, 0.9, 0.3, 1e-8, [0.01, 0.02, 0.03, 0.03, 0.03]
    module = model().double()
    optimizer = built(ScheduleFree(betas=(b1, b2), weight_decay=decay), module)
    x = {name: value.detach().flatten().tolist() for name, value in module.items()}
    z, v = {name: list(value) for name, value in x.items()}, {name: [0.0] * len(value) for name, value in x.items()}
    total = 0.0
    for t, lr in enumerate(rates, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss(module, t).backward()
        rate = lr * (1 - b2**t) ** 0.5
        total += rate**2
        for name, value in module.items():
            own = decay * (name != "scale")
            for i, g in enumerate(value.grad.flatten().tolist()):
                y = (1 - b1) * z[name][i] + b1 * x[name][i]
                v[name][i] = b2 * v[name][i] + (1 - b2) * g * g
                z[name][i] -= rate * g / (v[name][i] ** 0.5 + eps) + rate * own * y
                x[name][i] += rate**2 / total * (z[name][i] - x[name][i])
        optimizer.step()
        for name, value in module.items():
            y = [(1 - b1) * a + b1 * b for a, b in zip(z[name], x[name], strict=True)]
            torch.testing.assert_close(value.detach().flatten(), torch.tensor(y, dtype=torch.float64))
    trained = {name: value.detach().clone() for name, value in module.items()}
    with averaged(optimizer) as differs:
        assert differs
        for name, value in module.items():
            torch.testing.assert_close(value.detach().flatten(), torch.tensor(x[name], dtype=torch.float64))
    assert_same(module, trained, rtol=0, atol=0)
    average(optimizer)
    torch.testing.assert_close(module["up"].detach().flatten(), torch.tensor(x["up"], dtype=torch.float64))
    with averaged(optimizer) as differs:
        assert not differs


@pytest.mark.parametrize("spec", [SOAP(), ScheduleFree(), AdamW(cautious=True), Lion(cautious=True)])
def test_frozen_parameters_stay_and_tied_ones_move_once(spec):
    module, tied = model(), model()
    for each in (module, tied):
        each["down"].requires_grad_(False)
    train(module, built(spec, module), range(3))
    twice = [*tied.named_parameters(), ("again", tied["up"])]
    train(tied, spec.build(twice, 0.01), range(3))
    assert_same(module, tied, rtol=0, atol=0)
    assert torch.equal(module["down"], model()["down"]) and not torch.equal(module["up"], model()["up"])


def test_adam_adds_its_decay_to_the_gradient():
    ours, theirs = model(), model()
    train(ours, built(Adam(weight_decay=0.1), ours), range(3))
    train(theirs, torch.optim.Adam(decay_groups(theirs.named_parameters(), 0.1), lr=0.01), range(3))
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", Optimizer.members)
def test_groups_have_their_own_rate_and_decay(kind):
    groups = [{"parameters": ["u*", "scale"], "lr_factor": 0.5}, {"parameters": ["*"], "weight_decay": 0.25}]
    module = model()
    spec = parse(Optimizer, {"type": kind, "weight_decay": 0.1, "groups": groups})
    found = {
        id(value): (group.get("lr_factor", 1.0), group["weight_decay"])
        for group in built(spec, module).param_groups
        for value in group["params"]
    }
    assert {name: found[id(value)] for name, value in module.items()} == {
        "embedding": (1.0, 0.25),
        "up": (0.5, 0.1),
        "down": (1.0, 0.25),
        "experts": (1.0, 0.25),
        "scale": (0.5, 0.0),
    }


def test_patterns_that_match_nothing_are_found():
    groups = (Group(parameters=("u*", "block.*.bias")), Group(parameters=("scal",)))
    assert unmatched(groups, model()) == ["block.*.bias", "scal"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "lion", "betas": [0.9]}, r"train\.optimizer: lion has two betas, found 1"),
        ({"type": "adafactor", "decay": 2}, r"optimizer\.decay: must be at most 1"),
        ({"type": "muon", "groups": [{"lr_factor": 2}]}, r"groups\.0\.parameters: is missing"),
        ({"type": "muon", "scaling": "orignal"}, r"optimizer\.scaling: .*did you mean 'original'"),
        ({"type": "muon", "ns_steps": 0}, r"optimizer\.ns_steps: must be at least 1"),
        ({"type": "soap", "frequency": 0}, r"optimizer\.frequency: must be at least 1"),
        ({"type": "soap", "max_dimension": -1}, r"optimizer\.max_dimension: must be at least 1"),
        ({"type": "soap", "betas": [0.9]}, r"train\.optimizer: soap has two betas, found 1"),
        ({"type": "adam", "cautious": True}, r"'cautious' is not a key of"),
        ({"type": "schedule_free", "betas": [0, 0.9]}, r"optimizer\.betas\.0: must be greater than 0"),
        ("schedule_free", r"train\.schedule: schedule_free averages weights in place of a rate that decays; say `sch"),
        ({"type": "adamw", "groups": [{"parameters": ["*"], "lr": 2}]}, r"'lr' is not a key of group"),
    ],
)
def test_refuses(optimizer, message):
    with pytest.raises(SpecError, match=message):
        load_recipe({"tokens": 1000, "lr": 1e-3, "optimizer": optimizer})


@pytest.mark.parametrize("schedule", ["constant", {"type": "wsd", "decay": 0}])
def test_schedule_free_takes_a_rate_that_stays(schedule):
    assert load_recipe({"tokens": 10**6, "lr": 1e-3, "optimizer": "schedule_free", "schedule": schedule})
