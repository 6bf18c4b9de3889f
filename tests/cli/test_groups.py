"""What a user is told to type next: commands in groups, a folder's studies, and what a shell completes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from archlab.cli.groups import GROUPS, first_sentence
from archlab.cli.main import main
from archlab.search.planning.plan import plan
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.cli.test_cli import TINY, archlab
from tests.search.study_files import write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that was run, one that was not, a file that is none, and a folder below."""
    place = tmp_path_factory.mktemp("folder")
    write_study(place, **TINY)
    write_study(place, "other.yaml", study="study: other", **TINY)
    write_study(place, "a_copy.yaml", **TINY)  # under the name of the one that is run
    (place / "notes.yaml").write_bytes(b"study: \xff")
    (place / "below").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.delenv("ARCHLAB_STORE", raising=False)
        assert archlab("run", "study.yaml", "--inline", "--no-track").exit_code == 0
    return place


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ARCHLAB_STORE", raising=False)
    return folder


def test_every_command_is_in_one_group_and_told_in_a_whole_sentence() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(main.commands)
    shown = " ".join(archlab("--help").stdout.split())
    for command in main.commands.values():
        assert first_sentence(command) in shown
        assert "..." not in first_sentence(command)


def test_an_empty_folder_is_told_to_write_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARCHLAB_STORE", raising=False)
    assert "archlab init my_study.yaml" in archlab().stdout


def test_a_folder_is_told_what_to_do_with_each_of_its_studies(here: Path) -> None:
    lines = [line.split("  ")[1] for line in archlab().stdout.splitlines() if line.startswith("  ")]
    assert lines == [
        "archlab report a_copy.yaml",
        "archlab plan other.yaml",
        "archlab run other.yaml",
        "archlab report study.yaml",
        "archlab dashboard",
        "archlab --help",
    ]


def test_a_study_with_trials_left_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned = plan(load_study(write_study(tmp_path, **TINY)), tmp_path / "data")
    with Store.open(tmp_path / ".archlab") as store:
        store.save_study("gates", planned.record(), "")
        store.add_trials("gates", planned.rows([]))
    assert "archlab run study.yaml  go on: 4 trials: 4 planned" in archlab().stdout


def test_the_nearest_store_above_is_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here / "below")
    assert "gates" in archlab("status").stdout
    assert "archlab report gates" in archlab().stdout
    monkeypatch.setattr(Path, "home", lambda: here / "below")
    assert archlab("status").exit_code != 0, "above the home folder none is looked for"


@pytest.mark.parametrize(
    ("words", "typed", "expected"),
    [
        (["plan"], "st", ["study.yaml"]),
        (["plan"], "", ["a_copy.yaml", "below/", "other.yaml", "study.yaml"]),
        (["report"], "ga", ["gates"]),
        (["report"], "o", ["other.yaml"]),
        (["show", "study.yaml", "--variant"], "g", ["gated"]),
        (["retry", "gates", "--variant"], "b", ["baseline"]),
        (["show"], "fox_pro/7", ["fox_pro/760m"]),
        (["diff", "gpt2/small"], "llam", ["llama", "llama3", "llama4"]),
        (["generate"], "gates/", ["gates/baseline", "gates/gated"]),
        (["generate"], "", ["gates/"]),
        (["generate"], "none/", []),
        (["primitives"], "forget_", ["forget_gate"]),
        (["zoo", "show"], "t5_", ["t5_v1_1"]),
        (["dash"], "dash", ["dashboard"]),
    ],
)
def test_a_shell_completes(here: Path, words: list[str], typed: str, expected: list[str]) -> None:
    completer = ShellComplete(main, {}, "archlab", "_ARCHLAB_COMPLETE")
    words = [] if words == ["dash"] else words
    assert [item.value for item in completer.get_completions(words, typed)] == expected


def test_what_cannot_be_read_completes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("study: a\nvariants: [")
    completer = ShellComplete(main, {}, "archlab", "_ARCHLAB_COMPLETE")
    assert completer.get_completions(["show", "bad.yaml", "--variant"], "") == []
    assert [item.value for item in completer.get_completions(["status"], "")] == ["bad.yaml"]
