"""A study that was edited between runs: what is kept, what is new and what is left out is said; nothing is lost."""

import io

import pytest

from archlab.search.planning.edits import edits
from archlab.search.planning.page import print_plan
from archlab.search.planning.plan import plan
from archlab.search.running.progress import LineProgress
from archlab.search.running.run import run
from archlab.search.running.watch import follow
from archlab.search.store.lock import StudyLock, StudyLocked
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.study_files import SECTIONS, write_study


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with a study that was run."""
    folder = tmp_path_factory.mktemp("study")
    assert run(write_study(folder), folder / "store", executor="inline", track=False).exit_code == 0
    return folder


def said(folder, **sections):
    """What a plan says of the study with other sections."""
    planned = plan(load_study(write_study(folder, "edited.yaml", **sections)), folder / "store" / "data")
    with Store.open(folder / "store") as store:
        return edits(planned, store)


def train(*changes):
    text = SECTIONS["train"]
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


LEFT_OUT = (
    "{} trials are no part of the study any more ({}): they stay in the store, and another study or the file as it was "
    "takes them up again"
)
CASES = [
    pytest.param({}, [], id="nothing"),
    pytest.param({"study": "study: another"}, [], id="a study that is new"),
    pytest.param({"seeds": "seeds: 3"}, [], id="a seed more"),
    pytest.param({"variants": f"{SECTIONS['variants']}\n  wide: {{block.ffn.width: 200}}"}, [], id="a variant more"),
    pytest.param(
        {"question": "question: Or not?"},
        ["the question was 'Does a gate help?', now it is 'Or not?'"],
        id="another question",
    ),
    pytest.param({"seeds": "seeds: 1"}, [LEFT_OUT.format(2, "1 of baseline, 1 of gated")], id="a seed less"),
    pytest.param(
        {"variants": "variants:\n  baseline: {}"}, [LEFT_OUT.format(2, "2 of gated")], id="a variant less"
    ),
    pytest.param(
        {"components": "components:\n  gate: {block.attention.gate: {position: value}}"},
        [LEFT_OUT.format(2, "2 of gated")],
        id="a variant of another kind",
    ),
    pytest.param(
        {"train": train(("tokens: 1k", "tokens: 2k"), ("lr: 1e-3", "lr: 2e-3"))},
        [
            "the recipe has another tokens (was 1000, now 2000), lr (was 0.001, now 0.002)",
            LEFT_OUT.format(4, "2 of baseline, 2 of gated"),
        ],
        id="another recipe",
    ),
    pytest.param(
        {"train": train(("batch: 4", "batch: 2"))},
        ["the recipe has another batch (was 4, now 2)", LEFT_OUT.format(4, "2 of baseline, 2 of gated")],
        id="another batch, which the warm-up follows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "lines"), CASES)
def test_a_plan_says_what_was_edited(ran, sections, lines):
    assert said(ran, **sections) == lines


def test_what_an_edit_leaves_out_is_listed_and_comes_back_with_the_file_as_it_was(ran, capsys):
    store, events = ran / "store", []
    path = write_study(ran, "edited.yaml", seeds="seeds: 1")
    print_plan(plan(load_study(path), store / "data"), store)
    assert "edited: 2 trials are no part of the study any more" in capsys.readouterr().out
    run(path, store, executor="inline", track=False, on_event=events.append)
    (event,) = (event for event in events if event["event"] == "edited")
    assert event["message"].startswith("2 trials are no part")
    with Store.open(store) as opened:
        assert len(opened.study_trials("gates", orphaned=True)) == 2
    summary = run(ran / "study.yaml", store, executor="inline", track=False)
    assert summary.counts == {"complete": 4, "reused": 4}


def test_a_repeat_that_waits_for_a_new_value_of_the_grid_is_not_left_out(tmp_path):
    tune = "tune: {lr: [1e-3, 2e-3]}"
    run(write_study(tmp_path, tune=tune), tmp_path / "store", executor="inline", track=False)
    assert said(tmp_path, tune="tune: {lr: [1e-3, 2e-3, 4e-3]}") == []
    (line,) = said(tmp_path, tune="tune: {lr: [4e-3, 8e-3]}")
    assert line.startswith("8 trials are no part of the study any more (4 of baseline, 4 of gated)")


def test_a_finished_study_has_nothing_left_though_fewer_seeds_were_needed_than_it_may_take(tmp_path, capsys):
    seeds = "seeds: {min: 3, max: 4, until: resolved, margin: 1e9}"
    path, root = write_study(tmp_path, seeds=seeds), tmp_path / "store"
    assert run(path, root, executor="inline", track=False).counts["complete"] == 6
    print_plan(plan(load_study(path), root / "data"), root)
    told = capsys.readouterr().out
    assert "at most 8 trials" in told and "all that are wanted have a result (6): the study is complete" in told
    assert "of one core" not in told
    file = io.StringIO()
    follow(root, "gates", LineProgress(file))
    assert "gates: 6/6 trials" in file.getvalue() and " left" not in file.getvalue()


def test_a_file_that_is_edited_while_it_runs_is_refused_until_the_run_has_ended(ran):
    path = write_study(ran, "edited.yaml", seeds="seeds: 3")
    with StudyLock(ran / "store", "gates"), pytest.raises(StudyLocked, match="already being run by process"):
        run(path, ran / "store", executor="inline", track=False)
