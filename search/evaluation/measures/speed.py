"""What training costs on this device: the time of a step, how much of the device it uses, and energy."""

from __future__ import annotations

import statistics

import torch

from archlab import arch_dsl
from archlab.arch_dsl.language.spec import Count, Positive, added
from archlab.arch_dsl.model.model import Model
from archlab.search.evaluation.family import Found, Measure, Subject
from archlab.search.hardware.peaks import joules, known_peak, measured_peak
from archlab.search.objectives import has_encoder
from archlab.search.recipe.recipe import Recipe, load_recipe
from archlab.search.recipe.stages import parts
from archlab.search.training.step_times import WARM_UP, Timed, steps_of
from archlab.search.trial.trial import Trial


@Measure.register("speed")
class Speed(Measure):
    """The median time of `steps` training steps after some that warm up, alone on one device, and what follows from it.

    MFU is the model's FLOPs of a step over its time and the device's peak, three forward passes being a step; HFU
    counts what is computed again too (arXiv:2204.02311, appendix B). The peak is known for some GPUs by their name;
    `peak` says it in FLOP/s, and `calibrate` times products of large matrices now. Energy is told where the machine
    tells.
    """

    in_all = False
    timed = True
    steps: Count = added(default=10)
    peak: Positive | None = added(default=None)
    calibrate: bool = added(default=False)

    @property
    def ending(self) -> str:
        return self.unusual("steps", "peak") + "_calibrated" * self.calibrate

    def compute(self, subject: Subject) -> Found:
        about, device = subject.about, subject.device
        recipe = about.recipe
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = joules(device)
        seconds = list(steps_of(Timed(about.model, recipe, about.dataset), self.steps, subject.tick))
        after, step_s = joules(device), statistics.median(seconds)
        tokens = recipe.sequences * recipe.context
        values = {"step_ms": 1e3 * step_s, "train_tokens_per_s": tokens / step_s}
        if device.type == "cuda":
            values["train_peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
        if before is not None and after is not None and after > before:
            values["joules_per_token"] = (after - before) / (self.steps + WARM_UP) / tokens
        if (peak := self.peak or self._peak(device, recipe)) is not None:
            per_s = recipe.sequences / step_s / peak
            model, again = flops_of(about.model, recipe)
            values |= {"mfu": model * per_s, "hfu": (model + again) * per_s, "peak_tflops": peak / 1e12}
        values["training_flops"] = training_flops(subject)
        return Found(values).with_ending(self.ending)

    def _peak(self, device: torch.device, recipe: Recipe) -> float | None:
        if self.calibrate:
            return measured_peak(device, recipe.precision)
        return known_peak(torch.cuda.get_device_name(device), recipe.precision) if device.type == "cuda" else None


def flops_of(model: Model, recipe: Recipe) -> tuple[float, float]:
    """FLOPs of training on one sequence as papers count them, and those of what is computed again for the gradients."""
    lengths = recipe.objective.lengths(recipe.context, has_encoder(model))
    total = arch_dsl.cost(model, lengths.tokens, lengths.source or None)
    stacks = sum(cost.flops_model for name, cost in total.children.items() if name in ("stack", "encoder", "decoder"))
    return 3 * (total.flops_model + total.trained_flops), stacks if recipe.recompute == "layers" else 0


def training_flops(subject: Subject) -> float:
    """FLOPs of the whole trial, all of its stages."""
    if subject.folder is None:
        recipe = subject.about.recipe
        return flops_of(subject.about.model, recipe)[0] * recipe.rows_before(recipe.steps)
    trial = Trial.from_json((subject.folder / "trial.json").read_text())
    found = 0.0
    for part in parts(load_recipe(trial.recipe, "recipe"), trial):
        model = arch_dsl.resolve(arch_dsl.load(part.model))
        found += flops_of(model, part.recipe)[0] * part.recipe.rows_before(part.recipe.steps)
    return found
