"""The tiles of the attention kernels for a card: of those that keep their values in registers, the largest."""

from typing import Any

from archlab.kernels import interpret, launch

LIST = 64  # positions in a block of the lists of patterns that have them; tiles divide it
Tile = tuple[int, int, int, int]  # QUERIES, KEYS, num_warps, num_stages


def widest(capability: int, bits: int) -> int:
    """The widest heads that are served. On sm_90 a product has 64 rows or more: the gradients of 64 keys and values of
    256 columns alone take half of the registers. Of tiles of 64 by 16 to 64 with 8 or 16 warps only the forward
    pass keeps its values in them; the others spill 80 to 712 bytes a thread."""
    return 128 if capability >= 90 and bits < 32 else 256


def tile(
    kind: str, width: int, value_width: int, bits: int, listed: bool, learned: bool, crowded: int
) -> dict[str, Any]:
    """QUERIES, KEYS, num_warps and num_stages of a kernel (`forward`, `keys`, `queries`).

    `listed`: the pattern's blocks are lists of blocks of 64 positions. `learned`: sums by distance need tiles that are
    square. `crowded`: what is added to logits or hides pairs needs registers (1), a table of blocks more of them (2).
    """
    wide = max(width, value_width)
    key = {"D": wide, "bits": bits, "listed": listed, "learned": learned, "crowded": crowded}
    own = max(wide, 64)
    if interpret.small_tiles():
        queries, keys, warps, stages = 32, 32, 4, 1
    elif bits == 32:
        queries, keys, warps, stages = _FLOAT32[kind][own]
    else:
        queries, keys, warps, stages = _table()[kind][own][crowded]
    if listed:
        queries, keys = min(queries, LIST), min(keys, LIST)
    if learned:
        queries = keys = LIST if launch.generation() >= 90 and bits < 32 else min(queries, keys, 32)
    chosen = {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}
    return launch.tuned(f"attention_{kind}", key, chosen)


def _table() -> dict[str, dict[int, tuple[Tile, Tile, Tile]]]:
    capability = launch.capability()
    if launch.generation() >= 90:
        return _HOPPER if capability < 100 else _BLACKWELL
    return _OTHERS if capability < 120 else _RTX_50


# On sm_90 products of 64 rows or more, as its tensor cores need; others have less shared memory.
_HOPPER: dict[str, dict[int, tuple[Tile, Tile, Tile]]] = {
    "forward": {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        128: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    },
    "keys": {
        64: ((32, 128, 8, 2), (32, 128, 8, 2), (16, 64, 8, 1)),
        128: ((32, 128, 8, 2), (16, 64, 8, 1), (16, 64, 8, 1)),
    },
    "queries": {
        64: ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        128: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
    },
}
_OTHERS: dict[str, dict[int, tuple[Tile, Tile, Tile]]] = {
    "forward": {
        64: ((64, 64, 8, 1), (64, 64, 8, 1), (64, 32, 8, 2)),
        128: ((64, 64, 8, 1), (64, 64, 8, 1), (64, 32, 8, 2)),
        256: ((64, 32, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1)),
    },
    "keys": {
        64: ((32, 64, 8, 1), (32, 64, 8, 1), (32, 32, 8, 2)),
        128: ((32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
        256: ((32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    },
    "queries": {
        64: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        128: ((64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2)),
        256: ((64, 32, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1)),
    },
}
# What spills on sm_100 with the tiles of sm_90, and on sm_120 with those of sm_89.
_BLACKWELL = _HOPPER | {
    "keys": {
        64: ((32, 128, 8, 2), (32, 128, 8, 1), (32, 64, 8, 1)),
        128: ((32, 128, 8, 1), (32, 64, 8, 1), (32, 64, 8, 1)),
    }
}
_RTX_50 = _OTHERS | {"forward": _OTHERS["forward"] | {256: ((64, 16, 8, 1), (64, 16, 8, 1), (64, 16, 8, 1))}}
_FLOAT32: dict[str, dict[int, Tile]] = {
    "forward": {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "keys": {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "queries": {64: (32, 32, 8, 1), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)},
}
