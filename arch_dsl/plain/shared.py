"""Parts that several layers share: one home, and statements that give the others theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from archlab.arch_dsl.plain.trees import Unexportable


def shared(model: nn.Module) -> list[str]:
    """The statements. Raises Unexportable for a part that is shared outside of layers."""
    homes: dict[int, str] = {}
    rows: dict[tuple[str, str], list[int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not any(True for _ in module.parameters()):
            continue
        home = homes.setdefault(id(module), path)
        if home != path and not _inside_shared(path, model, homes):
            first, other = (re.fullmatch(r"block\.(\d+)\.(.*)", item) for item in (home, path))
            if first is None or other is None or first[2] != other[2]:
                raise Unexportable(f"{path} is shared with {home}")
            rows.setdefault((first[1], first[2]), []).append(int(other[1]))
    found = []
    count = len(model.block)  # type: ignore[arg-type]
    for (layer, step), others in rows.items():
        if others == list(range(int(layer) + 1, count)):
            over = f"self.block[{int(layer) + 1}:]"
        else:
            over = "(" + ", ".join(f"self.block[{other}]" for other in others) + ("," if len(others) == 1 else "") + ")"
        found += [f"for layer in {over}:", f"    layer.{step} = self.block[{layer}].{step}"]
    return ["\n".join(found)] if found else []


def _inside_shared(path: str, model: nn.Module, homes: dict[int, str]) -> bool:
    """Whether a part that holds this one is shared already."""
    steps = path.split(".")
    above: Iterator[str] = (".".join(steps[:end]) for end in range(1, len(steps)))
    return any(homes.get(id(model.get_submodule(item)), item) != item for item in above)
