"""Pipeline parallel (arXiv:1811.06965): layers divided among processes, micro-batches under way one after another.

The schedule is torch's 1F1B (arXiv:1806.03377, section 3.2), over the recipe's micro-batches, or GPipe's
where these are fewer than the processes. The first process has what stands before the layers, the last one what comes
after; a tied table of tokens both have, and sum its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from archlab.arch_dsl.compiler.modules import Decoder
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.layers import Site
from archlab.search.data.batches import Batch
from archlab.search.recipe.recipe import Recipe
from archlab.search.training.held_out import autocast
from archlab.search.training.parallel.meeting import Meeting
from archlab.search.training.team import Noted


def cut(model: Decoder, meeting: Meeting) -> set[str]:
    """Leaves in a decoder what its stage has, under the same names; the parameters that two stages have."""
    index, count = meeting.place["pipeline"], meeting.sizes["pipeline"]
    first, last, n_layers = index == 0, index == count - 1, len(model.block)
    for depth in range(n_layers):
        if not n_layers * index // count <= depth < n_layers * (index + 1) // count:
            del model.block._modules[str(depth)]
    tied = model.unembedding is None
    if not first:
        model.embed, model.embedding_projection = Site(()), None
    if not last:
        for branch in [branch for layer in model.block.children() for branch in layer.children()][-1:]:
            fused.part(branch)
        model.final, model.logit_maps = Site(()), Site(())
        model.unembedding = model.unembedding_projection = model.bias = None
    if not first and not (last and tied):
        vocab = len(model.embedding)
        del model.embedding
        model.embedding = torch.empty(vocab, 0)  # type: ignore[assignment]  # how long a table the loss is over
    return {"embedding"} if tied else set()


class Pipeline:
    """A stage of a model that was cut, and its place among the others."""

    def __init__(self, model: Decoder, recipe: Recipe, meeting: Meeting) -> None:
        self.model, self.recipe, self.meeting = model, recipe, meeting
        self.index, self.count = meeting.place["pipeline"], meeting.sizes["pipeline"]
        self.first, self.last = self.index == 0, self.index == self.count - 1
        self.group = meeting.mesh.get_group("pipeline")
        self.ranks = dist.get_process_group_ranks(self.group)
        self.dtype = next(model.parameters()).dtype
        self.scored: int | None = None  # targets of the batch that is trained on; None while evaluating
        self.told: Noted = []  # the losses of each micro-batch, at the last stage
        model.stage = self._stage  # type: ignore[assignment]
        register_fsdp_forward_method(model, "stage")
        self.schedules: dict[tuple[int, int], Schedule1F1B | ScheduleGPipe] = {}

    def backward(self, parts: list[Batch], whole: Batch) -> tuple[Tensor, Noted, dict[str, Tensor]]:
        """Leaves the gradients of this stage; at the last one the loss and others of each micro-batch, else zeros."""
        self.scored, self.told = whole.scored, []
        pairs = [_tensors(part, self.meeting.device) for part in parts]
        given = {name: torch.cat([pair[name] for pair in pairs]) for name in pairs[0]}
        schedule = self._schedule(len(parts), tuple(pairs[0]["tokens"].shape))
        inputs = (given["tokens"],) if self.first else ()
        schedule.step(*inputs, target=given["targets"] if self.last else None, return_outputs=False, **given)  # type: ignore[arg-type]
        self.scored = None
        zero = torch.zeros((), device=self.meeting.device)
        names = ["loss", "z_loss"] if self.recipe.z_loss else ["loss"]
        told = self.told if self.last else [dict.fromkeys(names, zero) for _ in parts]
        return sum((losses.pop("loss") for losses in told), zero), told, {}

    @torch.no_grad()
    def score(self, part: Batch) -> Tensor:
        """The loss of every target, `[rows, time]`, on all stages."""
        given = _tensors(part, self.meeting.device)
        if self.first:
            stream = given["tokens"]
        else:
            shape = *given["tokens"].shape, self.model.spec.d_model
            stream = torch.empty(shape, dtype=self.dtype, device=self.meeting.device)
            dist.recv(stream, self.ranks[self.index - 1], group=self.group)
        found: Tensor = self.model.stage(stream, **given)  # type: ignore[operator]
        if not self.last:
            dist.send(found.contiguous(), self.ranks[self.index + 1], group=self.group)
            found = torch.empty(given["targets"].shape, dtype=self._loss_dtype(), device=self.meeting.device)
        found = found.contiguous()
        dist.broadcast(found, self.ranks[-1], group=self.group)
        return found

    def _loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def _schedule(self, count: int, tokens: tuple[int, ...]) -> Schedule1F1B | ScheduleGPipe:
        """The schedule of a step of `count` micro-batches, all of `tokens` `[rows, time]`."""
        key = count, tokens[0]
        if key not in self.schedules:
            streams = torch.empty(*tokens, self.model.spec.d_model, dtype=self.dtype, device="meta", requires_grad=True)
            words = torch.empty(tokens, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=self._loss_dtype(), device="meta", requires_grad=True)
            stage = PipelineStage(
                _Stage(self.model),
                self.index,
                self.count,
                self.meeting.device,
                input_args=words if self.first else streams,
                output_args=loss if self.last else streams,
                group=self.group,
            )
            kind = Schedule1F1B if count >= self.count else ScheduleGPipe
            self.schedules[key] = kind(stage, count, loss_fn=_as_it_is, scale_grads=False)
        return self.schedules[key]

    def _stage(
        self,
        stream: Tensor,
        tokens: Tensor,
        targets: Tensor,
        padding: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """What this stage makes of the stream, or the first one of tokens; the last one gives losses.

        Between stages the stream is in the dtype of the weights: of a pre-norm model it is that under autocast too.
        """
        with autocast(self.meeting.device, self.recipe.precision):
            call = self.model.with_documents(Call(padding=padding, prefix=prefix), self.model, tokens)
            stream = self.model.through(self.model.embedded(stream) if self.first else stream, call)
            if not self.last:
                return stream.to(self.dtype)
            losses, squares = self.model.losses(stream, targets, bool(self.recipe.z_loss and self.scored))
            if self.scored is None:
                return losses
            loss = losses.sum() / self.scored
            self.told.append({"loss": loss.detach()})
            if squares is not None:
                z_loss = self.recipe.z_loss * squares.sum() / self.scored
                self.told[-1]["z_loss"] = z_loss.detach()
                loss = loss + z_loss
            return loss


class _Stage(nn.Module):
    """What torch's schedule calls: the stage's own method of the model."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, stream: Tensor, **given: Tensor) -> Any:
        return self.model.stage(stream, **given)  # type: ignore[operator]


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    """The last stage has computed the loss."""
    return output


def _tensors(part: Batch, device: torch.device) -> dict[str, Tensor]:
    """What every stage is told of some rows."""
    tokens, targets, call = part.tensors(device)
    more = {"padding": call.padding, "prefix": call.prefix}
    return {"tokens": tokens, "targets": targets, **{name: value for name, value in more.items() if value is not None}}
