"""The real trainer, with a checkpoint after every step, which leaves a line per step that it has really trained.

STORM_STEP_S is what a step takes longer than it has to.
"""

import os
import time

from archlab.search.recipe.steps import total_steps
from archlab.search.training.train import Interrupted
from archlab.search.training.train import train as really_train
from archlab.search.trial.checkpoint import steps_in

__all__ = ["Interrupted", "train"]


def train(folder, data_root, attempt, should_stop, **options):
    """See archlab.search.training.train."""
    done, total = max(steps_in(folder), default=0), total_steps(folder)
    log = os.open(data_root.parent / "steps.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    slow_s = float(os.environ.get("STORM_STEP_S", "0"))

    def note(what, step):
        os.write(log, f"{folder.name} {attempt} {what} {step} {time.time()}\n".encode())

    def counted():
        nonlocal done
        done += 1
        time.sleep(slow_s)
        if done <= total:  # it is asked after every step, and again while evaluating
            note("step", done)
        return should_stop()

    note("start", done)
    try:
        return really_train(folder, data_root, attempt, counted, checkpoint_s=0.0, **options)
    finally:
        os.close(log)


if __name__ == "__main__":
    from archlab.cli.main import main
    from archlab.search.running import run

    run.ENTRY = "tests.search.storm_trainer:train"
    main()
