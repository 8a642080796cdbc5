"""gatv2_target, transformer_target: gradients of attention on the side of the targets.

With a the softmax of a row's scores and t_k = <grad[i], value[idx[k]]> (+ grad_weights[k]), the
gradient of score k is s_k = a_k * (t_k - delta[i]), delta[i] = sum_l a_l t_l, and

    gatv2        grad_query[i] = att * g_i,  g_i = sum_k s_k * slope_k    (slope_k: 1, or the slope)
                 att_parts += query[i] * g_i                    (edges: see attention_edges)
    transformer  grad_query[i] = scale * sum_k s_k * key[idx[k]]
                 grad_edge_query[i] = scale * sum_k s_k * attr[k]
                 grad_attr[k] = sum_h scale * s_k * edge_query[i, h] + a_k * grad_edge[i, h]

A first pass over a row's edges writes a_k and t_k, a second one, whose data is still in the
caches, replaces them by what the pass over the sources needs: the weight after dropout, and s_k.
Where a row is but one batch, both are one, and a_k and t_k stay in scratch memory.

Shapes    as attention_forward; delta [N, H]  terms [E + L, 2, H]
          signs [E + L, H * ceil(C / 8)] bytes: which hidden values are positive
          scores [E + L, H]: if given, they and the signs are those of the forward pass
          att_parts float64 [P, H*C]: a slot per chunk of rows or group of tiles
Mapping   phase 0: whole rows, and the first pass over tiles; 1: their delta; 2: their second
          pass; 3: merge
Traffic   gathers E rows of key, and of value (gatv2: of x_l once), key twice where a row exceeds
          the cache (transformer); terms and signs once
Numerics  scores are those of the forward pass, bit for bit; tiles and slots in a fixed order
"""

# mypy: ignore-errors
import ctypes

import torch

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cpu.attention import (
    BATCH,
    LANES,
    NO_LOOP,
    add_rows,
    add_weighted,
    clear,
    dot_products,
    draw,
    drop_of,
    fill,
    locate,
    look_ahead,
    loop_offset,
    mlp_scores,
    multiply,
    multiply_rows,
    numbers,
    present,
    read_rows,
    scale,
    shape_fields,
    size_fields,
    write_rows,
)
from pyg_ioaware.engines.cpu.attention_edges import gatv2_edges
from pyg_ioaware.engines.cpu.attention_slopes import add_products, add_slopes, settle
from pyg_ioaware.engines.cpu.blocks import fold_sum, number_of, numbers_of, repeat, value_of
from pyg_ioaware.engines.cpu.exp import exp
from pyg_ioaware.engines.cpu.jit import Entry, device, items_of, phase_of, take, unpack
from pyg_ioaware.engines.cpu.memory import empty
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import (
    add,
    better,
    load,
    mul,
    scratch,
    select,
    store,
    sub,
    tail,
    zeros_of,
)
from pyg_ioaware.philox import keep_scale, threshold

# The tensors of a kernel after those of the structure; None those that it does not have.
ARGUMENTS = (
    *("grad_query", "grad_edge_query", "delta", "terms", "signs", "att_parts", "grad_attr"),
    *("partial", "partial_edge", "partial_delta", "scores", "grad", "grad_edge", "grad_weights"),
    *("query", "key", "value", "att", "stats", "attr", "lin", "edge_query"),
)


