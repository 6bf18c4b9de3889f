"""Curves are read once, as they grow, and survive what a resumed or killed trial does to its file."""

import json

import numpy as np
import pytest

from archlab.dashboards.curves import CurveFile, Line, group, group_level, smooth, strided, thin


def line(step, attempt=1, **values):
    return json.dumps({"step": step, "time": 100.0 + step, "attempt": attempt, **values}) + "\n"


def test_appended_lines_are_added_and_a_half_written_one_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = CurveFile(path)
    assert file.look() is False and file.last_step == 0
    path.write_text(line(1, loss=3.0) + '{"step": 2, "lo')
    assert file.look() is True and file.look() is False
    assert file.series("loss")[2].tolist() == [3.0]
    with path.open("a") as more:
        more.write('ss": 2.5, "time": 102.0, "attempt": 1}\n')
    assert file.look() is True
    step, seconds, value = file.series("loss")
    assert (step.tolist(), seconds.tolist(), value.tolist()) == ([1.0, 2.0], [0.0, 1.0], [3.0, 2.5])


def test_only_what_was_appended_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(i, loss=1.0) for i in range(1000)))
    file = CurveFile(path)
    assert file.look() and file.last_step == 999
    parsed = []
    monkeypatch.setattr(file, "_take", parsed.extend)
    with path.open("a") as more:
        more.write(line(1000, loss=1.0))
    assert file.look() and file.last_step == 999
    assert len(parsed) == 1


@pytest.mark.parametrize("again", [3, 9], ids=["shorter", "longer than before"])
def test_a_file_that_a_resumed_trial_cut_back_is_read_anew(tmp_path, again):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(i, loss=1.0) for i in range(1, 6)))
    file = CurveFile(path)
    assert file.look() and file.last_step == 5
    path.write_text(
        "".join(line(i, loss=1.0) for i in range(1, 3)) + "".join(line(i, 2, loss=0.5) for i in range(3, again + 1))
    )
    file.look()
    assert file.series("loss")[0].tolist() == list(range(1, again + 1))
    assert file.series("loss")[2][2:].tolist() == [0.5] * (again - 2)


def test_null_is_a_gap_and_a_damaged_line_is_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, loss=None) + "garbage\n" + line(2, validation_loss=1.5) + "[1]\n")
    file = CurveFile(path)
    file.look()
    assert np.isnan(file.series("loss")[2]).tolist() == [True]
    assert file.series("validation_loss")[2].tolist() == [1.5]
    assert file.unreadable == 2


def test_a_pause_between_attempts_is_no_training_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, loss=1.0) + line(2, loss=1.0) + line(5000, 2, loss=1.0) + line(5003, 2, loss=1.0))
    file = CurveFile(path)
    file.look()
    assert file.series("loss")[1].tolist() == [0.0, 1.0, 1.0, 4.0]


def _line(seed, y, diverged=False):
    step = np.arange(1.0, len(y) + 1)
    return Line("v", seed, f"seed {seed}", step, step * 10, np.array(y, float), diverged)


def test_a_group_is_the_mean_of_shared_steps_without_diverged_trials():
    found = group([_line(0, [3, 2, 1]), _line(1, [5, 4]), _line(2, [9, np.nan], diverged=True)])
    assert found.seeds == 2 and found.x.tolist() == [10.0, 20.0] and found.mean.tolist() == [4.0, 3.0]
    np.testing.assert_allclose(found.std, np.sqrt(2))
    assert len(found.lines) == 3


def test_a_level_is_the_mean_of_trials_at_the_same_tokens_though_their_steps_hold_unlike_many():
    step = np.arange(1.0, 9)
    dense = Line("b4", 0, "seed 0", step, step * 10, step * 10)  # y = x
    sparse = Line("b8", 0, "seed 0", step[:3], step[:3] * 20, np.array([40.0, 80.0, 120.0]))  # y = 2 x
    gap = Line("b4", 1, "seed 1", step[:7], step[:7] * 10, np.array([np.nan, 60, 90, np.nan, 150, 180, 210]))  # y = 3 x
    lost = Line("b4", 2, "seed 2", step, step * 10, step * 0, diverged=True)
    found = group_level([dense, sparse, gap, lost], "with gate", "gate")
    assert (found.variant, found.factor, found.seeds, len(found.lines)) == ("with gate", "gate", 3, 4)
    assert found.x.tolist() == [20.0, 40.0, 60.0] and found.mean.tolist() == [40.0, 80.0, 120.0]
    np.testing.assert_allclose(found.std, found.x)
    apart = Line("c", 0, "", step + 100, step * 10 + 1000, step)
    assert group_level([dense, apart], "a", "f").seeds == 0 and group_level([lost], "a", "f").seeds == 0


def test_smoothing_keeps_a_constant_and_passes_gaps():
    assert smooth(np.array([2.0, 2.0, 2.0]), 0.9).tolist() == pytest.approx([2.0, 2.0, 2.0])
    np.testing.assert_allclose(smooth(np.array([1.0, np.nan, 3.0]), 0.5), [1.0, np.nan, 7 / 3])
    with pytest.raises(ValueError, match="smoothing"):
        smooth(np.array([1.0]), 1.0)


def test_thinning_keeps_the_ends():
    keep = thin(10_000, 400)
    assert len(keep) == 400 and keep[0] == 0 and keep[-1] == 9_999
    assert thin(3, 400).tolist() == [0, 1, 2]


def test_thinned_lines_of_different_lengths_keep_their_places_in_common():
    lines = []
    for points in (2000, 1777):
        keep = strided(points, 5)
        lines.append(Line("a", 0, "", keep * 10.0, keep * 10.0, keep * 1.0))
        assert len(keep) <= 401 and keep[-1] == points - 1
    assert len(group(lines).x) == 356 and not len(strided(0, 5)) and strided(3, 1).tolist() == [0, 1, 2]
