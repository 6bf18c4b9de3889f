"""A PostgreSQL server of Debian's package for tests: a cluster of its own in a temporary folder, on loopback only."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from archlab.search.executors.group_end import free_port
from tests.search.processes import alive
from tests.search.study_kit import until


def programs():
    """The folder of initdb and postgres, or None where PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


class Cluster:
    """A server that can be killed and started again, each of its databases fresh. Its password is `open:sesame`."""

    PASSWORD = "open%3Asesame"

    def __init__(self, folder, host="127.0.0.1"):
        self.folder, self.bin, self.process, self.host = Path(folder), programs(), None, host
        self._databases = 0
        os.chmod(folder, 0o755)
        if os.geteuid() == 0:
            shutil.chown(folder, self._owner())
        self.port = free_port()
        self._make()
        settings = f"listen_addresses = '{host}'\nport = {self.port}\nunix_socket_directories = ''\nfsync = off\n"
        with open(self.folder / "data" / "postgresql.conf", "a") as file:
            file.write(settings)

    def _make(self):
        (self.folder / "password").write_text("open:sesame\n")
        self._run("initdb", "-D", "data", "-U", "lab", "-A", "scram-sha-256", "--pwfile=password", "-E", "UTF8")

    def _around(self, command):
        """The command line that runs a program where the server is."""
        return command

    @staticmethod
    def _owner():
        """initdb refuses root; any other user will do."""
        return "postgres" if any(user.pw_name == "postgres" for user in pwd.getpwall()) else "nobody"

    def _as_owner(self):
        if os.geteuid() != 0:
            return {}
        owner = pwd.getpwnam(self._owner())
        return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}

    def _run(self, name, *arguments):
        subprocess.run(
            self._around([self.bin / name, *arguments]),
            cwd=self.folder,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(self.folder)},
            **self._as_owner(),
        )

    def start(self):
        """Starts the server and waits until it answers."""
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                self._around([self.bin / "postgres", "-D", "data"]),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(self.folder)},
                **self._as_owner(),
            )
        until(self.answers)

    def answers(self):
        """Whether somebody can connect."""
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            return False
        return True

    def stop(self, number=signal.SIGINT):
        """SIGINT: connections are cut and the server ends in order. SIGKILL: as if the power had failed."""
        if self.process is not None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            self.process.send_signal(number)
            self.process.wait(240)
            if number == signal.SIGKILL:  # its children see that, and end, a moment later
                until(lambda: not any(map(alive, children)))
                (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
            self.process = None

    def close(self):
        """Ends it and removes what it had."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database, password=PASSWORD):
        """The address of one of its databases."""
        return f"postgresql://lab:{password}@{self.host}:{self.port}/{database}"

    def emptied(self, database="lab"):
        """The address of a database that holds nothing any more; quicker than a new one."""
        if not self.run("postgres", f"SELECT 1 FROM pg_database WHERE datname = '{database}'"):
            self.run("postgres", f"CREATE DATABASE {database}")
        self.run(database, "DROP SCHEMA IF EXISTS archlab, archlab_optuna CASCADE")
        return self.url(database)

    def new_database(self):
        """The address of a database that holds nothing."""
        self._databases += 1
        name = f"lab{self._databases}"
        self.run("postgres", f"CREATE DATABASE {name}")
        return self.url(name)

    def run(self, database, sql):
        """What a statement returns in a database, given by name or address."""
        import psycopg

        address = database if database.startswith("postgresql:") else self.url(database)
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="session")
def postgres():
    """A running server, one for the session of tests."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: nothing is tested on PostgreSQL")
    if programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql): nothing is tested on it")
    folder = tempfile.mkdtemp(prefix="archlab-pg-")
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)
