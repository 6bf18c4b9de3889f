"""Variants made concrete: a study's patches applied, matched in size, resolved, costed; their mistakes, each once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from arch_dsl import rules
from arch_dsl.errors import Mark, Problem, SpecError
from arch_dsl.identity import Change, brief_text, canonical, diff
from arch_dsl.layout import shapes_of
from arch_dsl.model import Model, cost, resolve
from arch_dsl.patch import Setting, apply
from arch_dsl.paths import get, update
from arch_dsl.source import Node
from arch_dsl.spec import Family, alternatives, marks_of, set_marks
from search.data.dataset import HELD_OUT, Dataset
from search.data.prepare import prepare, require
from search.ladder import Rung
from search.match import SCALE, Match, solve, solve_time
from search.micro_batch import at_most
from search.objectives import Lengths, has_encoder
from search.objectives.checks import positions, refusals
from search.optimizers import unmatched
from search.parallel.rules import refuse
from search.recipe import Recipe
from search.settled import Settled
from search.space import Space, probes
from search.stage_plans import StagePlan, plan_stages
from search.stages import Stage, prompts
from search.start import Start, Started, as_written, keep_weights, started
from search.study import Asked, Study, asked_variants
from search.timing import Timed, Timings
from search.trial import Trial, canonical_json


@dataclass(frozen=True)
class Variant:
    """One row of the table: a resolved model and the recipe that trains it."""

    name: str
    base: str
    baseline: str
    model: Model
    recipe: Recipe
    dataset: Dataset
    changes: tuple[Change, ...]
    components: dict[str, bool]
    parameters: int
    figures: dict[str, int]  # what else it costs: Cost.figures
    test_text: str  # equal where the test documents are the same text, whatever the tokenizers
    size: int = 0  # what matching counts of it
    mismatch: float = 0.0
    matched: dict[str, int] = field(default_factory=dict)
    start: Started | None = None  # where it starts from weights
    repaired: tuple[str, ...] = ()  # the rules that changed a combination which made no sense
    stages: tuple[StagePlan, ...] = ()
    series: str = ""  # what all rungs of a ladder have in common of its name
    rung: str = ""  # and what is the rung's own

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs per token, mask-aware."""
        return self.figures["flops_per_token"]

    @property
    def timed(self) -> Timed:
        """What the time of its steps depends on."""
        return Timed(self.model, self.recipe, self.dataset)

    def trial(self, seed: int, lr: float | None = None) -> Trial:
        """This variant under one seed, at its recipe's learning rate or at another one."""
        recipe = self.recipe if lr is None else self.recipe.replace(lr=lr)
        spelled = ("data", "tokenizer")  # how the data is written down; what it is, its identity says
        plain = {name: value for name, value in recipe.told().items() if name not in spelled}
        if recipe.init:
            plain["init"] = {"sha256": recipe.init.sha256}
        for stage, own in zip(plain.get("stages", ()), recipe.stages, strict=True):
            del stage["name"], stage["data"]
            stage["model"] = own.model.text
        return Trial(self._written, plain, self.dataset.identity, seed)

    @cached_property
    def _written(self) -> dict[str, Any]:
        """The model as all of its trials share it: of ten thousand trials each would hold a copy."""
        written: dict[str, Any] = canonical(self.model)
        return written

    @property
    def batches(self) -> str:
        """What decides the batches: two variants with the same text here saw the same tokens in the same order."""
        recipe = self.recipe
        said = [self.dataset.identity, recipe.context, recipe.sequences, recipe.tokens, canonical(recipe.objective)]
        said += [] if recipe.ramp is None else [canonical(recipe.ramp)]
        said += [] if recipe.data_seed is None else [{"data_seed": recipe.data_seed}]
        for stage in self.stages:
            own = stage.recipe
            said.append([stage.dataset.identity, own.context, own.sequences, own.tokens, canonical(own.objective)])
        return canonical_json(said)

    def record(self) -> dict[str, Any]:
        """What the store keeps of it, for tables and pages."""
        return {
            "name": self.name,
            "baseline": self.baseline,
            "changes": [[c.path, brief_text(c.before), brief_text(c.after)] for c in self.changes],
            "components": self.components,
            "parameters": self.parameters,
            "mismatch": self.mismatch,
            "matched": self.matched,
            **self.figures,
            "tokens": self.recipe.tokens,
            "context": self.recipe.context,
            "batches": self.batches,
            "test": self.test_text,
            "bytes_per_token": self.dataset.bytes_per_token("test"),
            **({"lossy": self.dataset.lossy} if self.dataset.lossy else {}),
            "domains": [domain.name for domain in (self.stages[-1] if self.stages else self).dataset.domains],
            **(
                {}
                if self.recipe.whole[-1].objective.every
                else {"objective": canonical(self.recipe.whole[-1].objective)}
            ),
            "spec": canonical(self.model, brief=True),
            **({"series": self.series, "rung": self.rung} if self.series else {}),
            **({"start": dataclasses.asdict(self.start)} if self.start else {}),
            **({"stages": [stage.record() for stage in self.stages]} if self.stages else {}),
        }


