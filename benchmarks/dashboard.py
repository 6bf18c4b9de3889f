"""Time until a study can be read: our study page beside MLflow's run list, same store, same browser, taking turns.

Ready is: ours, the table has its rows and the curves are drawn; MLflow's, the list has a row per run that it shows.
Both with an empty browser cache (a first visit) and with a warm one.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def make(root: Path, variants: int) -> int:
    """A finished study in the store and in its MLflow database. Returns the number of trials."""
    from search.track import sync
    from tests.dashboards.generate import Plan, make_store, make_study

    effects = {"baseline": 0.0, **{f"v{i}": -0.004 * i for i in range(1, variants)}}
    with make_store(root) as store:
        plan = make_study(store, Plan(effects=effects))
        trials = len({trial["key"] for trial in store.study_trials(plan.name)})
    sync(root, plan.name)
    return trials


def serve_ours(root: Path) -> tuple[str, Callable[[], None]]:
    """The address of the study's page, and how to stop it."""
    from dashboards.server import listen

    server = listen(root, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.port}/study/gate-position", server.shutdown


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


READY = {
    "archlab study page": "document.querySelectorAll('#table .ag-center-cols-container .ag-row').length > 1 && "
    "document.querySelectorAll('#curves .scatterlayer .trace').length > 1",
    "MLflow run list": "document.querySelectorAll('[role=row] a[href*=\"/runs/\"]').length > 1",
}


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


def main() -> None:
    """Prints a row per visit: medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--variants", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / ".archlab"
        trials = make(root, options.variants)
        ours, stop_ours = serve_ours(root)
        theirs, stop_theirs = serve_mlflow(root)
        try:
            times = measure({"archlab study page": ours, "MLflow run list": theirs}, options.turns)
        finally:
            stop_ours()
            stop_theirs()
    print(f"{trials} trials of {options.variants} variants; median of {options.turns} visits, taking turns")
    for what in ("first visit", "again"):
        a, b = (statistics.median(times[name][what]) for name in times)
        print(f"  {what:12} archlab {a:5.2f} s   MLflow {b:5.2f} s   ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
