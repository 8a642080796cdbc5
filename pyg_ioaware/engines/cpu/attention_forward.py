"""gatv2, transformer: out[i] = sum_k softmax_k(score[k]) * value[idx[k]], one pass over the edges.

Scores    gatv2: att . leaky_relu(key[j] + query[i] + lin attr[k])      (key and value are x_l)
          transformer: scale * (query[i] . key[j] + edge_query[i] . attr[k])
Shapes    query, out [N, H*C]  key, value [S, H*C]  att [H*C]  attr [E, D]  lin [D, H*C]
          edge_query, edge_out [N, H*D]: edge_out[i] = sum_k softmax_k * attr[k]
          stats [N, 2*H]: largest score, then one over the sum of exponentials
          scores [E + L, H], signs [E + L, H * ceil(C / 8)] bytes, for the backward pass if asked
          partial of out, edge_out and stats for each tile
Mapping   see ``attention``; running maximum and sum per head, one rescale per batch
Traffic   gathers E rows of key, and of value (gatv2: of x_l once); out, stats and attr once
Numerics  a row without edges gives 0, one whose scores are all -inf NaN; tiles merge in order
"""

# mypy: ignore-errors
import ctypes
import math

import torch

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cpu.attention import (
    LANES,
    NO_LOOP,
    add_weighted,
    clear,
    dot_products,
    draw,
    fill,
    locate,
    look_ahead,
    loop_offset,
    mlp_scores,
    multiply,
    multiply_rows,
    numbers,
    present,
    scale,
    shape_fields,
    size_fields,
    write_rows,
)
from pyg_ioaware.engines.cpu.blocks import (
    fold_max,
    fold_sum,
    number_of,
    numbers_of,
    repeat,
    value_of,
)
from pyg_ioaware.engines.cpu.exp import exp
from pyg_ioaware.engines.cpu.jit import Entry, device, items_of, phase_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import (
    add,
    better,
    div,
    load,
    mul,
    scratch,
    select,
    splat,
    store,
    sub,
    tail,
    zeros_of,
)
from pyg_ioaware.philox import keep_scale, threshold

INF = float("inf")


@device
def _add_values(out, at, first, factors, weights, key, value, starts, n, shape):
    if value is None:  # they are the keys
        add_weighted(out, at, first, factors, weights, key, starts, n, shape)
    else:
        add_weighted(out, at, first, factors, weights, value, starts, n, shape)


@device
def _softmax_step(scores, n, stats, at, heads, first, last, factors, group):
    """Turns the scores of a batch into terms of the sums, for the group of heads of stats[at].

    Writes the factors of the sums so far. In the last batch of a row that is also its first, the
    terms are divided by their sum already.
    """
    zero, none = zeros_of(scores, LANES), numbers_of(scores, group)
    low, count = splat(zero, -INF), n * value_of(group)
    best = low
    for q in range(0, count, LANES):
        s = select(tail(zero, count - q), load(scores, q, zero, None), low)
        best = select(better(s, best, None), s, best)
    top, total = fold_max(best, group), none
    if not first:
        before = load(stats, at, none, None)
        top = select(better(before, top, None), before, top)
        factor = exp(sub(before, _shift(top)))
        total = mul(load(stats, at + heads, none, None), factor)
        store(factors, 0, factor, None)
    shift, terms = repeat(_shift(top), zero), zero
    for q in range(0, count, LANES):
        s = select(tail(zero, count - q), load(scores, q, zero, None), low)
        p = exp(sub(s, shift))
        terms = add(terms, p)
        store(scores, q, p, None)
    total = add(total, fold_sum(terms, group))
    if first and last:
        total = _inverse(top, total)
        inverse = repeat(total, zero)
        for q in range(0, count, LANES):
            store(scores, q, mul(load(scores, q, zero, None), inverse), None)
    store(stats, at, top, None)
    store(stats, at + heads, total, None)


@device
def _shift(top):
    """Returns what is taken from scores: the largest of them, if it is not -inf."""
    zero = splat(top, 0.0)
    return select(better(top, splat(top, -INF), None), top, zero)


@device
def _inverse(top, total):
    """Returns one over the sum of exponentials; NaN where all scores are -inf."""
    some = better(top, splat(top, -INF), None)
    return select(some, div(splat(top, 1.0), total), mul(total, splat(top, math.nan)))


