"""What flows between the parts of a model: from each branch's input through its maps and its core to the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from archlab.arch_dsl.inspection.text_tree import Line
from archlab.arch_dsl.primitives.branch import OUTER

CORES = ("attend", "recur", "scan", "wkv", "activation")
"""What the lanes of a branch meet in."""
FIRST = ("shift", "router", "switch")
"""What acts on the branch's input before its maps do."""
LATE = ("query", "key", "value", "decay", "mask", "scores", "weights", "query_table", "memory", "beta_projection")
"""What leads to the core though its cost may be counted after it."""
LATENTS = {"query": ("query", "rotary_query"), "kv": ("key", "value")}
"""What is made of the latents of latent attention."""

BESIDE = ("predict", "exit")
"""What reads the stream beside the logits."""


@dataclass(frozen=True)
class Edge:
    """What one place hands to another: `flow` within a branch, the residual `stream`, or what is `read` beside it."""

    start: str
    end: str
    kind: Literal["flow", "stream", "read"] = "flow"


@dataclass(frozen=True)
class Part:
    """A line of a model's tree with the parts below it. `place` is where it is built: `block.0.attention.query`."""

    name: str
    line: Line
    parts: list[Part]
    place: str = ""


def wires(parts: list[Part]) -> list[Edge]:
    """The edges of a whole model, each once, in order."""
    wiring = _Wiring()
    here = "embedding"
    names = [part.name for part in parts]
    for part in parts:
        if part.name in ("encoder", "decoder"):
            here = wiring.stack(part.parts, "embedding", f"{part.name}.", wiring.source)
            if part.name == "encoder":
                wiring.source = here
    if "encoder" not in names:
        own = [part for part in parts if part.name not in ("embedding", "unembedding", "logits", *BESIDE)]
        here = wiring.stack(own, here, "", None)
    for name in BESIDE:
        if name in names:
            wiring.link(here, name, "read")
    wiring.chain(here, [name for name in ("unembedding", "logits") if name in names], "")
    return list(wiring.found)


