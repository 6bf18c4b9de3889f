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


def pruned_bounds(
    q: Tensor, k: Tensor, biases: Any, scale: float, prune: float, queries: int, keys: int, by_key: bool
) -> Tensor:
    """The same by head `[B, H, tiles, 2]`: keys whose weights sum to less than `prune` for every query of a tile are
    out of its reach (arXiv:2504.06949, section 3.2).

    With |q k| <= U a key has at most the weight exp(2 U + c_i - c_j), as a query's own key is among those that it
    sees. Logarithms are in base 2. A cap on the logits bounds U; a relative bias adds the most that it can.
    """
    (batch, heads, length, _), total = q.shape, k.shape[2]
    largest = q.float().norm(dim=-1).amax(-1) * k.float().norm(dim=-1).amax(-1).repeat_interleave(
        heads // k.shape[1], 1
    )
    most = abs(scale) * largest
    if biases.softcap is not None:
        most = most.clamp(max=biases.softcap)
    least = 2 * most
    if biases.relative is not None:
        least = least + biases.relative.amax(-1) - biases.relative[:, total - 1]
    threshold = torch.tensor(prune / total, device=q.device).log2() - least
    c = biases.decay.expand(batch, heads, total)
    highest = _last(c[..., total - length :], queries, torch.amax, -torch.inf)
    lowest = _last(c, keys, torch.amin, torch.inf)
    reach = highest[..., :, None] - lowest[..., None, :] >= threshold[..., None, None]
    if not by_key:
        return _stretch(reach, keys)
    return _stretch(reach.transpose(-1, -2), queries) + torch.tensor([total - length, total - length], device=q.device)


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
