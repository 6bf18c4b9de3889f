"""Planning 1,000 variants, beside what PyYAML and plain dictionaries need to make as many configurations of the text.

    python benchmarks/plan.py [variants]

The peer is a floor: it reads the file, copies the model's dictionary and sets the same values, and checks nothing. A
plan parses with places, checks every value and path, solves the feed-forward width of each variant for equal
parameters, derives sizes, counts parameters and FLOPs, and refuses twins.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from archlab.search.planning.plan import Plan, plan
from archlab.search.study.load import load_study

STUDY = """\
study: thousand
model:
  d_model: 64
  n_layers: 4
  block:
    norm: {{type: rmsnorm, placement: pre}}
    attention: {{heads: 4, positional: rope}}
    ffn: {{type: glu, activation: silu}}
variants:
{variants}
match: {{parameters: v0000, by: block.ffn.width}}
report: {{baseline: v0000}}
train: {{data: {{text: corpus.txt}}, tokens: 100k, context: 32, batch: 4, lr: 1e-3}}
seeds: 3
"""


def study_of(count: int) -> str:
    """A study of `count` different variants: base frequencies of the rotation, half of them with a gate."""
    lines = ["  v0000: {}"]
    for number in range(1, count):
        gate = ", block.attention.gate: {position: sdpa}" if number % 2 else ""
        lines.append(f"  v{number:04d}: {{block.attention.positional.theta: {10_000 + number}.0{gate}}}")
    return STUDY.format(variants="\n".join(lines))


def write(folder: Path, count: int) -> Path:
    """The study and its corpus in a folder."""
    corpus = "\n\n".join(f"document {number} " + "of some words " * 20 for number in range(600))
    (folder / "corpus.txt").write_text(corpus)
    (folder / "study.yaml").write_text(study_of(count))
    return folder / "study.yaml"


def ours(path: Path) -> Plan:
    """Load and plan."""
    return plan(load_study(path), path.parent / "data")


def floor(path: Path) -> list[dict[str, Any]]:
    """`yaml.safe_load`, a deep copy per variant, and its values set."""
    data = yaml.safe_load(path.read_text())
    made = []
    for changes in data["variants"].values():
        model = copy.deepcopy(data["model"])
        for dotted, value in changes.items():
            *parents, last = dotted.split(".")
            node = model
            for name in parents:
                if not isinstance(node.get(name), dict):
                    node[name] = {"type": node.get(name)}
                node = node[name]
            node[last] = value
        made.append(model)
    return made


def main() -> None:
    """Prints both times and their ratio."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name), count)
        ours(write(Path(name), 2))  # imports, and the data, which is prepared once
        path = write(Path(name), count)
        times = {}
        for label, make in (("archlab plan", ours), ("PyYAML and deepcopy", floor)):
            started = time.perf_counter(), time.process_time()
            made = make(path)
            times[label] = time.perf_counter() - started[0]
            assert len(made.variants if isinstance(made, Plan) else made) == count
            cpu = time.process_time() - started[1]
            print(f"{label:<20} {count:,} variants: {times[label]:6.2f} s wall, {cpu:6.2f} s of one core")
        print(f"ratio {times['archlab plan'] / times['PyYAML and deepcopy']:.1f}")


if __name__ == "__main__":
    main()