@dataclass(frozen=True)
class Built:
    """A resolved model, what it changes in the base, what it costs, and what matching solved."""

    model: Model
    changes: tuple[Change, ...]
    parameters: int
    size: int  # what matching counts
    figures: dict[str, int]
    matched: dict[str, int]
    repaired: tuple[str, ...]
    base: Model  # what it changes, resolved


class Builder:
    """Turns what a study asks for into variants: patch, match, resolve, cost; data sets are prepared once each."""

    def __init__(self, study: Study, data_root: Path, micro_batch: int | None = None) -> None:
        """`micro_batch` is what the store has decided that all variants are computed with at most, in sequences."""
        self.study, self.data_root, self.micro_batch = study, data_root, micro_batch
        self.settled: Settled | None = None
        self.datasets: dict[str, Dataset] = {}
        self.bases: dict[tuple[Model, tuple[int, int]], Model] = {}
        self.built: dict[str, Built] = {}
        self.guess = 1 if study.match and len(study.match.by) == 1 else SCALE  # that of the variant before, later
        self.timings = Timings(data_root.parent / "timings", study.resources.cpus)
        self.test_texts: dict[str, str] = {}
        self.files: dict[Start, Start] = {}
        self.starts: dict[tuple[str | None, Model], Started] = {}

    def variant(self, asked: Asked, target: Variant | None, matched: bool = True) -> Variant:
        """One variant, if there is a `target` matched to it, or as it is written. Raises SpecError."""
        written = self.recipe(asked.settings, asked.rung)
        if problems := written.problems("train"):
            raise SpecError(problems)
        recipe = self.kept(written)
        recipe = self.settle(at_most(recipe, self.micro_batch) if self.micro_batch else recipe)
        dataset = self.dataset(recipe)
        built = self.build(asked, target if matched else None, dataset, recipe)
        refuse_idle_groups(recipe, built.model)
        recipe, stages = plan_stages(recipe, built.model, dataset, self.staged_dataset)
        refuse(self.study.resources.parallel, built.model, recipe)
        tested = (stages[-1].recipe, stages[-1].dataset) if stages else (recipe, dataset)
        label = f" [{asked.cell}]" if asked.cell else ""
        return Variant(
            name=asked.name,
            base=asked.base,
            baseline=f"{asked.against or self.study.report.baseline}{label}",
            model=built.model,
            recipe=recipe,
            dataset=dataset,
            changes=(*built.changes, *_recipe_changes(self.recipe((), asked.rung), written)),
            components=dict(asked.components),
            parameters=built.parameters,
            figures=built.figures,
            test_text=self.test_text(*tested),
            size=built.size,
            mismatch=self.mismatch(Timed(built.model, recipe, dataset), built.size, target),
            matched=built.matched,
            start=self.started(recipe, built),
            repaired=built.repaired,
            stages=stages,
            series=asked.series,
            rung=asked.rung.label if asked.rung else "",
        )

    def settle(self, recipe: Recipe) -> Recipe:
        """The recipe with what it leaves open as it was settled for the study, once it was."""
        return self.settled.apply(recipe) if self.settled else recipe

    def started(self, recipe: Recipe, built: Built) -> Started | None:
        """What a variant takes from the weights that its recipe starts from. Raises SpecError."""
        if recipe.init is None:
            return None
        key = recipe.init.sha256, built.model
        if key not in self.starts:
            self.starts[key] = started(recipe.init, built.model, built.base, self.data_root)
        return self.starts[key]

    def kept(self, recipe: Recipe) -> Recipe:
        """The recipe with the digest of the weights that it starts from, which the store keeps. Raises SpecError."""
        if recipe.init is None:
            return recipe
        if recipe.init not in self.files:
            base = self.study.file.parent if self.study.file else None
            self.files[recipe.init] = keep_weights(recipe.init, base, self.data_root)
        return recipe.replace(init=self.files[recipe.init])

    def mismatch(self, timed: Timed, size: int, target: Variant | None) -> float:
        """How far a model is from what it is to be matched to, as a share of that."""
        match = self.study.match
        if target is None or match is None:
            return 0.0
        return (self.timings.ratio(timed, target.timed) if match.kind == "step_time" else size / target.size) - 1

    def build(self, asked: Asked, target: Variant | None, dataset: Dataset, recipe: Recipe) -> Built:
        """The model of a variant, matched, resolved and costed; once for all that differ in their recipe alone."""
        settings = [s for s in asked.settings if not s.path.startswith("train.")]
        mend = asked.impossible == "repair"
        asks = [[r.context, canonical(r.objective)] for r in recipe.whole]
        more = prompts(recipe.stages)
        match = self.study.match if target else None
        goal = [target.trial(0).key if match.kind == "step_time" else target.size] if match and target else []
        sized = [s for s in (asked.rung.settings if asked.rung else ()) if not s.path.startswith("train.")]
        changed = [[(s.path, s.node.plain()) for s in each] for each in (sized, settings)]
        timed = canonical(recipe) if match and match.kind == "step_time" else None
        key = json.dumps([changed, goal, dataset.vocab, asks, more, mend, timed])
        if key not in self.built:
            base = apply(self.study.model, sized)
            model = apply(base, settings)
            model, repaired = rules.repaired(model) if mend else (model, [])
            lengths = recipe.objective.lengths(recipe.context, has_encoder(model))
            needed = (positions(r, model) + extra for r, extra in zip(recipe.whole, more, strict=True))
            sizes = max(r.vocab(dataset.vocab) for r in recipe.whole), max(needed)
            matched: dict[str, int] = {}
            if match and target:
                self.refuse_own_size(model, base, match, asked)
                model, matched = self.solved(model, match, target, sizes, lengths, Timed(model, recipe, dataset))
            model = resolve(model, vocab=sizes[0], max_positions=sizes[1])
            if problems := list(refusals(recipe, model)):
                raise SpecError(problems)
            total = cost(model, lengths.tokens, lengths.source or None)
            base = self.resolved(base, sizes)
            figures = total.figures(recipe.context)  # per token of text
            size = self.study.match.counted(total, recipe.context) if self.study.match else 0
            changes = tuple(diff(base, model))
            self.built[key] = Built(model, changes, total.parameters, size, figures, matched, tuple(repaired), base)
        return self.built[key]

    def recipe(self, settings: Iterable[Setting], rung: Rung | None = None) -> Recipe:
        """The recipe with these changes, of which those that start with `train.` are its own, at a rung."""
        recipe = self.study.train
        try:
            for each in (rung.settings if rung else (), settings):
                mine = [_below(s, "train.") for s in each if s.path.startswith("train.")]
                recipe = _one_batch(apply(recipe, mine), mine) if mine else recipe
            return recipe
        except SpecError as error:
            raise SpecError(dataclasses.replace(p, path=f"train.{p.path}") for p in error.problems) from error

    def patched(self, settings: Iterable[Setting], rung: Rung | None = None) -> tuple[Model, Recipe]:
        """The base model and the recipe with these changes. Raises SpecError with what is wrong with either."""
        mine = list(settings)
        problems: list[Problem] = []
        model, recipe = self.study.model, self.study.train
        try:
            for each in (rung.settings if rung else (), mine):
                model = apply(model, [s for s in each if not s.path.startswith("train.")])
        except SpecError as error:
            problems += error.problems
        try:
            recipe = self.recipe(mine, rung)
        except SpecError as error:
            problems += error.problems
        if problems:
            raise SpecError(problems)
        return model, recipe

    def resolved(self, base: Model, sizes: tuple[int, int]) -> Model:
        """What variants change, resolved for so many tokens and positions; once for each rung of a ladder."""
        if (base, sizes) not in self.bases:
            self.bases[base, sizes] = resolve(base, vocab=sizes[0], max_positions=sizes[1])
        return self.bases[base, sizes]

    def idle_problems(self) -> Iterator[Problem]:
        """What is wrong with the parts of a study that no variant uses: spare components, the axes of a search."""
        used = {name for patch in self.study.variants.values() for name in patch.components}
        for name, component in self.study.components.items():
            if name not in used:
                yield from self._refusals(component.settings)
        if self.study.space:
            yield from self._space_problems(self.study.space)

    def _space_problems(self, space: Space) -> Iterator[Problem]:
        """What the base refuses of a search: unknown paths, wrong values, conditions on what is not there."""
        told: set[tuple[object, str]] = set()
        for path, settings in probes(space, self.study.components):
            for problem in self._refusals(settings):
                if (key := (problem.mark, problem.message)) not in told:
                    told.add(key)
                    yield dataclasses.replace(problem, path=f"space.{path}")
        for path, axis in space.axes.items():
            for asked in [at for at in axis.when.paths if at in space.needs] if axis.when else []:
                try:
                    self.given(asked)
                except SpecError as error:
                    for problem in error.problems:
                        yield Problem(f"space.{path}.when", problem.message, axis.mark("when"))

    def given(self, path: str) -> Any:
        """What stands at a path of the base, as a condition compares it: a primitive is its type. Raises SpecError."""
        spec, steps = (
            (self.study.train, path.split(".")[1:])
            if path.startswith("train.")
            else (self.study.model, path.split("."))
        )
        value = get(spec, tuple(steps))
        return value.type if isinstance(value, Family) else canonical(value, brief=True)

    def _refusals(self, settings: Iterable[Setting]) -> tuple[Problem, ...]:
        try:
            self.patched(settings)
        except SpecError as error:
            return error.problems
        return ()

    def refuse_own_size(self, model: Model, base: Model, match: Match, asked: Asked) -> None:
        """Raises SpecError if a variant sets a field that matching solves: its value would be ignored."""
        for by in match.by:
            try:
                own, before = (get(spec, tuple(by.split("."))) for spec in (model, base))
            except SpecError:
                continue  # a path by knobs or with `*`
            if own not in (None, before):
                setting = next((s for s in asked.settings if by.startswith(s.path)), None)
                message = f"`match` solves {by} for this variant; the {own} that is set here would be ignored"
                raise SpecError.of(by, message, setting.mark if setting else match.mark("by"))

    def solved(
        self, model: Model, match: Match, target: Variant, sizes: tuple[int, int], lengths: Lengths, timed: Timed
    ) -> tuple[Model, dict[str, int]]:
        """The model with the integer fields of a match solved, and these. Raises SpecError."""
        mark, context = match.mark("by"), timed.recipe.context
        known = {"vocab": model.vocab or sizes[0], "max_positions": model.max_positions or sizes[1]}
        steps = [_integer_field(model, by, mark) for by in match.by]
        given = _values(resolve(model, vocab=sizes[0], max_positions=sizes[1]), match) if len(steps) > 1 else []

        def at(size: int) -> Model:
            values = zip(match.by, match.values(size, given), strict=True)
            return apply(model, [Setting(by, Node(value, mark), "match", mark) for by, value in values])

        def sized(size: int) -> Model:  # the same as a rule, and faster
            changed = model
            for path, value in zip(steps, match.values(size, given), strict=True):
                changed = update(changed, type(changed), path, _always(value))
            return changed

        def counted(size: int) -> int:
            changed = (sized if all(steps) else at)(size).replace(**known)
            return match.counted(cost(changed, lengths.tokens, lengths.source or None), context)

        def ratio(size: int) -> float:
            own = resolve(at(size), vocab=sizes[0], max_positions=sizes[1])
            return self.timings.ratio(dataclasses.replace(timed, model=own), target.timed)

        try:
            if match.kind == "step_time":
                first = _first_value(target.model, match) if len(steps) == 1 else SCALE
                self.guess = solve_time(ratio, first)
            else:
                self.guess, _ = solve(counted, target.size, self.guess)
        except SpecError as error:
            own = model.replace(**known).check()  # what is wrong with the model explains it better
            said = [Problem("match.by", f"{', '.join(match.by)}: {p.message}", mark) for p in error.problems]
            raise SpecError(own or said) from error
        return at(self.guess), dict(zip(match.by, match.values(self.guess, given), strict=True))

    def test_text(self, recipe: Recipe, dataset: Dataset) -> str:
        """What tells one test text from another: its source, how it falls into documents, and where not all of it is
        predicted, what is."""
        source = canonical_json(recipe.data.held_out())
        if not recipe.objective.every:
            asked = [dataset.identity, recipe.context, canonical(recipe.objective)]
            source = canonical_json([source, *asked])
        if source not in self.test_texts:
            lengths = canonical_json(dataset.documents("test").bytes.tolist())
            self.test_texts[source] = hashlib.sha256(f"{source}{lengths}".encode()).hexdigest()[:16]
        return self.test_texts[source]

    def staged_dataset(self, stage: Stage, recipe: Recipe, before: Dataset, path: str) -> Dataset:
        """The data of a stage: its own in the tokens of that before it, or that. Raises SpecError."""
        if stage.data is None:
            return self.enough(recipe, before, path)
        if not before.has_text and not stage.data.holds_tokens:
            message = "is text, and what was trained on before is tokens, whose tokenizer is not known"
            raise SpecError.of(f"{path}.data", message, stage.mark("data"))
        found = self.dataset(recipe, before, path)
        if (found.vocab, found.eod) != (before.vocab, before.eod):
            what = f"{found.vocab:,} tokens, of which {found.eod} ends a document"
            message = f"has {what}; before it were {before.vocab:,} and {before.eod}, and a stage reads the same tokens"
            raise SpecError.of(f"{path}.data", message, stage.mark("data"))
        return found

    def dataset(self, recipe: Recipe, like: Dataset | None = None, path: str = "train") -> Dataset:
        """The prepared data of a recipe, in the tokens of another data set if there is one. Raises SpecError."""
        alike = like.identity if like else None
        key = canonical_json([canonical(recipe.data), canonical(recipe.tokenizer), alike])
        if key not in self.datasets:
            base = self.study.file.parent if self.study.file else None
            self.datasets[key] = prepare(recipe.data, recipe.tokenizer, self.data_root, base, path, like)
        return self.enough(recipe, self.datasets[key], path)

    def enough(self, recipe: Recipe, dataset: Dataset, path: str = "train") -> Dataset:
        """The data set, if it holds what the recipe asks of it. Raises SpecError."""
        mark = recipe.mark("data") or self.study.mark("train")
        if recipe.objective.of_examples:
            if complaint := _not_its_examples(recipe, dataset):
                field, message = complaint
                raise SpecError.of(f"{path}.{field}", message, recipe.mark(field) or mark)
            return dataset
        require(dataset, recipe.context, recipe.sequences, path, mark)
        for split in () if recipe.objective.every else HELD_OUT:
            if (found := dataset.tokens[split] - 1) < recipe.context:
                message = f"of {recipe.context} tokens does not fit into the {split} text, which has {found:,}"
                raise SpecError.of(f"{path}.context", message, recipe.mark("context") or self.study.mark("train"))
        return dataset


