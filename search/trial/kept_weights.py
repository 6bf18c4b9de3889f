"""Which weights stay when a trial has ended: a choice of the study, no part of what is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from archlab.arch_dsl.language.spec import Spec
from archlab.search.utils.files import read_json, write_whole

WEIGHTS = "weights"  # the folder of a trial with the weights after 1, 2, 4, 8, … steps


class Keep(Spec):
    """The weights at the end of a trial (`final`), and those after 1, 2, 4, 8, … optimizer steps (`log2`)."""

    title: ClassVar[str] = "keep"
    final: bool = True
    log2: bool = False

    def record(self) -> dict[str, bool]:
        """What the store keeps of it."""
        return {"final": self.final, "log2": self.log2}


def union(wishes: list[dict[str, Any] | None]) -> dict[str, bool]:
    """What several studies together keep; a record from before there was a choice keeps the final weights."""
    default = Keep().record()
    return {name: any((wish or default).get(name, default[name]) for wish in wishes) for name in default}


def tell(folder: Path, wish: dict[str, bool]) -> None:
    """Leaves in a trial's folder what is to be kept of it, by this study or an earlier one; nothing for the default."""
    path = folder / "keep.json"
    if path.exists():
        wish = union([told(folder), wish])
    if wish != Keep().record():
        write_whole(path, json.dumps(wish), durable=False)
    else:
        path.unlink(missing_ok=True)


def told(folder: Path) -> dict[str, bool]:
    """What `tell` left."""
    return read_json(folder / "keep.json") or Keep().record()


def is_power_of_two(step: int) -> bool:
    """Whether `log2` keeps the weights after this step."""
    return step > 0 and step & (step - 1) == 0
