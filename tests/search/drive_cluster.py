"""Run as a script with FOLDER trials|gangs: Ray nodes on this machine run a study by address while one dies."""

import os
import secrets
import sys
import threading
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}

from ray.cluster_utils import Cluster

from archlab.search.executors.process_group import Parallel
from archlab.search.executors.ray_executor import RayExecutor
from archlab.search.executors.resources import Resources
from archlab.search.running.driver import drive
from tests.search.study_kit import ENTRY, go, make_store, rows_of, steps_run, toy, until

STEPS_BEFORE = 10
HELD = {"trials": 8, "gangs": 12}  # where each of two trials, or the only one, waits for the machine to die


def run(cluster, folder, entry, resources, trials, victim):
    """The study, while the machine that `victim` names is killed after some steps."""
    store, rows = make_store(folder), rows_of(*trials)
    executor = RayExecutor(entry, folder, resources, address=cluster.address)
    assert executor.slots == len(cluster.list_all_nodes()) // resources.world
    assert executor._ray.nodes(), "the driver is not on the cluster"

    def kill():
        until(lambda: sum(steps_run(folder)[0].values()) > STEPS_BEFORE)
        cluster.remove_node(victim(executor), allow_graceful=False)
        until(lambda: "planned" in [event["kind"] for event in store.events("s")])
        go(folder, *HELD.values())

    killer = threading.Thread(target=kill)
    killer.start()
    summary = drive(store, "s", lambda _: rows, executor)
    killer.join()
    print(summary, store.events("s"), flush=True)
    groups = executor._ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}, groups
    executor.close()
    return summary.exit_code


def node_of_the_gang(cluster):
    """The one beside the head that has a process of the trial."""

    def find(executor):
        (launched,) = {id(each): each for each in executor._running.values()}.values()
        placed = executor._ray.util.placement_group_table(launched.group)["bundles_to_node_id"].values()
        return next(node for node in cluster.worker_nodes if node.node_id in placed)

    return find


def main(folder, what):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(1 if what == "trials" else 2)]
    if what == "trials":
        trials = [toy(x, steps=16, step_s=0.1, holds=[HELD[what]]) for x in range(1, 4)]
        code = run(cluster, folder, ENTRY, Resources(), trials, lambda _: nodes[0])
    else:
        resources, trials = Resources(parallel=Parallel(data=2)), [toy(1, steps=20, step_s=0.1, holds=[HELD[what]])]
        code = run(cluster, folder, "tests.search.toy_gang:train", resources, trials, node_of_the_gang(cluster))
    cluster.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
