"""The training loop: every step is a pure function of the trial and the step before; all of its state is in `state()`.

What the clock decides (when a checkpoint is written, when lines are flushed) never touches what is computed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from archlab.arch_dsl.parts.layers import after_step
from archlab.search.data import mixing
from archlab.search.data.batches import Batch
from archlab.search.data.dataset import Dataset
from archlab.search.data.examples import examples
from archlab.search.objectives import has_encoder
from archlab.search.recipe.curve import curve_points, curve_windows
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.schedule_free import average, averaged
from archlab.search.training.ends import Diverged, Interrupted, Paused
from archlab.search.training.held_out import held_out, losses
from archlab.search.training.passes import Graphed, passes_of, times_of
from archlab.search.training.routers import health
from archlab.search.training.team import ALONE, Noted, Sums, Team
from archlab.search.trial import checkpoint
from archlab.search.trial.fingerprint import differences, fingerprint
from archlab.search.trial.journal import Journal, note_event
from archlab.search.trial.kept_weights import WEIGHTS, is_power_of_two, told
from archlab.search.trial.loss_windows import write_windows
from archlab.search.trial.pace import Pace
from archlab.search.trial.writer import Writer

LOG_LINES = 400
_NEVER = 2**62


@dataclass(frozen=True)
class Before:
    """What a trial did before a stage: how each earlier one ended; steps, tokens and seconds of them all."""

    stages: tuple[dict[str, Any], ...] = ()
    steps: int = 0
    tokens: int = 0
    train_s: float = 0.0

    def then(self, recipe: Recipe, ended: dict[str, Any], train_s: float) -> Before:
        """The same with one stage more, that ended as `ended` says `train_s` seconds into the trial."""
        steps, tokens = self.steps + recipe.steps, self.tokens + recipe.tokens_at(recipe.steps)
        return Before((*self.stages, ended), steps, tokens, train_s)


class Loop:
    """A model on its way through a recipe. `step` counts the optimizer steps of the trial that are done."""

    def __init__(
        self,
        folder: Path,
        key: str,
        attempt: int,
        recipe: Recipe,
        dataset: Dataset,
        model: nn.Module,
        seed: int,
        before: Before = Before(),
        team: Team = ALONE,
    ) -> None:
        """`key` is the trial's, `seed` orders its batches."""
        self.folder, self.key, self.attempt = folder, key, attempt
        self.recipe, self.model, self.seed, self.before = recipe, model, seed, before
        self.dataset, self.team = dataset, team
        self.device = next(model.parameters()).device
        self.size = sum(parameter.numel() for parameter in model.parameters())
        own = team.divide(model, recipe)
        self.optimizer = recipe.optimizer.build(own, recipe.lr)
        self.parameters = [parameter for _, parameter in own if parameter.requires_grad]
        self.passes = passes_of(model, recipe, self.device, team is ALONE)
        self.streams = dataset.streams()
        self.encoder = has_encoder(model)
        count = curve_windows(recipe)
        self.curve = held_out(dataset, "validation", recipe.context, recipe.objective, self.encoder, count)
        self.fingerprint = fingerprint(str(self.device)) | team.facts
        (self.log2,) = team.agree(told(folder)["log2"])
        self.prefix_step = 0  # after which `keep_prefix` is given all of its state, for longer trials; 0: after none
        self.keep_prefix: Callable[[dict[str, Any], Journal], None]
        self.continued: dict[str, Any] | None = None  # key and step of the shorter trial that it went on from
        self.writer = Writer(folder, attempt)
        self.step = before.steps
        self.train_s = before.train_s
        self.pending = 0  # steps since the last line
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.sums: dict[str, Tensor] = {}  # of what is logged beside the loss, since the last line
        self.measures: dict[str, Tensor] = {}  # of the last step, summed over its micro-batches
        self.grad_norm = torch.zeros((), device=self.device)
        self.first_bad = torch.full((), _NEVER, device=self.device)
        self._clock = time.perf_counter()
        self._line_s = before.train_s

    def run(
        self, journal: Journal, should_stop: Callable[[], bool], checkpoint_s: float | None, until: int | None = None
    ) -> None:
        """Trains to the end, with a checkpoint of the weights there, or to step `until` of the trial.

        Raises Paused there, and Diverged, Interrupted, OSError. `writer` may not have finished yet.
        """
        recipe = self.recipe
        every = max(1, recipe.steps // LOG_LINES)
        points = curve_points(recipe.steps)
        self.writer.pace = Pace(checkpoint_s)
        self._clock = time.perf_counter()
        if not recipe.steps:
            self.save(journal, whole=False, now=False)
        for step in range(self.step - self.before.steps, recipe.steps):
            self.update(step)
            last = step + 1 == recipe.steps
            if (step + 1) % every == 0 or last:
                self.log(journal)
            if step + 1 in points:
                self.validate(journal)
            if self.log2 and is_power_of_two(self.step):
                self.keep_weights()
            if self.step == self.prefix_step:
                self.leave_prefix(journal)
            if last:
                average(self.optimizer)
            pause = self.step == until
            stop, due = self.team.agree(should_stop() and not last, self.writer.due())
            if stop or last or pause or due:
                self.save(journal, whole=pause or not last, now=stop or pause)
            if pause:
                raise Paused
            if stop:
                raise Interrupted(f"stopped after step {step + 1} of {recipe.steps}")
            journal.pulse()
        if isinstance(self.passes, Graphed):
            self.passes.release()  # the test that follows needs memory

    def update(self, step: int) -> None:
        """Optimizer step `step` of the stage. Nothing here waits for the device."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr_at(step) * group.get("lr_factor", 1.0)
        loss = self.gradients(step)
        self.grad_norm = self.team.settle(self.parameters)
        if recipe.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, recipe.clip, self.grad_norm)
        self.optimizer.step()
        after_step(self.model, self.measures)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss
        self.pending += 1
        self.step = self.before.steps + step + 1
        bad = torch.where(torch.isfinite(loss) & torch.isfinite(self.grad_norm), _NEVER, self.step)
        self.first_bad = torch.minimum(self.first_bad, bad)

    def gradients(self, step: int) -> Tensor:
        """Leaves the gradients of a step's loss in the parameters; returns the mean over its targets, detached.

        What the model leaves in `call.losses` is trained on too. Micro-batches weigh by their targets, so that the
        gradients are those of the batch as a whole.
        """
        recipe, dataset = self.recipe, self.dataset
        first, end = recipe.rows_before(step), recipe.rows_before(step + 1)
        if recipe.objective.of_examples:
            rows = examples(dataset, self.seed, first, end - first, recipe.context)
        else:
            rows = mixing.rows(self.streams, self.seed, first, end - first, recipe.context)
        whole = recipe.objective.batch(rows, self.seed, first, dataset.vocab, self.encoder, dataset.eod)
        self.team.begin(self.seed, self.step)
        total, noted, self.measures = self.team.backward(self.backward, whole)
        for added in noted:
            self.note(added)
        self.note(health(self.measures, -(-len(whole) // recipe.micro_batch)))
        return total

    def backward(self, whole: Batch) -> Sums:
        """Leaves this process's share of a batch's gradients in the parameters.

        Returns its share of the loss; the other losses of each micro-batch; the measures, summed over micro-batches.
        """
        recipe = self.recipe
        total, noted, earlier = torch.zeros((), device=self.device), Noted(), dict[str, Tensor]()
        for rows in whole.parts(recipe.micro_batch):
            part = self.team.share(rows)
            tokens, targets, call = part.tensors(self.device)
            times = times_of(whole, part, self.device)
            found = self.passes(tokens, targets, replace(call, earlier=dict(earlier)), *times)
            total += found.loss
            for name, value in found.measures.items():
                earlier[name] = earlier.get(name, 0) + value
            noted.append(found.added)
        return total, noted, earlier

    def note(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().double()

    def tokens_at(self, step: int) -> int:
        """Tokens that the first `step` steps of the trial consume."""
        return self.before.tokens + self.recipe.tokens_at(step - self.before.steps)

    def check(self) -> None:
        """Raises Diverged when any step so far was not finite."""
        bad = int(self.first_bad)
        if bad < _NEVER:
            raise Diverged(bad)

    def log(self, journal: Journal) -> None:
        """A line about the steps since the last one: their mean loss, the last one's rate and gradient norm."""
        self.check()
        tokens = self.tokens_at(self.step)
        fresh = tokens - self.tokens_at(self.step - self.pending)
        since = self.elapsed() - self._line_s
        journal.write(
            self.step,
            tokens=tokens,
            loss=float(self.loss_sum) / self.pending,
            lr=self.recipe.lr_at(self.step - self.before.steps - 1),
            grad_norm=float(self.grad_norm),
            tokens_per_s=round(fresh / since, 1) if since > 0 else None,
            **{name: float(value) / self.pending for name, value in self.sums.items()},
        )
        self.sums.clear()
        self.loss_sum.zero_()
        self.pending = 0
        self._line_s = self.train_s

    def log_diverged(self, journal: Journal, step: int) -> None:
        """The line of the step that was not finite, unless it ended a trial whose steps all were."""
        if self.pending:
            nothing = dict.fromkeys(("loss", "grad_norm", "tokens_per_s"))
            rate = self.recipe.lr_at(step - self.before.steps - 1)
            journal.write(step, tokens=self.tokens_at(step), lr=rate, **nothing)

    def validate(self, journal: Journal) -> None:
        """A line with the mean loss on the same few validation windows every time."""
        self.check()
        self.elapsed()
        with averaged(self.optimizer) as meanwhile:
            found = losses(self.model, self.curve, self.recipe.micro_batch, self.recipe.precision, team=self.team)
        if meanwhile:
            self.team.read_again(self.model)
        if self.team.leads:
            place = sum(point < self.step - self.before.steps for point in curve_points(self.recipe.steps))
            write_windows(self.folder, self.before.steps, place, self.step, found.sum(1))
        journal.write(self.step, validation_loss=float(found.sum() / self.curve.scored))
        self._clock = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds of training so far, over all attempts, without validation and checkpoints."""
        now = time.perf_counter()
        self.train_s += now - self._clock
        self._clock = now
        return self.train_s

    def save(self, journal: Journal, whole: bool, now: bool) -> None:
        """A checkpoint after the lines up to it, of the weights alone at a trial's end; `now`: not beside training."""
        self.check()
        self.elapsed()
        state = self.state(whole)
        if self.team.leads:
            journal.flush()
            self.writer.put(self.folder, self.step, state, journal.persist, began=self._clock, now=now)
        self._clock = time.perf_counter()

    def keep_weights(self) -> None:
        """Puts the weights of this step aside, for good."""
        self.elapsed()
        state, folder = self.state(whole=False), self.folder / WEIGHTS
        if self.team.leads:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.writer.put(folder, self.step, state, lambda: None, began=self._clock, keep=sys.maxsize)
        self._clock = time.perf_counter()

    def leave_prefix(self, journal: Journal) -> None:
        """Keeps all of this step for longer trials."""
        self.check()
        self.elapsed()
        state = self.state()
        if self.team.leads:
            journal.sync()
            self.keep_prefix(state, journal)
        self._clock = time.perf_counter()

    def state(self, whole: bool = True) -> dict[str, Any]:
        """What continuing needs; the place in the data is the step. Without `whole`, what evaluating needs.

        `model` is what is evaluated, `trained` what is trained where that differs.
        """
        state: dict[str, Any] = {
            "key": self.key,
            "step": self.step,
            "train_s": self.train_s,
            "fingerprint": self.fingerprint,
            "model": self.weights(),
            "stages": list(self.before.stages),
            "continued": self.continued,
        }
        if not whole:
            return state
        if self.recipe.optimizer.averages:
            state["trained"] = self.team.model_state(self.model)
        return state | {
            "optimizer": self.team.optimizer_state(self.optimizer),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "pending": self.pending,
            "loss_sum": self.loss_sum,
            "sums": self.sums,
            "line_s": self._line_s,
        }

    def weights(self) -> dict[str, Tensor]:
        """Those of the whole model that are evaluated."""
        with averaged(self.optimizer) as meanwhile:
            found = self.team.model_state(self.model)
            return {name: value.clone() for name, value in found.items()} if meanwhile else found

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state. Raises ValueError for another trial's, RuntimeError if the model does not fit."""
        if state["key"] != self.key:
            raise ValueError(f"the checkpoint in {self.folder} belongs to trial {state['key']}, this is {self.key}")
        self.team.load_model(self.model, state.get("trained", state["model"]))
        self.step, self.train_s, self.continued = state["step"], state["train_s"], state.get("continued")
        if "optimizer" not in state:
            return
        self.team.load_optimizer(self.optimizer, state["optimizer"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_cuda"] is not None:  # None: it was begun on a CPU
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
        self.pending, self._line_s = state["pending"], state["line_s"]
        self.loss_sum = state["loss_sum"].to(self.device)
        self.sums = {name: value.to(self.device) for name, value in state.get("sums", {}).items()}

    def resume(self, found: checkpoint.Loaded) -> None:
        """Goes on from a checkpoint, if there is one; who leads notes what was found and discarded."""
        for name, reason in found.discarded if self.team.leads else ():
            note_event(self.folder, self.attempt, "discarded", checkpoint=name, reason=reason)
        if found.state is not None:
            self.restore(found.state)
        if self.team.leads and (found.state is not None or found.discarded):
            changed = differences(found.state["fingerprint"], self.fingerprint) if found.state else {}
            note_event(self.folder, self.attempt, "resumed", step=self.step, changed=changed)