class _Wiring:
    """Collects edges; `source` is where an encoder's stream comes from."""

    def __init__(self) -> None:
        self.found: dict[Edge, None] = {}
        self.source: str | None = None

    def link(self, start: str, end: str, kind: Literal["flow", "stream", "read"] = "flow") -> None:
        self.found[Edge(start, end, kind)] = None

    def chain(self, here: str, names: list[str], at: str) -> str:
        """One after another; the last one's path."""
        for name in names:
            self.link(here, at + name)
            here = at + name
        return here

    def stack(self, parts: list[Part], here: str, at: str, source: str | None) -> str:
        """A stack's parts on its stream, and where the stream ends."""
        for part in parts:
            if not part.parts:
                here = self.chain(here, [part.name], at)
            for branch in part.parts:
                here = self.branch(branch, here, f"{at}{part.name}.", source)
        return here

    def branch(self, branch: Part, stream: str, at: str, source: str | None) -> str:
        """A branch that reads the stream and joins it again; its join."""
        at = f"{at}{branch.name}."
        for end in self.update(branch, stream, at, source):
            self.link(end, f"{at}join")
        self.link(stream, f"{at}join", "stream")
        return f"{at}join"

    def update(self, branch: Part, stream: str, at: str, source: str | None) -> list[str]:
        """What a branch would add to the stream: the places whose sum it is."""
        names = [part.name for part in branch.parts]
        here = self.chain(stream, ["pre"] if "pre" in names else [], at)
        inner = [part for part in branch.parts if part.name not in OUTER]
        members = [part for part in inner if part.parts]
        if branch.line.what.startswith("sequential"):
            for part in members:
                here = self.branch(part, here, at, source)
            ends = [here]
        elif members:
            ends = [end for part in members for end in self.update(part, here, f"{at}{part.name}.", source)]
            if "output_projection" in names:  # one of all members
                ends = self.sum(ends, f"{at}output_projection")
        else:
            crossing = branch.line.what.split(":")[0] == "cross_attention"
            ends = self.transform(inner, here, at, source if crossing else None)
        return self.sum(ends, f"{at}post") if "post" in names else ends

    def sum(self, ends: list[str], here: str) -> list[str]:
        """A place that reads the sum of others."""
        for end in ends:
            self.link(end, here)
        return [here]

    def transform(self, parts: list[Part], here: str, at: str, source: str | None) -> list[str]:
        """From the branch's input through lanes that meet in a core, and what follows it; `source` is read by keys and
        values instead where it is given."""
        names = [part.name for part in parts]
        core = core_of(parts)
        if core is None:
            return [self.chain(here, names, at)]
        place, read = names.index(core), here
        early = [part for index, part in enumerate(parts) if index < place or part.name in LATE]
        later = [part for index, part in enumerate(parts) if index > place and part.name not in LATE]
        here = self.chain(here, [part.name for part in early if part.name in FIRST], at)
        lanes: dict[str, list[Part]] = {}
        starts = self.latents(early, here, at)
        for part in early:
            if part.name not in FIRST and not _of_latent(part):
                lanes.setdefault(_stem(part.name, names), []).append(part)
        for stem, lane in lanes.items():
            start = starts.get(stem, here)
            if core == "scan" and stem != "value":  # Mamba makes the rest of what it scans
                start = f"{at}{max(lanes['value'], key=_order).name}"
            elif source and stem in ("key", "value"):
                start = source
            passes = (core, stem) == ("activation", "receptance")  # whose sigmoid gates what the core makes
            turned = stem.startswith("rotary_") and "rotary" in names
            self.lane(sorted(lane, key=_order), start, at, at + ("gate" if passes else "rotary" if turned else core))
        return self.after(at + core, later, read, at)

    def latents(self, parts: list[Part], here: str, at: str) -> dict[str, str]:
        """The latents that a branch makes of its input: where the lanes that read them begin."""
        found: dict[str, str] = {}
        for name, stems in LATENTS.items():
            own = [part for part in parts if _of_latent(part) and part.name.startswith(name)]
            if own:
                found |= dict.fromkeys(stems, self.chain(here, [part.name for part in sorted(own, key=_order)], at))
        return found

    def lane(self, lane: list[Part], start: str, at: str, end: str) -> None:
        """Parts one after another, from what they read, if the first one reads anything."""
        first, *rest = [part.name for part in lane]
        if lane[0].line.cost.flops_matmul:
            self.link(start, at + first)
        self.link(self.chain(at + first, rest, at), end)

    def after(self, here: str, parts: list[Part], read: str, at: str) -> list[str]:
        """What follows a core, some of which reads the branch's input too; beside it, shared experts."""
        beside = []
        for part in parts:
            where = at + part.name
            if part.name == "balance":
                self.link(f"{at}router", where, "read")
            elif part.name == "shared":
                self.link(read, where)
                beside.append(where)
            else:
                self.link(here, where)
                here = where
                if part.line.cost.flops_matmul and "projection" not in part.name:
                    self.link(read, where, "read")
        return [here, *beside]


def core_of(parts: list[Part]) -> str | None:
    """The part in which the lanes of a branch meet, if it has one."""
    return next((part.name for part in parts if part.name in CORES), None)


def _stem(name: str, beside: list[str]) -> str:
    """The lane of a part: `query` of its map, its table and its site. `beside` are the names of all."""
    if name in ("preactivation", "linear"):
        return "gate" if name == "preactivation" and "gate_projection" in beside else "input"
    if name == "norm" and "embedding_projection" in beside:
        return "embedding"  # whose product a per-layer embedding norms
    for end in ("_projections", "_projection", "_table"):
        name = name.removesuffix(end)
    return "rank" if name in ("dt", "step") else name


def _of_latent(part: Part) -> bool:
    return part.name.endswith("_latent_projection") or part.name in ("query_inner", "kv_inner")


def _order(part: Part) -> int:
    """Where in its lane a part stands: a table, a map of it, what acts on that."""
    return 0 if part.name.endswith("_table") else 1 if "projection" in part.name else 2