def _not_its_examples(recipe: Recipe, dataset: Dataset) -> tuple[str, str] | None:
    """The field that keeps an objective of examples from these data, and why, or None."""
    if recipe.objective.type != "answers":
        why = "targets needs examples: data whose source says with `input` what is given"
        return ("objective", why) if dataset.inputs("train") is None else None
    if dataset.answers("train") is None:
        return "objective", "answers needs a probe: data that say which of their tokens are answers"
    if recipe.context < (longest := int(dataset.documents("train").tokens.max()) - 1):
        return "context", f"must be at least {longest}, the length of the probe's sequences, found {recipe.context}"
    return None


def refuse_idle_groups(recipe: Recipe, model: Model) -> None:
    """Raises SpecError for a group of the optimizer or of initial values that names no parameter of a model."""
    groups = getattr(recipe.optimizer, "groups", ())
    if not (groups or model.init.groups):
        return
    names = shapes_of(model)
    model.init.factors(names)
    problems = []
    for index, group in enumerate(groups):
        for pattern in unmatched([group], names):
            near = get_close_matches(pattern, names, 1)
            message = f"'{pattern}' matches no parameter" + (f"; did you mean '{near[0]}'?" if near else "")
            problems.append(Problem(f"train.optimizer.groups.{index}.parameters", message, group.mark("parameters")))
    if problems:
        raise SpecError(problems)


