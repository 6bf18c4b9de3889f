"""The questions that a proposer may put, each with its arguments, and what checks these before anything is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.language.errors import shorten, unknown
from archlab.cli.referee_server.desk import Refused
from archlab.cli.referee_server.language import TOPICS

MOST_WAIT_S = 50.0  # many clients give up on an answer after a minute
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a text"),
    "number": ((int, float), "a number"),
    "integer": ((int,), "an integer"),
    "object": ((dict,), "a mapping"),
    "array": ((list,), "a list"),
}
_CHANGES = {
    "type": ["object", "array", "string"],
    "description": "A mapping from paths to values, a list of component names and such mappings, or either as YAML.",
}


@dataclass(frozen=True)
class Tool:
    """A question by its name; `arguments` are JSON schemas, `required` those that have no default. One that `reads`
    changes nothing, not even the queue."""

    name: str
    about: str
    arguments: dict[str, dict[str, Any]]
    required: tuple[str, ...] = ()
    reads: bool = True

    @property
    def schema(self) -> dict[str, Any]:
        """As a JSON Schema."""
        return {
            "type": "object",
            "properties": self.arguments,
            "required": [*self.required],
            "additionalProperties": False,
        }

    def checked(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments, all of them allowed. Raises Refused for what is not."""
        for name, value in given.items():
            if name not in self.arguments:
                raise Refused(unknown(name, f"argument of {self.name}", self.arguments))
            kinds = self.arguments[name]["type"]
            wanted = [_KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]
            if isinstance(value, bool) or not any(isinstance(value, types) for types, _ in wanted):
                words = " or ".join(word for _, word in wanted)
                raise Refused(f"{self.name}: '{name}' must be {words}, found {shorten(repr(value))}")
        if missing := [name for name in self.required if name not in given]:
            raise Refused(f"{self.name}: '{missing[0]}' is missing; it takes {', '.join(self.arguments)}")
        return given


_TEXT = {"type": "string"}
TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "describe_language",
            "What a patch may say. Topics: patch (how to write one), primitives [FAMILY], the name of a primitive, "
            "zoo [NAME], paths [START] (what can be changed in the champion, with its value), components.",
            {"topic": {**_TEXT, "description": f"{', '.join(TOPICS)}, or the name of a primitive."}},
            ("topic",),
        ),
        Tool(
            "check_patch",
            "Checks a patch without training: its differences to the champion, parameters, FLOPs per token, trials and "
            "core-seconds that it would take, whether it was tried. Free; do it before every challenge.",
            {"changes": _CHANGES},
            ("changes",),
        ),
        Tool(
            "challenge",
            "Holds a patch against the champion, with as many seeds as the verdict takes. Returns a ticket at once; "
            "state(wait_seconds, ticket) has the verdict. One runs at a time, the others wait. What was tried is not "
            "tried again. Costs part of the budget.",
            {
                "name": {**_TEXT, "description": "What tables call it: 1 to 80 characters, words and single spaces."},
                "changes": _CHANGES,
                "why": {**_TEXT, "description": "What you expect of it and why. The ledger keeps it."},
            },
            ("name", "changes", "why"),
            reads=False,
        ),
        Tool("ledger", "All that was tried: changes, verdict, difference, why. The champion.", {}),
        Tool(
            "state",
            "Who is champion, what runs and waits, how much of the budget is spent. With wait_seconds it answers when "
            "something has changed, or that time is over.",
            {
                "wait_seconds": {"type": "number", "description": f"0 (the default) to {MOST_WAIT_S:g}."},
                "ticket": {**_TEXT, "description": "Of a challenge: answers at once if it is over, with its verdict."},
            },
        ),
        Tool(
            "diagnostics",
            "Of one challenger of the ledger, by its number or name: validation losses by seed, curves, spikes, speed.",
            {"entry": {"type": ["integer", "string"]}},
            ("entry",),
        ),
        Tool(
            "stop",
            "Stops the challenge that runs; its trials write checkpoints. It and all that wait go on with the next "
            "challenge. With a ticket, takes that one out of the queue instead.",
            {"ticket": _TEXT},
            reads=False,
        ),
    )
}
