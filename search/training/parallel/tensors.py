"""Tensor parallel (arXiv:1909.08053, section 3): heads and feed-forward channels divided among processes.

The maps into heads and hidden channels are divided by rows, those back to the stream by columns, whose products are
summed. All else (norms, tables of tokens, logits) every process computes alike. `rules.py` says what can be divided so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from archlab.arch_dsl.model.stack import Stack
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.layers import Linear, Products
from archlab.arch_dsl.primitives.parallel import Parallel

INTO = {"attention": ("query", "key", "value"), "glu": ("gate", "input"), "mlp": ("input",)}  # maps, by type of branch
SITES = "query", "key", "value", "sdpa"  # what acts on heads


class Columns(ParallelStyle):
    """A map whose rows of weights, and so channels of its product, are divided; the input is whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        pieces = partial(_distribute, weight=0, bias=Shard(0))
        return distribute_module(module, device_mesh, pieces, None, lambda _, output, mesh: output.to_local())


class Rows(ParallelStyle):
    """A map whose input channels are divided: products are summed over the processes, the bias is added once."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        pieces = partial(_distribute, weight=1, bias=Replicate())
        return distribute_module(module, device_mesh, pieces, _divided, _summed)  # type: ignore[arg-type]


def divide_heads(model: nn.Module, mesh: DeviceMesh) -> set[str]:
    """Divides the attention and feed-forward branches of a decoder in place.

    Returns the paths of parameters that are whole everywhere but act on the heads of a process alone (weights of norms
    of queries and keys), whose gradients are parts of the whole one.
    """
    partial: set[str] = set()
    for path, branch in _branches(model.spec):  # type: ignore[arg-type]
        if branch.type not in INTO:
            continue
        module = model.get_submodule(path)
        plan: dict[str, ParallelStyle] = {f"{name}_projection": Columns() for name in INTO[branch.type]}
        plan["output_projection"] = Rows()
        sites = SITES if branch.type == "attention" else ()
        gates = {
            f"{site}.{name}": gate
            for site in sites
            for name, gate in module.get_submodule(site).named_children()
            if getattr(gate, "projection", None) is not None
        }
        plan |= {f"{name}.projection": Columns() for name in gates}
        parallelize_module(module, mesh, plan, src_data_rank=None)
        group = path.rpartition(".members.")[0]
        for owner in (module, model.get_submodule(group)) if group else (module,):
            owner.products = _products(mesh)  # type: ignore[assignment]
        for gate in gates.values():
            heads, *rest = gate.shape  # type: ignore[misc]
            gate.shape = (heads // mesh.size(), *rest)  # type: ignore[assignment]
        for site in sites:
            own = module.get_submodule(site).named_parameters(prefix=f"{path}.{site}")
            partial |= {name for name, value in own if not isinstance(value, DTensor)}
    return partial


def _branches(stack: Stack) -> Iterator[tuple[str, Branch]]:
    """Every branch of every layer with the path of its module, members in the place of their group."""
    for depth, block in enumerate(stack.layers()):
        for name, branch in block.items():
            path = f"block.{depth}.{name}"
            if isinstance(branch, Parallel):
                yield from ((f"{path}.members.{own}", member) for own, member in branch.branches.items())
            else:
                yield path, branch


def _products(mesh: DeviceMesh) -> Products:
    """Maps of one tensor, divided and whole ones: its gradient is summed over the processes once for all of them."""

    def products(x: Tensor, maps: Sequence[Linear]) -> list[Tensor]:
        shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return [item(shared if isinstance(item.weight, DTensor) else x) for item in maps]

    return products


def _distribute(_: str, module: nn.Module, mesh: DeviceMesh, *, weight: int, bias: Shard | Replicate) -> None:
    """Divides the weight of a map along a dimension."""
    for name, value in list(module.named_parameters(recurse=False)):
        placement = Shard(weight) if name == "weight" else bias
        piece = nn.Parameter(
            distribute_tensor(value.data, mesh, [placement], src_data_rank=None), requires_grad=value.requires_grad
        )
        module.register_parameter(name, piece)


def _divided(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    return (DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False),)


def _summed(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(placements=[Replicate()]).to_local()