def _values(model: Model, match: Match) -> list[int]:
    """The fields of a match in a resolved model. Raises SpecError for a path that names none, or several."""
    found = []
    for by in match.by:
        try:
            value = get(model, tuple(by.split(".")))
        except SpecError:
            value = None
        if not isinstance(value, int):
            message = f"{by} is no single field with a number: several fields are scaled from what they are"
            raise SpecError.of("match.by", message, match.mark("by"))
        found.append(value)
    return found


def _always(value: int) -> Callable[[Any, Any], int]:
    return lambda old, annotation: value


def _first_value(model: Model, match: Match) -> int:
    """Where timing begins: at what the one field is in the model that is matched to, in units of `multiple`."""
    return max(1, _values(model, match)[0] // match.multiple)


def _integer_field(model: Model, by: str, mark: Mark | None) -> tuple[str, ...]:
    """The steps to the integer field `by`; none where it is a path by knobs or with `*`, or one that matches nothing,
    as the patch will say. Raises SpecError if it is another kind of field."""
    steps = tuple(by.split("."))
    try:
        get(model, steps)
    except SpecError:
        return ()
    found: list[Any] = []

    def keep(old: Any, annotation: Any) -> Any:
        found.append(annotation)
        return old

    update(model, type(model), steps, keep)
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in alternatives(found[0])]
    if int not in kinds:
        raise SpecError.of("match.by", f"{by} is no integer field: there is nothing to solve", mark)
    return steps


