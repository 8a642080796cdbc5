"""spmm: out[i] = sum_k weight[perm[k], h] * scale[idx[k]] * x[idx[k]] over the edges k of row i.

Shapes    x [S, H*C]  out [N, H*C]  weight [E, H] or None  scale [S] or None  partial [T, H*C]
Mapping   features in blocks of up to 256 bytes that stay in registers over all edges of a row
Traffic   must move x and out once, idx (perm, weight) once; gathers E rows of x through the caches
Numerics  sums in edge order (blocks of 64 bytes or less: as four sums), tiles in order; mean
          divides by the degree; a row without edges gives 0
"""

# mypy: ignore-errors
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

AHEAD = 8  # edges between the prefetch of a row and its use


@device
def _add(acc, mask, k, f, h, x, idx, weight, perm, scale, last, width, heads):
    """Returns acc with the features [f, f + lanes) of edge k added."""
    j = idx[k]
    v = load(x, j * width + f, acc, mask)
    if weight is not None:
        e = k
        if perm is not None:
            e = perm[k]
        w = weight[e * heads + h]
        if scale is not None:
            w *= scale[j]
        return fma(splat(acc, w), v, acc)
    if scale is not None:
        return fma(splat(acc, scale[j]), v, acc)
    return add(acc, v)


@device
def _ahead(acc, k, f, x, idx, weight, perm, scale, last, width, heads):
    prefetch(x, idx[min(k, last)] * width + f, acc)


@device
def _sum(acc, mask, begin, end, f, h, edges):
    k = begin
    if nbytes(acc) <= 64:  # four sums, or each add would wait for the one before
        a, b, c = acc, acc, acc
        while k + 4 <= end:
            for ahead in range(4 * AHEAD, 4 * AHEAD + 4):
                _ahead(acc, k + ahead, f, *edges)
            acc = _add(acc, mask, k, f, h, *edges)
            a = _add(a, mask, k + 1, f, h, *edges)
            b = _add(b, mask, k + 2, f, h, *edges)
            c = _add(c, mask, k + 3, f, h, *edges)
            k += 4
        acc = add(add(acc, a), add(b, c))
    while k < end:
        _ahead(acc, k + AHEAD, f, *edges)
        acc = _add(acc, mask, k, f, h, *edges)
        k += 1
    return acc


@device
def _block(acc, mask, to, at, begin, end, f, h, n, edges):
    acc = _sum(acc, mask, begin, end, f, h, edges)
    if n > 1:
        acc = div(acc, splat(acc, n))
    store(to, at + f, acc, mask)


@device
def _span(zero, to, at, begin, end, f, stop, h, n, edges):
    while f + lanes(zero) <= stop:
        _block(zero, None, to, at, begin, end, f, h, n, edges)
        f += lanes(zero)
    return f


@device
def _row(to, at, begin, end, n, width, heads, x, edges):
    """Writes the sum over the edges [begin, end), divided by n, to to[at:]."""
    channels = width // heads
    for h in range(heads):
        f, stop = h * channels, (h + 1) * channels
        f = _span(zeros(x, 256), to, at, begin, end, f, stop, h, n, edges)
        f = _span(zeros(x, 128), to, at, begin, end, f, stop, h, n, edges)
        f = _span(zeros(x, 64), to, at, begin, end, f, stop, h, n, edges)
        zero = zeros(x, 32)
        while f < stop:
            _block(zero, tail(zero, stop - f), to, at, begin, end, f, h, n, edges)
            f += lanes(zero)


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
        launch(_entry, fields, values, work, tiles.shape[0], merges=True)
