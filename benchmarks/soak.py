"""What a store costs as it grows: a study of very many trials, whose driver is killed again and again.

    python benchmarks/soak.py --trials 100000              # SQLite: half an hour
    python benchmarks/soak.py --trials 100000 --postgres   # on a PostgreSQL server that is started for it
    ARCHLAB_DATABASE=... python benchmarks/soak.py         # in an empty database of yours

A study of a hundred seeds per variant is driven inline, and its driver is killed every `--kill-s` seconds and started
again. A dashboard of the store is up all the while. After 1,000, 10,000, half and all of its trials the driver waits,
and a line of JSON tells:

* driver_mb, per_s, trial_cpu_ms, commit_ms, slow_commit_ms: the resident memory of the driver, its trials per second,
  its processor time for each, and the median and the 99th percentile of the milliseconds in which the table takes a
  result, over the last thousand trials;
* table_mb: the size of the trial table;
* report_s, report_cpu_s, report_mb: what a process of its own needs to compare and print all trials;
* study_s, again_s, trial_s: seconds until the dashboard has answered with the page of the study after it has changed,
  with that page when nothing has, and with the page of one trial; with `_cpu_s` its processor time for that;
  dashboard_mb: its resident memory then.

Exits with 1 when not every trial has ended, or one was started twice that no kill hit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from archlab.search.store.store import Store  # noqa: E402
from benchmarks.scale import environment, resident_mb, write_study  # noqa: E402
from benchmarks.servers import Up, free_port, ours, served  # noqa: E402

STUDY, SEEDS = "scale", 100
SIZE = (
    "SELECT sum(pg_total_relation_size(c.oid))::bigint AS size FROM pg_class AS c JOIN pg_namespace AS n "
    "ON n.oid = c.relnamespace WHERE n.nspname = 'archlab' AND c.relkind = 'r'"
)
Told = dict[str, Any]


class Timed(Store):
    """A store that keeps how many seconds each result took."""

    took: ClassVar[list[float]] = []

    def finish(self, *given: Any, **named: Any) -> None:
        """As that of a store."""
        began = time.perf_counter()
        super().finish(*given, **named)
        self.took.append(time.perf_counter() - began)


def tell(found: Told) -> None:
    """A line of JSON."""
    print(json.dumps({name: round(v, 2) if isinstance(v, float) else v for name, v in found.items()}), flush=True)


def driven(path: Path, root: Path) -> None:
    """Drives the study from where it stands. After every thousand trials it tells, and waits for a line."""
    from archlab.search.executors.inline import InlineExecutor
    from archlab.search.planning.plan import plan
    from archlab.search.running.driver import drive
    from archlab.search.study.load import load_study

    study = load_study(path)
    planned = plan(study, root / "data")
    with Timed.open(root) as store:
        store.save_study(study.study, planned.record(), path.read_text())

        def done() -> int:
            return sum(row["counts"].get("complete", 0) for row in store.studies())

        trials = before = done()
        since, used = time.monotonic(), time.process_time()

        def pause() -> None:
            nonlocal before, since, used
            took, count = sorted(store.took) or [0.0], max(1, trials - before)
            tell(
                {
                    "trials": trials,
                    "driver_mb": resident_mb(os.getpid()),
                    "per_s": count / (time.monotonic() - since),
                    "trial_cpu_ms": 1e3 * (time.process_time() - used) / count,
                    "commit_ms": 1e3 * statistics.median(took),
                    "slow_commit_ms": 1e3 * took[int(0.99 * len(took))],
                }
            )
            sys.stdin.readline()
            store.took.clear()
            before, since, used = trials, time.monotonic(), time.process_time()

        def on_event(event: Told) -> None:
            nonlocal trials
            if event["event"] == "finished":
                trials += 1
                if trials % 1000 == 0 and trials < planned.trials:
                    pause()

        drive(store, study.study, planned.rows, InlineExecutor("scale:train", root / "data"), on_event=on_event)
        trials = done()  # a trial that had ended when its driver was killed is no event
        pause()


def reported(root: Path) -> None:
    """Compares and prints all trials, and says what that took."""
    from archlab.search.comparison.compare import load_comparison
    from archlab.search.reporting.report import report

    began, used = time.monotonic(), time.process_time()
    with Store.open(root, create=False) as store:
        report(load_comparison(store, STUDY), "json")
    took = {"report_s": time.monotonic() - began, "report_cpu_s": time.process_time() - used}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tell({**took, "report_mb": peak, "table_mb": size_of(root)})


def size_of(root: Path) -> float:
    """The trial table in MB, with its indexes and its log."""
    if files := [*root.glob("trials.db*")]:
        return sum(each.stat().st_size for each in files) / 1e6
    with Store.open(root, create=False) as store:
        return float(store.database.query(SIZE)[0]["size"]) / 1e6


class Pages:
    """The pages of a dashboard, asked for as a browser asks."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._ask("/")
        known = json.loads(self._ask("/_dash-dependencies"))
        self._output = next(each["output"] for each in known if "_pages_content" in each["output"])

    def seconds(self, path: str) -> float:
        """Until the page at an address is there."""
        asked = [("pathname", path), ("search", "")]
        location = [{"id": "_pages_location", "property": name, "value": value} for name, value in asked]
        outputs = [{"id": i, "property": p} for i, p in (("_pages_content", "children"), ("_pages_store", "data"))]
        changed = ["_pages_location.pathname"]
        body = {"output": self._output, "outputs": outputs, "inputs": location, "changedPropIds": changed}
        began = time.monotonic()
        page = self._ask("/_dash-update-component", json.dumps(body).encode())
        if b"className" not in page or b'"problem"' in page:
            raise SystemExit(f"{path} has no page: {page[:300]!r}")
        return time.monotonic() - began

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self._base + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=1200) as answer:
            return bytes(answer.read())


def looked_at(root: Path, pages: Pages, dashboard: Up) -> Told:
    """What a report and the pages of the dashboard take now."""
    command = [sys.executable, __file__, "--reported", str(root)]
    answer = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout
    with Store.open(root, create=False) as store:
        key = store.study_trials(STUDY)[0]["key"]
    times: Told = {}
    for name, path in (("study", f"/study/{STUDY}"), ("again", f"/study/{STUDY}"), ("trial", f"/run/{key}")):
        used = dashboard.cpu()
        times |= {f"{name}_s": pages.seconds(path), f"{name}_cpu_s": dashboard.cpu() - used}
    return {**json.loads(answer), **times, "dashboard_mb": resident_mb(dashboard.pid)}


def soak(path: Path, root: Path, trials: int, kill_s: float) -> bool:
    """Whether every trial ended once, but for those that a kill hit."""
    shown, kills = {1000, 10_000, trials // 2, trials}, 0
    with Store.open(root):
        pass
    command, url = ours(root, free_port())
    with served(command, url) as dashboard:
        pages = Pages(url.rpartition("/assets")[0])
        while True:
            driver = [sys.executable, __file__, "--driven", str(path), str(root)]
            process = subprocess.Popen(
                driver, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            look = partial(_look, root, pages, dashboard, shown, kills)
            try:
                killed = _until_killed(process, kill_s, trials, look)
            finally:
                process.kill()
            if not killed:
                return process.wait() == 0 and once(root, trials, kills)
            kills += 1


def _look(root: Path, pages: Pages, dashboard: Up, shown: set[int], kills: int, found: Told) -> None:
    if found["trials"] in shown:
        tell({"kills": kills, **found, **looked_at(root, pages, dashboard)})


def _until_killed(process: subprocess.Popen[str], kill_s: float, trials: int, look: Callable[[Told], object]) -> bool:
    """Answers a driver, which waits while one looks, until it ends or, so long after its first thousand, is killed."""
    assert process.stdout is not None and process.stdin is not None
    drove, since = 0.0, None
    for line in process.stdout:
        drove += 0.0 if since is None else time.monotonic() - since
        found = json.loads(line)
        look(found)
        process.stdin.write("\n")
        since = time.monotonic()
        if drove > kill_s and found["trials"] < trials:
            time.sleep(random.random())  # it may be anywhere then
            process.kill()
            process.wait()
            return True
    process.wait()
    return False


def once(root: Path, trials: int, kills: int) -> bool:
    """Whether every trial ended, and so many were started twice at most."""
    with Store.open(root, create=False) as store:
        rows = store.study_trials(STUDY)
    attempts = sum(row["attempt"] for row in rows)
    return all(row["state"] == "complete" for row in rows) and len(rows) == trials and attempts <= trials + kills


@contextmanager
def server(wanted: bool) -> Iterator[None]:
    """A PostgreSQL server for the block, if it is wanted: one that keeps what it commits, as yours does."""
    if not wanted:
        yield
        return
    from tests.search.postgres_kit import Cluster, programs

    if programs() is None:
        raise SystemExit("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    folder = tempfile.mkdtemp(prefix="archlab-soak-")
    cluster = Cluster(folder)
    with open(Path(folder) / "data" / "postgresql.conf", "a") as file:
        file.write("fsync = on\n")
    try:
        cluster.start()
        os.environ["ARCHLAB_DATABASE"] = cluster.new_database()
        yield
    finally:
        cluster.stop()
        shutil.rmtree(folder)


def main() -> None:
    """Prints a line of JSON per moment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="a multiple of a thousand")
    parser.add_argument("--postgres", action="store_true", help="on a server of its own, which needs PostgreSQL")
    parser.add_argument("--kill-s", type=float, default=120.0, help="after which the driver is killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, server(options.postgres):
        path = write_study(Path(name), options.trials, SEEDS)
        ended = soak(path, Path(name) / "store", options.trials, options.kill_s)
    sys.exit(int(not ended))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--driven"]:
        driven(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--reported"]:
        reported(Path(sys.argv[2]))
    else:
        main()