@device
def _row(
    row,
    begin,
    end,
    loop,
    to,
    to_edge,
    at,
    stats,
    keeps,
    kept,
    signs,
    whole,
    work,
    graph,
    query,
    key,
    value,
    att,
    attr,
    lin,
    edge_query,
    shape,
):
    """Attends from one row, or tile, to its edges; the results of a tile are left undivided."""
    scores, drops, factors, sources, places, starts, rows_at, signs_at, ahead = work
    idx, permuted, perm, edges, last_edge, skip, offset = graph
    masked, group, _, _, channels, width, heads, dim, factor, drop, seed, limit, keep = shape
    k, stop, first = begin, end + (loop != NO_LOOP), True
    while k < stop:
        n, k = fill(sources, places, k, end, row, skip, loop, idx)
        if n == 0:
            continue
        scale(rows_at, sources, n, width)
        look_ahead(ahead, n, k, last_edge, width, idx)
        if attr is not None:
            locate(starts, places, n, edges, permuted, perm, offset, dim, attr)
        if signs is not None:
            scale(signs_at, places, n, heads * ((channels + 7) // 8))
        single = first and k >= stop and whole
        for h in range(0, heads, value_of(group)):
            if att is not None:
                batch = (rows_at, signs_at, starts, ahead)
                form = (group, masked, factor, channels, width, dim)
                mlp_scores(scores, signs, h, n, row, batch, att, key, query, attr, lin, form)
            if value is not None:
                batch, form = (rows_at, starts, ahead), (group, masked, channels, width, dim, heads)
                more = (query, key, value, edge_query, attr, form)
                dot_products(scores, h, n, row, batch, *more)
                multiply(scores, n * value_of(group), factor)
            if keeps:
                write_rows(kept, places, heads, h, scores, n, group)
            place = at * 2 * heads + h
            _softmax_step(scores, n, stats, place, heads, first, single, factors, group)
            if drop:
                if h % 4 == 0:
                    draw(drops, places, n, h, seed, limit, keep, group)
                multiply_rows(scores, drops, n, h, group)
            _sum_up(to, to_edge, at, h, n, first, work, key, value, attr, edge_query, shape)
        if single:
            return
        first = False
    if first:
        _none(to, to_edge, stats, at, whole, heads, width, heads * dim)
    elif whole:
        _divide(to, to_edge, stats, at, heads, channels, dim, group)


@device
def _sum_up(to, to_edge, at, h, n, first, work, key, value, attr, edge_query, shape):
    """Adds the values of a batch, and features of edges, for one group of heads."""
    weights, _, factors, _, _, starts, rows_at, _, _ = work
    _, group, together, edge_together, channels, width, heads, dim, _, _, _, _, _ = shape
    base = h * channels
    form = (base, channels, channels, group, together)
    to_f = at * width + base
    _add_values(to, to_f, first, factors, weights, key, value, rows_at, n, form)
    if edge_query is not None:
        to_f, form = (at * heads + h) * dim, (0, 0, dim, group, edge_together)
        add_weighted(to_edge, to_f, first, factors, weights, attr, starts, n, form)


@device
def _none(to, to_edge, stats, at, whole, heads, width, edge_width):
    """Writes the results of no edges."""
    clear(to, at * width, width)
    if to_edge is not None:
        clear(to_edge, at * edge_width, edge_width)
    for h in range(heads):
        stats[at * 2 * heads + h] = 0 if whole else -INF
        stats[at * 2 * heads + heads + h] = 0


@device
def _divide(to, to_edge, stats, at, heads, channels, dim, group):
    """Divides the sums of a row, and puts the inverse of its sum of exponentials in place."""
    none = numbers_of(stats, group)
    for h in range(0, heads, value_of(group)):
        place = at * 2 * heads + h
        top, total = load(stats, place, none, None), load(stats, place + heads, none, None)
        store(stats, place + heads, _inverse(top, total), None)
    for h in range(heads):
        inverse = stats[(at * 2 + 1) * heads + h]
        for f in range((at * heads + h) * channels, (at * heads + h + 1) * channels):
            to[f] *= inverse
        if to_edge is not None:
            for f in range((at * heads + h) * dim, (at * heads + h + 1) * dim):
                to_edge[f] *= inverse


@device
def _add_tile(out, row, partial, t, h, heads, size, first, factor):
    for f in range(size):
        v = partial[(t * heads + h) * size + f] * factor
        at = (row * heads + h) * size + f
        out[at] = v if first else out[at] + v


@device
def _merge(
    t,
    count,
    tiles,
    out,
    edge_out,
    stats,
    partial,
    partial_edge,
    partial_stats,
    heads,
    channels,
    dim,
    group,
):
    """Merges the tiles of a row, of which t is the first."""
    row, stop = tiles[4 * t], t + 1
    while stop < count and tiles[4 * stop] == row:
        stop += 1
    for h in range(heads):
        top, total = partial_stats[t * 2 * heads + h], 0.0
        for part in range(t + 1, stop):
            other = partial_stats[part * 2 * heads + h]
            top = other if other > top else top
        shift = top if top > -INF else 0.0
        for part in range(t, stop):
            place = part * 2 * heads + h
            factor = math.exp(partial_stats[place] - shift)
            total += partial_stats[place + heads] * factor
            _add_tile(out, row, partial, part, h, heads, channels, part == t, factor)
            if edge_out is not None:
                _add_tile(edge_out, row, partial_edge, part, h, heads, dim, part == t, factor)
        stats[row * 2 * heads + h] = top
        stats[row * 2 * heads + heads + h] = total
    _divide(out, edge_out, stats, row, heads, channels, dim, group)


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, tiles, out, edge_out, stats, kept, signs = values[:9]
    partial, partial_edge, partial_stats, query, key, value, att, attr, lin, edge_query = values[
        9:19
    ]
    reals, rows, count, split, heads, channels, dim = values[19:26]
    num_loops, offset, seed, limit, drop, permuted, keeps = values[26:33]
    masked, group, together, edge_together = values[33:]
    factor, keep = reals[0], reals[1]
    channels = number_of(channels)
    items, phase = items_of(args), phase_of(args)
    width, edges = heads * channels, rowptr[rows]
    work = (
        *(scratch(out, 512), scratch(out, 512), scratch(out, 8), scratch(tiles, 64)),
        *(scratch(tiles, 64), scratch(tiles, 64), scratch(tiles, 64), scratch(tiles, 64)),
        scratch(tiles, 64),
    )
    graph = (idx, permuted, perm, edges, edges - 1, num_loops >= 0, offset)
    forms = (masked, group, together, edge_together)
    shape = (*forms, channels, width, heads, dim, factor, drop, seed, limit, keep)
    item = take(args)
    while item >= 0:
        if phase == 1:
            for t in range(item * count // items, (item + 1) * count // items):
                if t == 0 or tiles[4 * (t - 1)] != tiles[4 * t]:
                    _merge(
                        t,
                        count,
                        tiles,
                        out,
                        edge_out,
                        stats,
                        partial,
                        partial_edge,
                        partial_stats,
                        heads,
                        channels,
                        dim,
                        group,
                    )
        else:
            in_tile = item < count
            first, stop = rows_of(item, items, rowptr, rows, tiles, count)
            for row in range(first, stop):
                begin, end, at = rowptr[row], rowptr[row + 1], row
                loop = edges + row if row < num_loops else NO_LOOP
                to, to_edge, to_stats = out, edge_out, stats
                if in_tile:
                    begin, end, at = tiles[4 * item + 1], tiles[4 * item + 2], item
                    loop = loop if end == rowptr[row + 1] else NO_LOOP
                    to, to_edge, to_stats = partial, partial_edge, partial_stats
                elif end - begin > split:
                    continue
                whole = not in_tile
                _row(
                    row,
                    begin,
                    end,
                    loop,
                    to,
                    to_edge,
                    at,
                    to_stats,
                    keeps,
                    kept,
                    signs,
                    whole,
                    work,
                    graph,
                    query,
                    key,
                    value,
                    att,
                    attr,
                    lin,
                    edge_query,
                    shape,
                )
        item = take(args)


def _run(csr, tensors, factor, heads, channels, dim, num_loops, offset, dropout, seed):
    rowptr, idx, perm, tiles, split = csr
    reals = numbers(factor, keep_scale(dropout))
    out, edge_out, stats, scores, *others = tensors
    rows = rowptr.shape[0] - 1
    perm, permuted = present(perm, idx)
    scores, keeps = present(scores, stats)
    tensors = (rowptr, idx, perm, tiles, out, edge_out, stats, scores, *others)
    sizes = size_fields(channels, out.dtype, 8)
    shape = shape_fields(heads, channels, out.dtype)
    fields = (*(dtype(t) for t in tensors), torch.float64, *sizes, *shape)
    drop = seed is not None
    values = (
        *(address(t) for t in tensors),
        *(ctypes.addressof(reals), rows, tiles.shape[0], split, heads, channels, dim),
        *(num_loops, offset, int(seed) if drop else 0, threshold(dropout), drop, permuted, keeps),
        *(0, 0, 0, 0),
    )
    if rows and heads:
        work = 2 * (idx.shape[0] + rows) * max(heads * channels, 1)
        launch(_entry, fields, values, work, tiles.shape[0], phases=2)


def gatv2(
    csr,
    out,
    stats,
    scores,
    signs,
    partial,
    partial_stats,
    x_l,
    x_r,
    att,
    attr,
    loop_attr,
    lin,
    heads,
    num_loops,
    slope,
    dropout,
    seed,
):
    """Attends to each row's sources by an MLP of both ends."""
    tensors = (out, None, stats, scores, signs, partial, None, partial_stats)
    tensors += (x_r, x_l, None, att, attr, lin, None)
    dim = 0 if lin is None else lin.shape[0]
    offset = loop_offset(attr, loop_attr)
    channels = row_width(out) // heads
    _run(csr, tensors, slope, heads, channels, dim, num_loops, offset, dropout, seed)


def transformer(
    csr,
    out,
    edge_out,
    stats,
    scores,
    partial,
    partial_edge,
    partial_stats,
    query,
    key,
    value,
    attr,
    edge_query,
    heads,
    scale,
    dropout,
    seed,
):
    """Attends to each row's sources by dot products."""
    if attr is None:
        edge_out = partial_edge = None
    tensors = (out, edge_out, stats, scores, None, partial, partial_edge, partial_stats)
    tensors += (query, key, value, None, attr, None, edge_query)
    dim = 0 if attr is None else attr.shape[1]
    channels = row_width(out) // heads
    _run(csr, tensors, scale, heads, channels, dim, -1, 0, dropout, seed)
