"""Which positions the tiles of one call reach: the stretch of their documents, and where a forget gate has closed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def document_bounds(documents: Tensor, queries: int, keys: int, by_key: bool) -> Tensor:
    """For every tile of `queries` (`by_key`: of `keys`) positions the first and one after the last position of tiles
    of the other that may hold one of its documents `[B, T]`: `[B, tiles, 2]`."""
    own, other = (keys, queries) if by_key else (queries, keys)
    low, high = _extremes(documents, own)
    first, last = _extremes(documents, other)
    return _stretch((low[:, :, None] <= last[:, None]) & (first[:, None] <= high[:, :, None]), other)


def within_reach(reach: Tensor, decay: Tensor, queries: int, keys: int, by_key: bool) -> Tensor:
    """The same by head `[B, H, tiles, 2]` for pairs whose key's decay `[B, H, S]` is within the query's `reach`."""
    ahead = decay.shape[-1] - reach.shape[-1]
    furthest = _last(reach, queries, torch.amax, -torch.inf)
    lowest = _last(decay, keys, torch.amin, torch.inf)
    near = furthest[..., :, None] >= lowest[..., None, :]
    return _stretch(near.transpose(-1, -2), queries) + ahead if by_key else _stretch(near, keys)


def within_both(bounds: Tensor, others: Tensor) -> Tensor:
    """Where two stretches overlap."""
    low, high = torch.maximum(bounds[..., 0], others[..., 0]), torch.minimum(bounds[..., 1], others[..., 1])
    return torch.stack([low, high], -1)


def _last(c: Tensor, size: int, reduce: Any, rest: float) -> Tensor:
    found: Tensor = reduce(F.pad(c, (0, -c.shape[-1] % size), value=rest).unflatten(-1, (-1, size)), -1)
    return found


def _extremes(documents: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest number in each tile `[B, tiles]`."""
    tiles = F.pad(documents[:, None], (0, -documents.shape[-1] % size), mode="replicate")[:, 0].unflatten(
        -1, (-1, size)
    )
    return tiles.amin(-1), tiles.amax(-1)


def _stretch(reach: Tensor, size: int) -> Tensor:
    """From the first to the last of the tiles of `size` positions that are reached, in positions `[..., 2]`; the whole
    where none is, which no tile of queries with a key can be."""
    count = reach.shape[-1]
    place = torch.arange(count, device=reach.device)
    first = torch.where(reach, place, count).amin(-1)
    last = torch.where(reach, place, -1).amax(-1) + 1
    return torch.stack([first * size, last * size], -1)
