"""Makes docs/guides/python.ipynb and runs it: `python docs/guides/make_notebook.py`. Its outputs are committed.

The study is tiny and trains in the kernel's own process. The store is a temporary folder, so every run starts anew.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

NOTEBOOK = Path(__file__).with_name("python.ipynb")

CELLS = [
    """# archlab from Python

What the command line shows is what these functions return: studies, plans, summaries and data frames. The study below
is far too small to mean anything; it shows the calls.

This notebook is made and run by `docs/guides/make_notebook.py`.""",
    """## A study

A study is a YAML file, or the same as a Python mapping. `load_study` reads it and raises `SpecError` with everything
that is wrong with it.""",
    """import archlab

gates = {
    "study": "gates",
    "question": "Does a gate on the attention output help?",
    "model": {
        "d_model": 16,
        "n_layers": 1,
        "block": {
            "norm": "rmsnorm",
            "attention": {"heads": 2, "positional": "rope"},
            "ffn": {"type": "glu"},
        },
    },
    "variants": {
        "baseline": {},
        "G1": {"block.attention.gate": {"position": "sdpa"}},
        "G2": {"block.attention.gate": {"position": "value"}},
    },
    "match": {"parameters": "baseline", "by": "block.ffn.width"},
    "train": {
        "data": {"type": "stdlib", "bytes": "4M", "validation_bytes": "50k", "test_bytes": "50k"},
        "tokens": "10k",
        "context": 64,
        "batch": 4,
        "lr": 3e-3,
    },
    "tune": {"lr": [3e-3, 1e-2]},
    "seeds": 3,
}
study = archlab.load_study(gates)
list(study.variants)""",
    """`overrides` replaces values by path, as `--set` does. A mistake says where it is and what was meant.""",
    """from archlab import SpecError

try:
    archlab.load_study(gates, {"train.schedule": "cosin", "seeds": 0})
except SpecError as error:
    print(error)""",
    """## A plan

`plan` makes the study concrete: it prepares the data and solves the widths, and trains nothing.""",
    """plan = archlab.plan(study)
plan""",
    """`show` draws a variant with what each part costs; it takes a model alone too: a mapping, `gpt2/medium`.""",
    """archlab.show(study, "G1")""",
    """## A run

`run` trains what is missing, and shows how far it is below the cell. Without `executor="inline"` each trial gets a
process of its own, by Ray. After an interruption the same call goes on; a second call finds everything done.
`track=False` sends nothing to trackers.""",
    """archlab.run(study, executor="inline", track=False)""",
    """again = archlab.run(study, executor="inline", track=False)
again.counts""",
    """## The results

`compare` returns what the printed table, the figures and the dashboard all read. A notebook shows its table.""",
    """found = archlab.compare(study)
found""",
    """The frames hold plain numbers. Losses and differences of
`table` are of the test set; `rates` holds the validation losses on which each variant's learning rate was chosen.""",
    """columns = ["variant", "lr", "n", "perplexity_mean", "delta", "delta_low", "delta_high", "verdict"]
found.table[columns].round(4)""",
    """found.rates.pivot(index="variant", columns="lr", values="validation_loss").round(3)""",
    """found.trials[["variant", "role", "lr", "seed", "state", "test_loss"]].round(3)""",
    """`noise` says what the intervals are made of, `notes` what a reader must know besides the numbers.""",
    """{name: found.noise[name] for name in ("resolvable", "unit", "df", "comparisons", "paired")}""",
    """found.notes""",
    """## The report

`report` renders them as text, Markdown, LaTeX, CSV or JSON.""",
    """print(archlab.report(found, "md"))""",
    """## The figures

`figures` draws what `archlab figures` writes. Each has a caption, the numbers in it as `rows`, and its files as PDF,
SVG and PNG.""",
    """drawn = archlab.figures(study)
drawn["differences"]""",
    """[*drawn], drawn["differences"].rows.columns.tolist()""",
    """## The model behind a row

A plan's variants hold resolved specs; `arch_dsl` compiles them.""",
    """import torch

from archlab import arch_dsl

model = arch_dsl.compile(plan.variants[1].model, seed=0)
logits = model(torch.zeros(1, 8, dtype=torch.long))
logits.shape, plan.variants[1].parameters == sum(p.numel() for p in model.parameters())""",
]


def notebook() -> NotebookNode:
    """The notebook before it runs; a cell is code unless it is prose."""
    made = new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
    for index, text in enumerate(CELLS):
        cell = new_markdown_cell(text) if _is_prose(text) else new_code_cell(text)
        cell["id"] = f"cell-{index:02d}"
        made.cells.append(cell)
    return made


def _is_prose(text: str) -> bool:
    try:
        compile(text, "cell", "exec")
    except SyntaxError:
        return True
    return text.startswith("#")


def run(made: NotebookNode) -> None:
    """Runs all cells in an empty folder with a store of its own. Raises CellExecutionError where one fails."""
    root = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models are no faster on more, and slow where others compute
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(made, timeout=900, resources={"metadata": {"path": folder}}).execute()
        _clean(made, folder)


def _clean(made: NotebookNode, folder: str) -> None:
    """Leaves out of the outputs what differs from run to run without meaning anything."""
    for cell in made.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = output["text"].replace(f"{folder}/", "")
            if "text/html" in output.get("data", {}):
                html = output["data"]["text/html"]
                output["data"]["text/html"] = re.sub(r"<style scoped>.*?</style>\n?", "", html, flags=re.DOTALL)


if __name__ == "__main__":
    made = notebook()
    run(made)
    nbformat.write(made, NOTEBOOK)
    sys.stdout.write(f"wrote {NOTEBOOK}\n")
