"""Gradients of reduce, from what it noted in ``arg`` and ``tied``.

    dx[idx[k]] += weight[perm[k], h] * d_k        dw[perm[k], h] += sum_c x[idx[k]] * d_k

where d_k is edge k's share of grad[i]. ``ties`` says who shares: 0 "even", every edge that attains
the result, and the buffer of zeros that scatter_reduce starts from as one more where the result is
zero; 1 "first", the first edge; 2 "exact", every edge that attains the result.

Shapes    dx, x [S, H*C]  dw, weight [E, H]  grad, arg [N, H*C]  tied [N]
Mapping   dx: a thread owns a range of features (whole cache lines) and walks all rows, so nothing
          is added atomically; with more threads than lines, a share of the sources too. dw: rows
Traffic   grad and arg once, and as many scattered words of dx; x and idx only where ties are
Numerics  sums in row order, then edge order. "even" multiplies as stock does, so that NaN and inf
          come out at the same places: 0 for the edges that have no share, times grad and weight
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.gather import AHEAD, edge_of, weighted, weighted_block
from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, device, items_of, take, unpack
from pyg_ioaware.engines.cpu.pool import threads
from pyg_ioaware.engines.cpu.reduce import SPECIAL
from pyg_ioaware.engines.cpu.rows import address, dtype, first_row, launch
from pyg_ioaware.engines.cpu.vec import (
    add,
    any_lane,
    both,
    complement,
    div,
    either,
    eq,
    hsum,
    int_eq,
    int_lt,
    lanes,
    load,
    mul,
    prefetch,
    select,
    splat,
    splat_int,
    store,
    tail,
    unordered,
    zeros,
)

EVEN, FIRST = 0, 1
LINE = 64  # bytes of a block of features
FEW = 24  # edges of a row up to which it is faster to go by edge than by feature


@device
def _message(zero, mask, k, f, h, x, idx, weight, perm, last, width, heads):
    """Returns the message of the edge at position k at a block of features."""
    v = load(x, idx[k] * width + f, zero, mask)
    return weighted_block(v, k, h, weight, perm, heads)


@device
def _place(a):
    """Returns the place of the first edge from an arg, complemented or not."""
    return max(a, ~a) & (SPECIAL - 1)


@device
def _places(a):
    return select(int_lt(a, splat_int(a, 0)), both(complement(a), splat_int(a, SPECIAL - 1)), a)


@device
def _is_shared(zero, mask, i, arg, grad, ties):
    """Whether the block at i needs more than the first edge."""
    if ties == FIRST:
        return False
    more = int_lt(load(arg, i, zero, mask), splat_int(zero, 0))
    if ties == EVEN:
        odd = mul(load(grad, i, zero, mask), zero)
        more = either(more, unordered(odd, odd))
    return any_lane(more, mask)


@device
def _share(zero, mask, i, begin, end, f, h, arg, grad, ties, edges):
    """Returns the result at a block of features, and the share of one edge that attains it."""
    a = load(arg, i, zero, mask)
    places = _places(a)
    best, one, count = zero, splat(zero, 1), zero
    for k in range(begin, end):
        here = int_eq(places, splat_int(a, k - begin))
        if any_lane(here, mask):
            best = select(here, _message(zero, mask, k, f, h, *edges), best)
    for k in range(begin, end):
        hit = _attains(_message(zero, mask, k, f, h, *edges), best, ties)
        count = add(count, select(hit, one, zero))
    if ties == EVEN:
        count = add(count, select(eq(best, zero), one, zero))
    return best, div(load(grad, i, zero, mask), count)


@device
def _attains(v, best, ties):
    if ties == EVEN:
        return eq(v, best)
    return either(eq(v, best), both(unordered(v, v), unordered(best, best)))


@device
def _part(v, best, share, ties):
    """Returns the gradient of the messages v."""
    zero = splat(v, 0)
    hit = _attains(v, best, ties)
    if ties == EVEN:
        return mul(select(hit, splat(v, 1), zero), share)
    return select(hit, share, zero)


@device
def _few(zero, mask, i, begin, end, f, h, dx, grad, arg, low, high, edges):
    """Gives grad to the first edges, edge by edge: for rows with few edges."""
    _, idx, weight, perm, last, width, heads = edges
    a, g = load(arg, i, zero, mask), load(grad, i, zero, mask)
    places = _places(a)
    for k in range(begin, end):
        prefetch(dx, idx[min(k + AHEAD, last)] * width + f, zero)
        j, here = idx[k], int_eq(places, splat_int(a, k - begin))
        if low <= j < high:
            at = j * width + f
            part = weighted_block(select(here, g, zero), k, h, weight, perm, heads)
            store(dx, at, add(load(dx, at, zero, mask), part), mask)


@device
def _span(zero, mask, row, begin, end, f, stop, edges, dx, grad, arg, low, high, ties):
    """Adds the gradients of one row at the features [f, stop) of one head to rows of dx."""
    _, idx, weight, perm, _, width, heads = edges
    h, i = f // (width // heads), row * width + f
    if not _is_shared(zero, mask, i, arg, grad, ties):
        if end - begin <= FEW:
            _few(zero, mask, i, begin, end, f, h, dx, grad, arg, low, high, edges)
            return
        for c in range(stop - f):
            k = begin + _place(arg[i + c])
            j = idx[k]
            if low <= j < high:
                dx[j * width + f + c] += weighted(grad[i + c], k, h, weight, perm, heads)
        return
    best, share = _share(zero, mask, i, begin, end, f, h, arg, grad, ties, edges)
    for k in range(begin, end):
        j = idx[k]
        if low <= j < high:
            part = _part(_message(zero, mask, k, f, h, *edges), best, share, ties)
            at = j * width + f
            part = weighted_block(part, k, h, weight, perm, heads)
            store(dx, at, add(load(dx, at, zero, mask), part), mask)


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, dx, grad, arg, _, x, weight = values[:9]
    ties, rows, sources, width, heads, across = values[9:]
    edges = (x, idx, weight, perm, rowptr[rows] - 1, width, heads)
    zero, channels = zeros(x, LINE), width // heads
    lines = (width + lanes(zero) - 1) // lanes(zero)
    parts = items_of(args) // across
    item = take(args)
    while item >= 0:
        left = item % across * lines // across * lanes(zero)
        right = min((item % across + 1) * lines // across * lanes(zero), width)
        part = item // across
        low, high = part * sources // parts, (part + 1) * sources // parts
        for row in range(rows):
            begin, end, f = rowptr[row], rowptr[row + 1], left
            while f < right and begin < end:
                stop = min(right, f + lanes(zero), (f // channels + 1) * channels)
                to = (dx, grad, arg, low, high, ties)
                if stop - f == lanes(zero):  # masked stores are slow
                    _span(zero, None, row, begin, end, f, stop, edges, *to)
                else:
                    _span(zero, tail(zero, stop - f), row, begin, end, f, stop, edges, *to)
                f = stop
        item = take(args)


@device
def _weight_row(row, begin, end, dw, grad, arg, tied, ties, edges):
    x, idx, _, perm, _, width, heads = edges
    zero, channels = zeros(x, LINE), width // heads
    for h in range(heads):
        for f in range(h * channels, (h + 1) * channels, lanes(zero)):
            n, i = min(lanes(zero), (h + 1) * channels - f), row * width + f
            mask = tail(zero, n)
            if not _is_shared(zero, mask, i, arg, grad, ties):
                for c in range(n):
                    k = begin + _place(arg[i + c])
                    dw[edge_of(k, perm) * heads + h] += x[idx[k] * width + f + c] * grad[i + c]
                continue
            best, share = _share(zero, mask, i, begin, end, f, h, arg, grad, ties, edges)
            for k in range(begin, end):
                part = _part(_message(zero, mask, k, f, h, *edges), best, share, ties)
                part = mul(part, load(x, idx[k] * width + f, zero, mask))
                dw[edge_of(k, perm) * heads + h] += hsum(select(mask, part, zero))


@Entry
def _weight_entry(args):
    values = unpack(args)
    rowptr, idx, perm, dw, grad, arg, tied, x, weight = values[:9]
    ties, rows, _, width, heads = values[9:]
    edges = (x, idx, weight, perm, rowptr[rows] - 1, width, heads)
    items = items_of(args)
    item = take(args)
    while item >= 0:
        for row in range(
            first_row(rowptr, rows, item, items), first_row(rowptr, rows, item + 1, items)
        ):
            begin, end = rowptr[row], rowptr[row + 1]
            if begin < end:
                _weight_row(row, begin, end, dw, grad, arg, tied, ties, edges)
        item = take(args)


def _arguments(csr, to, grad, arg, tied, x, weight, ties):
    perm = None if weight is None else csr.perm
    heads = 1 if weight is None else weight.shape[1]
    tensors = (csr.rowptr, csr.idx, perm, to, grad, arg, tied, x, weight)
    fields = (*(dtype(t) for t in tensors), *(INTEGER,) * 5)
    return fields, (
        *(address(t) for t in tensors),
        *(ties, grad.shape[0], x.shape[0], x.shape[1], heads),
    )


def reduce_backward(csr, dx, grad, arg, tied, x, weight, ties):
    """Adds the gradient of ``x`` to ``dx``, which the caller has filled with zeros."""
    fields, values = _arguments(csr, dx, grad, arg, tied, x, weight, ties)
    rows, width = grad.shape
    if rows and width and x.shape[0]:
        # As wide a range of features as there are threads for: rows are read in pieces otherwise.
        lines, count = -(-width * x.element_size() // LINE), threads()
        across = min(lines, count)
        fields, values = (*fields, INTEGER), (*values, across)
        launch(_entry, fields, values, 4 * rows * width, 0, chunks=across * (count // across))


def reduce_backward_weight(csr, dw, grad, arg, tied, x, weight, ties):
    """Adds the gradient of ``weight`` to ``dw``, which the caller has filled with zeros."""
    fields, values = _arguments(csr, dw, grad, arg, tied, x, weight, ties)
    rows, width = grad.shape
    if rows and width and x.shape[0]:
        launch(_weight_entry, fields, values, 4 * rows * width, 0)
