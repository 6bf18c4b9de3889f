"""A recipe says how a variant is trained: data, objective, tokens, batch, optimizer, schedule, precision."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.parse import INVALID, parse, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, NotNegative, Positive, Range, Spec, added, marks_of
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.zoo import expand_recipe
from archlab.search.data.sources.family import Source, Stdlib
from archlab.search.data.tokenizers.family import Bytes, Tokenizer
from archlab.search.objectives import Answers, Causal, Objective
from archlab.search.recipe.initial_weights import Start
from archlab.search.recipe.optimizers import AdamW, Optimizer
from archlab.search.recipe.schedules import AUTO, Cosine, Schedule
from archlab.search.recipe.stage import Stage

if TYPE_CHECKING:
    from archlab.search.data.dataset import Dataset


Seed = Annotated[int, Range(min=0, max=2**31)]


class Ramp(Spec):
    """A batch that grows (arXiv:2005.14165, section 2.3): `start` sequences, and `step` more at equal shares of the
    first `tokens` tokens, until it is whole."""

    title: ClassVar[str] = "ramp"
    start: Count
    step: Count
    tokens: Count


class Recipe(Spec):
    """How a variant is trained. `tokens` are those of the whole trial, rounded up to whole steps.

    One optimizer step consumes `batch` sequences of `context` tokens, computed as `accumulate` micro-batches; where the
    batch is given in tokens, `batch_tokens`, it has as many sequences at every context as these fill. With a `ramp` the
    first steps have smaller batches, computed in micro-batches of the same size.
    `tokens` and `context` count tokens of text: what an objective makes of a window of `context` tokens may be longer
    or shorter, so that at equal tokens all objectives have seen the same text. `z_loss` times the mean of log^2 Z, of
    the softmax's normaliser, is added to the loss that is trained on (arXiv:2204.02311, section 5: 1e-4).
    `recompute: layers` keeps of each layer only its input for the backward pass: less memory, a third more work.
    A trial's seed gives its initial values and the order of its batches; `init_seed` or `data_seed` holds one of them
    fixed, at what it is under that seed, while the other varies from trial to trial.
    `clip` bounds the global L2 norm of the gradients; `bf16` is autocast with float32 weights, and `compile: blocks`
    trains each layer as code made by torch.compile, which rounds otherwise. What is `auto` a study settles once, for
    all its variants, by the machine, the model and the length of training. Where a recipe is written, the key `recipe`
    names a published one of the zoo, whose fields it takes over but for those beside it.
    """

    title: ClassVar[str] = "recipe"
    short_forms: ClassVar[tuple[str, ...]] = ("recipe",)

    data: Source = Stdlib()
    tokenizer: Tokenizer = Bytes()
    objective: Objective = Causal()
    tokens: Count
    context: Count = 256
    batch: Count = 16
    batch_tokens: Count | None = added(default=None)
    ramp: Ramp | None = added(default=None)
    accumulate: Count = 1
    optimizer: Optimizer = AdamW()
    lr: Positive
    schedule: Schedule = Cosine()
    clip: Positive | None = 1.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "off", "blocks"] = added(default="auto")
    init: Start | None = added(None)
    z_loss: NotNegative = added(0.0)
    recompute: Literal["none", "layers"] = added(default="none")
    stages: tuple[Stage, ...] = added(default=())
    init_seed: Seed | None = added(default=None)
    data_seed: Seed | None = added(default=None)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of fields, those of a published recipe among them."""
        before = len(problems)
        if isinstance(node.value, dict) and "recipe" in node.value:
            node = expand_recipe(node, path, problems)
        given = node.value if isinstance(node.value, dict) else {}
        rate = given.get("lr")
        if rate is not None and isinstance(rate.value, list):
            message = "must be a number, found a list; `tune: {lr: […]}` gives each variant its best rate of several"
            problems.append(Problem(f"{path}.lr" if path else "lr", message, rate.mark))
            node = Node({**given, "lr": Node.of(1.0)}, node.mark, node.key_marks)
        recipe = parse_record(cls, node, path, problems)
        if len(problems) > before:
            return INVALID
        return recipe.replace(objective=Answers()) if recipe.data.holds_answers and "objective" not in given else recipe

    @property
    def settled(self) -> Recipe:
        """The recipe with the warm-ups as numbers, its stages' too."""
        own, *later = self.whole
        if all(each.schedule.warmup != AUTO for each in (own, *later)):
            return self
        stages = tuple(
            stage.replace(schedule=each.warmed) if stage.tokens and each.schedule.warmup == AUTO else stage
            for stage, each in zip(self.stages, later, strict=True)
        )
        return self.replace(schedule=own.warmed, stages=stages)

    @property
    def warmed(self) -> Schedule:
        """The schedule with its warm-up as a number."""
        return self.schedule.settled(self.steps, self.optimizer.memory)

    def told(self) -> dict[str, Any]:
        """Its canonical form, settled, without `compile: off`, which trials had before there was a choice."""
        plain: dict[str, Any] = canonical(self.settled)
        return {name: value for name, value in plain.items() if (name, value) != ("compile", "off")}

    @property
    def sequences(self) -> int:
        """Sequences of a whole batch."""
        return self.batch_tokens // self.context if self.batch_tokens else self.batch

    @property
    def micro_batch(self) -> int:
        """Sequences computed at a time."""
        return self.sequences // self.accumulate

    @property
    def steps(self) -> int:
        """Optimizer steps of a trial: with batches of one size ceil(tokens / (sequences * context))."""
        growing = self._ramp()
        left = max(self.tokens - growing[-1] * self.context, 0)
        needed = -(-left // (self.sequences * self.context))
        if needed or self.ramp is None:
            return len(growing) - 1 + needed
        return next(step for step, rows in enumerate(growing) if rows * self.context >= self.tokens)

    @property
    def whole(self) -> tuple[Recipe, ...]:
        """The recipe of every stage, from the first on, which is its own."""
        found = [self.replace(stages=()) if self.stages else self]
        for stage in self.stages:
            said = stage.said()
            fresh = {"init": None, "ramp": None, **({"batch_tokens": None} if "batch" in said else {})}
            found.append(found[-1].replace(**fresh, **said))
        return tuple(found)

    def in_rows(self, rows: int) -> Recipe:
        """The recipe with micro-batches of at most so many sequences, in its stages too: where more do not fit. The
        batches stay as they are."""
        counts = []
        for each in self.whole:  # as few micro-batches as can be, of equal size
            divisors = (n for n in range(each.accumulate, each.sequences + 1) if each.sequences % n == 0)
            counts.append(next(n for n in divisors if each.sequences // n <= max(rows, 1)))
        stages = tuple(
            stage if own == (stage.accumulate or before) else stage.replace(accumulate=own)
            for stage, before, own in zip(self.stages, counts[:-1], counts[1:], strict=True)
        )
        if counts[0] == self.accumulate and stages == self.stages:
            return self
        return self.replace(accumulate=counts[0], stages=stages)

    @property
    def all_steps(self) -> int:
        """Optimizer steps of a trial, those of all its stages."""
        return sum(recipe.steps for recipe in self.whole)

    @property
    def all_tokens(self) -> int:
        """Tokens of a trial, those of all its stages."""
        return sum(recipe.tokens for recipe in self.whole)

    def epochs(self, dataset: Dataset) -> tuple[float, ...]:
        """How often a trial, without its stages, reads the training split, or each of its domains; nothing where that
        is absent."""
        if dataset.absent:
            return ()
        if self.objective.of_examples:
            return (self.rows_before(self.steps) / len(dataset.documents("train").tokens),)
        return tuple(self.tokens * share / (len(tokens) - 1) for share, tokens in dataset.streams())

    def rows_before(self, step: int) -> int:
        """Sequences that the steps before `step` consume."""
        growing = self._ramp()
        last = len(growing) - 1
        return growing[step] if step <= last else growing[-1] + (step - last) * self.sequences

    def tokens_at(self, step: int) -> int:
        """Tokens that the first `step` steps consume."""
        return self.rows_before(step) * self.context

    def _ramp(self) -> tuple[int, ...]:
        """Sequences consumed before each step of the ramp and before the first whole batch; (0,) without a ramp."""
        if self.ramp is None:
            return (0,)
        return _ramp_rows(self.ramp.start, self.ramp.step, self.ramp.tokens // self.context, self.sequences)

    def vocab(self, tokens: int) -> int:
        """The vocabulary that a tokenizer of so many tokens and the objective need together."""
        return tokens + self.objective.extra(self.context)

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        return self.lr * self.warmed.factor(step, self.steps)

    def problems(self, path: str = "train") -> list[Problem]:
        """What the fields, each right by itself, get wrong together."""
        found: list[Problem] = []
        names = [stage.name for stage in self.stages]
        for index, own in enumerate(self.whole[1:]):
            found += self.stages[index].problems(f"{path}.stages.{index}")
            found += own.problems(f"{path}.stages.{index}")
            if names[index] and names[index] in names[:index]:
                message = f"two stages are called '{names[index]}'"
                found.append(Problem(f"{path}.stages.{index}.name", message, self.stages[index].mark()))
        twice = "batch" in marks_of(self)
        if self.batch_tokens and (self.batch_tokens % self.context or twice):
            message = f"must be a multiple of the context, {self.context}, found {self.batch_tokens}"
            if twice:
                message = "stands for the batch, which is given in sequences too; give one of them"
            return [Problem(f"{path}.batch_tokens", message, self.mark("batch_tokens"))]  # the rest would only echo it
        if self.sequences % self.accumulate:
            message = f"must divide batch, found {self.accumulate} for a batch of {self.sequences} sequences"
            found.append(Problem(f"{path}.accumulate", message, self.mark("accumulate") or self.mark("batch")))
        if self.ramp and self.ramp.tokens > self.tokens:
            message = f"must be at most the {self.tokens:,} tokens of the trial, found {self.ramp.tokens:,}"
            found.append(Problem(f"{path}.ramp.tokens", message, self.ramp.mark("tokens")))
        if self.ramp and self.ramp.start >= self.sequences:
            message = f"must be less than the batch of {self.sequences} sequences, found {self.ramp.start}"
            found.append(Problem(f"{path}.ramp.start", message, self.ramp.mark("start")))
        if self.init_seed is not None and self.data_seed is not None:
            message = "leaves a trial's seed nothing to vary, as init_seed is given too; give one of them"
            found.append(Problem(f"{path}.data_seed", message, self.mark("data_seed")))
        for name in ("optimizer", "schedule"):
            part: Optimizer | Schedule = getattr(self, name)
            if complaint := part.complaint():
                found.append(Problem(f"{path}.{name}", complaint, part.mark() or self.mark(name)))
        if self.optimizer.averages and self.schedule.stable(self.steps) < self.steps:
            message = f"{self.optimizer.type} averages weights in place of a rate that decays; say `schedule: constant`"
            found.append(Problem(f"{path}.schedule", message, self.mark("schedule") or self.mark("optimizer")))
        if wrong := self.objective.complaint(self.context):
            field, complaint = wrong
            place = f"{path}.objective.{field}" if field else f"{path}.objective"
            found.append(Problem(place, complaint, self.objective.mark(field) or self.mark("objective")))
        return found


@lru_cache(maxsize=16)
def _ramp_rows(start: int, step: int, over: int, whole: int) -> tuple[int, ...]:
    """Sequences before each step of a ramp of `over` sequences, and before the first whole batch."""
    increments = -(-(whole - start) // step)
    rows = [0]
    while rows[-1] < over:
        rows.append(rows[-1] + min(start + step * (rows[-1] * increments // over), whole))
    return tuple(rows)


def load_recipe(data: Any, path: str = "train") -> Recipe:
    """A recipe from a Node or plain data, all its rules checked. Raises SpecError with all its problems."""
    recipe = parse(Recipe, data, path)
    if found := recipe.problems(path):
        raise SpecError(found)
    return recipe
