"""Sends trials to Weights & Biases: a run per trial, grouped by study, its job type the variant, the table an artefact.

W&B sends in the background and says nothing of what arrived before a run is finished. So a trial's points are
remembered as sent when its run is, and what a kill left unfinished is sent again, to the same run and steps.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.store.addresses import WANDB
from archlab.search.trackers.acknowledged import Shipped, Spool, news_of, pending_of, unsent_of
from archlab.search.trackers.run_facts import facts_of, final_metrics, measured_points, run_name, state_tags
from archlab.search.trackers.tracked import Tracked, new_lines, values_of

if TYPE_CHECKING:
    from wandb import Run

INIT_S = 30.0  # until a server has answered
_EXITS = {"complete": 0, "diverged": 0, "pruned": 0, "failed": 1}
_KILLED = 255  # W&B's code for a run that somebody stopped
_SILENT: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_code": True,
    "disable_git": True,  # the fingerprint has the commit
    "x_disable_stats": True,  # of this process, which trains nothing
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "init_timeout": INIT_S,
}


class NoLogin(Exception):
    """W&B has no key for its server."""


class WandbSink:
    """One study's way to the project that ARCHLAB_WANDB names: `project` or `entity/project`.

    W&B's own variables hold: WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE=offline, which keeps files for `wandb sync`.
    """

    name = "Weights & Biases"

    def __init__(self, store_root: Path, study: str, spool: Spool, record: dict[str, Any]) -> None:
        self._root, self._study, self._spool, self._record = store_root, study, spool, record
        self._entity, _, self._project = os.environ[WANDB].strip().rpartition("/")
        where = (os.environ.get("WANDB_BASE_URL", ""), self._entity, self._project, _offline())
        self._target = "wandb:" + hashlib.sha256(repr(where).encode()).hexdigest()[:16]
        self._runs: dict[str, Run] = {}  # that are open
        self._sent: dict[str, Shipped] = {}  # to these, not acknowledged

    def pending(self, trials: Sequence[Tracked]) -> int:
        """How many points and news of states are in no finished run yet."""
        return pending_of(unsent_of(trials, self._spool.all(self._target, self._study)))

    def ship(self, trials: Sequence[Tracked]) -> None:
        """Sends what is new. Raises what W&B raises; the next call goes on from what was acknowledged."""
        for trial, shipped in unsent_of(trials, self._spool.all(self._target, self._study) | self._sent):
            try:
                self._ship(trial, shipped)
            except Exception:
                self._sent.pop(trial.key, None)
                if (run := self._runs.pop(trial.key, None)) is not None:
                    run.finish(exit_code=_KILLED)
                raise

    def _ship(self, trial: Tracked, shipped: Shipped) -> None:
        """Points, then the state. A run whose trial doesn't train any more is finished, and so acknowledged."""
        run = self._runs.get(trial.key) or self._open(trial)
        position = shipped.position
        for line in new_lines(trial.metrics, position):
            run.log({"step": line.record["step"], "_timestamp": line.record["time"], **values_of(line.record)})
            position = line.position
        sent = Shipped(run.id, position, news_of(trial))
        if shipped.told != sent.told:
            final, step = final_metrics(trial)
            for name, value, when, at in measured_points(trial, step):
                run.log({"step": at, "_timestamp": when, name: value})
            run.summary.update({**final, **state_tags(trial)})
        self._sent[trial.key] = sent
        if trial.state != "running":
            self._runs.pop(trial.key).finish(exit_code=_EXITS.get(trial.state, _KILLED))
            self._spool.put(self._target, self._study, trial.key, self._sent.pop(trial.key))

    def _open(self, trial: Tracked) -> Run:
        """The trial's run. Its id is the trial's key and its study: a trial of two studies is a run of each."""
        facts = {**facts_of(trial, self._record), "key": trial.key, "data": trial.trial.data}
        tags = [*trial.roles, *(["reused"] if trial.reused else [])]
        identity = f"{trial.key[:32]}-{hashlib.sha256(self._study.encode()).hexdigest()[:6]}"
        run = self._start(
            identity, run_name(trial), trial.variant, config=facts | {"model": trial.trial.model}, tags=tags
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        self._runs[trial.key] = run
        return run

    def _start(self, identity: str, name: str, job_type: str, **more: Any) -> Run:
        """Makes or resumes a run. Raises NoLogin, and what W&B raises where no server answers."""
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        if not _offline() and not wandb.login(prompt=False):
            raise NoLogin("it has no key: set WANDB_API_KEY or call `wandb login`; WANDB_MODE=offline keeps files")
        return wandb.init(
            entity=self._entity or None,
            project=self._project,
            group=self._study,
            id=identity,
            name=name,
            job_type=job_type[:64],
            dir=os.environ.get("WANDB_DIR") or self._root,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**_SILENT),
            **more,
        )

    def table(self, texts: Mapping[str, str]) -> None:
        """Sends the study's table, Markdown and CSV, as a version of an artefact where it is another than before."""
        told = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
        if self._spool.all(self._target, self._study).get("", Shipped()).told == told:
            return
        identity = hashlib.sha256(self._study.encode()).hexdigest()[:24]
        run = self._start(f"table-{identity}", f"table of {self._study}", "table")
        from wandb import Artifact

        artifact = Artifact(f"{self._study}-table", type="table", description=self._record.get("question") or None)
        with tempfile.TemporaryDirectory() as folder:
            for form, text in texts.items():
                file = Path(folder) / f"table.{form}"
                file.write_text(text)
                artifact.add_file(str(file))
            run.log_artifact(artifact)
            run.finish()
        self._spool.put(self._target, self._study, "", Shipped(run.id, told=told))


def _offline() -> bool:
    return os.environ.get("WANDB_MODE", "").lower() in ("offline", "dryrun")
