"""Decoding: what a node holds of the tokens that were read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl.parts.context import Call


def recent(call: Call, path: str, new: Tensor, most: int | None = None, what: str = "", first: int = 0) -> Tensor:
    """`new` `[batch, time, …]` after what decoding holds of `what` under `path`, or `new` alone outside decoding.

    The last `most` entries of both (by default all) are then held for the next call, or the `first` ones of all that
    was read and the last `most - first`. The two are joined here so that
    outside decoding nothing depends on the path: layers that are alike are compiled once.
    """
    if call.held is None:
        return new
    path += what
    whole = torch.cat([call.held[path], new], 1) if path in call.held else new
    if most is None or whole.shape[1] <= most:
        call.held[path] = whole
    elif first:
        call.held[path] = torch.cat([whole[:, :first], whole[:, first - most :]], 1)
    else:
        call.held[path] = whole[:, -most:].clone()
    return whole


def padding_of_keys(
    call: Call, path: str, own: Tensor, keys: int, most: int | None = None, first: int = 0
) -> Tensor | None:
    """Which of all `keys` `[batch, keys]` nothing may read, held under `path` while decoding; None where none is.

    `own` `[batch, time, …]` are the queries of this call, and `most` is how many keys are held, `first` of them the
    first ones: then it is held from the first call on, as what is missing may stand anywhere.
    """
    if call.held is None or (call.padding is None and f"{path}.padding" not in call.held and not first):
        return call.padding
    new = own.new_zeros(own.shape[:2], dtype=torch.bool) if call.padding is None else call.padding
    whole = recent(call, path, new, most, ".padding", first)
    return F.pad(whole, (keys - whole.shape[1], 0))


def opens_document(call: Call, path: str) -> Tensor:
    """Whether a token's document is another than that of the token before it `[batch, time]`, also where decoding read
    that one before; False for the very first."""
    assert call.documents is not None
    time = call.documents.shape[1]
    whole = recent(call, path, call.documents, most=1, what=".documents")
    return F.pad(whole[:, 1:] != whole[:, :-1], (1, 0))[:, -time:]


def shifted(x: Tensor, call: Call, path: str, documents: bool = False, what: str = "") -> Tensor:
    """x_(t-1) for each x_t `[batch, time, width]`: zero before the first token, or what decoding holds of `what` under
    `path`; zero where x_(t-1) is padding, and before the first token of a document where `documents` are kept apart."""
    if call.padding is not None:
        x = x.masked_fill(call.padding[..., None], 0)
    before = F.pad(recent(call, path, x, most=1, what=what), (0, 0, 1, 0))[:, -x.shape[1] - 1 : -1]
    if documents and call.documents is not None:
        before = before.masked_fill(opens_document(call, path)[:, :, None], 0)
    return before
