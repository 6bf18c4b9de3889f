"""What `precision: auto` and `compile: auto` mean for a study: decided once, for all its variants, and then kept.

The rule reads the machine, the model and the FLOPs of a trial, and times nothing: a busy machine decides as an idle
one does. Where its numbers come from is in docs/performance/step.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from archlab.search.hardware import facts as machine
from archlab.search.recipe.recipe import Recipe
from archlab.search.store.store import Store
from archlab.search.trial.fingerprint import cpu_info

if TYPE_CHECKING:
    from archlab.search.executors.resources import Resources
    from archlab.search.variants.variant import Variant

DECISION = "precision and compile"
AUTO = "auto"
CORE_FLOPS = 5e10  # of a core in float32, small models: 45 to 65 GFLOP/s measured
BF16_FASTER = 2.0  # times, on a core with bfloat16 units
GPU_FLOPS = 5e13
SHORT_S = 60.0  # below it a trial is mostly its start, its evaluation and its checkpoints
NARROW = 64  # d_model below which casts cost what bfloat16 products save
COMPILE_S = 25.0  # the first time that a distinct layer is compiled
_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16"}  # by the processor's flag
PAYS_S = 180.0  # of training per distinct layer, of which compiled code saves a tenth to a third


@dataclass(frozen=True)
class Settled:
    """The precision and compilation of all recipes that leave them open, each with what decided it."""

    precision: str
    compile: str
    why_precision: str
    why_compile: str

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with both said: as it says them, or else as they were settled."""
        open_ = {name: getattr(self, name) for name in ("precision", "compile") if getattr(recipe, name) == AUTO}
        return recipe.replace(**open_) if open_ else recipe

    def beside(self, now: Settled) -> Settled:
        """The same, with what is said of either if it would be settled otherwise `now`."""
        whys = {}
        for name in ("precision", "compile"):
            why, other = getattr(self, f"why_{name}"), getattr(now, name)
            if other != getattr(self, name):
                why += f", when the study was first run; it would be {other} now: write train.{name} to have that"
            whys[f"why_{name}"] = why
        return replace(self, **whys)

    def told(self) -> dict[str, str]:
        """Each of the two in words."""
        return {
            "precision": f"precision {self.precision}: {self.why_precision}",
            "compile": f"compile {self.compile}: {self.why_compile}",
        }

    def __str__(self) -> str:
        return "; ".join(self.told().values())


PLAIN = Settled("fp32", "off", "", "")


def kept_in(root: Path, study: str) -> Settled | None:
    """What was settled for a study of the store in a folder, if there is one; where its trials were begun before
    anything was, what open meant then: float32 and no compilation."""
    if not (root / "store.json").exists():
        return None
    with Store.open(root, create=False) as store:
        if found := store.decided(study, DECISION):
            return Settled(**found)
        known = any(each["name"] == study for each in store.studies())
        if not known or all(row["attempt"] == 0 for row in store.study_trials(study)):
            return None
    why = "its trials were begun before anything was settled"
    return replace(PLAIN, why_precision=why, why_compile=why)


def keep(store: Store, study: str, settled: Settled) -> None:
    """Has every later run and plan of the study settle it alike."""
    store.decide(study, DECISION, lambda: asdict(settled))


def lines(settled: Settled | None, written: Recipe, recipes: Iterable[Recipe]) -> Iterator[str]:
    """What `plan` and `run` say: what was settled of what a study's recipe leaves open as it is `written` (or of what
    its variants do), and why; and where this machine cannot do what is asked.
    """
    from archlab.search.hardware.compiler import cannot_compile

    if settled:
        told = settled.told()
        yield "; ".join([text for name, text in told.items() if getattr(written, name) == AUTO] or told.values())
    if any(recipe.compile == "blocks" for recipe in recipes) and (missing := cannot_compile()):
        yield f"compile blocks: here {missing}, so trials that train here run uncompiled, which rounds otherwise"


def settle(variants: Iterable[Variant], resources: Resources) -> Settled:
    """By the longest trial among some variants, as they were built with nothing settled."""
    found = [*variants]
    if not found:  # what is wrong with them, a plan says
        return PLAIN
    gpus = machine.usable_gpus() if resources.gpus is None else int(resources.gpus > 0)
    longest = max(found, key=_training_flops)
    flops, width = _training_flops(longest), longest.model.d_model
    rate = GPU_FLOPS if gpus else CORE_FLOPS * resources.cpus
    units = gpu_units() if gpus else cpu_units()
    precision, why = _precision(flops / rate, width, units)
    halved = precision == "bf16" if longest.recipe.precision == AUTO else longest.recipe.precision == "bf16"
    seconds = flops / rate / (BF16_FASTER if halved and not gpus else 1.0)
    layers = len({block for stack in longest.model.stacks().values() for block in stack.layers()})
    compiled, why_compile = _compile(seconds, layers, bool(gpus), resources)
    return Settled(precision, compiled, why, why_compile)


def _training_flops(variant: Variant) -> float:
    return 3.0 * variant.flops_per_token * variant.recipe.all_tokens


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds >= 0.5 else "less than a second"


def _precision(seconds: float, width: int, units: str | None) -> tuple[str, str]:
    if units is None:
        return "fp32", "no bfloat16 units are known where trials run"
    if seconds < SHORT_S:
        return "fp32", f"a trial takes {_about(seconds)} in float32, too short for bfloat16 to matter"
    if width < NARROW:
        return "fp32", f"at d_model {width} casts cost what bfloat16 products save"
    return "bf16", f"{units}, and a step is mostly matrix products"


def _compile(seconds: float, layers: int, gpu: bool, resources: Resources) -> tuple[str, str]:
    from archlab.search.hardware.compiler import cannot_compile

    distinct = f"{layers} distinct layers" if layers > 1 else "its layer"
    cost = f"a trial takes {_about(seconds)}, compiling {distinct} {COMPILE_S * layers:.0f} s"
    if gpu:
        return "off", "on a GPU, CUDA graphs save most of what it would"
    if resources.world > 1:
        return "off", "a trial is divided among processes"
    if missing := cannot_compile():
        return "off", missing
    return ("blocks" if seconds >= PAYS_S * layers else "off"), cost


@cache
def cpu_units() -> str | None:
    """What this CPU multiplies bfloat16 with, in words; None where it does so by float32."""
    import torch

    flags = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    listed = cpu_info("flags").split()
    found = [name for flag, name in _UNITS.items() if flags.get(flag) or flag in listed]
    return f"this CPU has {' and '.join(found)}" if found else None


@cache
def gpu_units() -> str | None:
    """The same of the first GPU here: from compute capability 8.0 on."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return f"the GPU is sm_{major}{minor}" if major >= 8 else None
