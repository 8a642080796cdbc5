"""sddmm: out[perm[k], h] = sum_c a[i, h, c] * b[idx[k], h, c] over the edges k of row i.

Shapes    a [N, H*C]  b [S, H*C]  out [E, H]
Mapping   one edge and head after another; a's row stays in the first-level cache over its edges
Traffic   must move a, b, idx (perm) and out once; gathers E rows of b through the caches
Numerics  up to 16 registers' lanes summed apart, then as a tree; mean divides by the degree
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.gather import AHEAD, edge_of
from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, device, items_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import fma, hsum, lanes, load, prefetch, tail, zeros


@device
def _dot(a, i, b, j, ahead, channels):
    """Returns the dot product of a[i : i + channels] and b[j : j + channels]."""
    wide, narrow, c = zeros(a, 128), zeros(a, 32), 0
    while c + lanes(wide) <= channels:
        prefetch(b, ahead + c, wide)
        wide = fma(load(a, i + c, wide, None), load(b, j + c, wide, None), wide)
        c += lanes(wide)
    if c < channels:
        prefetch(b, ahead + c, wide)
    while c + lanes(narrow) <= channels:
        narrow = fma(load(a, i + c, narrow, None), load(b, j + c, narrow, None), narrow)
        c += lanes(narrow)
    if c < channels:
        mask = tail(narrow, channels - c)
        narrow = fma(load(a, i + c, narrow, mask), load(b, j + c, narrow, mask), narrow)
    if channels < lanes(wide):
        return hsum(narrow)
    if channels % lanes(wide) == 0:
        return hsum(wide)
    return hsum(wide) + hsum(narrow)


@device
def _row(row, begin, end, n, idx, perm, out, a, b, last, width, heads):
    channels = width // heads
    for k in range(begin, end):
        ahead, j, e = idx[min(k + AHEAD, last)] * width, idx[k] * width, edge_of(k, perm)
        for h in range(heads):
            c = h * channels
            dot = _dot(a, row * width + c, b, j + c, ahead + c, channels)
            out[e * heads + h] = dot / n


@Entry
def _entry(args):
    rowptr, idx, perm, tiles, out, a, b, rows, count, split, width, heads, mean = unpack(args)
    items, last = items_of(args), rowptr[rows] - 1
    item = take(args)
    while item >= 0:
        first, stop = rows_of(item, items, rowptr, rows, tiles, count)
        for row in range(first, stop):
            begin, end = rowptr[row], rowptr[row + 1]
            n = end - begin if mean else 1
            if item < count:
                begin, end = tiles[4 * item + 1], tiles[4 * item + 2]
            elif end - begin > split:
                continue
            _row(row, begin, end, n, idx, perm, out, a, b, last, width, heads)
        item = take(args)


def sddmm(csr, out, a, b, mean):
    """Writes one dot product per edge and head, in the order of the input edges, to ``out``."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = a.shape
    edges, heads = out.shape
    fields = (
        *(rowptr.dtype, idx.dtype, dtype(perm), tiles.dtype),
        *(out.dtype, a.dtype, b.dtype),
        *(INTEGER,) * 6,
    )
    values = (
        *(address(t) for t in (rowptr, idx, perm, tiles, out, a, b)),
        *(rows, tiles.shape[0], split, width, heads, mean),
    )
    if edges and heads:
        launch(_entry, fields, values, edges * max(width, heads), tiles.shape[0])
