"""Run as a script: a cluster of two Ray nodes on this machine runs a study by address while the second node dies."""

import os
import secrets
import sys
import threading
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}

from ray.cluster_utils import Cluster

from search.driver import drive
from search.ray_executor import RayExecutor
from tests.search.study_kit import ENTRY, make_store, rows_of, steps_run, toy, until


def main(folder):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    store, rows = make_store(folder), rows_of(*(toy(x, steps=30, step_s=0.1) for x in range(1, 4)))
    executor = RayExecutor(ENTRY, folder, address=cluster.address)
    assert executor.slots == 2
    joined = {node["NodeManagerAddress"] for node in executor._ray.nodes()}
    assert joined, "the driver is not on the cluster"

    def kill_the_second():
        until(lambda: len(steps_run(folder)[1]) >= 2 and sum(steps_run(folder)[0].values()) > 10)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_the_second)
    killer.start()
    summary = drive(store, "s", lambda _: rows, executor)
    killer.join()
    print(summary, store.events("s"), flush=True)
    executor.close()
    cluster.shutdown()
    return summary.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
