"""`archlab mcp`: a proposer gets verdicts, a mistake gets an error, and neither a dead client nor a full budget loses
anything."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.tree.identity import brief_text, canonical
from archlab.arch_dsl.tree.paths import get
from archlab.cli.referee_server.desk import Desk, Refused
from archlab.search.challenge.ledger import ledgers
from archlab.search.store.store import Store
from tests.cli.mcp_kit import GATE, WILD, Call, ask, decided, desk_in, environment, over_stdio, words_of
from tests.search.challenge.test_challenge import trials_in


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return desk_in(tmp_path_factory.mktemp("desk"))


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"block.norm": 1}
    for _ in range(depth):
        found = {"a": found}
    return found


NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    ("check_patsch", {}, "did you mean 'check_patch'?"),
    ("check_patch", {"change": {}}, "did you mean 'changes'?"),
    ("check_patch", {}, "'changes' is missing"),
    ("check_patch", {"changes": 5}, "must be a mapping or a list or a text, found 5"),
    ("check_patch", {"changes": {}}, "changes nothing"),
    ("check_patch", {"changes": "[}"}, "<changes>:1:2"),
    ("check_patch", {"changes": {"block.attention.gat": 1}}, "did you mean 'gate'?"),
    ("check_patch", {"changes": {"train.lr": 1e-3}}, "is the same model and recipe as 'baseline'"),
    ("check_patch", {"changes": ["gatte"]}, "did you mean 'gate'?"),
    ("check_patch", {"changes": nested(100)}, "nested deeper than 64 levels"),
    ("check_patch", {"changes": "a: " + "x" * 10_000_000}, "at most 1,000,000 bytes"),
    ("check_patch", {"changes": {"block.norm": "x" * 10_000_000}}, "at most 1,000,000 bytes"),
    ("check_patch", {"changes": {"train.data": {"text": "/etc/passwd"}}}, "its owner alone chooses them"),
    ("check_patch", {"changes": {"train.*": 1}}, "its owner alone chooses them"),
    ("challenge", {"name": "x [y]", "changes": GATE, "why": ""}, "is no variant name"),
    ("challenge", {"name": "x" * 81, "changes": GATE, "why": ""}, "at most 80 characters"),
    ("challenge", {"name": "baseline", "changes": GATE, "why": ""}, "is the name of a champion"),
    ("challenge", {"name": "wide", "changes": {"d_model": 10**8}, "why": ""}, "of memory at least"),
    ("describe_language", {"topic": "rmsnrom"}, "did you mean 'rmsnorm'?"),
    ("describe_language", {"topic": "../../etc/passwd"}, "is no topic"),
    ("state", {"wait_seconds": 1e9}, "is 0 to 50"),
    ("state", {"wait_seconds": True}, "must be a number, found True"),
    ("state", {"ticket": "nobody"}, "there is no ticket 'nobody'"),
    ("diagnostics", {"entry": 3}, "the ledger has no entry '3'; it has none yet"),
    ("stop", {"ticket": "nobody"}, "there is no ticket 'nobody'"),
]


@pytest.mark.parametrize(("tool", "given", "message"), NONSENSE, ids=[str(n) for n in range(len(NONSENSE))])
def test_nonsense_is_an_error_that_says_what_is_allowed(
    desk: Desk, tool: str, given: dict[str, Any], message: str
) -> None:
    found = ask(desk, tool, **given)
    assert isinstance(found, str) and message in found
    state = ask(desk, "state")
    assert state["queue"] == [] and state["entries"] == 0 and state["budget"]["trials"]["spent"] == 0


def test_the_language_is_told_topic_by_topic(desk: Desk) -> None:
    assert "rmsnorm" in ask(desk, "describe_language", topic="primitives")["families"]["norm"]
    assert ask(desk, "describe_language", topic="rope")["primitives"][0]["type"] == "rope"
    assert "gpt2" in ask(desk, "describe_language", topic="zoo")["entries"]
    assert ask(desk, "describe_language", topic="components")["components"] == {"gate": [GATE]}
    paths = {each["path"]: each["value"] for each in ask(desk, "describe_language", topic="paths")["paths"]}
    assert paths["d_model"] == "16" and paths["block.attention.heads"] == "2" and paths["train.lr"] == "0.001"


def test_every_path_that_is_told_leads_to_the_value_that_is_told(desk: Desk) -> None:
    with desk.referee() as referee:
        model = referee.alone().planned.variants[0].model
    told = {each["path"]: each["value"] for each in ask(desk, "describe_language", topic="paths")["paths"]}
    of_model = {path: value for path, value in told.items() if not path.startswith("train")}
    found = {path: brief_text(canonical(get(model, tuple(path.split("."))), brief=True))[:160] for path in of_model}
    assert found == of_model and len(found) > 30


def test_a_check_says_what_a_patch_would_be_and_trains_nothing(desk: Desk) -> None:
    for changes in (GATE, [GATE], "block.attention.gate: {position: sdpa}"):
        found = ask(desk, "check_patch", changes=changes)
        assert found["against"] == "baseline" and found["tried"] is None and found["refused"] is None
        assert found["parameters"] > found["champion_parameters"]
        assert found["trials"] == {"first_look": 2, "all_seeds": 4}
        assert any("gate" in each for each in found["differences"])
    assert trials_in(Path(desk.job.store).parent) == {}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"trials": 1}, "the next look takes 2 trials, of 1 that are left"),
        ({"core_seconds": 0.01}, "core-seconds, of 0 that are left"),
        ({"disk": 1000}, "the store holds"),
    ],
)
def test_what_the_budget_has_no_room_for_is_refused_before_it_is_queued(
    tmp_path: Path, rules: dict[str, Any], message: str
) -> None:
    desk = desk_in(tmp_path, **rules)
    assert message in desk.check(GATE)["refused"]
    with pytest.raises(Refused, match=message):
        desk.challenge("gate", GATE, "")
    assert desk.state()["queue"] == [] and trials_in(tmp_path) == {}


def test_a_queue_outlives_its_server_and_asking_twice_is_asking_once(tmp_path: Path) -> None:
    first = desk_in(tmp_path).challenge("gate", GATE, "it helped elsewhere")
    desk = desk_in(tmp_path)
    assert desk.challenge("gate", GATE, "")["ticket"] == first["ticket"]
    assert desk.challenge("wild", WILD, "")["ahead"] == 1
    with pytest.raises(Refused, match="the same changes wait already, as 'gate'"):
        desk.challenge("gate again", GATE, "")
    with pytest.raises(Refused, match="another challenger that waits is called 'gate'"):
        desk.challenge("gate", {"block.norm": "layernorm"}, "")
    assert [each["name"] for each in desk.state()["queue"]] == ["gate", "wild"]
    assert desk.withdraw(first["ticket"])["state"] == "withdrawn"
    assert [each["name"] for each in desk.state()["queue"]] == ["wild"]
    job, busy = desk.next()
    assert job is not None and job.ticket != first["ticket"] and not busy
    desk.crashed(job.ticket, -9)
    assert "exit code -9" in desk.state(job.ticket)["asked"]["message"]


def test_a_study_with_a_mistake_is_told_when_it_is_asked_about(tmp_path: Path) -> None:
    desk = desk_in(tmp_path)
    text = Path(desk.job.study).read_text().replace("d_model", "d_modell")
    Path(desk.job.study).write_text(text)
    assert "did you mean 'd_model'?" in ask(desk, "ledger")
    with pytest.raises(SpecError):
        desk.state()


def test_archlab_is_imported_without_the_protocol() -> None:
    asked = "import sys, archlab, archlab.cli.main; sys.exit('mcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], env=environment()).returncode == 0


@pytest.mark.slow
def test_a_scripted_proposer_gets_verdicts_and_the_ledger_says_why(tmp_path: Path) -> None:
    async def propose(call: Call) -> dict[str, Any]:
        for name, changes in (("wild", WILD), ("gate", ["gate"])):
            asked = await call("challenge", name=name, changes=changes, why=f"because of {name}")
            found = await decided(call, asked["ticket"])
            assert found["state"] == "decided" and found["entry"]["name"] == name
        again = await call("challenge", name="wilder", changes=WILD, why="")
        assert again["known"] and again["entry"]["verdict"] == "diverged"
        told = await call("diagnostics", entry="gate")
        assert {each["state"] for each in told["trials"]} == {"complete"} and "test" not in json.dumps(told["trials"])
        assert (await call("stop"))["stopped"] is None
        return dict(await call("ledger"))

    ledger = over_stdio(tmp_path, propose, "--trials", "6", "--core-seconds", "10000", "--disk", "1GB")
    assert [(each["verdict"], each["why"]) for each in ledger["entries"]] == [
        ("diverged", "because of wild"),
        (ledger["entries"][1]["verdict"], "because of gate"),
    ]

    async def more(call: Call) -> Any:
        return await call("challenge", name="norm", changes={"block.norm": "layernorm"}, why="")

    trained = len(trials_in(tmp_path))  # another server counts what this one trained
    assert "of 0 that are left" in over_stdio(tmp_path, more, "--trials", str(trained))
    assert len(trials_in(tmp_path)) == trained


class Raw:
    """A server whose lines are read one by one, as a client sees them that knows nothing of the SDK."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, *words_of(folder)]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        self.number = 0
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        assert self.request("initialize", hello)["serverInfo"]["name"] == "archlab"
        self.send(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}))

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))  # nothing but the protocol is there

    def request(self, method: str, params: dict[str, Any]) -> Any:
        self.number += 1
        self.send(json.dumps({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}))
        found = self.read()
        assert found["id"] == self.number
        return found["result"]

    def call(self, tool: str, **given: Any) -> dict[str, Any]:
        return dict(self.request("tools/call", {"name": tool, "arguments": given})["structuredContent"])

    def end(self) -> int:
        """Its exit code, after its standard input has ended."""
        self.process.communicate()
        return self.process.returncode


