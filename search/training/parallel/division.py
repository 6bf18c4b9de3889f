"""What a process keeps of a model: its shard of every parameter, its heads and channels, its layers.

The optimizer works on plain tensors: views of what torch's distributed tensors hold on this process.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from archlab.arch_dsl.model.stack import StackModule
from archlab.arch_dsl.parts.context import Call
from archlab.search.recipe.recipe import Recipe
from archlab.search.training.parallel.meeting import Meeting
from archlab.search.training.parallel.rules import refuse
from archlab.search.training.parallel.tensors import divide_heads

SPLIT = "shard", "tensor"  # the dimensions over which a parameter may lie in pieces


class Division:
    """A model divided in place. `local` names the plain parameters that are updated here; `own` what the model has.

    `stand_ins` are parameters of the whole model, without memory, as one process would update them.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, meeting: Meeting) -> None:
        """Raises SpecError for what cannot be divided so."""
        refuse(meeting.gang.parallel, model.spec, recipe)  # type: ignore[arg-type]
        self.model, self.meeting, self.recipe = model, meeting, recipe
        named = dict(model.named_parameters())
        said = {path: vars(value) for path, value in named.items()}  # what optimizers go by: `decay`, `table`
        self.stand_ins = [(path, _like(value, torch.zeros(()).expand(value.shape))) for path, value in named.items()]
        names = {id(value): path for path, value in named.items()}
        state = model.state_dict(keep_vars=True)
        self.keys = {key: names.get(id(value), "") for key, value in state.items()}  # the parameter; '' of a buffer
        self.partial: set[str] = set()  # whole everywhere, used on some heads alone: gradients add up
        self.repeated: set[str] = set()  # in more than one stage of the pipeline
        if meeting.sizes["tensor"] > 1:
            self.partial = divide_heads(model, meeting.mesh["tensor"])
        if meeting.sizes["pipeline"] > 1:
            from archlab.search.training.parallel.pipeline import cut

            self.repeated = cut(model, meeting)  # type: ignore[arg-type]
        if meeting.sizes["shard"] > 1:
            shard(model, meeting.mesh["shard"])
        self.own = dict(model.named_parameters())
        self.local = [
            (path, _like(value, value.to_local().detach()) if isinstance(value, DTensor) else value)
            for path, value in self.own.items()
        ]
        for path, value in [*self.own.items(), *self.local]:
            vars(value).update(said[path])
        self._all = dict(self.local)

    def settle(self, parameters: list[nn.Parameter]) -> Tensor:
        """Sums the gradients of the processes where they are parts; their L2 norm over the whole model."""
        grads: dict[str, Tensor] = {}
        for path, value in self.own.items():
            if value.grad is None:
                continue
            if isinstance(value, DTensor):
                self._all[path].grad, value.grad = value.grad.to_local(), None  # type: ignore[attr-defined]
            grads[path] = self._all[path].grad  # type: ignore[assignment]
        self.meeting.sum_all([grads[path] for path in grads if path in self.partial], ["tensor"])
        for path in self.repeated & grads.keys():
            self.meeting.sum_ends(grads[path])
        self.meeting.sum_all(list(grads.values()), ["data"])
        if not any(self.meeting.sizes[name] > 1 for name in (*SPLIT, "pipeline")):
            return nn.utils.get_total_norm(list(grads.values()))
        return self._norm(grads)

    def _norm(self, grads: dict[str, Tensor]) -> Tensor:
        """Squares are summed over the dimensions over which a parameter lies in pieces, and over the stages."""
        squares = {pieces: torch.zeros((), dtype=torch.float64, device=self.meeting.device) for pieces in _SUBSETS}
        for path, grad in grads.items():
            if path in self.repeated and self.meeting.place["pipeline"]:
                continue
            squares[self._pieces(path)] += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        total = torch.zeros((), dtype=torch.float64, device=self.meeting.device)
        for pieces in _SUBSETS:
            total = total + self.meeting.sum(squares[pieces], pieces)
        return self.meeting.sum(total, ["pipeline"]).sqrt().to(next(iter(grads.values())).dtype)

    def _pieces(self, path: str) -> tuple[str, ...]:
        """The dimensions over which a parameter lies in pieces."""
        value = self.own[path]
        if not isinstance(value, DTensor):
            return ()
        placed = zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=True)
        return tuple(name for name, placement in placed if not placement.is_replicate())

    def whole(self, path: str, piece: Tensor) -> Tensor:
        """A tensor that lies as the parameter at `path` does, put together from its pieces, on the CPU."""
        value = self.own[path]
        if not isinstance(value, DTensor):
            return piece.detach().cpu()
        lies: dict[str, Any] = {"shape": value.shape, "stride": value.stride()}
        found = DTensor.from_local(piece.detach(), value.device_mesh, value.placements, run_check=False, **lies)
        placements = list(value.placements)
        for index in range(len(placements)):  # one after another, as a shard is divided after its heads
            placements[index] = Replicate()
            found = found.redistribute(placements=placements)
        return found.to_local().cpu()

    def piece(self, path: str, whole: Tensor) -> Tensor:
        """What lies here of a tensor that is divided as the parameter at `path`."""
        value = self.own[path]
        whole = whole.to(self.meeting.device)
        if not isinstance(value, DTensor):
            return whole
        return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None).to_local()

    def model_state(self) -> dict[str, Tensor]:
        """The state of the whole model as one process has it; complete at the leader alone."""
        found = {path: self.whole(path, value) for path, value in self.local}
        present = self.model.state_dict(keep_vars=True)
        found |= {key: present[key].cpu() for key, path in self.keys.items() if not path and key in present}
        merged = self.merged(found)
        return {key: merged[path or key] for key, path in self.keys.items() if (path or key) in merged}

    def merged(self, found: dict[str, Any]) -> dict[str, Any]:
        """What all stages of the pipeline have, at the leader; what this one has, elsewhere."""
        if self.meeting.sizes["pipeline"] == 1:
            return found
        everything: dict[str, Any] = {}
        for part in self.meeting.to_leader(found):
            everything |= part
        return everything or found

    @torch.no_grad()
    def load_model(self, state: dict[str, Tensor]) -> None:
        """Takes its part of the state of a whole model. Raises RuntimeError where it does not fit."""
        missing = [key for key in self.keys if key not in state]
        if missing or len(state) != len(self.keys):
            more = [key for key in state if key not in self.keys]
            raise RuntimeError(f"the state does not fit the model: it lacks {missing[:3]}, and has {more[:3]} besides")
        present = self.model.state_dict(keep_vars=True)
        for key, path in self.keys.items():
            if path in self._all:
                self._all[path].copy_(self.piece(path, state[key]))
            elif not path and key in present:
                present[key].copy_(state[key])

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer in the format that one process writes; complete at the leader alone."""
        entries: dict[str, dict[str, Any]] = {}  # of each parameter, by path
        for part, order in _parts(optimizer, self.local):
            state = part.state_dict()["state"]
            for path, own in ((path, state[number]) for number, path in enumerate(order) if number in state):
                entries[path] = {k: self.whole(path, v) if self._divides(path, v) else v for k, v in own.items()}
        entries = self.merged(entries)
        whole = self.recipe.optimizer.build(self.stand_ins, self.recipe.lr)
        parts = [
            part.state_dict()
            | {"state": {number: entries[path] for number, path in enumerate(order) if path in entries}}
            for part, order in _parts(whole, self.stand_ins)
        ]
        return {"parts": parts} if hasattr(whole, "parts") else parts[0]

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes of what `optimizer_state` gave the part of this process."""
        whole = self.recipe.optimizer.build(self.stand_ins, self.recipe.lr)
        entries: dict[str, dict[str, Any]] = {}
        given = state["parts"] if hasattr(whole, "parts") else [state]
        for (_, order), part in zip(_parts(whole, self.stand_ins), given, strict=True):
            entries |= {path: part["state"][number] for number, path in enumerate(order) if number in part["state"]}
        for mine, order in _parts(optimizer, self.local):
            own = {
                number: {k: self.piece(path, v) if self._divides(path, v) else v for k, v in entries[path].items()}
                for number, path in enumerate(order)
                if path in entries
            }
            mine.load_state_dict(mine.state_dict() | {"state": own})

    def _divides(self, path: str, value: Any) -> bool:
        """Whether a tensor of a parameter's state lies as the parameter does: moments do, a count of steps does not."""
        return isinstance(value, Tensor) and value.ndim == self.own[path].ndim > 0


