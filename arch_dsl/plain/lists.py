"""A list of constructor calls as people write it: equal ones as a loop, others by what differs in them."""

from __future__ import annotations

import itertools


def listed(calls: list[str]) -> str:
    """A list of constructor calls, equal ones as a loop."""
    count = len(calls)
    if count > 1 and len(set(calls)) == 1:
        return f"{calls[0]} for _ in range({count})"
    heads = {call.partition("(")[0] for call in calls}
    arguments = [call.partition("(")[2].removesuffix(")") for call in calls]
    if len(heads) == 1 and count > 2 and all(item and "(" not in item for item in arguments):
        (head,) = heads
        if all("," not in item for item in arguments):
            return f"{head}(number) for number in ({', '.join(arguments)})"
        rows = ", ".join(f"({item})" for item in arguments)
        return f"{head}(*numbers) for numbers in ({rows})"
    if not any(arguments):
        for period in range(2, count // 2 + 1):
            if count % period == 0 and calls == calls[:period] * (count // period):
                kinds = ", ".join(call.removesuffix("()") for call in calls[:period])
                return f"kind() for kind in ({kinds}) * {count // period}"
        runs = [(key, len(list(group))) for key, group in itertools.groupby(calls)]
        if count > 2 and len(runs) < count:
            parts = [f"[{key.removesuffix('()')}]" + (f" * {number}" if number > 1 else "") for key, number in runs]
            return f"kind() for kind in {' + '.join(parts)}"
    return f"[{', '.join(calls)}]"