@pytest.mark.slow
def test_a_killed_server_loses_nothing_and_prints_only_the_protocol(tmp_path: Path) -> None:
    first = Raw(tmp_path)
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    for line in ("hello", f'{{"jsonrpc":"2.0","id":77,"method":"tools/call","params":{deep}}}'):
        first.send(line)
        found = first.read()
        assert "not a message of the protocol" in found["error"]["message"]
    assert found["id"] == 77
    ticket = first.call("challenge", name="gate", changes=GATE, why="")["ticket"]
    while first.call("state", wait_seconds=5, ticket=ticket)["asked"]["state"] == "waiting":
        pass
    first.process.kill()
    first.end()
    desk = desk_in(tmp_path)
    while desk.state()["running"] is not None:  # what it ran ends by itself
        time.sleep(0.2)
    before = trials_in(tmp_path)
    second = Raw(tmp_path)
    again = second.call("challenge", name="gate", changes=GATE, why="")
    while again["state"] in ("waiting", "running"):
        again = second.call("state", wait_seconds=5, ticket=ticket)["asked"]
    assert again["state"] == "decided"
    assert second.end() == 0
    after = trials_in(tmp_path)
    assert before.keys() <= after.keys() and {state for state, _ in after.values()} == {"complete"}
    assert all(attempt == 1 for key, (_, attempt) in after.items() if before.get(key, ("", 0))[0] == "complete")


@pytest.mark.slow
def test_two_clients_share_one_ledger(tmp_path: Path) -> None:
    async def propose(call: Call, name: str, changes: Any) -> str:
        asked = await call("challenge", name=name, changes=changes, why="")
        return str((await decided(call, asked["ticket"]))["state"])

    def client(idea: tuple[str, Any]) -> Any:
        return over_stdio(tmp_path, lambda call: propose(call, *idea))

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(client, {"gate": GATE, "wild": WILD}.items())] == ["decided", "decided"]
    with Store.open(tmp_path / "store", create=False) as store:
        assert {each.name for each in ledgers(store)["gates"].entries} == {"gate", "wild"}
    assert {attempt for _, attempt in trials_in(tmp_path).values()} == {1}
