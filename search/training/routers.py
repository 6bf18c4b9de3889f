"""Router health: what the routers of a model with experts tell, layer by layer and over all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

KINDS = ("load_max", "entropy", "dropped")


def health(measures: Mapping[str, Tensor], count: float) -> dict[str, Tensor]:
    """Single numbers from the sums of measures over `count` micro-batches (or whatever else they were weighted by).

    A number becomes its mean. Of a `load` `[experts]` the largest is told in multiples of the mean: `….ffn.load_max` is
    1 where all experts are used alike, and the number of experts where one gets everything. `router_load_max`,
    `router_entropy` (nats) and `router_dropped` (share of assignments) are means over the layers that have a router.
    """
    found = {name: value / count for name, value in measures.items() if value.ndim == 0}
    routers = [name.removesuffix(".load") for name, value in measures.items() if name.endswith(".load")]
    for router in routers:
        load = measures[f"{router}.load"]
        found[f"{router}.load_max"] = load.max() / load.mean()
    for kind in KINDS if routers else ():
        found[f"router_{kind}"] = torch.stack([found[f"{router}.{kind}"].double() for router in routers]).mean()
    return found
