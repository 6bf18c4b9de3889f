"""The probes of a study's `screen:`: every variant under the cheap recipe, with all that is wrong with any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.search.sections.screen.decide import SPARE
from archlab.search.sections.screen.spec import Screen
from archlab.search.variants.asked import Asked
from archlab.search.variants.asks import Builds, Question
from archlab.search.variants.mistakes import Mistakes
from archlab.search.variants.variant import Variant


def probes_of(
    screen: Screen, builds: Builds, variants: list[Variant], made: Mapping[str, tuple[Asked, Variant | None]]
) -> dict[str, Variant]:
    """By variant: its model, at the widths that matching found, under its recipe as the screen changes it.

    `made` has what each variant was made of. Raises SpecError with everything that is wrong with any of them.
    """
    study = builds.study
    if problem := _too_few(screen, len(variants)):
        raise SpecError([problem])
    over, wrong, probes = _changes(screen, study), Mistakes(len(variants)), dict[str, Variant]()
    for variant in variants:
        asked, _ = made[variant.name]
        widths = tuple(Setting(path, Node.of(width), "match") for path, width in variant.matched.items())
        try:
            probes[variant.name] = builds.variant(replace(asked, settings=(*asked.settings, *widths), over=over), None)
        except SpecError as error:
            wrong.add((_of_screen(study, each) for each in error.problems), variant.name)
    if problems := [
        *wrong.problems(),
        *(_idle(screen, variants, probes) if len(probes) == len(variants) else ()),
    ]:
        raise SpecError(problems)
    return {name: replace(probe, name=f"{name} (probe)") for name, probe in probes.items()}


def _changes(screen: Screen, study: Question) -> tuple[Setting, ...]:
    """What the screen changes in every recipe; data with answers are asked for these unless it says otherwise."""
    settings = screen.train.settings
    said = {setting.path.split(".")[0] for setting in settings}
    over = [replace(setting, path=f"train.{setting.path}") for setting in settings]
    if "data" in said and "objective" not in said and apply(study.train, settings).data.holds_answers:
        over.append(Setting("train.objective", Node.of("answers"), "the screen"))
    return tuple(over)


def _too_few(screen: Screen, variants: int) -> Problem | None:
    calibrate = screen.calibrate
    if variants >= calibrate + SPARE:
        return None
    least = 4 + SPARE
    way = f"write calibrate: {variants - SPARE}" if variants >= least else f"a screen needs at least {least}"
    message = f"must leave at least {SPARE} of the {variants} variants to choose from, found {calibrate}; {way}"
    return Problem("screen.calibrate", message, screen.mark("calibrate"))


def _of_screen(study: Question, problem: Problem) -> Problem:
    """A problem at the path where a reader can mend it."""
    mark = problem.mark or study.mark("screen")
    if problem.path.partition(".")[0] == "train":
        return replace(problem, path=f"screen.{problem.path}", mark=mark)
    return replace(problem, message=f"{problem.message}, as the screen trains it", mark=mark)


def _idle(screen: Screen, variants: list[Variant], probes: dict[str, Variant]) -> Iterator[Problem]:
    """That probes are the trials that they were to spare, or that they are all the same one."""
    keys = {name: probe.trial(0).key for name, probe in probes.items()}
    mark = screen.mark("train")
    if all(keys[variant.name] == variant.trial(0).key for variant in variants):
        yield Problem("screen.train", "changes nothing: each probe is the variant's own trial", mark)
    elif len(set(keys.values())) == 1:
        yield Problem("screen.train", "undoes all in which the variants differ: their probes are one trial", mark)
