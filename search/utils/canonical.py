"""One spelling of JSON, so that what is equal has one hash."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces, no NaN. Raises ValueError for a non-finite number."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
