"""What people write beside studies and trials: kept as written, on either database, and read by nobody who computes."""

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.store.addresses import DATABASE
from archlab.search.store.notes import LONGEST, Note, checked, read_notes, write_note
from tests.search.study_kit import make_store, rows_of, toy


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_the_newest_note_of_a_study_and_of_a_trial_stands(tmp_path, monkeypatch, request, database):
    if database == "postgresql":
        monkeypatch.setenv(DATABASE, request.getfixturevalue("postgres").emptied())
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    write_note(store, checked("first", []), study="s")
    write_note(store, checked(" it\nworked ", ["paper", "", "paper", "v2.1"]), study="s")
    write_note(store, Note("odd"), trial=toy().key)
    found = read_notes(store)
    assert found.studies == {"s": Note("it\nworked", ("paper", "v2.1"))} and found.trials == {toy().key: Note("odd")}
    write_note(store, checked("", []), study="s")
    assert not read_notes(store).studies["s"]


@pytest.mark.parametrize("tags", [["two words"], ["x" * 41], ["a=b"], ['"'], [str(i) for i in range(51)]])
def test_a_tag_that_no_filter_could_name_is_refused(tags):
    with pytest.raises(ValueError, match="tag"):
        checked("", tags)
    with pytest.raises(ValueError, match="20,000 at most"):
        checked("x" * (LONGEST + 1), [])


def archlab(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_notes_are_written_and_read_by_the_command_line(tmp_path):
    root = tmp_path / "store"
    make_store(root, rows=rows_of(toy())).close()
    key = toy().key
    assert "archlab note s TEXT --tag TAG" in archlab("note", "s", "--store", root).output
    assert archlab("note", "s", "It holds.", "--tag", "paper", "--tag", "a", "--store", root).exit_code == 0
    assert archlab("note", "s", "--untag", "a", "--store", root).output == "s  [paper]\n  It holds.\n"
    assert archlab("note", "s", "spiky", "--trial", key[:9], "--store", root).output == f"{key[:12]}\n  spiky\n"
    assert archlab("note", "s", "--store", root).output == f"s  [paper]\n  It holds.\n{key[:12]}\n  spiky\n"
    wrong = archlab("note", "s", "--trial", "ffffffff", "--store", root)
    assert wrong.exit_code == 2 and "no trial" in wrong.output
    assert archlab("note", "s", "--tag", "two words", "--store", root).exit_code == 2
    assert archlab("note", "nope", "text", "--store", root).exit_code == 2
