"""A store with studies, an app on it, and a browser that may reach nothing but this machine."""

import shutil
import threading

import pytest

from archlab.dashboards.server import listen
from tests.dashboards.generate import Plan, make_store, make_study, planned, run_trial
from tests.search.postgres_kit import postgres

__all__ = ["postgres"]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
XSS = "<img src=x onerror=alert(1)><b>bold</b>"
QK_NORM = Plan(
    "qk-norm",
    f"Does query-key normalisation help? {XSS}",
    {"baseline": 0.0, "qk_norm": -0.01, XSS: -0.05},
    diverge=(("baseline", 4e-3),),
)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """gate-position, finished; qk-norm, half done, with a diverged trial and names that look like HTML."""
    root = tmp_path_factory.mktemp("store") / ".archlab"
    with make_store(root) as made:
        make_study(made)
        make_study(made, QK_NORM, finish=False)
        for i, key in enumerate(planned(made, QK_NORM, "tune")[:6]):
            run_trial(made, QK_NORM, key, 1.0 if i < 5 else 0.6)
    return root


@pytest.fixture(scope="session")
def address(store, served):
    """Where the store is served."""
    return served(store)


@pytest.fixture(scope="session")
def served():
    """`served(root)` serves a store and returns its address."""
    servers = []

    def start(root):
        server = listen(root, port=0)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.port}"

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """One browser with a fresh profile for all tests."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if path is None:
        pytest.skip("no chromium on this machine: `apt-get install chromium` lets this test run")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS, timeout=240_000)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(240_000)
        yield context
        browser.close()


class Visit:
    """A page under watch: what it logs, what fails, and where its requests go."""

    def __init__(self, context):
        self.page = context.new_page()
        self.problems, self.requests = [], []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("response", lambda r: self.problems.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        self.page.on("dialog", lambda d: (self.problems.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def study(self, address):
        """Opens a study and waits for its table and curves."""
        self.page.goto(address)
        self.page.wait_for_selector(".ag-row")
        self.page.wait_for_selector("#curves .scatterlayer .trace")

    def cells(self, row):
        """{column: shown text} of one row of the table, pinned column included."""
        found = {}
        for cell in self.page.query_selector_all(f'.ag-row[row-id="{row}"] [role=gridcell]'):
            found[cell.get_attribute("col-id")] = cell.inner_text()
        return found


@pytest.fixture
def visit(chromium):
    """A page whose errors and requests are recorded; both are checked at the end."""
    yield from _watched(chromium)


@pytest.fixture(scope="session")
def opened(chromium, address):
    """The page of the finished study, for tests that only look at it."""
    for found in _watched(chromium):
        found.study(f"{address}/study/gate-position")
        yield found


def _watched(context):
    found = Visit(context)
    yield found
    found.page.close()
    remote = [url for url in found.requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]
    assert not remote, f"requests left the machine: {remote}"
    assert not found.problems
