"""Machines of a lab on this one: namespaces of network, host name and mounts, plugged into a switch that we can break.

Needs root, `unshare`, `nsenter`, `setpriv` and `ip` of Linux. Files are shared, as on a network file system that never
fails; a machine's temporary folder, where Ray is, is its own and can be filled.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.search.postgres_kit import Cluster, programs
from tests.search.processes import descendants
from tests.search.study_kit import ROOT, until

HERE = 250  # the number of this process in the lab
TEMPORARY_BYTES = 400 * 2**20
MOVED_CLOCK = Path(__file__).with_name("moved_clock")
# Ray believes for a minute in a machine that does not answer; most scenarios have no minutes to wait.
HASTY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}


def lacks() -> str:
    """What a lab needs and this machine does not have; "" where it can be built."""
    if os.geteuid() != 0:
        return "root"
    missing = [name for name in ("unshare", "nsenter", "setpriv", "ip") if shutil.which(name) is None]
    if not Path("/dev/net/tun").exists():
        missing.append("/dev/net/tun")
    if programs() is None:
        missing.append("PostgreSQL")
    return ", ".join(missing)


class Machine:
    """A place with a name, an address, processes and a temporary folder of its own, while this process lives."""

    def __init__(self, name: str, address: str, temporary: Path) -> None:
        self.name, self.address, self.temporary = name, address, temporary
        set_up = f"hostname {name}; mount -t tmpfs -o size={TEMPORARY_BYTES},mode=1777 {name} {temporary}; echo up; "
        unshare = ["unshare", "-n", "-m", "-u", "-p", "--fork", "--kill-child", "--mount-proc"]
        # its first process reaps all whose parent is gone
        first = ["sh", "-ec", f"{set_up} trap '' CHLD; exec sleep infinity"]
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare, *first], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "up\n"
        self.process.stdout.close()
        (self.pid,) = map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())

    def command(self, *arguments: object, folder: Path = ROOT, owner: str = "root", apart: bool = True) -> list[str]:
        """The command line that does this on the machine, and that dies with us. `apart` it sees no process of other
        machines, and is a child of what is started."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", *(["-p"] if apart else [])]
        as_owner = ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups", "--pdeathsig", "KILL"]
        return [*enter, *as_owner, "env", "-C", *map(str, (folder, *arguments))]

    def run(self, *arguments: object) -> None:
        subprocess.run(self.command(*arguments), check=True, stdout=subprocess.DEVNULL)

    def fill(self) -> None:
        """Leaves no byte on its disk."""
        with suppress(subprocess.CalledProcessError):
            self.run("dd", "if=/dev/zero", f"of={self.temporary}/filler", "bs=1M", "status=none")

    def free(self) -> None:
        self.run("rm", "-f", self.temporary / "filler")


