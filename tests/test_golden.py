"""The resolved text of every committed study is the one that was reviewed, and their list names all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from archlab.search.study.load import load_study
from tests.golden import BEGIN, END, GOLDEN, PAGE, ROOT, STUDIES, files, golden_of, row_of, text_of

SLOW = {"zoo-decoders.yaml"}  # sizes of forty entries are solved
NAMES = [pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.name in SLOW else []) for file in files()]


@pytest.mark.parametrize("file", NAMES)
def test_a_study_is_what_its_golden_text_says(file: Path) -> None:
    golden = golden_of(file)
    assert golden.exists(), f"{golden.relative_to(ROOT)} is missing: `make golden` writes it"
    if changed := differences(golden.read_text(), text_of(file)):
        shown = "\n".join(changed[:20]) + (f"\nand {len(changed) - 20} more" if len(changed) > 20 else "")
        pytest.fail(
            f"{golden.relative_to(ROOT)}: what the study trains has changed\n{shown}\n"
            "If that is meant, `make golden` writes it anew: commit it, and say so in CHANGELOG.md.",
            pytrace=False,
        )


def differences(before: str, now: str) -> list[str]:
    """The lines of a golden text that are others now, each with its number and its variant."""
    old, new = _lines(before), _lines(now)
    gone = [(line, variant, f"- {said}") for (variant, said), line in old.items() if (variant, said) not in new]
    come = [(line, variant, f"+ {said}") for (variant, said), line in new.items() if (variant, said) not in old]
    return [f"{line}: {variant}: {said}" for line, variant, said in sorted([*gone, *come])]


def _lines(text: str) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    variant = ""
    for number, line in enumerate(text.splitlines(), 1):
        variant = line[3:] if line.startswith("== ") else variant
        if line:
            found[variant, line] = number
    return found


def test_a_changed_line_is_told_with_its_number_and_variant() -> None:
    before = "study.yaml\n\n== baseline\nmodel.d_model: 64\ntrain.clip: 1.0\n\n== wide\nmodel.d_model: 96\n"
    now = before.replace("train.clip: 1.0", "train.clip: 2.0")
    assert differences(before, now) == ["5: baseline: + train.clip: 2.0", "5: baseline: - train.clip: 1.0"]
    assert differences(before, before) == []


def test_every_golden_text_is_of_a_study() -> None:
    assert {*GOLDEN.glob("**/*.txt")} == {golden_of(file) for file in files()}, "make golden"


def test_the_list_of_studies_names_each_with_its_question() -> None:
    listed = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    found = [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in listed]
    names = [file.relative_to(STUDIES).as_posix() for file in files()]
    assert found == [(f"[{name}]({name})", load_study(STUDIES / name).question) for name in names], "make golden"


def test_a_row_of_the_list_counts_trials_and_time() -> None:
    row = row_of(STUDIES / "gated-attention-table3.yaml")
    assert "| small, medium, published | 112 |" in row and row.endswith("`gated_attention.table3_nonlinearity` |")
