"""A Ray cluster: what its machines must share with the driver, and trials whose processes are on several of them."""

from __future__ import annotations

import importlib
import secrets
from pathlib import Path
from typing import Any

from archlab.search.executors.executor import ExecutorError
from archlab.search.executors.ray_task import meeting_point
from archlab.search.executors.shipping import examine, ours
from archlab.search.trial.outcome_files import read_attempt

_STRATEGIES = "ray.util.scheduling_strategies"
_EXAMINED_S = 120.0  # our code is sent to every machine first


def of_all(options: dict[str, Any], processes: int) -> dict[str, Any]:
    """The options of a task that has so many processes of a trial run."""
    counted = ("num_cpus", "num_gpus", "memory")
    return {name: value * processes if name in counted else value for name, value in options.items()}


def launch_gang(
    ray: Any, attempt: Any, job: dict[str, Any], options: dict[str, Any], world: int
) -> tuple[Any, dict[Any, int]]:
    """A placement group with a bundle for each rank, on as few machines as can be, and the task in each of them.

    The group waits until all of its bundles are free at once, and holds none until then.
    """
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    bundle = {names[name]: value for name, value in options.items() if name in names and value}
    group = ray.util.placement_group([bundle] * world, strategy="PACK")

    def at(rank: int) -> Any:
        return importlib.import_module(_STRATEGIES).PlacementGroupSchedulingStrategy(group, rank)

    meeting = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=at(0))(meeting_point).remote()
    tasks = {
        attempt.options(**options, scheduling_strategy=at(rank)).remote(job, "", meeting, rank): rank
        for rank in range(world)
    }
    return group, tasks


def blame_machines(ray: Any, answer: dict[str, Any], folder: Path, attempt: int, group: Any) -> dict[str, Any]:
    """The answer of an attempt; a failure is no trial's fault where a machine that it was on is gone, or the driver's
    own one, with which Ray ends the workers of all. The ranks of a `group` fail in more ways when one is gone."""
    if answer.get("failure") not in ("crash", *(() if group is None else ("user", "infra"))):
        return answer
    on = trains_on(folder, attempt) if group is None else placed_on(ray, group)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return {**answer, "failure": "node"} if {*on, ray.get_runtime_context().get_node_id()} - alive else answer


def dead_machines(ray: Any) -> dict[str, str]:
    """The address of each machine that has left the cluster, by Ray's number for it."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"]}


def placed_on(ray: Any, group: Any) -> set[str]:
    """The machines of a placement group, by Ray's numbers."""
    return set(ray.util.placement_group_table(group).get("bundles_to_node_id", {}).values())


def trains_on(folder: Path, attempt: int) -> set[str]:
    """The machine that an attempt said it was on when it began; none before that, while it waits for an earlier one."""
    said = read_attempt(folder)
    return {said["node"]} if said.get("attempt") == attempt and "node" in said else set()


def check_machines(ray: Any, store: Path) -> None:
    """Asks every machine of a cluster whether it has what trials need. Raises ExecutorError naming those that lack it.

    Asking sends our code to them, so that the first trials find it there.
    """
    token = store / f".seen-{secrets.token_hex(8)}"
    there = str(store) if store.is_dir() else ""  # `archlab plan` makes none
    if there:
        token.touch(mode=0o600)
    try:
        near = importlib.import_module(_STRATEGIES).NodeAffinitySchedulingStrategy
        nodes = [node for node in ray.nodes() if node["Alive"]]
        asked = [
            ray.remote(num_cpus=0, scheduling_strategy=near(node["NodeID"], soft=False))(examine).remote(
                ours(), there, token.name
            )
            for node in nodes
        ]
        wrong = [found for found in ray.get(asked, timeout=_EXAMINED_S) if found]
    finally:
        token.unlink(missing_ok=True)
    if wrong:
        raise ExecutorError("; ".join(wrong))
