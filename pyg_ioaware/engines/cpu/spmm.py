"""spmm: out[i] = sum_k weight[perm[k], h] * scale[idx[k]] * x[idx[k]] over the edges k of row i.

Shapes    x [S, H*C]  out [N, H*C]  weight [E, H] or None  scale [S] or None  partial [T, H*C]
Mapping   features in blocks of up to 256 bytes that stay in registers over all edges of a row
Traffic   must move x and out once, idx (perm, weight) once; gathers E rows of x through the caches
Numerics  sums in edge order (blocks of 64 bytes or less: as four sums), tiles in order; mean
          divides by the degree; a row without edges gives 0
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.gather import AHEAD, edge_of
from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, device, items_of, phase_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import (
    add,
    div,
    fma,
    lanes,
    load,
    nbytes,
    prefetch,
    splat,
    store,
    tail,
    zeros,
)


@device
def _add(acc, v, k, j, h, weight, perm, scale, heads):
    """Returns acc + v times the weight of the edge at position k and the scale of its source j."""
    if weight is not None:
        w = weight[edge_of(k, perm) * heads + h]
        if scale is not None:
            w *= scale[j]
        return fma(splat(acc, w), v, acc)
    if scale is not None:
        return fma(splat(acc, scale[j]), v, acc)
    return add(acc, v)


@device
def _span(
    zero, mask, to, at, begin, end, n, f, stop, h, x, idx, weight, perm, scale, last, width, heads
):
    """Writes the features [f, ...) of a row by whole blocks; returns where it stopped."""
    while f + lanes(zero) <= stop:
        k, a, b, c, d = begin, zero, zero, zero, zero
        if nbytes(zero) <= 64:  # four sums, or each add would wait for the one before
            while k + 4 <= end:
                for q in range(k + 4 * AHEAD, k + 4 * AHEAD + 4):
                    prefetch(x, idx[min(q, last)] * width + f, zero)
                j0, j1, j2, j3 = idx[k], idx[k + 1], idx[k + 2], idx[k + 3]
                v0, v1 = load(x, j0 * width + f, zero, mask), load(x, j1 * width + f, zero, mask)
                v2, v3 = load(x, j2 * width + f, zero, mask), load(x, j3 * width + f, zero, mask)
                a = _add(a, v0, k, j0, h, weight, perm, scale, heads)
                b = _add(b, v1, k + 1, j1, h, weight, perm, scale, heads)
                c = _add(c, v2, k + 2, j2, h, weight, perm, scale, heads)
                d = _add(d, v3, k + 3, j3, h, weight, perm, scale, heads)
                k += 4
            a = add(add(a, b), add(c, d))
        while k < end:
            prefetch(x, idx[min(k + AHEAD, last)] * width + f, zero)
            j = idx[k]
            v = load(x, j * width + f, zero, mask)
            a = _add(a, v, k, j, h, weight, perm, scale, heads)
            k += 1
        if n > 1:
            a = div(a, splat(a, n))
        store(to, at + f, a, mask)
        f += lanes(zero)
    return f


@device
def _row(to, at, begin, end, n, width, heads, x, edges):
    """Writes the sum over the edges [begin, end), divided by n, to to[at:]."""
    channels = width // heads
    for h in range(heads):
        f, stop = h * channels, (h + 1) * channels
        f = _span(zeros(x, 256), None, to, at, begin, end, n, f, stop, h, *edges)
        f = _span(zeros(x, 64), None, to, at, begin, end, n, f, stop, h, *edges)
        zero = zeros(x, 32)
        while f < stop:
            mask = tail(zero, stop - f)
            f = _span(zero, mask, to, at, begin, end, n, f, f + lanes(zero), h, *edges)


@device
def _merge(first, stop, count, rowptr, tiles, out, partial, width, mean):
    for t in range(first, stop):
        row = tiles[4 * t]
        if t > 0 and tiles[4 * (t - 1)] == row:
            continue
        n = rowptr[row + 1] - rowptr[row] if mean else 1
        for f in range(width):
            total = partial[t * width + f]
            part = t + 1
            while part < count and tiles[4 * part] == row:
                total += partial[part * width + f]
                part += 1
            out[row * width + f] = total / n


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, tiles, out, x, weight, scale, partial = values[:9]
    rows, count, split, width, heads, mean = values[9:]
    items, phase = items_of(args), phase_of(args)
    edges = (x, idx, weight, perm, scale, rowptr[rows] - 1, width, heads)
    item = take(args)
    while item >= 0:
        if phase == 1:
            first, stop = item * count // items, (item + 1) * count // items
            _merge(first, stop, count, rowptr, tiles, out, partial, width, mean)
        else:
            in_tile = item < count
            first, stop = rows_of(item, items, rowptr, rows, tiles, count)
            to = partial if in_tile else out
            for row in range(first, stop):
                begin, end, at = rowptr[row], rowptr[row + 1], row * width
                n = end - begin if mean else 1
                if in_tile:
                    begin, end, at, n = tiles[4 * item + 1], tiles[4 * item + 2], item * width, 1
                elif end - begin > split:
                    continue
                _row(to, at, begin, end, n, width, heads, x, edges)
        item = take(args)


def spmm(csr, out, x, weight, scale, partial, mean):
    """Sums the rows of ``x`` over each row's edges into ``out``."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = out.shape
    if weight is None:
        perm = None
    heads = 1 if weight is None else weight.shape[1]
    fields = (
        *(rowptr.dtype, idx.dtype, dtype(perm), tiles.dtype),
        *(out.dtype, x.dtype, dtype(weight), dtype(scale), partial.dtype),
        *(INTEGER,) * 6,
    )
    values = (
        *(address(t) for t in (rowptr, idx, perm, tiles, out, x, weight, scale, partial)),
        *(rows, tiles.shape[0], split, width, heads, mean),
    )
    if rows and width:
        work = (idx.shape[0] + rows) * width
        launch(_entry, fields, values, work, tiles.shape[0], phases=2)
