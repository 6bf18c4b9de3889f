"""Fully sharded data parallel (arXiv:2304.11277): torch's `fully_shard` of every layer, and of the rest of a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from archlab.arch_dsl.model.stack import StackModule
from archlab.arch_dsl.parts.context import Call


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves of every parameter one shard here; layers are gathered one by one, and gradients summed.

    Where layers share parameters, all layers are gathered at once.
    """
    layers = [layer for stack in model.modules() if isinstance(stack, StackModule) for layer in stack.block]
    owners = Counter(id(value) for layer in layers for value in layer.parameters())
    if all(count == 1 for count in owners.values()):
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
