"""reduce: out[i] = max or min of weight[perm[k], h] * x[idx[k]] over the edges k of row i.

Shapes    x [S, H*C]  out [N, H*C]  weight [E, H] or None  partial, partial_arg [T, H*C]
          arg int32 [N, H*C]  tied uint8 [N]  (both None: inference)
Mapping   features in blocks that stay in registers over all edges of a row
Traffic   as spmm; arg costs one more write of N*H*C words
Numerics  NaN propagates as in amax; a row without edges gives 0

``arg`` is the place in the row of the first edge that attains the result, or its complement where
a gradient needs more than that: several edges attain it, it is zero, or (then with bit 30 of the
place set) some value of the row at that feature is not finite. ``tied`` tells whether the row
has any complement.

Values that are not finite are found by adding 0 * v to a sum, which is NaN from the first one on:
one instruction per register. Such features, which are rare, are then recomputed one by one.
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.gather import AHEAD, weighted, weighted_block
from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, device, items_of, phase_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import (
    any_lane,
    as_good,
    better,
    bits_of,
    complement,
    either,
    eq,
    fma,
    int_ne,
    lanes,
    load,
    prefetch,
    select,
    splat,
    splat_int,
    store,
    tail,
    unordered,
    zeros,
)

INF = float("inf")
SPECIAL = 1 << 30  # in a complemented arg: the row has a value that is not finite at this feature


@device
def _beats(v, best, minimum):
    """Whether the number v replaces best; NaN beats all, and the first NaN stays."""
    return best == best and (better(v, best, minimum) or v != v)


@device
def _mend(
    odd, to, at, to_arg, origin, begin, end, f, h, minimum, x, idx, weight, perm, last, width, heads
):
    """Recomputes the features f + lane, for the bits of odd: there, some value is not finite."""
    for lane in range(64):
        if (odd >> lane) & 1:
            best, first, c = to[0], begin, f + lane
            for k in range(begin, end):
                v = weighted(x[idx[k] * width + c], k, h, weight, perm, heads)
                if k == begin or _beats(v, best, minimum):
                    best, first = v, k
            to[at + c] = best
            if to_arg is not None:
                to_arg[at + c] = ~((first - origin) | SPECIAL)


@device
def _span(
    zero,
    mask,
    to,
    at,
    to_arg,
    origin,
    begin,
    end,
    f,
    stop,
    h,
    minimum,
    x,
    idx,
    weight,
    perm,
    last,
    width,
    heads,
):
    """Reduces the features [f, ...) by whole blocks.

    Returns where it stopped, and whether any arg is complemented.
    """
    worst = splat(zero, -INF if minimum is None else INF)
    tied = False
    while f + lanes(zero) <= stop:
        best, special, first = worst, zero, splat_int(zero, 0)
        final = first  # the last edge that attains the result; another than the first in a tie
        for k in range(begin, end):
            prefetch(x, idx[min(k + AHEAD, last)] * width + f, zero)
            v = load(x, idx[k] * width + f, zero, mask)
            v = weighted_block(v, k, h, weight, perm, heads)
            ahead = better(v, best, minimum)
            if to_arg is not None:
                place = splat_int(zero, k - origin)
                final = select(as_good(v, best, minimum), place, final)
                first = select(ahead, place, first)
            best, special = select(ahead, v, best), fma(v, zero, special)
        store(to, at + f, best, mask)
        if to_arg is not None:
            more = either(int_ne(first, final), eq(best, zero))
            tied |= any_lane(more, mask)
            store(to_arg, at + f, select(more, complement(first), first), mask)
        odd = bits_of(unordered(special, special))  # never of lanes off the mask: these hold 0
        if odd:
            _mend(
                odd,
                to,
                at,
                to_arg,
                origin,
                begin,
                end,
                f,
                h,
                minimum,
                x,
                idx,
                weight,
                perm,
                last,
                width,
                heads,
            )
            tied = True
        f += lanes(zero)
    return f, tied


@device
def _row(to, at, to_arg, origin, begin, end, x, width, heads, minimum, edges):
    """Reduces the edges [begin, end) to to[at:]; returns whether any arg is complemented."""
    channels, tied = width // heads, False
    zero = zeros(x, 32)
    for h in range(heads):
        f, stop = h * channels, (h + 1) * channels
        f, more = _span(
            zeros(x, 64), None, to, at, to_arg, origin, begin, end, f, stop, h, minimum, *edges
        )
        tied |= more
        while f < stop:
            mask, to_f = tail(zero, stop - f), f + lanes(zero)
            f, more = _span(
                zero, mask, to, at, to_arg, origin, begin, end, f, to_f, h, minimum, *edges
            )
            tied |= more
    return tied


@device
def _merge(t, count, rowptr, tiles, out, arg, tied, partial, partial_arg, width, minimum):
    """Merges the tiles of a row, of which t is the first."""
    row, any_more = tiles[4 * t], False
    stop = t + 1
    while stop < count and tiles[4 * stop] == row:
        stop += 1
    for f in range(width):
        best, first, more, special = partial[t * width + f], t, False, False
        for part in range(t + 1, stop):
            v = partial[part * width + f]
            more |= v == best
            if _beats(v, best, minimum):
                best, first, more = v, part, False
        out[row * width + f] = best
        if arg is not None:
            for part in range(t, stop):
                special |= partial_arg[part * width + f] < -SPECIAL
            place = partial_arg[first * width + f]
            more |= place < 0
            if more or special or best == 0:
                place = max(place, ~place) & (SPECIAL - 1)
                place = ~(place | SPECIAL) if special else ~place
                any_more = True
            arg[row * width + f] = place
    if tied is not None:
        tied[row] = any_more


@device
def _note(tied, row, any_more):
    if tied is not None:
        tied[row] = any_more


@device
def _empty(row, out, arg, tied, width):
    for f in range(row * width, (row + 1) * width):
        out[f] = 0
        if arg is not None:
            arg[f] = 0
    if tied is not None:
        tied[row] = 0


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, tiles, out, arg, tied, x, weight, partial, partial_arg = values[:11]
    minimum, rows, count, split, width, heads = values[11:]
    items, phase = items_of(args), phase_of(args)
    edges = (x, idx, weight, perm, rowptr[rows] - 1, width, heads)
    item = take(args)
    while item >= 0:
        if phase == 1:
            for t in range(item * count // items, (item + 1) * count // items):
                if t == 0 or tiles[4 * (t - 1)] != tiles[4 * t]:
                    _merge(
                        t,
                        count,
                        rowptr,
                        tiles,
                        out,
                        arg,
                        tied,
                        partial,
                        partial_arg,
                        width,
                        minimum,
                    )
        else:
            in_tile = item < count
            first, stop = rows_of(item, items, rowptr, rows, tiles, count)
            to, to_arg = (partial, partial_arg) if in_tile else (out, arg)
            for row in range(first, stop):
                origin = begin = rowptr[row]
                end, at = rowptr[row + 1], row * width
                if in_tile:
                    begin, end, at = tiles[4 * item + 1], tiles[4 * item + 2], item * width
                elif end - begin > split:
                    continue
                more = _row(to, at, to_arg, origin, begin, end, x, width, heads, minimum, edges)
                if begin == end:
                    _empty(row, out, arg, tied, width)
                elif not in_tile:
                    _note(tied, row, more)
        item = take(args)


def reduce(csr, out, arg, tied, x, weight, partial, partial_arg, is_max, _ties=None):
    """Reduces each row's messages to ``out``, and tells in ``arg`` where the results come from."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = out.shape
    if weight is None:
        perm = None
    if arg is None:
        partial_arg = None
    heads = 1 if weight is None else weight.shape[1]
    tensors = (rowptr, idx, perm, tiles, out, arg, tied, x, weight, partial, partial_arg)
    fields = (*(dtype(t) for t in tensors), None if is_max else INTEGER, *(INTEGER,) * 5)
    values = (*(address(t) for t in tensors), 0, rows, tiles.shape[0], split, width, heads)
    if rows and width:
        work = (idx.shape[0] + rows) * width
        launch(_entry, fields, values, work, tiles.shape[0], phases=2)
    elif tied is not None:
        tied.zero_()
