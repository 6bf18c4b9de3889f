"""How evenly experts are used."""

from __future__ import annotations

from torch import Tensor

from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.primitives.moe import MoE
from archlab.search.evaluation.by_layer import grids
from archlab.search.evaluation.family import Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer
from archlab.search.training.routers import KINDS, health


@Measure.register("router_load")
class RouterLoad(Diagnostic):
    """The share of assignments that each expert gets, times the number of experts, by layer: 1 where all are used alike
    (arXiv:2101.03961, section 2.2, f_i times N).

    `router_load_max` is the largest of a layer, `router_entropy` the mean entropy of a router's choice in nats,
    `router_dropped` the share of assignments that no expert served: means over layers.
    """

    needs = (MoE,)
    lacks = "no experts"


class _Routers(Observer, of=RouterLoad):
    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def after(self, call: Call, windows: int) -> None:
        for name, value in call.measures.items():
            self.sums[name] = self.sums.get(name, 0) + windows * value.double()

    def found(self, windows: int) -> Found:
        told = health(self.sums, windows)
        rows = {}
        for name, load in self.sums.items():
            stack, _, rest = name.removesuffix(".load").rpartition("block.")
            layer, _, branch = rest.partition(".")
            if name.endswith(".load"):
                rows[stack + branch, int(layer)] = (load / load.mean()).tolist()
        values = {f"router_{kind}": float(told[f"router_{kind}"]) for kind in KINDS}
        return Found(values, grids=grids(rows, "router_load", "expert", windows))
