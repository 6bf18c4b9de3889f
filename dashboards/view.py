"""What a reader chose to see, as the query of the address: the same address gives the same picture on any machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from urllib.parse import urlencode

METRICS = {
    "validation": ("validation_loss", "Validation", "Validation loss (nats/token)"),
    "training": ("loss", "Training", "Training loss (nats/token)"),
    "gradient": ("grad_norm", "Gradient norm", "Gradient norm"),
    "rate": ("lr", "Learning rate", "Learning rate"),
    "speed": ("tokens_per_s", "Speed", "Training speed (tokens/s)"),
}
"""Key in the address: (field of metrics.jsonl, name of the control, title of the axis)."""

X_AXES = {
    "tokens": ("Tokens", "Training tokens"),
    "flops": ("FLOPs", "Training FLOPs (three times the forward pass)"),
    "time": ("Time", "Training time (minutes)"),
    "steps": ("Steps", "Optimizer steps"),
}
SMOOTHING = {"0": "none", "0.5": "0.5", "0.9": "0.9", "0.98": "0.98"}
TRIALS = {"reported": "Final seeds", "tuning": "Rates", "all": "All"}
LINES = {"mean": "Means", "runs": "Trials"}
SCALES = {"linear": "Linear", "y": "Log y", "xy": "Log both"}
VARIANT = "variant"
CHOICES: dict[str, Mapping[str, object]] = {
    "metric": METRICS,
    "x": X_AXES,
    "smooth": SMOOTHING,
    "trials": TRIALS,
    "lines": LINES,
    "scale": SCALES,
}


@dataclass(frozen=True)
class View:
    """The controls of the curves; every field is a key of the address. `by` is what trials share whose mean is drawn:
    their variant, or the level of a component, axis or rung."""

    metric: str = "validation"
    x: str = "tokens"
    smooth: str = "0"
    trials: str = "reported"
    lines: str = "mean"
    scale: str = "linear"
    by: str = VARIANT

    @property
    def alone(self) -> bool:
        """Whether each trial is a line of its own, without means."""
        return self.lines == "runs" or self.trials != "reported"

    def said(self) -> dict[str, str]:
        """What is not at its default, by its key in the address."""
        return {key: value for key, value in asdict(self).items() if value != getattr(View(), key)}

    def query(self) -> str:
        """`?metric=training`, without what is at its default; empty where all is."""
        return f"?{urlencode(self.said())}" if self.said() else ""


def read_view(query: Mapping[str, object], keys: Collection[str] = tuple(CHOICES)) -> tuple[View, list[str]]:
    """The view that an address asks for with these keys, and a notice for each value that doesn't exist; others are
    ignored."""
    chosen, notices = {}, []
    for field in (each for each in fields(View) if each.name in keys):
        value = str(query.get(field.name, field.default))
        if value in CHOICES[field.name]:
            chosen[field.name] = value
        else:
            known = ", ".join(CHOICES[field.name])
            said = f"The address asks for {field.name} {value[:40]!r}, which does not exist (there is: {known})."
            notices.append(said)
    return View(**chosen), notices
