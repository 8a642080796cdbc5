"""gatv2_edges: gradients of the features of edges, and of their map, from those of the scores.

    lin_parts += attr[k] x slope_k          grad_attr[k] = scaled slope_k,  scaled = lin * att

with slope_k, per channel, the gradient of the score of position k and the channel's head, times
the negative slope where the hidden value was not positive.

Shapes    terms [E + L, 2, H]: gradients of scores come second  signs [E + L, H * ceil(C / 8)] bytes
          attr, grad_attr [E, D], those of loops somewhere else  scaled [H*C, D]
          lin_parts float64 [P, D, H*C]: a slot per work item; recent has the same in the dtype of
          attr, and holds what is not yet added to it
Mapping   positions in batches; the slopes of up to COLUMNS channels are written out, and
          multiplied as small matrices: 4 features by 64 bytes of channels, 4 edges by 64 bytes of
          features
Traffic   reads terms, signs and attr once, writes grad_attr once
Numerics  sums over a few batches in the dtype of attr, over these in float64, in a fixed order
"""

# mypy: ignore-errors
import ctypes

import torch

from pyg_ioaware.engines.cpu.attention import (
    locate,
    numbers,
    present,
    read_signs,
    repeat_last,
)
from pyg_ioaware.engines.cpu.blocks import BLOCK, select_by_bits
from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, device, items_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch
from pyg_ioaware.engines.cpu.vec import (
    add,
    fma,
    lanes,
    load,
    mul,
    scratch,
    splat,
    store,
    tail,
    zeros,
)

BATCH = 32  # edges; their slopes leave half of the first-level cache to what they meet
COLUMNS = 128  # channels that are written out at once
STRIDE = COLUMNS + 8  # a block may be written past the last channel
RECENT = 128  # edges whose sums are kept apart before they are added in float64
PAIR = 64  # bytes


@device
def _row_of(rowptr, rows, k):
    """The row of the edge at a position."""
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high) // 2
        if rowptr[middle + 1] <= k:
            low = middle + 1
        else:
            high = middle
    return low


@device
def _fill(places, k, row, span, graph):
    """Takes the next positions of a work item, loops last, without edges that a loop replaces.

    Returns their number, what comes next, and its row. The last one is repeated up to a multiple
    of four.
    """
    stop, total, shift = span
    rowptr, idx, skip = graph
    n = 0
    while k < total and n < BATCH:
        place = k if k < stop else k + shift
        if skip and k < stop:
            while rowptr[row + 1] <= k:
                row += 1
        if not skip or k >= stop or idx[k] != row:
            places[n] = place
            n += 1
        k += 1
    repeat_last(places, n)
    return n, k, row


@device
def _write_slopes(slopes, column, n, places, h, c, size, terms, signs, shape):
    """Writes the slopes of a batch at the channels [c, c + size) of a head, from a column on."""
    heads, channels, _, factor = shape
    zero, stride = zeros(slopes, BLOCK), (channels + 7) // 8
    for e in range(n):
        steep = splat(zero, terms[(places[e] * 2 + 1) * heads + h])
        flat = mul(steep, splat(zero, factor))
        at = (places[e] * heads + h) * stride
        for f in range(0, size, lanes(zero)):
            positive = read_signs(signs, at, c + f, stride, None, zero)
            slope = select_by_bits(positive, steep, flat)
            store(slopes, e * STRIDE + column + f, slope, None)


@device
def _add_to(out, at, v, m):
    store(out, at, add(load(out, at, v, m), v), m)


@device
def _outer_at(zero, m, f, at, slopes, recent, attr, starts, n, dim, width):
    for d in range(0, dim, 4):
        d1, d2, d3 = min(d + 1, dim - 1), min(d + 2, dim - 1), min(d + 3, dim - 1)
        s0, s1, s2, s3 = zero, zero, zero, zero
        for e in range(n):
            g, start = load(slopes, e * STRIDE + f, zero, None), starts[e]
            s0 = fma(splat(zero, attr[start + d]), g, s0)
            s1 = fma(splat(zero, attr[start + d1]), g, s1)
            s2 = fma(splat(zero, attr[start + d2]), g, s2)
            s3 = fma(splat(zero, attr[start + d3]), g, s3)
        to = at + d * width + f
        _add_to(recent, to, s0, m)
        if d + 1 < dim:
            _add_to(recent, to + width, s1, m)
        if d + 2 < dim:
            _add_to(recent, to + 2 * width, s2, m)
        if d + 3 < dim:
            _add_to(recent, to + 3 * width, s3, m)


@device
def _add_outer(recent, at, columns, slopes, attr, starts, n, dim, width):
    """Adds to recent[at + d * width + f] the sum over a batch of attr[d] times slope f."""
    rest = (at, slopes, recent, attr, starts, n, dim, width)
    pair, block = zeros(recent, PAIR), zeros(recent, BLOCK)
    f = 0
    while f + lanes(pair) <= columns:
        _outer_at(pair, None, f, *rest)
        f += lanes(pair)
    while f < columns:
        _outer_at(block, tail(block, columns - f), f, *rest)
        f += lanes(block)


