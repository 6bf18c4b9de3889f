"""Time until a study can be read: our pages beside MLflow's run list and optuna-dashboard's study, same store, same
browser, taking turns.

Ready is: ours, the grid has its rows (and on the study's page the curves are drawn); MLflow's, the list has a row per
run that it shows; optuna-dashboard's, its figures are drawn. All with an empty browser cache (a first visit) and with a
warm one. Of our table also: the server's start, the bytes of a first visit, from a filter to its rows, sorting 10,000
rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from werkzeug.serving import make_server

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def make(root: Path, variants: int, points: int, track: bool) -> int:
    """A finished study in the store, five trials per variant with so many points each, and where it is asked for in its
    MLflow and Optuna databases. Returns the number of trials."""
    from search.track import sync
    from tests.dashboards.generate import Plan, make_store, make_study

    effects = {"baseline": 0.0, **{f"v{i}": -0.004 * i for i in range(1, variants)}}
    with make_store(root) as store:
        plan = make_study(store, Plan(effects=effects, points=points, steps=points))
        trials = len({trial["key"] for trial in store.study_trials(plan.name)})
    if track:
        sync(root, plan.name)
    return trials


def serve_ours(root: Path) -> tuple[str, Callable[[], None]]:
    """The address of the study's page, and how to stop it."""
    from dashboards.server import listen

    server = listen(root, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.port}", server.shutdown


def serve_optuna(root: Path) -> tuple[str, Callable[[], None]]:
    """The address of the study in optuna-dashboard, and how to stop it. Raises ImportError where that is missing."""
    import optuna
    import optuna_dashboard

    storage = optuna.storages.RDBStorage(f"sqlite:///{root / 'optuna.db'}")
    study = next(each for each in optuna.get_all_study_summaries(storage) if each.study_name == "gate-position")
    server = make_server("127.0.0.1", 0, optuna_dashboard.wsgi(storage), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.port}/dashboard/studies/{study._study_id}", server.shutdown


def serve_mlflow(root: Path) -> tuple[str, Callable[[], None]]:
    """The address of the experiment's run list, and how to stop it."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{root / 'mlflow.db'}"
    experiment = next(e for e in MlflowClient(uri).search_experiments() if e.name != "Default")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        uri,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    process = subprocess.Popen(
        command, env={**os.environ, **quiet}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    base = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while not _answers(f"{base}/health"):
        if time.monotonic() > deadline or process.poll() is not None:
            process.terminate()
            raise RuntimeError("MLflow's server did not start within two minutes")
        time.sleep(0.3)

    def stop() -> None:
        process.terminate()
        process.wait(20)

    return f"{base}/#/experiments/{experiment.experiment_id}/runs", stop


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


GRID_READY = "document.querySelectorAll('#{id} .ag-center-cols-container .ag-row').length > 1"
READY = {
    "archlab study": GRID_READY.format(id="table")
    + " && document.querySelectorAll('#curves .scatterlayer .trace').length > 1",
    "archlab table": GRID_READY.format(id="ablation"),
    "archlab runs": GRID_READY.format(id="runs"),
    "MLflow run list": "document.querySelectorAll('[role=row] a[href*=\"/runs/\"]').length > 1",
    "optuna-dashboard": "document.querySelectorAll('.js-plotly-plot .main-svg').length > 1",
}
OURS = {"archlab study": "", "archlab table": "/table", "archlab runs": "/runs"}


def visit(page: Any, name: str, url: str) -> float:
    """Seconds from the request to a page that can be read."""
    page.goto("about:blank")
    started = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_function(READY[name], polling=20, timeout=90_000)
    return time.perf_counter() - started


def measure(addresses: dict[str, str], turns: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per page and visit, {name: {"first visit": [...], "again": [...]}}."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise SystemExit("no chromium on this machine: install it to run this benchmark")
    found: dict[str, dict[str, list[float]]] = {name: {"first visit": [], "again": []} for name in addresses}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        for turn in range(turns + 1):
            for name, url in addresses.items():
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                page = context.new_page()
                times = visit(page, name, url), visit(page, name, url)
                context.close()
                if turn:  # the first turn warms the servers
                    found[name]["first visit"].append(times[0])
                    found[name]["again"].append(times[1])
        browser.close()
    return found


def start_seconds(root: Path) -> float:
    """From the command to the first answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import dashboards; from pathlib import Path; dashboards.serve(Path({str(root)!r}), port={port})"
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not _answers(f"http://127.0.0.1:{port}/assets/archlab.css"):
            if process.poll() is not None or time.perf_counter() - began > 120:
                raise RuntimeError("the dashboard did not start")
            time.sleep(0.02)
        return time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(20)


def table_seconds(base: str) -> dict[str, float]:
    """Of the table's page: the megabytes of a first visit (compressed), from a filter to its rows, and the sorting of
    10,000 rows in the grid."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        sizes: list[float] = []
        session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
        page.goto(f"{base}/study/gate-position/table")
        page.wait_for_function(READY["archlab table"], polling=20, timeout=90_000)
        page.wait_for_load_state("networkidle")
        found = {"first visit, MB": sum(sizes) / 1e6}
        began = time.perf_counter()
        page.fill("#ablation-q", "variant=v7")
        rows = "document.querySelectorAll('#ablation .ag-center-cols-container .ag-row').length == 1"
        page.wait_for_function(rows, polling=20, timeout=90_000)
        found["filter to rows, s"] = time.perf_counter() - began
        found["10,000 rows sorted, s"] = page.evaluate(SORT)
        browser.close()
    return found


SORT = """async () => {
  const grid = dash_ag_grid.getApi('ablation'), one = grid.getDisplayedRowAtIndex(0).data;
  const rows = Array.from({length: 10000}, (_, i) =>
    ({...one, id: 'r' + i, number: {...one.number, c_loss: 0, c_perplexity: Math.sin(i)}}));
  grid.setGridOption('rowData', rows);
  await new Promise(done => setTimeout(done, 1000));
  const began = performance.now();
  grid.applyColumnState({state: [{colId: 'c_perplexity', sort: 'asc'}]});
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  return (performance.now() - began) / 1000;
}"""


def main() -> None:
    """Prints a row per page: medians of first and later visits; then what else was measured of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--variants", type=int, default=200, help="five trials each")
    parser.add_argument("--points", type=int, default=500, help="of each trial's curve")
    parser.add_argument("--alone", action="store_true", help="without MLflow and optuna-dashboard")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / ".archlab"
        trials = make(root, options.variants, options.points, not options.alone)
        print(f"{trials} trials of {options.variants} variants with {options.points} points each")
        print(f"  server up {start_seconds(root):.2f} s")
        base, stop = serve_ours(root)
        stops, addresses = [stop], {name: f"{base}/study/gate-position{path}" for name, path in OURS.items()}
        if not options.alone:
            for name, serve in (("MLflow run list", serve_mlflow), ("optuna-dashboard", serve_optuna)):
                try:
                    addresses[name], stop = serve(root)
                    stops.append(stop)
                except ImportError as error:
                    print(f"  {name}: left out, {error}")
        try:
            times = measure(addresses, options.turns)
            told = table_seconds(base)
        finally:
            for stop in stops:
                stop()
    print(f"  seconds until it can be read, median of {options.turns} visits, taking turns")
    print(f"  {'':18} first visit   again")
    for name, found in times.items():
        first, again = (statistics.median(found[what]) for what in ("first visit", "again"))
        print(f"  {name:18} {first:11.2f} {again:7.2f}")
    for what, value in told.items():
        print(f"  {what:24} {value:.2f}")


if __name__ == "__main__":
    main()
