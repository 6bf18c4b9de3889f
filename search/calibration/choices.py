"""What a calibration may change of a recipe: a few values for each choice, the study's own among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.schedules import AUTO
from archlab.search.sections.search.axes import Choice as Categorical
from archlab.search.sections.search.axes import Integers
from archlab.search.sections.search.space import Space
from archlab.search.study.calibrated import START
from archlab.search.training.step_times import Timed, Timings
from archlab.search.variants.variant import Variant

_RATES = range(-4, 5)  # half octaves: from a fourth to four times the study's own
_BATCHES = range(-2, 3)  # octaves
_WARMUPS = (AUTO, 0.02, 0.2)
_SCHEDULES = ("cosine", "linear", "wsd")
_BETAS = (0.95, 0.99, 0.999)
_DECAYS = (0.0, 0.1)
_STARTS = ("small", 0.02)
_DIGITS = 3  # of the tokens that take equal time
_SAME = 0.1  # starts whose standard deviations differ by less are one


@dataclass(frozen=True)
class Choice:
    """One choice of a recipe: its name, its path as `recipes:` writes it, its values, and which is the study's own.

    Values that are `ordered` have neighbours. `ends` are the places beyond which there are more.
    """

    name: str
    path: str
    values: tuple[Any, ...]
    own: int
    ordered: bool = False
    ends: tuple[int, ...] = ()


def choices_of(model: Model, recipe: Recipe, parts: int = 1) -> list[Choice]:
    """Those that a recipe has, in the order in which a patch sets them. One with a single value is left out.

    A batch must have rows for each of its micro-batches in each of the `parts` that processes divide it into.
    """
    sequences, unit = recipe.sequences, recipe.context if recipe.batch_tokens else 1
    rates = [float(f"{recipe.lr * 2 ** (step / 2):.2g}") for step in _RATES if step]
    batches = [sequences * 2**step if step >= 0 else sequences // 2**-step for step in _BATCHES]
    least = recipe.accumulate * parts
    fits = [b for b in batches if b > 0 and b % least == 0]
    batch = "batch_tokens" if recipe.batch_tokens else "batch"
    found = [
        _ordered("rate", "lr", recipe.lr, rates),
        _ordered("batch", batch, sequences * unit, [b * unit for b in fits], below=fits[0] % (2 * least) == 0),
        _named("schedule", "schedule", recipe.schedule.type, () if recipe.optimizer.averages else _SCHEDULES),
        _named("warm-up", "schedule.warmup", recipe.schedule.warmup, _WARMUPS),
        *_of_optimizer(recipe),
        _of_start(model),
    ]
    return [choice for choice in found if len(choice.values) > 1]


def _ordered(name: str, path: str, own: Any, others: list[Any], below: bool = True) -> Choice:
    """Numbers, with more above and, where that is so, `below`."""
    values = sorted({own, *others})
    last = len(values) - 1
    return Choice(name, path, tuple(values), values.index(own), True, (0, last) if below else (last,))


def _named(name: str, path: str, own: Any, others: tuple[Any, ...]) -> Choice:
    return Choice(name, path, tuple(dict.fromkeys((own, *others))), 0)


def _of_optimizer(recipe: Recipe) -> Iterator[Choice]:
    """The memory of the second moment and the weight decay, where the optimizer has them."""
    if (betas := getattr(recipe.optimizer, "betas", None)) and recipe.optimizer.memory:
        first, own = betas
        yield Choice("beta2", "optimizer.betas", tuple([first, beta] for beta in dict.fromkeys((own, *_BETAS))), 0)
    independent = getattr(recipe.optimizer, "independent_decay", False)  # whose decays are smaller by the rate
    if (decay := getattr(recipe.optimizer, "weight_decay", None)) is not None and not independent:
        yield _named("weight decay", "optimizer.weight_decay", decay, _DECAYS)


def _of_start(model: Model) -> Choice:
    """The standard deviation of the initial values; values that are nearly the study's own are left out."""

    def size(std: Any) -> float:
        return math.sqrt(2 / (5 * model.d_model)) if std == "small" else float(std)

    own = model.init.std
    others = [std for std in _STARTS if abs(math.log(size(std) / size(own))) > _SAME]
    return Choice("start", START, (own, *others), 0)


def equal_time(first: Variant, batch: int, timings: Timings) -> int:
    """Tokens of a trial with that batch that takes the time of one of the baseline's own, to three digits."""
    recipe = first.recipe
    field = "batch_tokens" if recipe.batch_tokens else "batch"
    own = recipe.batch_tokens or recipe.batch
    other = Timed(first.model, recipe.replace(**{field: batch}), first.dataset)
    tokens = recipe.tokens * batch / own / timings.ratio(other, first.timed)
    return int(float(f"{tokens:.{_DIGITS}g}"))


@dataclass(frozen=True)
class Tries:
    """The recipes that choices make, each at as many tokens as take equal time. `tokens_for` tells them by batch."""

    recipe: Recipe
    choices: list[Choice]
    tokens_for: Callable[[int], int]

    @property
    def own(self) -> dict[str, int]:
        """The study's own recipe, as every point is written: the place of each choice's value, by its name."""
        return {choice.name: choice.own for choice in self.choices}

    @property
    def default(self) -> dict[str, int]:
        """The study's own recipe with archlab's warm-up and start."""
        usual = {"warm-up": AUTO, "start": "small"}
        told = {c.name: c.values.index(usual[c.name]) for c in self.choices if usual.get(c.name) in c.values}
        return {**self.own, **told}

    def space(self) -> Space:
        """What Optuna draws from: places of values."""
        return Space(
            axes={
                each.name: Integers(low=0, high=len(each.values) - 1)
                if each.ordered
                else Categorical(values=tuple(range(len(each.values))))
                for each in self.choices
            }
        )

    def settings(self, point: Mapping[str, int], share: float = 1.0) -> dict[str, Any]:
        """What a point changes in the study's own recipe, when trials take that share of their time."""
        found: dict[str, Any] = {}
        for choice in self.choices:
            if (place := point[choice.name]) == choice.own:
                continue
            value = choice.values[place]
            if choice.name == "schedule":  # whose warm-up is a choice of its own
                value = {"type": value, "warmup": self.recipe.schedule.warmup}
            found[choice.path] = value
        batch = next((c.values[point[c.name]] for c in self.choices if c.name == "batch"), None)
        if batch is not None and (tokens := self.tokens(batch, share)) != self.tokens(None, share):
            found["tokens"] = tokens
        return found

    def tokens(self, batch: int | None, share: float = 1.0) -> int:
        """Tokens of a trial with that batch, or with the study's own, that takes the share of the own one's time."""
        own = self.recipe.batch_tokens or self.recipe.batch
        whole = self.recipe.tokens if batch in (None, own) else self.tokens_for(int(batch or 0))
        return max(round(whole * share), self.recipe.context)

    def whole(self, point: Mapping[str, int], recipe: Recipe) -> dict[str, Any]:
        """Everything that a calibrated recipe says, as `train` spells it: `recipe` is what the point made of the own
        one. Text, objective and what the machine settles are left to the study."""
        left = {"data", "tokenizer", "objective", "context", "init", "init_seed", "data_seed", "stages", "precision"}
        left |= {"compile", "ramp", "batch" if recipe.batch_tokens else "batch_tokens"}
        fields: dict[str, Any] = canonical(recipe)
        kept = {
            name: value for name, value in fields.items() if name not in left and (value is not None or name == "clip")
        }
        starts = [choice.values[point[choice.name]] for choice in self.choices if choice.path == START]
        return {"train": kept, **({START: starts[0]} if starts else {})}