class Switch:
    """The cables between machines, in the order in which they were given; the last one is this process."""

    def __init__(self, machines: list[Machine]) -> None:
        self.names = [machine.name for machine in machines]
        plugs = [f"{machine.pid}:{machine.address}" for machine in machines] + [
            f"0:{machines[0].address.rpartition('.')[0]}.{HERE}"
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.search.switch", *plugs],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def set(self, name: str, *, out: bool = True, back: bool = True, **cable: float) -> None:
        """The cable of a machine: what it sends (`out`), what it hears (`back`), or both."""
        own = self.names.index(name)
        for other in range(len(self.names)):
            if other == own:
                continue
            for wanted, one, two in ((out, own, other), (back, other, own)):
                if wanted:
                    self.process.stdin.write(json.dumps({"from": one, "to": two, **cable}) + "\n")
        self.process.stdin.flush()

    def heal(self) -> None:
        for name in self.names:
            self.set(name)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Database(Cluster):
    """PostgreSQL on a machine of the lab; a second one can follow the first, and takes over when it is told to."""

    def __init__(self, machine: Machine, leader: Database | None = None) -> None:
        self.machine, self.leader = machine, leader
        super().__init__(tempfile.mkdtemp(prefix="archlab-lab-pg-"), host=machine.address)
        self.start()
        if leader is None:
            self.run("postgres", "CREATE ROLE follower REPLICATION LOGIN PASSWORD 'open:sesame'")

    def _make(self) -> None:
        if self.leader is None:
            super()._make()
            with open(self.folder / "data" / "pg_hba.conf", "a") as file:
                file.write("host all,replication all samenet scram-sha-256\n")
            return
        follower = self.leader.url("").replace("lab:", "follower:", 1).rstrip("/")
        self._run("pg_basebackup", "-D", "data", "-R", "-X", "stream", "-c", "fast", "-d", follower)

    def _around(self, command: list[object]) -> list[str]:
        return self.machine.command(*command, folder=self.folder, owner=self._owner(), apart=False)

    def _as_owner(self) -> dict:
        return {}

    def promote(self) -> None:
        """Has a follower lead."""
        self._run("pg_ctl", "promote", "-D", "data", "-w")


class Ray:
    """Ray on three machines, each started again by whoever looks after it when it has ended."""

    def __init__(self, machines: list[Machine], folder: Path) -> None:
        self.machines, self.head, self.folder = machines, machines[0], folder
        self.running: dict[str, subprocess.Popen] = {}
        self.own: dict[str, str] = dict(HASTY)
        self.ahead_s: dict[str, float] = {}  # by machine, how far the clock is off that Python reads
        self.token = secrets.token_hex(32)

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"

    def environment(self, machine: Machine) -> dict[str, str]:
        """What processes on a machine see: nothing for our own Ray, which a test before may have kept on loopback."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        paths = str(ROOT)
        if machine.name in self.ahead_s:
            paths = f"{MOVED_CLOCK}:{ROOT}"
            ours["LAB_AHEAD_S"] = str(self.ahead_s[machine.name])
        return {
            **ours,
            **{"PYTHONPATH": paths, "TMPDIR": str(machine.temporary), "STORM_STEP_S": "0.1"},
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            **{
                "RAY_worker_niceness": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self.token,
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            **self.own,
        }

    def start(self, machine: Machine) -> None:
        """Ray on one machine; it joins the head where it is not the head."""
        role = ["--head", "--port=6379", f"--temp-dir={machine.temporary}", "--include-dashboard=false"]
        if machine is not self.head:
            role = [f"--address={self.address}"]
        address = [f"--node-ip-address={machine.address}", "--num-cpus=1", "--block", "--disable-usage-stats"]
        memory = [f"--object-store-memory={80 * 2**20}", "--include-log-monitor=false"]
        ray = [Path(sys.executable).with_name("ray"), "start", *role, *address, *memory]
        with open(self.folder / f"ray-{machine.name}.log", "a") as log:
            self.running[machine.name] = subprocess.Popen(
                machine.command(*ray), env=self.environment(machine), cwd=ROOT, stdout=log, stderr=log
            )

    def kill(self, machine: Machine) -> None:
        """SIGKILL of everything of Ray on a machine, as if its power had failed."""
        if process := self.running.pop(machine.name, None):
            kill_tree(process)

    def signal(self, machine: Machine, number: signal.Signals) -> None:
        """Sends a signal to everything of Ray on a machine."""
        if process := self.running.get(machine.name):
            signal_tree(process, number)

    def look_after(self) -> None:
        """Starts Ray again where it has ended. Where the head has, the others join the new one."""
        for machine in self.machines:
            process = self.running.get(machine.name)
            if process is None or process.poll() is not None:
                self.kill(machine)
                self.start(machine)

    def alive(self) -> int:
        """Machines that the head has heard of lately, asked on the head itself."""
        ask = "import ray, sys; from ray._raylet import GcsClient; print(sum(each.state == 0 for each in "
        ask += "GcsClient(address=sys.argv[1]).get_all_node_info().values()))"
        command = self.head.command(sys.executable, "-c", ask, self.address)
        said = subprocess.run(command, env=self.environment(self.head), capture_output=True, text=True, timeout=90)
        return int(said.stdout.split()[-1]) if said.stdout.split() else 0

    def stop(self) -> None:
        for machine in self.machines:
            self.kill(machine)


class Lab:
    """Three machines with Ray, one with PostgreSQL's and MLflow's servers, and one for a standby."""

    def __init__(self, folder: Path, number: int = 0) -> None:
        self.folder = folder
        temporary = folder / "tmp"
        temporary.mkdir()
        names = ("head", "one", "two", "servers", "standby")
        net = f"10.{77 + number}.0"
        self.machines = {name: Machine(name, f"{net}.{place}", temporary) for place, name in enumerate(names, 1)}
        self.switch = Switch(list(self.machines.values()))
        self.ray = Ray([self.machines[name] for name in names[:3]], folder)
        self.database = Database(self.machines["servers"])
        self.standby: Database | None = None
        self.mlflow: subprocess.Popen | None = None
        self.start_mlflow()

    @property
    def uri(self) -> str:
        return f"http://{self.machines['servers'].address}:5000"

    def start_mlflow(self) -> None:
        machine = self.machines["servers"]
        places = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        kept = ["--artifacts-destination", self.folder / "artifacts", "--host", machine.address, "--port", "5000"]
        with open(self.folder / "mlflow.log", "a") as log:
            self.mlflow = subprocess.Popen(
                machine.command(sys.executable, "-m", "mlflow", "server", *places, *kept),
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
                stdout=log,
                stderr=log,
            )

    def ready(self) -> None:
        """Everything is up, and the head knows all three machines."""
        self.ray.look_after()
        wait_for("the servers", self.mlflow_answers)
        wait_for("Ray", lambda: self.ray.look_after() or self.ray.alive() == len(self.ray.machines))

    def mlflow_answers(self) -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200
        return False

    def follow(self) -> str:
        """Adds a standby that has whatever was committed; the address by which a client finds the one that leads."""
        self.standby = Database(self.machines["standby"], leader=self.database)
        self.database.run("postgres", "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.database.run("postgres", "SELECT pg_reload_conf()")
        both = f"{self.database.host}:{self.database.port},{self.standby.host}:{self.standby.port}"
        one = f"{self.database.host}:{self.database.port}"
        return self.database.new_database().replace(one, both) + "?target_session_attrs=read-write"

    def fail_over(self) -> None:
        """The database's machine loses its power, and the standby leads."""
        self.database.stop(signal.SIGKILL)
        self.standby.promote()

    def leave_standby(self) -> None:
        """The one that leads goes on alone, on the machine of the servers."""
        for each in filter(None, (self.database, self.standby)):
            each.close()
        self.standby, self.database = None, Database(self.machines["servers"])

    def close(self) -> None:
        self.ray.stop()
        for each in filter(None, (self.database, self.standby)):
            each.close()
        kill_tree(self.mlflow)
        self.switch.close()
        for machine in self.machines.values():
            machine.process.kill()
            machine.process.wait()


def signal_tree(process: subprocess.Popen, number: signal.Signals) -> None:
    """Sends a signal to a process and to all below it."""
    for pid in [*descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL of a process and of all below it."""
    signal_tree(process, signal.SIGKILL)
    process.wait()


def wait_for(what: str, true, most_s: float = 300.0):
    """Waits until `true()`, and says what for where it never comes."""
    deadline = time.monotonic() + most_s

    def late():
        assert time.monotonic() < deadline, f"{what}: not after {most_s:.0f} s"
        return true()

    return until(late)