@device
def _pass(
    first_part,
    second_part,
    row,
    begin,
    end,
    loop,
    at,
    work,
    graph,
    shape,
    weighs,
    back,
    to,
    to_edge,
    to_delta,
    delta,
    terms,
    signs,
    grad_attr,
    attr,
    *tables,
):
    """The first pass over a row, or tile, the second one, or both if it is but one batch."""
    weights, slopes, drops, sources, places, starts, rows_at, signs_at, back_at, ahead = work
    idx, permuted, perm, edges, last_edge, skip, offset = graph
    _, group, _, _, channels, width, heads, dim, _, drop, seed, limit, keep = shape
    if first_part:
        clear(to_delta, at * heads, heads)
    k, stop, first = begin, end + (loop != NO_LOOP), True
    while k < stop:
        n, k = fill(sources, places, k, end, row, skip, loop, idx)
        if n == 0:
            continue
        scale(rows_at, sources, n, width)
        if first_part:
            look_ahead(ahead, n, k, last_edge, width, idx)
        if signs is not None:
            scale(signs_at, places, n, heads * ((channels + 7) // 8))
        if dim:
            locate(starts, places, n, edges, permuted, perm, offset, dim, attr)
        if back:
            locate(back_at, places, n, edges, permuted, perm, 0, dim, None)
        for h in range(0, heads, value_of(group)):
            if first_part:
                if drop and h % 4 == 0:
                    draw(drops, places, n, h, seed, limit, keep, group)
                _score(row, h, n, work, shape, signs, attr, *tables)
                _weigh(row, h, n, to_delta, at, work, shape, weighs, attr, *tables)
            else:
                read_rows(weights, n, terms, places, 2 * heads, h, group)
                read_rows(slopes, n, terms, places, 2 * heads, heads + h, group)
            if second_part:
                settle(weights, slopes, n, delta, row * heads + h, drop, keep, group)
            write_rows(terms, places, 2 * heads, h, weights, n, group)
            write_rows(terms, places, 2 * heads, heads + h, slopes, n, group)
            if second_part:
                sums = (to, to_edge, signs, grad_attr)
                _sum_up(row, h, n, at, first, back, work, shape, *sums, attr, *tables)
        first = False
    if first and second_part:
        clear(to, at * width, width)
        if to_edge is not None:
            clear(to_edge, at * heads * dim, heads * dim)


@device
def _score(
    row,
    h,
    n,
    work,
    shape,
    signs,
    attr,
    query,
    key,
    value,
    att,
    lin,
    edge_query,
    grad,
    grad_edge,
    scores,
    grad_weights,
    stats,
):
    """Writes score and <grad, value> of each edge of a batch for one group of heads."""
    weights, dots, _, _, places, starts, rows_at, signs_at, _, ahead = work
    masked, group, _, _, channels, width, heads, dim, factor, _, _, _, _ = shape
    batch, form = (rows_at, starts, ahead), (group, masked, channels, width, dim, heads)
    if att is not None:
        if scores is None:
            signed, more = (rows_at, signs_at, starts, ahead), (group, masked, factor)
            to = (weights, signs, h, n, row, signed)
            mlp_scores(*to, att, key, query, attr, lin, (*more, channels, width, dim))
        else:
            read_rows(weights, n, scores, places, heads, h, group)
        dot_products(dots, h, n, row, batch, grad, key, None, None, None, form)
    if value is not None:
        dot_products(weights, h, n, row, batch, query, key, None, edge_query, attr, form)
        multiply(weights, n * value_of(group), factor)
        dot_products(dots, h, n, row, batch, grad, value, None, grad_edge, attr, form)


@device
def _weigh(
    row,
    h,
    n,
    delta,
    at,
    work,
    shape,
    weighs,
    attr,
    query,
    key,
    value,
    att,
    lin,
    edge_query,
    grad,
    grad_edge,
    scores,
    grad_weights,
    stats,
):
    """Turns scores into weights, and <grad, value> into t; adds the sum of their products."""
    weights, dots, drops, _, places, _, _, _, _, _ = work
    group, heads, drop = shape[1], shape[6], shape[9]
    zero, none = zeros_of(weights, LANES), numbers_of(weights, group)
    before = value is not None  # whether weights are handed out before dropout
    if weighs and not before:
        add_rows(dots, n, grad_weights, places, heads, h, group)
    if drop:
        multiply_rows(dots, drops, n, h, group)
    if weighs and before:
        add_rows(dots, n, grad_weights, places, heads, h, group)
    place, count = row * 2 * heads + h, n * value_of(group)
    top = repeat(load(stats, place, none, None), zero)
    inverse = repeat(load(stats, place + heads, none, None), zero)
    total = zero
    for q in range(0, count, LANES):
        inside = tail(zero, count - q)
        s = sub(load(weights, q, zero, None), top)
        a = mul(exp(select(inside, s, zero)), inverse)
        total = add(total, select(inside, mul(a, load(dots, q, zero, None)), zero))
        store(weights, q, a, None)
    place = at * heads + h
    total = add(load(delta, place, none, None), fold_sum(total, group))
    store(delta, place, total, None)
    if drop:
        # The sign tells ``settle`` that the weight was dropped.
        for q in range(n):
            a = load(weights, q * value_of(group), none, None)
            kept = better(drop_of(drops, q, h, group), none, None)
            store(weights, q * value_of(group), select(kept, a, sub(none, a)), None)


@device
def _sum_up(
    row,
    h,
    n,
    at,
    first,
    back,
    work,
    shape,
    to,
    to_edge,
    signs,
    grad_attr,
    attr,
    query,
    key,
    value,
    att,
    lin,
    edge_query,
    grad,
    grad_edge,
    scores,
    grad_weights,
    stats,
):
    """Adds the sums of a batch for the gradients of query and edge query, for a group of heads."""
    weights, slopes, _, _, _, starts, rows_at, signs_at, back_at, _ = work
    _, group, together, edge_together, channels, width, heads, dim, factor, _, _, _, _ = shape
    base = h * channels
    if att is not None:
        edges = (slopes, factor, signs, signs_at, n, group)
        add_slopes(to, at * width, h, first, channels, together, *edges)
    if value is not None:
        multiply(slopes, n * value_of(group), factor)
        form = (base, channels, channels, group, together)
        add_weighted(to, at * width + base, first, None, slopes, key, rows_at, n, form)
        if edge_query is not None:
            own, form = (at * heads + h) * dim, (0, 0, dim, group, edge_together)
            add_weighted(to_edge, own, first, None, slopes, attr, starts, n, form)
            if back:
                edges = (slopes, edge_query, weights, grad_edge)
                own = (row * heads + h) * dim
                add_products(grad_attr, back_at, h == 0, *edges, own, n, dim, group)


@device
def _merge(t, count, tiles, out, partial, size):
    """Sums the partials of a row, of which t is the first tile."""
    if out is not None:
        row = tiles[4 * t]
        for f in range(size):
            total, part = partial[t * size + f], t + 1
            while part < count and tiles[4 * part] == row:
                total += partial[part * size + f]
                part += 1
            out[row * size + f] = total


@device
def _finish(row, slot, grad_query, query, att, att_parts, width):
    """Puts the attention vector into a row's gradient, and the row into that of the vector."""
    if att is not None:
        for f in range(width):
            g = grad_query[row * width + f]
            att_parts[slot * width + f] += float(query[row * width + f]) * g
            grad_query[row * width + f] = att[f] * g


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, tiles, grad_query, grad_edge_query, delta, terms, signs = values[:9]
    att_parts, grad_attr, partial, partial_edge, partial_delta, scores = values[9:15]
    grad, grad_edge, grad_weights, query, key, value, att, stats, attr, lin = values[15:25]
    edge_query, reals, rows, count, split, heads, channels, dim = values[25:33]
    num_loops, offset, seed, limit, drop, chunks, permuted, weighs, back = values[33:42]
    masked, group, together, edge_together = values[42:]
    channels = number_of(channels)
    items, phase = items_of(args), phase_of(args)
    width, edges = heads * channels, rowptr[rows]
    work = (
        *(scratch(grad_query, 512), scratch(grad_query, 512), scratch(grad_query, 512)),
        *(scratch(tiles, 64), scratch(tiles, 64), scratch(tiles, 64), scratch(tiles, 64)),
        *(scratch(tiles, 64), scratch(tiles, 64), scratch(tiles, 64)),
    )
    graph = (idx, permuted, perm, edges, edges - 1, num_loops >= 0, offset)
    forms = (masked, group, together, edge_together)
    shape = (*forms, channels, width, heads, dim, reals[0], drop, seed, limit, reals[1])
    sums = (delta, terms, signs, grad_attr)
    rows_of_nodes = (query, key, value, att, lin, edge_query, grad, grad_edge)
    tables = (attr, *rows_of_nodes, scores, grad_weights, stats)
    item = take(args)
    while item >= 0:
        first, stop = item * count // items, (item + 1) * count // items  # tiles
        if phase == 0:
            first, stop = rows_of(item, items, rowptr, rows, tiles, count)
        for one in range(first, stop):
            tile = one
            if phase == 0:
                tile = item if item < count else -1
            row = one if phase == 0 else tiles[4 * one]
            begin, end, at, slot = rowptr[row], rowptr[row + 1], row, item - count
            loop = edges + row if row < num_loops else NO_LOOP
            to_both, to_delta = (grad_query, grad_edge_query), delta
            if tile >= 0:
                loop = loop if tiles[4 * tile + 2] == end else NO_LOOP
                begin, end, at, slot = tiles[4 * tile + 1], tiles[4 * tile + 2], tile, chunks + item
                to_both, to_delta = (partial, partial_edge), partial_delta
            elif end - begin > split:
                continue
            leads = tile >= 0 and (tile == 0 or tiles[4 * (tile - 1)] != row)
            if phase == 1 and leads:
                _merge(tile, count, tiles, delta, partial_delta, heads)
            whole = tile < 0
            once = whole and end - begin + (loop != NO_LOOP) <= BATCH
            for part in range(2):
                here = phase == 2 * part or (whole and phase == 0)
                if here and not (once and part == 1):
                    last = part == 1 or once
                    span = (part == 0, last, row, begin, end, loop, at, work, graph, shape)
                    to = (weighs, back, *to_both, to_delta)
                    _pass(*span, *to, *sums, *tables)
            if phase == 3 and leads:
                _merge(tile, count, tiles, grad_query, partial, width)
                _merge(tile, count, tiles, grad_edge_query, partial_edge, heads * dim)
            some = end > begin or loop != NO_LOOP  # else all is zero, whatever the row holds
            if some and (whole or (phase == 3 and leads)):
                _finish(row, slot, grad_query, query, att, att_parts, width)
        item = take(args)


def _run(csr, tensors, factor, heads, dim, num_loops, offset, dropout, seed, slots):
    rowptr, idx, perm, tiles, split = csr
    reals = numbers(factor, keep_scale(dropout))
    out, rows = tensors["grad_query"], rowptr.shape[0] - 1
    channels = row_width(out) // heads if heads else 0
    tensors["delta"] = empty((rows, heads), tensors["terms"].dtype)
    drop = seed is not None
    work = 4 * (idx.shape[0] + rows) * max(heads * channels, 1)
    chunks = min(slots // 2, work // (1 << 17) + 1)
    perm, permuted = present(perm, idx)
    tensors["grad_weights"], weighs = present(tensors["grad_weights"], tensors["terms"])
    tensors["grad_attr"], back = present(tensors.get("grad_attr"), tensors["terms"])
    given = (rowptr, idx, perm, tiles, *(tensors.get(name) for name in ARGUMENTS))
    sizes = size_fields(channels, out.dtype, 10)
    shape = shape_fields(heads, channels, out.dtype)
    fields = (*(dtype(t) for t in given), torch.float64, *sizes, *shape)
    values = (
        *(address(t) for t in given),
        *(ctypes.addressof(reals), rows, tiles.shape[0], split, heads, channels, dim),
        *(num_loops, offset, int(seed) if drop else 0, threshold(dropout), drop, chunks),
        *(permuted, weighs, back, 0, 0, 0, 0),
    )
    if rows and heads:
        count = tiles.shape[0]
        launch(_entry, fields, values, work, count, phases=4, chunks=chunks, groups=slots // 2)


def gatv2_target(
    csr,
    grad_x_r,
    terms,
    signs,
    att_parts,
    lin_parts,
    grad_attr,
    grad_loop,
    partial,
    partial_delta,
    scores,
    grad,
    grad_weights,
    x_l,
    x_r,
    att,
    stats,
    attr,
    loop_attr,
    lin,
    scaled,
    heads,
    num_loops,
    slope,
    dropout,
    seed,
):
    """Writes the gradients on the side of the targets, and what those of the sources need."""
    tensors = {
        **{"grad_query": grad_x_r, "query": x_r, "key": x_l, "att": att, "stats": stats},
        **{"terms": terms, "signs": signs, "att_parts": att_parts},
        **{"partial": partial, "partial_delta": partial_delta},
        **{"grad": grad, "grad_weights": grad_weights, "scores": scores},
    }
    dim, offset = 0, loop_offset(attr, loop_attr)
    if attr is not None and scores is None:
        tensors |= {"attr": attr, "lin": lin}
        dim = lin.shape[0]
    options = (num_loops, offset, dropout, seed, att_parts.shape[0])
    _run(csr, tensors, slope, heads, dim, *options)
    if attr is not None:
        offsets = offset, loop_offset(grad_attr, grad_loop)
        edges = (terms, signs, lin_parts, grad_attr, attr, scaled)
        gatv2_edges(csr, *edges, heads, num_loops, slope, offsets)


def transformer_target(
    csr,
    grad_query,
    grad_edge_query,
    terms,
    grad_attr,
    partial,
    partial_edge,
    partial_delta,
    grad,
    grad_edge,
    grad_weights,
    query,
    key,
    value,
    stats,
    attr,
    edge_query,
    heads,
    scale,
    dropout,
    seed,
):
    """Writes the gradients on the side of the targets, and what those of the sources need."""
    tensors = {
        **{"grad_query": grad_query, "query": query, "key": key, "value": value, "stats": stats},
        **{"terms": terms, "partial": partial, "partial_delta": partial_delta},
        **{"grad": grad, "grad_weights": grad_weights, "grad_attr": grad_attr},
    }
    if attr is not None:
        tensors |= {"attr": attr, "edge_query": edge_query, "grad_edge": grad_edge}
        tensors |= {"grad_edge_query": grad_edge_query, "partial_edge": partial_edge}
    dim = 0 if attr is None else attr.shape[1]
    _run(csr, tensors, scale, heads, dim, -1, 0, dropout, seed, 128)
