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
from pyg_ioaware.engines.cpu.gather import ahead, value, values
from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, device, items_of, phase_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import (
    any_lane,
    bits_of,
    both,
    complement,
    either,
    eq,
    fma,
    ge,
    gt,
    int_ne,
    lanes,
    le,
    lt,
    select,
    splat,
    splat_int,
    store,
    tail,
    unordered,
    zeros,
)

SPECIAL = 1 << 30  # in a complemented arg: the row has a value that is not finite at this feature


@device
def _better(v, best, minimum):
    if minimum is None:
        return gt(v, best)
    return lt(v, best)


@device
def _as_good(v, best, minimum):
    if minimum is None:
        return ge(v, best)
    return le(v, best)


@device
def _worst(zero, minimum):
    return splat(zero, float("-inf") if minimum is None else float("inf"))


@device
def _beats(v, best, minimum):
    """Whether the number v replaces best; NaN beats all, and the first NaN stays."""
    if best != best:
        return False
    if minimum is None:
        return v > best or v != v
    return v < best or v != v


@device
def _careful(begin, end, f, h, minimum, edges):
    """Returns the result at one feature with NaN propagated, and the first edge attaining it."""
    best, first = value(begin, f, h, edges), begin
    for k in range(begin + 1, end):
        v = value(k, f, h, edges)
        if _beats(v, best, minimum):
            best, first = v, k
    return best, first


@device
def _mend(odd, to, at, to_arg, origin, begin, end, f, h, minimum, edges):
    """Recomputes the features of a block of which some value is not finite: the bits of odd."""
    for lane in range(64):
        if (odd >> lane) & 1:
            best, first = _careful(begin, end, f + lane, h, minimum, edges)
            to[at + f + lane] = best
            if to_arg is not None:
                to_arg[at + f + lane] = ~((first - origin) | SPECIAL)


@device
def _block(zero, mask, to, at, to_arg, origin, begin, end, f, h, minimum, edges):
    """Reduces one block of features of a row; returns whether any arg is complemented."""
    best, special, tied = _worst(zero, minimum), zero, False
    if to_arg is None:
        for k in range(begin, end):
            ahead(zero, k, f, edges)
            v = values(zero, mask, k, f, h, edges)
            best = select(_better(v, best, minimum), v, best)
            special = fma(v, zero, special)
        store(to, at + f, best, mask)
    else:
        first = splat_int(zero, 0)
        final = first  # the last edge that attains the result; another than the first in a tie
        for k in range(begin, end):
            ahead(zero, k, f, edges)
            v = values(zero, mask, k, f, h, edges)
            place = splat_int(zero, k - origin)
            better = _better(v, best, minimum)
            final = select(_as_good(v, best, minimum), place, final)
            first, best = select(better, place, first), select(better, v, best)
            special = fma(v, zero, special)
        more = either(int_ne(first, final), eq(best, zero))
        if mask is not None:
            more = both(more, mask)
        tied = any_lane(more)
        store(to, at + f, best, mask)
        store(to_arg, at + f, select(more, complement(first), first), mask)
    odd = unordered(special, special)
    if mask is not None:
        odd = both(odd, mask)
    if any_lane(odd):
        _mend(bits_of(odd), to, at, to_arg, origin, begin, end, f, h, minimum, edges)
        tied = True
    return tied


@device
def _span(zero, to, at, to_arg, origin, begin, end, f, stop, h, minimum, edges):
    """Reduces the features [f, ...) by whole blocks; returns where it stopped, and as _block."""
    tied = False
    while f + lanes(zero) <= stop:
        tied |= _block(zero, None, to, at, to_arg, origin, begin, end, f, h, minimum, edges)
        f += lanes(zero)
    return f, tied


@device
def _row(to, at, to_arg, origin, begin, end, x, width, heads, minimum, edges):
    """Reduces the edges [begin, end) to to[at:]; returns whether any arg is complemented."""
    channels, tied = width // heads, False
    zero = zeros(x, 32)
    for h in range(heads):
        f, stop = h * channels, (h + 1) * channels
        if to_arg is None:
            f, _ = _span(zeros(x, 128), to, at, to_arg, origin, begin, end, f, stop, h, minimum, edges)
        f, more = _span(zeros(x, 64), to, at, to_arg, origin, begin, end, f, stop, h, minimum, edges)
        tied |= more
        while f < stop:
            mask = tail(zero, stop - f)
            tied |= _block(zero, mask, to, at, to_arg, origin, begin, end, f, h, minimum, edges)
            f += lanes(zero)
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
                    _merge(t, count, rowptr, tiles, out, arg, tied, partial, partial_arg, width, minimum)
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


def reduce(csr, out, arg, tied, x, weight, partial, partial_arg, is_max):
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
        launch(_entry, fields, values, work, tiles.shape[0], merges=True)
    elif tied is not None:
        tied.zero_()