def _one_batch(recipe: Recipe, settings: Iterable[Setting]) -> Recipe:
    """The recipe with its batch in sequences or in tokens alone, as the last of the two was set."""
    said = [setting.path for setting in settings if setting.path in ("batch", "batch_tokens")]
    if said == ["batch"]:
        return recipe.replace(batch_tokens=None)
    if said == ["batch_tokens"]:
        set_marks(recipe, {name: mark for name, mark in marks_of(recipe).items() if name != "batch"})
    return recipe


def _below(setting: Setting, prefix: str) -> Setting:
    return dataclasses.replace(setting, path=setting.path.removeprefix(prefix))


def _recipe_changes(before: Recipe, after: Recipe) -> list[Change]:
    """What differs between two recipes; another objective as a whole."""
    changes = diff(before, after)
    if type(before.objective) is not type(after.objective):
        sides = (canonical(recipe.objective, brief=True) for recipe in (before, after))
        changes = [change for change in changes if not change.path.startswith("objective.")]
        changes.append(Change("objective", *sides))
    return [as_written(dataclasses.replace(change, path=f"train.{change.path}")) for change in changes]


def model_mistakes(study: Study) -> list[Problem]:
    """What is wrong with the models of a study's variants, found without their data."""
    builder = Builder(study, Path())
    asked = asked_variants(study)
    mistakes = Mistakes(len(asked))
    for item in asked:
        if item.impossible != "refuse":
            continue  # left out or repaired when the study is planned
        of_model = [setting for setting in item.settings if not setting.path.startswith("train.")]
        try:
            model, _ = builder.patched(of_model, item.rung)
        except SpecError as error:
            mistakes.add(error.problems, item.name)
            continue
        mistakes.add(model.replace(max_positions=model.max_positions or 1).check(), item.name)  # the recipe's, later
    return list(mistakes.problems())


class Mistakes:
    """What is wrong with the variants, each mistake once: one of the base model shows in all of them."""

    def __init__(self, variants: int) -> None:
        self._variants = variants
        self._seen: dict[tuple[object, str], tuple[Problem, list[str]]] = {}

    def add(self, problems: Iterable[Problem], variant: str) -> None:
        """Notes the problems of one variant."""
        for problem in problems:
            _, names = self._seen.setdefault((problem.mark or problem.path, problem.message), (problem, []))
            if variant not in names[-1:]:
                names.append(variant)

    def problems(self) -> Iterable[Problem]:
        """Every mistake with the variants that make it, unless all do."""
        for problem, names in self._seen.values():
            if len(names) == self._variants:
                yield problem
                continue
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            many = "s" if len(names) > 1 else ""
            yield dataclasses.replace(problem, message=f"{problem.message} (variant{many} {shown})")
