"""gatv2_source, transformer_source: gradients of attention on the side of the sources.

    gatv2        out[j] = sum_k weight_k * grad[idx[k]] + att * g_j,  g_j = sum_k s_k * slope_k
                 att_parts += x_l[j] * g_j
    transformer  out[j] = sum_k weight_k * grad[idx[k]]       (the gradient of the values)
                 out_key[j] = scale * sum_k s_k * query[idx[k]]

over the edges k from source j, with the weight after dropout and the gradient s of the score.

Shapes    grad, query [N, H*C]  x_l, out, out_key [S, H*C]  att [H*C]  terms [E + L, 2, H]
          signs [E + L, H * ceil(C / 8)] bytes  att_parts float64 [P, H*C]  partial [2, T, H*C]
          perm holds the position of each edge in the rows by target; loops are at E and after
Mapping   features in blocks of up to 128 bytes that stay in registers over all edges of a row
Traffic   gathers E rows of grad (transformer: and of query), terms and signs; x_l and out once
Numerics  sums in edge order, tiles and slots in a fixed order
"""

# mypy: ignore-errors
import ctypes

import torch

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cpu.attention import (
    NO_LOOP,
    numbers,
    present,
    read_signs,
    shape_fields,
    size_fields,
)
from pyg_ioaware.engines.cpu.blocks import (
    BLOCK,
    WIDE,
    blocks,
    load_blocks,
    number_of,
    select_by_bits,
    spread,
    store_blocks,
    value_of,
)
from pyg_ioaware.engines.cpu.gather import AHEAD
from pyg_ioaware.engines.cpu.jit import Entry, device, items_of, phase_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import (
    add,
    fma,
    lanes,
    mul,
    prefetch,
    splat,
    tail,
    zeros,
)


@device
def _add(v, g, place, i, m, f, h, shape, grad, terms, signs, query):
    """Returns both sums of a block, or one of several heads, with the edge at a position added."""
    together, heads, channels, slope = shape
    at, start = place * 2 * heads + h, (i * heads + h) * channels + f
    s = spread(terms, at + heads, together, v)
    if signs is not None:
        stride = (channels + 7) // 8
        positive = read_signs(signs, (place * heads + h) * stride, f, stride, together, v)
        g = add(g, select_by_bits(positive, s, mul(s, splat(v, slope))))
    if query is not None:
        g = fma(s, load_blocks(query, start, channels, together, v, m), g)
    a = spread(terms, at, together, v)
    return fma(a, load_blocks(grad, start, channels, together, v, m), v), g