def _parts(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]
) -> list[tuple[torch.optim.Optimizer, list[str]]]:
    """The optimizers that one is made of, each with the paths of its parameters in the order of its numbers."""
    paths = {id(value): path for path, value in named}
    return [
        (part, [paths[id(value)] for group in part.param_groups for value in group["params"]])
        for part in getattr(optimizer, "parts", [optimizer])
    ]


_SUBSETS: tuple[tuple[str, ...], ...] = ((), ("shard",), ("tensor",), ("shard", "tensor"))


def _like(value: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter that optimizers treat as they would `value`, with other data."""
    found = nn.Parameter(data, requires_grad=value.requires_grad)
    vars(found).update(vars(value))
    return found


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Fully sharded data parallel (arXiv:2304.11277): leaves of every parameter one shard here.

    Layers are gathered one by one by torch's `fully_shard`, and gradients summed.
    Where layers share parameters, or a loop applies them again, all layers are gathered at once.
    """
    stacks = [stack for stack in model.modules() if isinstance(stack, StackModule)]
    layers = [layer for stack in stacks for layer in stack.block]
    owners = Counter(id(value) for layer in layers for value in layer.parameters())
    if all(count == 1 for count in owners.values()) and all(stack.loop is None for stack in stacks):
        for layer in layers:
            fully_shard(layer, mesh=mesh)
            layer.register_forward_pre_hook(_close, prepend=True)
            layer.register_forward_pre_hook(_open)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class _Closed:
    """A call that is no tree of tensors: FSDP rebuilds trees that it is handed, and what layers leave there is lost."""

    def __init__(self, call: Call) -> None:
        self.call = call


def _close(layer: nn.Module, inputs: tuple[Tensor, Call]) -> tuple[Any, ...]:
    """Before FSDP's own hook."""
    return inputs[0], _Closed(inputs[1])


def _open(layer: nn.Module, inputs: tuple[Tensor, Any]) -> tuple[Any, ...]:
    """After FSDP's own hook."""
    return inputs[0], inputs[1].call
