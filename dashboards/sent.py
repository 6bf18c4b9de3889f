"""What a browser can send as the value of a component's property: a callback gets no other kind of value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import flask

Check = Callable[[Any], bool]


def sent_json() -> Any:
    """What the body of a request holds; None for one that is no JSON."""
    try:
        return flask.request.get_json(silent=True)
    except (RecursionError, ValueError):  # nested so deeply, or a number so long, that no page of ours has sent it
        return None


def is_sendable(component: str, name: str, value: Any) -> bool:
    """Whether a page of ours may send that value of the property `name` of a component, by its id."""
    check = _OWN.get(component) or _PROPERTIES.get(name)
    if check is None and name == "data":
        check = next((check for end, check in _STORES.items() if component.endswith(end)), None)
    return check is None or check(value)


def is_name(key: str, value: Any) -> bool:
    """Whether a component of ours may have that value at a `key` of its id, where several share a pattern."""
    return isinstance(value, str) and (key not in _NAMES or _NAMES[key].fullmatch(value) is not None)


def _word(value: Any) -> bool:
    return isinstance(value, str)


def _text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _text_or_texts(value: Any) -> bool:
    return _text(value) or _texts(value)


def _count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _path(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"/[^\x00-\x1f\x7f]*", value) is not None


def _pair(value: Any) -> bool:
    """The name of a study, and the version of it that is on the page."""
    return _texts(value) and len(value) == 2


def _triple(value: Any) -> bool:
    return _texts(value) and len(value) == 3


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _ids(value: Any) -> bool:
    """The id of one of several components that share a pattern."""
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _clicked(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and isinstance(value.get("value"), str))


def _rows(value: Any) -> bool:
    """Rows that are ticked, each with its id, or `{ids: [...]}`."""
    if isinstance(value, dict):
        return _texts(value.get("ids", []))
    ids = [each.get("id") if isinstance(each, dict) else None for each in value] if isinstance(value, list) else []
    return value is None or (isinstance(value, list) and _texts(ids))


def _pinned_and_hidden(value: Any) -> bool:
    return isinstance(value, dict) and _texts(value.get("pin")) and _texts(value.get("hide"))


def _event(value: Any) -> bool:
    """What was changed of a figure's lines, and of which of them."""
    return value is None or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


_PROPERTIES: dict[str, Check] = {
    "n_clicks": _count, "n_intervals": _count, "value": _text, "pathname": _path, "search": _text, "id": _ids,
    "selectedRows": _rows, "cellRendererData": _clicked, "restyleData": _event,
}  # fmt: skip
_STORES: dict[str, Check] = {
    "-seen": _pair, "-zoom": _mapping, "-query": _text, "-sort": _text, "-study": _word, "-shown": _word,
    "-version": _text, "-writer": _word, "-before": _mapping, "-open": _texts, "-set": _pinned_and_hidden,
}  # fmt: skip
"""By the end of the id of a `dcc.Store`."""
_OWN: dict[str, Check] = {
    "across-studies": _texts, "compare-variants": _texts, "ablation-cols": _texts, "run-seen": _triple,
    '{"note":["MATCH"],"part":"tags"}': _text_or_texts,
}  # fmt: skip
"""Lists to choose several of, and what differs from its kind."""
_NAMES = {"action": re.compile("stop|stop at once|go on|retry"), "note": re.compile("(study|trial) [^ ]+")}
"""What may stand for a pattern in an id, by its key."""