@device
def _prefetch(zero, i, place, f, h, shape, grad, terms, signs, query):
    _, heads, channels, _ = shape
    prefetch(grad, (i * heads + h) * channels + f, zero)
    if query is not None:
        prefetch(query, (i * heads + h) * channels + f, zero)
    if f == 0:
        prefetch(terms, place * 2 * heads, zeros(terms, 32))
        if signs is not None:
            prefetch(signs, place * heads * ((channels + 7) // 8), zeros(signs, 32))


@device
def _span(zero, m, to, at, to_g, at_g, f, stop, h, span, graph, shape, *tables):
    row, begin, end, loop = span
    idx, permuted, perm, skip, last = graph
    together, _, channels, _ = shape
    while f + lanes(zero) // value_of(together) <= stop:
        v, g = zero, zero
        for k in range(begin, end):
            ahead = min(k + AHEAD, last)
            place = perm[ahead] if permuted else ahead
            _prefetch(zero, idx[ahead], place, f, h, shape, *tables)
            i = idx[k]
            if skip == 0 or i != row:
                place = perm[k] if permuted else k
                v, g = _add(v, g, place, i, m, f, h, shape, *tables)
        if loop != NO_LOOP:
            v, g = _add(v, g, loop, row, m, f, h, shape, *tables)
        store_blocks(to, at + h * channels + f, channels, together, v, m)
        store_blocks(to_g, at_g + h * channels + f, channels, together, g, m)
        f += lanes(zero) // value_of(together)
    return f


@device
def _row(to, at, to_g, at_g, together, *walk):
    """Sums over a row's targets: weighted gradients to to[at:], those of scores to to_g[at_g:]."""
    heads, channels = walk[2][1], walk[2][2]
    zero = blocks(to, together)
    for h in range(0, heads, value_of(together)):
        f = 0
        if together is None:
            f = _span(zeros(to, WIDE), None, to, at, to_g, at_g, f, channels, h, *walk)
        f = _span(zero, None, to, at, to_g, at_g, f, channels, h, *walk)
        if f < channels:
            m = tail(zeros(to, BLOCK), channels - f)
            stop = f + lanes(zero) // value_of(together)
            _span(zero, m, to, at, to_g, at_g, f, stop, h, *walk)


@device
def _merge(t, count, tiles, out, out_g, at_g, partial, width):
    """Sums the partials of a row, of which t is the first tile."""
    row, half = tiles[4 * t], count * width
    for f in range(width):
        v, g, part = partial[t * width + f], partial[half + t * width + f], t + 1
        while part < count and tiles[4 * part] == row:
            v += partial[part * width + f]
            g += partial[half + part * width + f]
            part += 1
        out[row * width + f] = v
        out_g[at_g + f] = g


@device
def _finish(row, slot, out, out_g, at_g, some, width, factor, x_l, att, att_parts):
    """Turns the sums over the gradients of scores into what the caller gets.

    Without edges all of them are zero, and stay so whatever the row holds.
    """
    if att is None:
        for f in range(width):
            out_g[at_g + f] *= factor
    elif some:
        for f in range(width):
            g = out_g[at_g + f]
            out[row * width + f] += att[f] * g
            att_parts[slot * width + f] += float(x_l[row * width + f]) * g


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, tiles, out, out_g, partial, grad, terms, signs, query = values[:11]
    x_l, att, att_parts, reals, rows, count, split, heads, channels, num_loops = values[11:21]
    chunks, permuted, by_slot, together = values[21:]
    channels = number_of(channels)
    items, phase, width, num_edges = items_of(args), phase_of(args), heads * channels, rowptr[rows]
    graph = (idx, permuted, perm, num_loops >= 0, num_edges - 1)
    shape, tables = (together, heads, channels, reals[0]), (grad, terms, signs, query)
    ends = (width, reals[0], x_l, att, att_parts)
    item = take(args)
    while item >= 0:
        if phase == 1:
            slot = chunks + item
            for t in range(item * count // items, (item + 1) * count // items):
                row = tiles[4 * t]
                if t == 0 or tiles[4 * (t - 1)] != row:
                    at_g = (slot if by_slot else row) * width
                    _merge(t, count, tiles, out, out_g, at_g, partial, width)
                    _finish(row, slot, out, out_g, at_g, True, *ends)
        else:
            in_tile, slot = item < count, item - count
            first, stop = rows_of(item, items, rowptr, rows, tiles, count)
            for row in range(first, stop):
                begin, end = rowptr[row], rowptr[row + 1]
                loop = num_edges + row if row < num_loops else NO_LOOP
                if in_tile:
                    loop = loop if tiles[4 * item + 2] == end else NO_LOOP
                    span = (row, tiles[4 * item + 1], tiles[4 * item + 2], loop)
                    at, at_g = item * width, (count + item) * width
                    _row(partial, at, partial, at_g, together, span, graph, shape, *tables)
                elif end - begin <= split:
                    span, at_g = (row, begin, end, loop), (slot if by_slot else row) * width
                    _row(out, row * width, out_g, at_g, together, span, graph, shape, *tables)
                    some = end > begin or loop != NO_LOOP
                    _finish(row, slot, out, out_g, at_g, some, *ends)
        item = take(args)


def _run(csr, written, read, ends, factor, heads, num_loops, slots):
    rowptr, idx, perm, tiles, split = csr
    reals, count = numbers(factor), tiles.shape[0]
    perm, permuted = present(perm, idx)
    tensors = (rowptr, idx, perm, tiles, *written, *read, *ends)
    rows, width = written[0].shape[0], row_width(written[0])
    work = 2 * (idx.shape[0] + rows) * width
    chunks = min(slots // 2, work // (1 << 17) + 1)
    channels, kind = width // max(heads, 1), written[0].dtype
    _, _, together, _ = shape_fields(heads, channels, kind)
    sizes = size_fields(channels, kind, 4)
    fields = (*(dtype(t) for t in tensors), torch.float64, *sizes, together)
    values = (
        *(address(t) for t in tensors),
        *(ctypes.addressof(reals), rows, count, split, heads, channels, num_loops),
        *(chunks, permuted, ends[0] is not None, 0),
    )
    if rows and width:
        groups = slots // 2
        launch(_entry, fields, values, work, count, phases=2, chunks=chunks, groups=groups)


def gatv2_source(
    csr, grad_x_l, att_parts, sums, partial, grad, x_l, att, terms, signs, heads, num_loops, slope
):
    """Writes the gradient of the sources, and their part of that of the attention vectors."""
    written, read, ends = (
        (grad_x_l, sums, partial),
        (grad, terms, signs, None),
        (x_l, att, att_parts),
    )
    _run(csr, written, read, ends, slope, heads, num_loops, att_parts.shape[0])


def transformer_source(csr, grad_value, grad_key, partial, grad, query, terms, heads, scale):
    """Writes the gradients of keys and values."""
    written, read = (grad_value, grad_key, partial), (grad, terms, None, query)
    _run(csr, written, read, (None, None, None), scale, heads, -1, 128)
