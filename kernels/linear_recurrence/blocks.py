"""Triangular matrices over the tokens of a chunk, built by joining blocks of tokens to ever larger ones.

Both ops are opaque to torch.compile and have their gradients written out, as they work in place.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import differentiable


def decayed_products(queries: Tensor, keys: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of R queries, S keys and a log decay of each token, `[M,C,R,D]`, `[M,C,S,D]` and `[M,C,D]`: A `[R,S,M,C,C]`, and
    the queries and keys with their decays.

    With c the cumulative sums of `log_decay` <= 0, A_ij = sum over d of queries_id exp(c_id - c_jd) keys_jd for j <= i,
    else 0; the queries are multiplied with exp(c_i), the keys with exp(c_last - c_i).

    What a block reads of an earlier block is a product of matrices: the decay from j to i is that from j to the end of
    its block, times that from there to i. So no exponent is positive, and no decay is too strong.
    """
    products, reading, writing = _decayed(queries, keys, log_decay)
    return products, reading, writing


def solve_unit_lower(lower: Tensor, right: Tensor) -> Tensor:
    """u of (I + lower) u = right, for strictly lower triangular matrices `[M,C,C]` and right sides `[M,C,D]`."""
    solved: Tensor = _solve(lower, right)[0]
    return solved


@custom_op("decayed_products")
def _decayed(queries: Tensor, keys: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = log_decay.exp()
    reading, writing = queries * total[:, :, None], keys.clone(memory_format=torch.contiguous_format)
    own = (queries[:, :, :, None] * keys[:, :, None]).sum(-1)
    products = torch.diag_embed(own.permute(2, 3, 0, 1))
    for size, rows, read, seen, _, _ in _joins(reading, writing, total):
        across = read.flatten(1, 2) @ seen.flatten(1, 2).transpose(1, 2)
        _across(products, size, rows).copy_(across.view(*_blocks(read, seen, len(queries))))
    return products, reading, writing


def _of_products(queries: Tensor, keys: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (batch, size, reads, _), writes = queries.shape, keys.shape[2]
    return queries.new_empty(reads, writes, batch, size, size), torch.empty_like(queries), torch.empty_like(keys)


_decayed.register_fake(_of_products)


def _blocks(read: Tensor, seen: Tensor, batch: int) -> tuple[int, ...]:
    """What the rows and columns of products `[N,block*R,before*S]` stand for: `[M,n,block,R,before,S]`."""
    return batch, len(read) // batch, *read.shape[1:3], *seen.shape[1:3]


def _across(products: Tensor, size: int, rows: slice) -> Tensor:
    """`_corners` of all products `[R,S,M,C,C]`, as `[M,n,block,R,before,S]`."""
    corners: Tensor = _corners(products.flatten(0, 2), size, rows).unflatten(0, products.shape[:3])
    return corners.permute(2, 3, 4, 0, 5, 1)


@custom_op("decayed_products_backward")
def _decayed_backward(
    dproducts: Tensor, dreading: Tensor, dwriting: Tensor, queries: Tensor, keys: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a log decay is the sum of all products that it is a factor of, each with its gradient.

    `dtotal` collects, from coarse to fine, the sums that belong to all tokens of a block, as what is read or written
    beyond it has them all as factors. There are no differences of sums, so that small gradients are exact as well.
    """
    decay = log_decay.exp()
    reading, writing = queries * decay[:, :, None], keys.clone(memory_format=torch.contiguous_format)
    joins = [
        (size, rows, read.clone(), seen.clone(), before, after)
        for size, rows, read, seen, before, after in _joins(reading, writing, decay)
    ]
    dqueries, dkeys = (x.clone(memory_format=torch.contiguous_format) for x in (dreading, dwriting))
    dtotal = torch.zeros_like(log_decay[:, :1])
    for size, rows, read, seen, before, after in reversed(joins):
        block, width = rows.stop - rows.start, queries.shape[-1]
        if rows.stop == size:  # the first join of its level that is met
            dtotal = dtotal.view(-1, 1, width).repeat(1, size // block, 1)
        dread, dseen = (
            x.view(-1, size, *x.shape[2:])[:, here] for x, here in ((dqueries, rows), (dkeys, slice(0, rows.start)))
        )
        dread *= before
        dseen *= after
        dtotal[:, : rows.start // block] += (read * dread).sum((1, 2))[:, None]
        dtotal[:, rows.start // block] += (seen * dseen).sum((1, 2))
        across = _across(dproducts, size, rows).reshape(len(read), read[0, :, :, 0].numel(), -1)
        dread += (across @ seen.flatten(1, 2)).view_as(read)
        dseen += (across.transpose(1, 2) @ read.flatten(1, 2)).view_as(seen)
    dqueries *= decay[:, :, None]
    dlog_decay = dtotal.view_as(log_decay) + (queries * dqueries).sum(2)
    own = dproducts.diagonal(dim1=3, dim2=4)[..., None]
    for i, row in enumerate(own):
        for j, each in enumerate(row):
            dqueries[:, :, i].addcmul_(each, keys[:, :, j])
            dkeys[:, :, j].addcmul_(each, queries[:, :, i])
    return dqueries, dkeys, dlog_decay


_decayed_backward.register_fake(lambda *given: tuple(map(torch.empty_like, given[3:])))
differentiable(_decayed, _decayed_backward, 3)


@custom_op("solve_unit_lower")
def _solve(lower: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The solution in the dtype of `right`, and the inverse of I + lower by which it was found."""
    inverse = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device).repeat(len(lower), 1, 1)
    for block, joined in _levels(lower.shape[1]):
        size = block * joined
        for start in range(block, size, block):
            rows, seen = slice(start, start + block), slice(0, start)
            here, there = (_diagonal(inverse, size)[:, :, x, x].flatten(0, 1) for x in (rows, seen))
            corner = _corners(inverse, size, rows)
            across = _corners(lower, size, rows).reshape(-1, block, start)
            corner.copy_(-(here @ across @ there).view_as(corner))
    inverse = inverse.to(right.dtype)
    return inverse @ right, inverse


_solve.register_fake(lambda lower, right: (torch.empty_like(right), torch.empty_like(lower, dtype=right.dtype)))


def _keep_solved(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output)
    ctx.dtype = inputs[0].dtype


def _solve_gradients(ctx: Any, dsolved: Tensor, dinverse: Tensor) -> tuple[Tensor, Tensor]:
    solved, inverse = ctx.saved_tensors
    dright = inverse.transpose(1, 2) @ dsolved
    return -(dright @ solved.transpose(1, 2)).tril(-1).to(ctx.dtype), dright


_solve.register_autograd(_solve_gradients, setup_context=_keep_solved)


def _levels(size: int) -> Iterator[tuple[int, int]]:
    """(block, how many of them are joined) from blocks of one token up to one of `size`."""
    block = 1
    while block < size:
        joined = next(n for n in (2, 3, 5, 7, size // block) if size // block % n == 0)
        yield block, joined
        block *= joined


def _joins(
    reading: Tensor, writing: Tensor, total: Tensor
) -> Iterator[tuple[int, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Multiplies `reading` with the decay from the start of the chunk and `writing` with that to its end, in place.

    Before each multiplication it tells what is read across the boundary before some `rows` of a block of `size` tokens
    that is being joined: those rows, decayed from the boundary, and what was written before them, decayed to it; and
    the factors that follow, the total decay before the rows and that of the rows.
    """
    width = reading.shape[-1]
    for block, joined in _levels(reading.shape[1]):
        read, written = (x.view(-1, joined, block, *x.shape[2:]) for x in (reading, writing))
        total = total.view(-1, joined, 1, 1, width)
        before = total[:, 0]
        for i in range(1, joined):
            seen = written[:, :i].flatten(1, 2)
            yield joined * block, slice(i * block, (i + 1) * block), read[:, i], seen, before, total[:, i]
            read[:, i] *= before
            seen *= total[:, i]
            before = before * total[:, i]
        total = before


def _diagonal(x: Tensor, size: int) -> Tensor:
    """The blocks `[M,C/size,size,size]` on the diagonals of matrices `[M,C,C]`, a view."""
    count = x.shape[-1] // size
    return x.reshape(-1, count, size, count, size).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _corners(x: Tensor, size: int, rows: slice) -> Tensor:
    """What these rows of each block on the diagonal have left of their own block, a view."""
    return _diagonal(x, size)[:, :, rows, : rows.start]
