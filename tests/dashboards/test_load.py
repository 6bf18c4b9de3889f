"""The load of trials and machines as the dashboard reads and draws it."""

import json
import shutil

import numpy as np

from archlab.dashboards.load import LoadFiles, binned, of_machines, of_trial
from archlab.search.store.store import Store
from tests.dashboards.test_app import Client


def write(folder, rows, end="\n"):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "load.jsonl").write_text("\n".join(map(json.dumps, rows)) + end)
    return folder


def row(time, **more):
    usual = {"host": "a", "cores": 1.5, "memory_bytes": 2**30, "machine_cpu": 0.5, "machine_memory": 0.25}
    return {"time": time, **usual, **more}


def _x_axes(part):
    """Those of all figures of a page, from its top to its bottom."""
    if isinstance(part, dict) and "xaxis" in part:
        return [part["xaxis"]]
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return [found for each in inner for found in _x_axes(each)]


def test_a_file_is_read_again_when_it_grows_up_to_its_last_whole_line(tmp_path):
    files, folder = LoadFiles(), tmp_path / "t"
    assert files.of(folder) == {}
    write(folder, [row(1.0), row(2.0)])
    found = files.of(folder)
    assert found["time"].tolist() == [1.0, 2.0] and files.of(folder) is found
    write(folder, [row(1.0), row(2.0, gpu=0.5), row(3.0)], end="")
    found = files.of(folder)
    assert found["time"].tolist() == [1.0, 2.0] and np.isnan(found["gpu"][0]) and found["gpu"][1] == 0.5
    (folder / "load.jsonl").write_text('{"time": 1}\n{"ti\n[]\n{"time": "x"}\n{"time": 3, "cores": 2}\n')
    assert files.of(folder)["time"].tolist() == [1.0, 3.0]


def test_a_trial_has_a_figure_for_each_thing_that_was_sampled(tmp_path):
    files = LoadFiles()
    figures = dict(of_trial(files.of(write(tmp_path / "t", [row(0.0), row(5.0, cores=2.0)]))))
    assert [*figures] == ["cores", "memory_bytes"]
    assert figures["cores"]["data"][0]["y"] == [1.5, 2.0] and figures["memory_bytes"]["data"][0]["y"] == [1.0, 1.0]
    assert figures["cores"]["data"][0]["x"][1] == "1970-01-01 00:00:05.000000"
    with_gpu = dict(of_trial(files.of(write(tmp_path / "u", [row(0.0, gpu=0.9, gpu_memory_bytes=2**31)]))))
    assert with_gpu["gpu"]["data"][0]["mode"] == "markers" and figures["cores"]["data"][0]["mode"] == "lines"
    assert with_gpu["gpu"]["data"][0]["y"] == [90.0] and with_gpu["gpu_memory_bytes"]["data"][0]["y"] == [2.0]


def test_trials_beside_each_other_are_one_machine_and_hosts_are_told_apart(tmp_path):
    files = LoadFiles()
    one = files.of(write(tmp_path / "1", [row(float(t), machine_cpu=0.4) for t in range(10)]))
    other = files.of(write(tmp_path / "2", [row(float(t), machine_cpu=0.6) for t in range(10)]))
    figure = of_machines([one, {}, other], 0.0, 10.0)
    assert [each["name"] for each in figure["data"]] == ["CPU", "memory"]
    assert np.allclose(figure["data"][0]["y"], 50.0) and len(figure["data"][0]["y"]) == 10
    there = files.of(write(tmp_path / "3", [row(0.0, host="b")]))
    assert {each["name"] for each in of_machines([one, there], 0.0, 10.0)["data"]} == {
        "CPU, a",
        "memory, a",
        "CPU, b",
        "memory, b",
    }
    assert of_machines([{}], 0.0, 10.0) is None


def test_a_trial_that_was_reused_takes_no_points_from_the_time_that_is_shown(tmp_path):
    files, week = LoadFiles(), 7 * 86400
    own = files.of(write(tmp_path / "own", [row(float(week + t), machine_cpu=0.4) for t in range(100)]))
    reused = files.of(write(tmp_path / "reused", [row(float(t), machine_cpu=0.8) for t in range(100)]))
    alone, both = (of_machines(each, week, week + 100.0) for each in ([own], [reused, own]))
    assert alone == both and len(both["data"][0]["x"]) == 100
    assert of_machines([reused], week, week + 100.0) is None


def test_a_line_ends_where_nothing_ran():
    x = np.concatenate([np.arange(0.0, 100.0), np.arange(5000.0, 5100.0)])
    times, values = binned(x, np.ones(len(x)))
    assert np.isnan(values).sum() == 1 and 99 < times[np.isnan(values)][0] < 5000
    assert np.nanmin(values) == np.nanmax(values) == 1.0


def test_pages_show_it(store, tmp_path):
    root = tmp_path / ".archlab"
    shutil.copytree(store, root)
    with Store.open(root, create=False) as opened:
        key = opened.study_trials("gate-position")[0]["key"]
        ran = [event["time"] for event in opened.events("gate-position") if event["key"] == key]
        write(opened.trial_folder(key), [row(min(ran)), row(max(ran))])
    client = Client(root)
    assert "load-cores" in client.page(f"/run/{key}") and "2 samples on a" in client.page(f"/run/{key}")
    page = client.page("/study/gate-position/timeline")
    assert "timeline-load" in page
    ranges = [found["range"] for found in _x_axes(json.loads(page))]
    assert len(ranges) == 2 and ranges[0] == ranges[1], "both figures are of the same time"
