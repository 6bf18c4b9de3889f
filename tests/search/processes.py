"""Looks at processes and their sockets through /proc, for tests of what is left, who listens and who runs where."""

import os
from contextlib import suppress
from pathlib import Path


def descendants(root=None, without=()):
    """pid -> command line of all processes below `root` (this one by default), but for `without` and what is below."""
    parents, commands = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    found, frontier = {}, {root or os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier and pid not in without}
        found |= {pid: commands[pid] for pid in frontier if pid in commands}
    return found


def alive(pid):
    """False for one that is gone or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listeners(pids):
    """Addresses in hexadecimal, as in /proc/net/tcp, on which these processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found
