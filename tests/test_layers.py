"""What must start fast loads nothing heavy; files and functions keep to their limits.

That imports point one way is held by `lint-imports`, in `make check`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"ray", "optuna", "mlflow"}
PACKAGES = ("kernels", "arch_dsl", "search", "dashboards", "archlab/cli")
HEAVY = {"torch", "ray", "optuna", "mlflow", "pandas", "scipy", "dash", "triton", "transformers"}


@pytest.mark.parametrize(
    ("modules", "stay_out"),
    [
        pytest.param("archlab.arch_dsl, archlab.kernels", SERVICES | {"pandas", "dash"}, id="models-and-kernels"),
        pytest.param("archlab, archlab.search", HEAVY, id="search"),
        pytest.param(
            "archlab.search.store.store, archlab.search.store.lock, archlab.search.trial.trial",
            HEAVY | {"numpy"},
            id="store-and-lock",
        ),
        pytest.param("archlab.search.comparison.compare", HEAVY - {"pandas", "scipy"}, id="compare"),
        pytest.param("archlab.cli.main", HEAVY, id="command-line"),
        pytest.param("archlab.cli.doctor", HEAVY, id="doctor"),
        pytest.param("archlab.dashboards", {"torch", "ray", "mlflow", "optuna"}, id="dashboards"),
        pytest.param(
            "archlab.search.training.train",
            {"archlab.search.training.parallel", "torch.distributed.fsdp", "ray", "mlflow", "optuna"},
            id="train",
        ),
    ],
)
def test_import_leaves_out(modules, stay_out):
    code = f"import {modules}\nimport sys\nprint(*sorted({stay_out!r} & set(sys.modules)))"
    assert python(code).split() == []


def python(code: str) -> str:
    """What a fresh interpreter prints for `code`, started in the checkout."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_files_and_functions_keep_to_their_limits():
    """350 lines a file, 60 a function, 12 parameters; a Triton kernel takes as many as it needs."""
    over = []
    for file in (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))):
        text, where = file.read_text(), file.relative_to(ROOT)
        over += [f"{where}: {text.count(chr(10))} lines"] if text.count("\n") > 350 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                taken = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                is_kernel = any("triton" in ast.unparse(each) for each in node.decorator_list)
                over += [f"{where}: {node.name} has {lines} lines"] if lines > 60 else []
                over += [f"{where}: {node.name} takes {taken}"] if taken > 12 and not is_kernel else []
    assert over == []
