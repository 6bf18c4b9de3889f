"""Alters the code in small ways, one at a time, and counts how often the tests notice.

`python -m tests.mutants kernels --tests tests/kernels --number 40 --seed 0` draws forty alterations of the files in
`kernels`: a comparison turned, `+` for `-`, a constant changed, a condition negated, `None` returned, a statement left
out. Each is made alone, in a copy of the checkout, where pytest then runs until the first failure. An alteration that
no test notices has survived: either no test holds what that line is for, or the line says the same thing both ways.

The same seed draws the same alterations as long as the files stay as they are. Tests that mirror the altered file (for
`arch_dsl/tree/paths.py` those in `tests/arch_dsl/tree`) go first, as they are the most likely to notice.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
HANGS = 1200  # seconds after which a run of the tests counts as hanging, and the alteration as noticed


@dataclass(frozen=True)
class Mutant:
    """One alteration: the text of `path` from `start` to `end`, in bytes, becomes `new`."""

    path: Path
    line: int
    start: int
    end: int
    new: str

    def applied(self, source: bytes) -> bytes:
        """The altered file."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """Where, and what became of what, on one line."""
        old = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path}:{self.line}: {old}  ->  {self.new}"


def alterations(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Parts of the tree directly at `node`, and what could stand in their place."""
    match node:
        case ast.Compare(left, [first, *more], rights) if type(first) in TURNED:
            yield node, f"({ast.unparse(ast.Compare(left, [TURNED[type(first)](), *more], rights))})"
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            yield node, f"({ast.unparse(ast.BinOp(left, SWAPPED[type(op)](), right))})"
        case ast.BoolOp(op, values):
            yield node, f"({ast.unparse(ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield node, repr(not value)
        case ast.Constant(int() | float() as value):
            yield node, repr(value + 1)
        case ast.If(test) | ast.IfExp(test) | ast.While(test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Return(value) if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            yield value, "None"
        case ast.Raise() | ast.Expr(ast.Call() | ast.Yield()) | ast.AugAssign() | ast.Continue():
            yield node, "pass"


def mutants_of(path: Path) -> list[Mutant]:
    """All alterations of one file, from its first line to its last."""
    source = (ROOT / path).read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    nodes = list(ast.walk(ast.parse(source)))
    # before Python 3.12, what stands in an f-string has no place of its own
    placeless = {inner for node in nodes if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    found = []
    for old, new in (pair for node in nodes if node not in placeless for pair in alterations(node)):
        start, end = begins[old.lineno - 1] + old.col_offset, begins[old.end_lineno - 1] + old.end_col_offset
        found.append(Mutant(path, old.lineno, start, end, new))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def passes(copy: Path, tests: list[str], marks: str) -> bool:
    """Whether the tests pass in the copy; tests that hang do not."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *tests]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=HANGS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)  # 5: there are none


def survives(copy: Path, mutant: Mutant, tests: list[str], marks: str) -> bool:
    """Whether no test fails once `mutant` is made; the copy is afterwards as it was."""
    source = (copy / mutant.path).read_bytes()
    (copy / mutant.path).write_bytes(mutant.applied(source))
    mirror = Path("tests") / mutant.path.parent
    first = [[str(mirror)]] if (copy / mirror).is_dir() and str(mirror) not in tests else []
    try:
        return all(passes(copy, chosen, marks) for chosen in [*first, tests])
    finally:
        (copy / mutant.path).write_bytes(source)


def main() -> None:
    """Draws, alters, runs, and prints each alteration with what became of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("paths", nargs="+", type=Path, help="files and folders to alter, from the root of the checkout")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests that should notice")
    parser.add_argument("--marks", default="not slow", help="which of the tests, as pytest -m takes it")
    parser.add_argument("--number", type=int, default=40, help="how many alterations")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    chosen = parser.parse_args()
    files = sorted({f for path in chosen.paths for f in ([path] if path.suffix else (ROOT / path).rglob("*.py"))})
    drawn = [mutant for f in files for mutant in mutants_of(f.relative_to(ROOT) if f.is_absolute() else f)]
    drawn = random.Random(chosen.seed).sample(drawn, min(chosen.number, len(drawn)))
    with tempfile.TemporaryDirectory(prefix="archlab-mutants-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache"))
        if not passes(copy, chosen.tests, chosen.marks):
            raise SystemExit("the tests fail before anything is altered")
        killed = 0
        for mutant in drawn:
            survived = survives(copy, mutant, chosen.tests, chosen.marks)
            killed += not survived
            told = mutant.describe((ROOT / mutant.path).read_bytes())
            print("SURVIVED" if survived else "killed  ", told, flush=True)
    print(f"{killed} of {len(drawn)} killed: {killed / max(len(drawn), 1):.0%}")


if __name__ == "__main__":
    main()
