"""Recipes: what they default to, what they refuse, how the rate moves, and what decays."""

import math

import pytest
import torch
from torch import nn

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.recipe.optimizers import AdamW
from archlab.search.recipe.parameter_groups import decay_groups
from archlab.search.recipe.recipe import load_recipe
from archlab.search.recipe.schedules import Constant, Cosine, InverseSqrt, Linear, Schedule, WarmupStableDecay

SHORT = {"tokens": 1000, "lr": 1e-3}


def test_short_recipe_is_completed_with_defaults_and_survives_its_canonical_form():
    recipe = load_recipe(read_text("{tokens: 2M, lr: 1e-3, schedule: linear}"))
    data = canonical(recipe)
    assert load_recipe(data) == recipe
    assert data["tokens"] == 2_000_000
    assert data["optimizer"] == {"type": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-8}
    assert data["schedule"] == {"type": "linear", "warmup": "auto", "final": 0.1}
    assert (data["context"], data["batch"], data["accumulate"], data["clip"]) == (256, 16, 1, 1.0)
    assert (data["objective"], data["precision"], data["tokenizer"]["type"]) == ("causal", "auto", "bytes")


@pytest.mark.parametrize(
    ("tokens", "context", "batch", "steps"),
    [(1000, 10, 10, 10), (1001, 10, 10, 11), (1, 256, 16, 1), (4096, 256, 16, 1), (4097, 256, 16, 2)],
)
def test_steps_are_tokens_over_batch_rounded_up(tokens, context, batch, steps):
    recipe = load_recipe(SHORT | {"tokens": tokens, "context": context, "batch": batch})
    assert (recipe.steps, recipe.tokens_at(1)) == (steps, context * batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 3}, r"train\.accumulate: must divide batch, found 3 for a batch of 16"),
        ({"batch_tokens": 1000}, r"train\.batch_tokens: must be a multiple of the context, 256, found 1000"),
        ({"ramp": {"start": 16, "step": 1, "tokens": 9}}, r"ramp\.start: must be less than the batch of 16 sequences"),
        ({"ramp": {"start": 2, "step": 1, "tokens": 9000}}, r"ramp\.tokens: must be at most the 1,000 tokens"),
        ({"optimizer": {"type": "adamw", "betas": [0.9]}}, r"train\.optimizer: adamw has two betas, found 1"),
        ({"optimizer": {"type": "adamw", "betas": [0.9, 1.0]}}, r"betas\.1: must be less than 1"),
        ({"schedule": {"type": "wsd", "warmup": 0.5, "decay": 0.6}}, r"train\.schedule: warmup and decay together"),
        ({"schedule": "cosin"}, r"did you mean 'cosine'"),
        ({"lr": 0}, r"train\.lr: must be greater than 0"),
        ({"tokens": -1}, r"train\.tokens: must be at least 1"),
        ({"precision": "fp16"}, r"'fp16' is not a precision"),
        ({"objective": "maskd"}, r"'maskd' is not an objective; did you mean 'masked'"),
        ({"clip": 0}, r"train\.clip: must be greater than 0"),
        ({"epochs": 3}, r"'epochs' is not a key of recipe"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_recipe_refuses(change, message):
    with pytest.raises(SpecError, match=message):
        load_recipe(SHORT | change)


def test_batch_in_tokens_has_as_many_sequences_as_they_fill():
    recipe = load_recipe(SHORT | {"batch_tokens": 640, "context": 32, "accumulate": 5})
    assert (recipe.sequences, recipe.micro_batch, recipe.steps, recipe.tokens_at(2)) == (20, 4, 2, 1280)


@pytest.mark.parametrize("tokens", [600, 690, 1000, 1001])
def test_ramp_grows_in_equal_shares_and_consumes_what_the_trial_has(tokens):
    ramp = {"start": 4, "step": 3, "tokens": 600}
    recipe = load_recipe(SHORT | {"tokens": tokens, "context": 10, "batch": 12, "ramp": ramp})
    # Three increments of 3 sequences, each after 20 of the first 60 sequences; the last stops at the batch.
    sizes = [4, 4, 4, 4, 4, 7, 7, 7, 10, 10] + [12] * 50
    before = [sum(sizes[:step]) for step in range(len(sizes))]
    assert [recipe.rows_before(step) for step in range(20)] == before[:20]
    steps = next(step for step, rows in enumerate(before) if rows * 10 >= tokens)
    assert recipe.steps == steps
    assert recipe.tokens_at(steps) == before[steps] * 10


def test_recipe_without_clip_is_one_without_a_bound():
    assert load_recipe(SHORT | {"clip": None}).clip is None


STEPS = 100


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (Constant(warmup=0.0), 0, 1.0),
        (Constant(warmup=0.1), 0, 0.1),
        (Constant(warmup=0.1), 8, 0.9),
        (Constant(warmup=0.1), 9, 1.0),
        (Constant(warmup=1.0), 49, 0.5),
        (Constant(warmup=0.1), 99, 1.0),
        (Cosine(warmup=0.2, final=0.1), 19, 1.0),
        (Cosine(warmup=0.2, final=0.1), 20, 1.0),
        (Cosine(warmup=0.2, final=0.1), 60, 0.55),
        (Cosine(warmup=0.2, final=0.1), 40, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (Cosine(warmup=0.0, final=0.0), 99, (1 + math.cos(math.pi * 0.99)) / 2),
        (Linear(warmup=0.2, final=0.1), 20, 1.0),
        (Linear(warmup=0.2, final=0.1), 60, 0.55),
        (Linear(warmup=0.0, final=0.0), 99, 0.01),
        (WarmupStableDecay(warmup=0.1, decay=0.2), 4, 0.5),
        (WarmupStableDecay(warmup=0.1, decay=0.2), 79, 1.0),
        (WarmupStableDecay(warmup=0.1, decay=0.2), 80, 1.0),
        (WarmupStableDecay(warmup=0.1, decay=0.2), 90, 0.5),
        (WarmupStableDecay(warmup=0.1, decay=0.2, final=0.2), 90, 0.6),
        (WarmupStableDecay(warmup=0.1, decay=0.2, shape="sqrt"), 85, 0.5),
        (WarmupStableDecay(warmup=0.0, decay=0.0), 99, 1.0),
        (InverseSqrt(warmup=0.25), 4, 0.2),
        (InverseSqrt(warmup=0.25), 25, 1.0),
        (InverseSqrt(warmup=0.25), 64, 0.625),
        (InverseSqrt(warmup=0.25, start="constant"), 4, 1.0),
        (InverseSqrt(warmup=0.25, start="constant"), 64, 0.625),
        (InverseSqrt(warmup=0.0), 64, 0.125),
    ],
    ids=str,
)
def test_schedule_has_its_closed_form(schedule, step, factor):
    assert schedule.factor(step, STEPS) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("kind", Schedule.members)
@pytest.mark.parametrize("warmup", [0.0, 0.02, 0.5, 1.0])
def test_schedule_wastes_no_step_and_never_passes_the_peak(kind, warmup):
    schedule = parse(Schedule.members[kind], {"warmup": warmup})
    for steps in (1, 2, 3, 7, 100):
        assert all(0 < schedule.factor(step, steps) <= 1 for step in range(steps))


@pytest.mark.parametrize("step", [-1, 10, 11])
@pytest.mark.parametrize("kind", Schedule.members)
def test_schedule_refuses_a_step_that_is_none(kind, step):
    with pytest.raises(ValueError, match="has steps 0 to 9"):
        Schedule.members[kind](warmup=0.02).factor(step, 10)


@pytest.mark.parametrize(
    ("steps", "change", "warm"),
    [
        (1000, {}, 100),  # a tenth
        (300, {}, 40),  # 2 / (1 - 0.95)
        (100, {}, 25),  # at most a quarter
        (1000, {"optimizer": {"type": "adamw", "betas": [0.9, 0.999]}}, 250),
        (30_000, {"optimizer": {"type": "adam", "betas": [0.9, 0.9995]}}, 4000),
        (300, {"optimizer": "lion"}, 30),  # it keeps no second moment
        (100, {"schedule": {"type": "wsd", "decay": 0.9}}, 10),  # all that is left before the decay
        (1000, {"schedule": {"type": "cosine", "warmup": 0.02}}, 20),  # as it is written
    ],
)
def test_warmup_left_to_us_is_long_enough_for_the_second_moment(steps, change, warm):
    recipe = load_recipe(SHORT | {"tokens": steps * 256 * 16} | change)
    assert recipe.warmed.warm(recipe.steps) == warm
    rates = [recipe.lr_at(step) / recipe.lr for step in range(warm + 1)]
    assert rates == pytest.approx([(step + 1) / warm for step in range(warm)] + [1.0])


def test_a_trial_has_its_warmup_as_a_number_so_that_writing_it_out_is_the_same_trial():
    left = load_recipe(SHORT | {"tokens": 300 * 256 * 16})
    written = load_recipe(SHORT | {"tokens": 300 * 256 * 16, "schedule": {"warmup": 0.133333}})
    assert left.told() == written.told()
    assert load_recipe(left.told()).warmed == left.warmed


def test_every_stage_has_a_warmup_of_its_own():
    stage = {"tokens": 100 * 256 * 16, "lr": 1e-4}
    recipe = load_recipe(SHORT | {"tokens": 1000 * 256 * 16, "stages": [stage, stage | {"schedule": {"warmup": 0.5}}]})
    told = load_recipe(recipe.told())
    assert [each.schedule.warmup for each in told.whole] == [0.1, 0.25, 0.5]
    assert told.told() == recipe.told()


def test_only_matrices_decay_unless_a_parameter_says_otherwise():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model.gate = nn.Parameter(torch.zeros(2, 2))
    model.gate.decay = False
    model.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    model.tied = model[0].weight
    decayed, free = decay_groups(model.named_parameters(remove_duplicate=False), 0.3)
    assert decayed["weight_decay"] == 0.3
    assert free["weight_decay"] == 0.0
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[1].weight)]
    assert {id(p) for p in free["params"]} == {id(p) for p in (model.gate, model[1].bias, *model[2].parameters())}


def test_adamw_step_is_its_formula():
    weight = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    spec = AdamW(betas=(0.8, 0.9), weight_decay=0.5, eps=1e-3)
    optimizer = spec.build([("weight", weight)], lr=0.1)
    weight.grad = torch.tensor([[0.5, -4.0]])
    optimizer.step()
    # after one step the bias-corrected means are g and g^2
    expected = [w - 0.1 * (g / (abs(g) + 1e-3) + 0.5 * w) for w, g in ((2.0, 0.5), (-1.0, -4.0))]
    assert weight.tolist()[0] == pytest.approx(expected, rel=1e-6)
