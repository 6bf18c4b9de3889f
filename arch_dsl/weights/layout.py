"""A layout says how another library names and stores the parameters of a model: a YAML file, read in both directions.

`tensors` maps each name there to our parameter, or to the several that one matrix holds, as patterns of names
(name_patterns.py). `{use}` numbers the layers that use shared branches, `{owner}` is the first with the same branch.
The name of a group is left out: `block.{i}.attention.…` is also `block.{i}.parallel.members.attention.…`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem, SpecError, unknown
from archlab.arch_dsl.language.parse import parse, parse_record
from archlab.arch_dsl.language.source import Node, read
from archlab.arch_dsl.language.spec import Spec

FOLDER = Path(__file__).parents[1] / "zoo" / "maps"


class Stored(Spec):
    """One tensor of a layout: our parameters in it, and how they lie there.

    `transpose`: matrices are stored as [inputs, outputs]. `flatten`: ours has several dimensions, theirs one. `ones`:
    theirs begins with so many dimensions of size 1. Several parameters in one tensor lie one after another along the
    outputs, in each of `groups` equal groups: 1, another number, or a field of the branch, as `kv_heads`. Outputs are
    the dimension `axis` of ours, 1 where ours holds the matrices of all experts; with `each` there is a tensor for each
    of them, `{expert}` in the name. `tied` names the tensor that this one equals where ours is tied; `also` are other
    names that checkpoints have for it. With `type` it is only of branches of that type, with `beside` only of layers
    that have this parameter of ours too, and then no other tensor holds the same there. With `import_only` it is
    another form of other tensors, which is read where a checkpoint has it and never written. In `to`, `{last}` is the
    number of the last layer, and with `{all}` the tensor holds the parameters of all layers in order.
    """

    title: ClassVar[str] = "tensor"
    to: tuple[str, ...]
    transpose: bool = False
    flatten: bool = False
    ones: int = 0
    groups: int | str = 1
    axis: int = 0
    each: bool = False
    tied: str | None = None
    also: tuple[str, ...] = ()
    type: str | None = None
    beside: str | None = None
    import_only: bool = False

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """A bare string is the one parameter that the tensor is."""
        return parse_record(cls, Node({"to": node}, node.mark) if isinstance(node.value, str) else node, path, problems)


class Layout(Spec):
    """Names and forms of all parameters. `zoo` lists the models stored this way.

    `prefix` is what checkpoints of the model without its head leave out of all names; `text` stands in its place where
    a checkpoint holds other models too, as encoders of images. Tensors that match `ignore` are no parameters (caches,
    masks); parameters of ours that match `fresh` are in no checkpoint.
    """

    title: ClassVar[str] = "map"
    zoo: tuple[str, ...] = ()
    prefix: str = ""
    text: str = ""
    tensors: dict[str, Stored]
    ignore: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()


def load_layout(name: str | Path) -> Layout:
    """A layout by its name or from its file. Raises SpecError."""
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and not path.exists():
        raise SpecError.of("", unknown(str(name), "map", layouts()))
    return parse(Layout, read(path))


def layouts() -> list[str]:
    """The names of all layouts that come with the zoo."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def layout_of(zoo: str) -> str:
    """The name of the layout in which checkpoints of a model of the zoo are published. Raises SpecError."""
    if found := [name for name in layouts() if zoo in load_layout(name).zoo]:
        return found[0]
    message = f"no map says how checkpoints of '{zoo}' are stored; give one of {', '.join(layouts())}"
    raise SpecError.of("", message)
