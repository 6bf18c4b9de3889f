"""Imports point one way: kernels, arch_dsl, search, dashboards; and what must start fast loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"arch_dsl", "kernels", "search", "dashboards"}
# What each layer may import beside the standard library and itself. None: any third-party package.
MAY_IMPORT: dict[str, set[str] | None] = {
    "kernels": {"torch", "triton", "numpy"},
    "arch_dsl": {"kernels", "torch", "yaml", "safetensors"},
    "search": None,
    "dashboards": None,
}
MAY_IMPORT_OF_OURS = {
    "kernels": set(),
    "arch_dsl": {"kernels"},
    "search": {"arch_dsl", "kernels"},
    "dashboards": {"arch_dsl", "search"},
}
# The commands that start the dashboard, and write its figures and pages, import it inside of their functions.
EXCEPTIONS = {("search/cli.py", "dashboards"), ("search/cli_paper.py", "dashboards")}
# A dashboard reads what a study stored: it neither trains nor schedules.
NEVER_IN_DASHBOARDS = {"torch", "ray", "kernels", "search.train"}


def files_of(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} has no Python files"
    return found


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, by full name, and whether the import stands inside a function."""
    tree = ast.parse(path.read_text(), filename=str(path))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from ((name, id(node) in inside) for name in names)


@pytest.mark.parametrize("package", sorted(OURS))
def test_layer_imports_only_what_lies_below_it(package):
    wrong = []
    for path in files_of(package):
        relative = path.relative_to(ROOT).as_posix()
        for name, inside in imports_of(path):
            top = name.partition(".")[0]
            if top == package or top in sys.stdlib_module_names:
                continue
            if top in OURS:
                allowed = top in MAY_IMPORT_OF_OURS[package] or ((relative, top) in EXCEPTIONS and inside)
            else:
                third_party = MAY_IMPORT[package]
                allowed = third_party is None or top in third_party
            if not allowed:
                wrong.append(f"{relative} imports {name}")
    assert sorted(set(wrong)) == []


def test_dashboards_neither_train_nor_schedule():
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files_of("dashboards")
        for name, _ in imports_of(path)
        for never in NEVER_IN_DASHBOARDS
        if name == never or name.startswith(never + ".")
    }
    assert sorted(wrong) == []


def test_tests_are_no_packages_and_so_hide_none():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_relative_and_nested_imports_are_seen(tmp_path, monkeypatch):
    """The reader of imports itself: what it missed, no rule above would hold."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "kernels" / "gate" / "triton.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch.nn as nn\nfrom ..op import Op\nfrom . import cases\ndef f():\n    from ray import get\n"
    )
    assert set(imports_of(path)) == {
        ("torch.nn", False),
        ("kernels.op", False),
        ("kernels.op.Op", False),
        ("kernels.gate", False),
        ("kernels.gate.cases", False),
        ("ray", True),
        ("ray.get", True),
    }


SERVICES = {"ray", "optuna", "mlflow"}
HEAVY = {"torch", "ray", "optuna", "mlflow", "pandas", "scipy", "dash", "triton", "transformers"}


@pytest.mark.parametrize(
    ("modules", "stay_out"),
    [
        pytest.param("arch_dsl, kernels", SERVICES | {"pandas", "dash"}, id="models-and-kernels"),
        pytest.param("search", HEAVY, id="search"),
        pytest.param("search.store, search.lock, search.trial", HEAVY | {"numpy"}, id="store-and-lock"),
        pytest.param("search.comparison", HEAVY - {"pandas", "scipy"}, id="compare"),
        pytest.param("search.cli", HEAVY, id="command-line"),
        pytest.param("search.doctor", HEAVY, id="doctor"),
        pytest.param("dashboards", {"torch", "ray", "mlflow", "optuna"}, id="dashboards"),
        pytest.param(
            "search.train", {"search.parallel", "torch.distributed.fsdp", "ray", "mlflow", "optuna"}, id="train"
        ),
    ],
)
def test_import_leaves_out(modules, stay_out):
    code = f"import {modules}\nimport sys\nprint(*sorted({stay_out!r} & set(sys.modules)))"
    assert python(code).split() == []


def test_transformers_beside_ours_takes_our_kernels_for_no_other_package():
    """`transformers` uses a distribution named kernels, when there is one: ours must not pass for it."""
    code = """
import kernels
from transformers.utils import is_kernels_available
assert not is_kernels_available(), "transformers takes our kernels for the package of that name"
assert not hasattr(kernels, "__version__")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
print(tuple(model(torch.arange(6)[None]).logits.shape))
import arch_dsl
print(kernels.__file__)
"""
    shape, loaded = python(code).splitlines()
    assert shape == "(1, 6, 32)"
    assert Path(loaded) == ROOT / "kernels" / "__init__.py"


def python(code: str) -> str:
    """What a fresh interpreter prints for `code`, started in the checkout."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout
