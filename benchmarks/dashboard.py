"""Time until a study can be read: our pages beside MLflow's run list and optuna-dashboard's study, same store, same
browser, taking turns, each served by a process of its own.

    python benchmarks/dashboard.py                         # 1,000 trials with 500 points each; rows are appended
    python benchmarks/dashboard.py --store FOLDER          # makes the study there, or takes the one that is there
    python benchmarks/dashboard.py --server                # no browser: the processor time that our server takes
    python benchmarks/dashboard.py --variants 6 --points 50 --turns 1 --alone --dry

Ready is: ours, the grid has its rows, or the figure its lines; MLflow's, the list has a row per run that it shows;
optuna-dashboard's, its figures are drawn. Of our study's page also until all its figures are drawn, which begin below
the window. `first visit` has an empty browser cache, `again` a warm one. Beside these: from the command to the first
answer, and the bytes of a first visit as they were sent; of ours also the table as the first page of a new server, from
a filter to its rows and to its figure, and sorting 10,000 rows.
Each row of benchmarks/results/dashboard.jsonl has what was measured, each time of it, the goal, the load of the machine
when it was written, processor and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.servers import PATIENCE_MS, STUDY, THEIRS, free_port, ours, runs_in_mlflow, served  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "dashboard.jsonl"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PACKAGES = ("dash", "dash-ag-grid", "dash-mantine-components", "plotly", "mlflow", "optuna", "optuna-dashboard")
SETTLED_MS = 5_000  # after which a page that can be read has loaded the rest of what it is; some ask again for ever
GOALS = {
    "server up, s": 1.5,
    "archlab table, new server, s": 2.5,
    "archlab table, first visit, s": 2.5,
    "archlab table, again, s": 1.0,
    "first visit, MB": 3.0,
    "filter to rows, s": 0.7,
    "filter to figure, s": 0.7,
    "10,000 rows sorted, s": 1.0,
}

Row = dict[str, Any]


def make(root: Path, variants: int, points: int, track: bool) -> int:
    """A finished study in the store, five trials per variant with so many points each, and where it is asked for in its
    MLflow and Optuna databases. Returns the number of trials; what is there already is kept, also where it is not all:
    MLflow takes 0.3 s of processor time for the 2,600 numbers of a trial."""
    from archlab.search.trackers.shipper import sync
    from tests.dashboards.generate import Plan, make_store, make_study

    effects = {"baseline": 0.0, **{f"v{i}": -0.004 * i for i in range(1, variants)}}
    plan = Plan(effects=effects, points=points, steps=points)
    with make_store(root) as store:
        if plan.name not in {study["name"] for study in store.studies()}:
            make_study(store, plan)
        trials = len({trial["key"] for trial in store.study_trials(plan.name)})
    if track and not (root / "mlflow.db").exists():
        sync(root, plan.name)
    return trials


GRID_READY = "document.querySelectorAll('#{id} .ag-center-cols-container .ag-row').length > 1"
LINES_READY = "document.querySelectorAll('#{id} .scatterlayer .trace').length > 1"
READY = {
    "archlab study": GRID_READY.format(id="table"),
    "archlab study's figures": " && ".join(LINES_READY.format(id=each) for each in ("forest", "rates", "curves")),
    "archlab table": GRID_READY.format(id="ablation"),
    "archlab curves": LINES_READY.format(id="curve"),
    "archlab runs": GRID_READY.format(id="runs"),
    "MLflow run list": "document.querySelectorAll('[role=row] a[href*=\"/runs/\"]').length > 1",
    "optuna-dashboard": "document.querySelectorAll('.js-plotly-plot .main-svg').length > 1",
}
PAGES = {"archlab study": "", "archlab table": "/table", "archlab curves": "/curves", "archlab runs": "/runs"}
OURS = PAGES | {"archlab study's figures": ""}


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, without what it would ask the internet for."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise SystemExit("no chromium on this machine: install it to run this benchmark (apt-get install chromium)")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS, timeout=PATIENCE_MS)
        yield made
        made.close()


@contextmanager
def tab(made: Any) -> Iterator[Any]:
    """A page with an empty cache."""
    context = made.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


def visit(page: Any, name: str, url: str) -> float:
    """Seconds from the request to a page that can be read."""
    page.goto("about:blank")
    started = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_function(READY[name], polling=20)
    return time.perf_counter() - started


def weight(made: Any, name: str, url: str) -> float:
    """MB of a first visit, as they were sent."""
    with tab(made) as page:
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        sizes: list[float] = []
        session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
        visit(page, name, url)
        page.wait_for_timeout(SETTLED_MS)
        return sum(sizes) / 1e6


def visits(made: Any, addresses: dict[str, str], turns: int) -> Iterator[tuple[str, list[float]]]:
    """(what was measured, seconds of each turn): of each page a first visit and one with a warm cache."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in addresses}
    for turn in range(turns + 1):
        for name, url in list(addresses.items()):
            with tab(made) as page:
                try:
                    times = visit(page, name, url), visit(page, name, url)
                except Exception as error:  # one of others must not cost the rest
                    print(f"  {name}: left out, {str(error).splitlines()[0]}", flush=True)
                    del addresses[name]
                    continue
            if turn:  # the first turn warms the servers
                for kept, seconds in zip(found[name], times, strict=True):
                    kept.append(seconds)
    for name in addresses:
        for what, times in zip(("first visit", "again"), found[name], strict=True):
            yield f"{name}, {what}, s", times


def of_table(made: Any, base: str, variant: str, turns: int) -> Iterator[tuple[str, list[float]]]:
    """Of the table and the curves: bytes of a first visit, from a filter to its rows and its figure, a sort."""
    yield "first visit, MB", [weight(made, "archlab table", f"{base}/study/{STUDY}/table")]
    with tab(made) as page:
        visit(page, "archlab table", f"{base}/study/{STUDY}/table")
        page.wait_for_load_state("networkidle")
        rows = "document.querySelectorAll('#ablation .ag-center-cols-container .ag-row').length"
        yield "filter to rows, s", [_filtered(page, "ablation", rows, variant) for _ in range(turns)]
        yield "10,000 rows sorted, s", [page.evaluate(SORT)]
        visit(page, "archlab curves", f"{base}/study/{STUDY}/curves")
        shown = "document.querySelectorAll('#curve .legendtext').length"
        yield "filter to figure, s", [_filtered(page, "curve", shown, variant) for _ in range(turns)]


def _filtered(page: Any, name: str, count: str, variant: str) -> float:
    """Seconds from the last letter of a filter to the one that it leaves; then the filter is taken off."""
    began = time.perf_counter()
    page.fill(f"#{name}-q", f"variant={variant}")
    page.wait_for_function(f"{count} == 1", polling=20)
    seconds = time.perf_counter() - began
    page.fill(f"#{name}-q", "")
    page.wait_for_function(f"{count} > 1", polling=20)
    return seconds


SORT = """async () => {
  const grid = dash_ag_grid.getApi('ablation'), one = grid.getDisplayedRowAtIndex(0).data;
  const rows = Array.from({length: 10000}, (_, i) =>
    ({...one, id: 'r' + i, number: {...one.number, c_loss: 0, c_perplexity: Math.sin(i)}}));
  grid.setGridOption('rowData', rows);
  await new Promise(done => setTimeout(done, 1000));
  const began = performance.now();
  grid.applyColumnState({state: [{colId: 'c_perplexity', sort: 'asc'}]});
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const seconds = (performance.now() - began) / 1000, first = grid.getDisplayedRowAtIndex(0).data.number.c_perplexity;
  if (first > -0.999) throw new Error(`the lowest of the sines comes first, not ${first}`);
  return seconds;
}"""


def measured(made: Any, root: Path, options: argparse.Namespace) -> Iterator[tuple[str, list[float]]]:
    """(what was measured, each time of it)."""
    starts, news, last = [], [], f"v{options.variants - 1}"
    for _ in range(options.turns):
        port = free_port()
        with served(*ours(root, port)) as up, tab(made) as page:
            starts.append(up.seconds)
            news.append(visit(page, "archlab table", f"http://127.0.0.1:{port}/study/{STUDY}/table"))
    yield "server up, s", starts
    yield "archlab table, new server, s", news
    port = free_port()
    with served(*ours(root, port)):
        base = f"http://127.0.0.1:{port}"
        yield from of_table(made, base, last, options.turns)
        mine = {name: f"{base}/study/{STUDY}{path}" for name, path in OURS.items()}
        yield from beside(made, root, mine, [] if options.alone else list(THEIRS), options.turns)


def of_server(root: Path) -> Iterator[tuple[str, list[float]]]:
    """Processor seconds of our server, which others on the machine change little: to its first answer, and for each
    page as the browser asks for it, the first time and again."""
    port = free_port()
    command, first = ours(root, port)
    with served(command, first) as up:
        yield "server up, CPU s", [up.cpu()]
        base = f"http://127.0.0.1:{port}"
        told = json.loads(urllib.request.urlopen(f"{base}/_dash-dependencies").read())
        output = next(each["output"] for each in told if "_pages_content" in each["output"])
        for name, path in PAGES.items():
            times = []
            for _ in range(2):
                before = up.cpu()
                _asked(base, output, f"/study/{STUDY}{path}")
                times.append(up.cpu() - before)
            yield f"{name}, first, CPU s", times[:1]
            yield f"{name}, again, CPU s", times[1:]


def _asked(base: str, output: str, path: str) -> None:
    """Asks for a page as Dash's script in the browser does."""
    place = [{"id": "_pages_location", "property": each, "value": value} for each, value in
             (("pathname", path), ("search", ""))]  # fmt: skip
    outputs = [{"id": "_pages_content", "property": "children"}, {"id": "_pages_store", "property": "data"}]
    body: Row = {"output": output, "outputs": outputs, "inputs": place, "changedPropIds": ["_pages_location.pathname"]}
    kind = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{base}/_dash-update-component", json.dumps(body).encode(), kind)
    with urllib.request.urlopen(asked, timeout=PATIENCE_MS / 1000) as answer:
        answer.read()


def beside(
    made: Any, root: Path, addresses: dict[str, str], others: list[str], turns: int
) -> Iterator[tuple[str, list[float]]]:
    """Visits with the servers of others up too, each that can be had."""
    if not others:
        yield from visits(made, addresses, turns)
        for name in addresses.keys() - OURS.keys():
            yield f"{name}, first visit, MB", [weight(made, name, addresses[name])]
        return
    name, *rest = others
    port = free_port()
    try:
        command, first, address = THEIRS[name](root, port)
    except (ImportError, StopIteration) as error:
        print(f"  {name}: left out, {error or 'the study was not sent to it'}", flush=True)
        yield from beside(made, root, addresses, rest, turns)
        return
    with served(command, first) as up:
        yield f"{name}, server up, s", [up.seconds]
        yield from beside(made, root, {**addresses, name: address}, rest, turns)


def machine() -> Row:
    """Processor and versions."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    found: Row = {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    chromium = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    told = subprocess.run([chromium, "--version"], capture_output=True, text=True).stdout if chromium else ""
    return {**found, "chromium": " ".join(told.split()[1:2]), "python": platform.python_version()}


def main() -> None:
    """Prints a line per measure, median and goal, and appends its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--variants", type=int, default=200, help="five trials each")
    parser.add_argument("--points", type=int, default=500, help="of each trial's curve")
    parser.add_argument("--server", action="store_true", help="the processor time of our server alone")
    parser.add_argument("--alone", action="store_true", help="without MLflow and optuna-dashboard")
    parser.add_argument("--store", type=Path, help="where the study is, or is made; a folder of its own without it")
    parser.add_argument("--dry", action="store_true", help="append nothing")
    options = parser.parse_args()
    told = machine()
    with tempfile.TemporaryDirectory() as folder:
        root = (options.store or Path(folder)).resolve() / ".archlab"
        root.parent.mkdir(parents=True, exist_ok=True)
        trials = make(root, options.variants, options.points, not (options.alone or options.server))
        told |= {"trials": trials, "points": options.points}
        if (root / "mlflow.db").exists():
            told["runs in MLflow"] = runs_in_mlflow(root)
        print(f"{trials} trials of {options.variants} variants with {options.points} points each", flush=True)
        if options.server:
            for what, times in of_server(root):
                note(what, times, told, options.dry)
            return
        with browser() as made:
            for what, times in measured(made, root, options):
                note(what, times, told, options.dry)


def note(what: str, times: list[float], told: Row, dry: bool) -> None:
    """Prints what was measured, and appends its row."""
    median, goal, load = statistics.median(times), GOALS.get(what), round(os.getloadavg()[0], 1)
    print(f"  {what:34} {median:6.2f}" + (f"   goal {goal:g}" if goal else "") + f"   load {load}", flush=True)
    row = {"measure": what, "value": round(median, 3), "goal": goal, "all": [round(t, 3) for t in times], "load": load}
    if not dry:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row | told) + "\n")


if __name__ == "__main__":
    main()
