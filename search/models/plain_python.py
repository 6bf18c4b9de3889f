"""`archlab export --python`: a model that a user names, as one file of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

from archlab import arch_dsl
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.plain import Unexportable
from archlab.search.models.find import Found, find_model
from archlab.search.models.weights import weights_of
from archlab.search.store.store import StoreRefused


def export_python(text: str, store: Path, out: Path | None, *, plugins: bool = False) -> None:
    """Writes the code of a model to a file, or prints it. Raises SpecError."""
    found = _model_of(text, store, plugins)
    try:
        code = arch_dsl.to_python(found.model, title=found.name)
    except Unexportable as error:
        raise SpecError.of("", f"{found.name} has no form in plain PyTorch: {error}") from error
    if out is None:
        print(code, end="")
        return
    out.write_text(code)
    print(f"wrote {out}: {len(code.splitlines())} lines that need torch alone")


def _model_of(text: str, store: Path, plugins: bool) -> Found:
    """The model of that name, or the one of weights that are found by it."""
    try:
        return find_model(text, store / "data", plugins=plugins)
    except SpecError as error:
        try:
            return Found(text, weights_of(text, store)[0])
        except (SpecError, StoreRefused):
            raise error from None