@device
def _back_at(zero, m, d, first, at, columns, slopes, e, out, starts, scaled, dim):
    i0, i1, i2, i3 = starts[e] + d, starts[e + 1] + d, starts[e + 2] + d, starts[e + 3] + d
    s0, s1, s2, s3 = zero, zero, zero, zero
    if not first:
        s0, s1 = load(out, i0, zero, m), load(out, i1, zero, m)
        s2, s3 = load(out, i2, zero, m), load(out, i3, zero, m)
    for f in range(columns):
        w, place = load(scaled, (at + f) * dim + d, zero, m), e * STRIDE + f
        s0 = fma(splat(zero, slopes[place]), w, s0)
        s1 = fma(splat(zero, slopes[place + STRIDE]), w, s1)
        s2 = fma(splat(zero, slopes[place + 2 * STRIDE]), w, s2)
        s3 = fma(splat(zero, slopes[place + 3 * STRIDE]), w, s3)
    # Of an edge that is repeated, the first is the one whose slopes are there.
    store(out, i3, s3, m)
    store(out, i2, s2, m)
    store(out, i1, s1, m)
    store(out, i0, s0, m)


@device
def _map_back(out, starts, first, at, columns, slopes, n, scaled, dim):
    """Writes, or adds, scaled[at + f] times slope f, over all columns, to the edges' gradients."""
    pair, block = zeros(out, PAIR), zeros(out, BLOCK)
    for e in range(0, n, 4):
        rest = (first, at, columns, slopes, e, out, starts, scaled, dim)
        d = 0
        while d + lanes(pair) <= dim:
            _back_at(pair, None, d, *rest)
            d += lanes(pair)
        while d < dim:
            _back_at(block, tail(block, dim - d), d, *rest)
            d += lanes(block)


@device
def _batch(n, slot, work, shape, back, terms, signs, recent, grad_attr, attr, scaled):
    """Adds what a batch of positions contributes."""
    slopes, places, starts, back_at = work
    heads, channels, dim, _ = shape
    width = heads * channels
    at, columns = 0, 0  # of the channels that are written out: the first, and how many
    for h in range(heads):
        for c in range(0, channels, COLUMNS):
            size = min(COLUMNS, channels - c)
            _write_slopes(slopes, columns, n, places, h, c, size, terms, signs, shape)
            columns += size
            left = width - at - columns
            if left == 0 or columns + min(COLUMNS, channels) > COLUMNS:
                to = slot * dim * width + at
                _add_outer(recent, to, columns, slopes, attr, starts, n, dim, width)
                if back:
                    own = (at == 0, at, columns)
                    _map_back(grad_attr, back_at, *own, slopes, n, scaled, dim)
                at += columns
                columns = 0


@device
def _flush(slot, recent, lin_parts, size):
    """Moves a slot's recent sums to where they are kept in float64."""
    for f in range(slot * size, (slot + 1) * size):
        lin_parts[f] += recent[f]
        recent[f] = 0


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, tiles, terms, signs, lin_parts, recent, grad_attr = values[:9]
    attr, scaled, reals, rows, heads, channels, dim, num_loops = values[9:17]
    offset, back_offset, permuted, back = values[17:]
    items, edges, loops = items_of(args), rowptr[rows], max(num_loops, 0)
    shape, skip, size = (heads, channels, dim, reals[0]), num_loops >= 0, dim * heads * channels
    slopes, places = scratch(attr, 4608), scratch(tiles, 64)  # BATCH * STRIDE, and a block
    starts, back_at = scratch(tiles, 64), scratch(tiles, 64)
    work, sums = (slopes, places, starts, back_at), (terms, signs, recent, grad_attr, attr, scaled)
    item = take(args)
    while item >= 0:
        k, stop = item * edges // items, (item + 1) * edges // items
        first, last = item * loops // items, (item + 1) * loops // items
        span = (stop, stop + last - first, edges + first - stop)
        row, count = _row_of(rowptr, rows, k), 0
        while k < span[1]:
            n, k, row = _fill(places, k, row, span, (rowptr, idx, skip))
            if n > 0:
                locate(starts, places, n, edges, permuted, perm, offset, dim, attr)
                if back:
                    locate(back_at, places, n, edges, permuted, perm, back_offset, dim, None)
                _batch(n, item, work, shape, back, *sums)
            count += n
            if count >= RECENT or k >= span[1]:
                _flush(item, recent, lin_parts, size)
                count = 0
        item = take(args)


def gatv2_edges(
    csr, terms, signs, lin_parts, grad_attr, attr, scaled, heads, num_loops, slope, offsets
):
    """Adds up the gradient of the map, and writes that of the features if it is asked for."""
    rowptr, idx, perm, tiles, _ = csr
    items, dim, width = lin_parts.shape
    channels, positions = width // max(heads, 1), terms.shape[0]
    perm, permuted = present(perm, idx)
    grad_attr, back = present(grad_attr, attr)
    reals, recent = numbers(slope), attr.new_zeros(lin_parts.shape)
    given = (rowptr, idx, perm, tiles, terms, signs, lin_parts, recent, grad_attr, attr, scaled)
    fields = (*(dtype(t) for t in given), torch.float64, *(INTEGER,) * 9)
    values = (
        *(address(t) for t in given),
        *(ctypes.addressof(reals), rowptr.shape[0] - 1, heads, channels, dim, num_loops),
        *(*offsets, permuted, back),
    )
    if positions and dim and width:
        work = 2 * positions * dim * width
        launch(_entry, fields, values, work, 0, chunks=items)
