"""What calls itself a callback of these pages: whether it is one, with ids and values that such a page can send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import dash

from archlab.dashboards.sent import is_name, is_sendable

PATH = "/_dash-update-component"
_SEVERAL = ("ALL", "ALLSMALLER")


def is_callback(app: dash.Dash, asked: Any) -> bool:
    """Whether it is a callback of a page of ours, with all of its parts, and values that such a page can send."""
    if not isinstance(asked, dict) or not isinstance(asked.get("output"), str):
        return False
    known = app.callback_map.get(asked["output"])
    if known is None or "callback" not in known:  # the latter: one that runs in the browser
        return False
    several = isinstance(known["output"], list | tuple)
    outputs = known["output"] if several else [known["output"]]
    given = asked.get("outputs") if several else [asked.get("outputs")]
    own = [{"id": each.component_id_str(), "property": each.component_property} for each in outputs]
    sent = [(asked.get(name, []), known[name]) for name in ("inputs", "state")]
    parts = [(given, own), *sent]
    return (
        all(isinstance(told, list) and len(told) == len(named) for told, named in parts)
        and all(_is_part(each, of) for told, named in parts for each, of in zip(told, named, strict=True))
        and _agree([pair for told, named in parts for pair in zip(told, named, strict=True)])
        and all(_is_sendable(each, of) for told, named in sent for each, of in zip(told, named, strict=True))
        and _are_of(asked.get("changedPropIds"), sent[0][0])
    )


def _is_part(told: Any, of: dict[str, str]) -> bool:
    """Whether that names a component's property; of a pattern of ids one that it fits, or a list of them."""
    if not of["id"].startswith("{"):
        return isinstance(told, dict) and told.get("id") == of["id"] and _plain(told.get("property")) == of["property"]
    pattern = json.loads(of["id"])
    if any(wanted in ([each] for each in _SEVERAL) for wanted in pattern.values()):
        return isinstance(told, list) and all(_fits(each, pattern, of["property"]) for each in told)
    return _fits(told, pattern, of["property"])


def _fits(told: Any, pattern: dict[str, Any], name: str) -> bool:
    """Whether that is the property `name` of a component whose id a pattern is for."""
    own = told.get("id") if isinstance(told, dict) else None
    if not isinstance(own, dict) or own.keys() != pattern.keys() or _plain(told.get("property")) != name:
        return False
    return all(
        is_name(key, own[key]) if isinstance(wanted, list) else own[key] == wanted for key, wanted in pattern.items()
    )


def _agree(pairs: list[tuple[Any, dict[str, str]]]) -> bool:
    """Whether what stands for MATCH is the same in every part."""
    found: dict[str, set[str]] = {}
    for told, of in pairs:
        pattern = json.loads(of["id"]) if of["id"].startswith("{") else {}
        for key in (key for key, wanted in pattern.items() if wanted == ["MATCH"]):
            found.setdefault(key, set()).update(each["id"][key] for each in _singly([told]))
    return all(len(names) == 1 for names in found.values())


def _are_of(changed: Any, inputs: list[Any]) -> bool:
    """Whether what is said to have changed are some of the inputs."""
    if not isinstance(changed, list) or not all(isinstance(each, str) for each in changed):
        return False
    known = [(each.get("id"), _plain(each.get("property"))) for each in _singly(inputs)]
    return all((_id_of(name), _plain(prop)) in known for name, _, prop in (each.rpartition(".") for each in changed))


def _id_of(name: str) -> Any:
    """The id that a text stands for: that of a pattern is JSON."""
    if not name.startswith("{"):
        return name
    try:
        return json.loads(name)
    except (ValueError, RecursionError):
        return None


def _singly(parts: list[Any]) -> Iterator[dict[str, Any]]:
    """Each part by itself."""
    for part in parts:
        yield from part if isinstance(part, list) else [part]


def _is_sendable(told: Any, of: dict[str, str]) -> bool:
    """Whether its value, or that of each that fits a pattern, is one that a page can send."""
    each = told if isinstance(told, list) else [told]
    return all(is_sendable(of["id"], of["property"], one.get("value")) for one in each)


def _plain(name: Any) -> str:
    """A property without the hash that it has where several callbacks set it."""
    return str(name).partition("@")[0]
