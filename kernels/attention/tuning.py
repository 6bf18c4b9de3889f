"""The tiles of the attention kernels for a card: of those that keep their values in registers, the largest."""

from typing import Any

from kernels import interpret, launch

LIST = 64  # tiles of patterns whose blocks are listed
Tile = tuple[int, int, int, int]  # QUERIES, KEYS, num_warps, num_stages


def tile(
    kind: str, width: int, value_width: int, bits: int, listed: bool, learned: bool, crowded: bool
) -> dict[str, Any]:
    """QUERIES, KEYS, num_warps and num_stages of a kernel (`forward`, `keys`, `queries`).

    `listed`: the pattern's blocks are lists of tiles of 64. `learned`: sums by distance need tiles that are square.
    `crowded`: what is added to logits needs registers.
    """
    wide = max(width, value_width)
    key = {"D": wide, "bits": bits, "listed": listed, "learned": learned, "crowded": crowded}
    found = (32, 32, 4, 1) if interpret.active() else _default(kind, max(wide, 64), bits, crowded)
    queries, keys, warps, stages = found
    if listed:
        queries = keys = LIST
    elif learned:
        queries = keys = min(queries, keys)
        if launch.capability() < 90:
            queries, keys, warps = 32, 32, 4
    chosen = {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}
    return launch.tuned(f"attention_{kind}", key, chosen)


def _default(kind: str, wide: int, bits: int, crowded: bool) -> Tile:
    """On sm_90 products of 64 rows or more where registers allow it, as its tensor cores need; others have less
    shared memory."""
    if bits == 32:
        return _FLOAT32[kind][wide]
    return (_HOPPER if launch.capability() >= 90 else _OTHERS)[kind, crowded and kind == "keys"][wide]


_HOPPER: dict[tuple[str, bool], dict[int, Tile]] = {
    ("forward", False): {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
    ("keys", False): {64: (32, 128, 8, 2), 128: (32, 128, 8, 2), 256: (32, 32, 8, 1)},
    ("keys", True): {64: (32, 128, 8, 2), 128: (16, 64, 8, 1), 256: (32, 32, 8, 1)},
    ("queries", False): {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
}
_OTHERS: dict[tuple[str, bool], dict[int, Tile]] = {
    ("forward", False): {64: (64, 64, 8, 1), 128: (64, 64, 8, 1), 256: (64, 32, 8, 1)},
    ("keys", False): {64: (32, 64, 8, 1), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
    ("keys", True): {64: (32, 64, 8, 1), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
    ("queries", False): {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)},
}
_FLOAT32: dict[str, dict[int, Tile]] = {
    "forward": {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "keys": {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "queries": {64: (32, 32, 8, 1), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)},
}
