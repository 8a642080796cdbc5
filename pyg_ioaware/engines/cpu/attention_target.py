"""gatv2_target, transformer_target: gradients of attention on the side of the targets.

With a the softmax of a row's scores and t_k = <grad[i], value[idx[k]]> (+ grad_weights[k]), the
gradient of score k is s_k = a_k * (t_k - delta[i]), delta[i] = sum_l a_l t_l, and

    gatv2        grad_query[i] = att * g_i,  g_i = sum_k s_k * slope_k    (slope_k: 1, or the slope)
                 lin_parts += attr[k] x (s_k * slope_k)         att_parts += query[i] * g_i
                 grad_attr[k] = scaled (s_k * slope_k)          with scaled = lin * att
    transformer  grad_query[i] = scale * sum_k s_k * key[idx[k]]
                 grad_edge_query[i] = scale * sum_k s_k * attr[k]
                 grad_attr[k] = sum_h scale * s_k * edge_query[i, h] + a_k * grad_edge[i, h]

A first pass over a row's edges writes a_k and t_k, a second one, whose data is still in the
caches, replaces them by what the pass over the sources needs: the weight after dropout, and s_k.

Shapes    as attention_forward; delta [N, H]  terms [E + L, 2, H]
          signs [E + L, H * ceil(C / 8)] bytes: which hidden values are positive
          att_parts, lin_sums float64 [P, H*C], [P, D, H*C]: a slot per chunk of rows or group of
          tiles; lin_parts holds what is not yet added to lin_sums
Mapping   phase 0: whole rows, and the first pass over tiles; 1: their delta; 2: their second
          pass; 3: merge
Traffic   gathers E rows of key, and of value (gatv2: of x_l once), key twice where a row exceeds
          the cache (transformer); terms and signs once
Numerics  scores are those of the forward pass, bit for bit; tiles and slots in a fixed order
"""

# mypy: ignore-errors
import ctypes

import torch

from pyg_ioaware.engines.cpu.attention import (
    BATCH,
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
    masked_field,
    mlp_scores,
    numbers,
    present,
)
from pyg_ioaware.engines.cpu.attention_slopes import (
    add_outer,
    add_rows,
    add_slopes,
    map_back,
    settle,
)
from pyg_ioaware.engines.cpu.exp import exp
from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, device, items_of, phase_of, take, unpack
from pyg_ioaware.engines.cpu.rows import address, dtype, launch, rows_of
from pyg_ioaware.engines.cpu.vec import (
    add,
    hsum,
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

FLUSH = 64  # edges whose float32 sums are kept apart before they are added in float64

# The tensors of a kernel after those of the structure; None those that it does not have.
ARGUMENTS = (
    *("grad_query", "grad_edge_query", "delta", "terms", "signs", "att_parts", "lin_parts"),
    *("grad_attr", "partial", "partial_edge", "partial_delta", "grad", "grad_edge"),
    *("grad_weights", "query", "key", "value", "att", "stats", "attr", "lin", "scaled"),
    "edge_query",
)


@device
def _first_pass(row, begin, end, loop, delta, at, work, graph, shape, weighs, *tables):
    """Writes weight and t of each edge, and the sum of their products to delta[at * H:]."""
    _, _, drops, sources, places, starts, _, _, ahead = work
    idx, permuted, perm, edges, last_edge, skip, offset, _ = graph
    _, _, width, heads, dim, _, drop, seed, limit, keep = shape
    for h in range(heads):
        delta[at * heads + h] = 0
    k, stop = begin, end + (loop != NO_LOOP)
    while k < stop:
        n, k = fill(sources, places, k, end, row, skip, loop, idx)
        if n == 0:
            continue
        look_ahead(ahead, n, k, last_edge, width, idx)
        if dim:
            locate(starts, places, n, row, edges, permuted, perm, offset, dim)
        for h in range(heads):
            if drop and h % 4 == 0:
                draw(drops, places, n, h // 4, seed, limit, keep)
            _score(row, h, n, work, shape, *tables)
            _weigh(row, h, n, delta, at, work, shape, weighs, *tables)


@device
def _score(
    row,
    h,
    n,
    work,
    shape,
    query,
    key,
    value,
    att,
    attr,
    lin,
    edge_query,
    grad,
    grad_edge,
    grad_weights,
    stats,
    terms,
    signs,
):
    """Writes score and <grad, value> of each edge of a batch for one head."""
    scores, dots, _, sources, places, starts, rows_at, _, ahead = work
    masked, channels, width, heads, dim, factor, _, _, _, _ = shape
    if att is not None:
        batch = (sources, places, starts, ahead)
        form = (masked, factor, channels, width, dim, heads * ((channels + 7) // 8))
        mlp_scores(scores, dots, signs, h, n, row, batch, att, key, query, grad, attr, lin, form)
    if value is not None:
        batch, form = (sources, starts, rows_at, ahead), (masked, channels, width, dim, heads)
        dot_products(scores, h, n, row, batch, query, key, edge_query, attr, form)
        dot_products(dots, h, n, row, batch, grad, value, grad_edge, attr, form)
        for q in range(n):
            scores[q] *= factor


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
    query,
    key,
    value,
    att,
    attr,
    lin,
    edge_query,
    grad,
    grad_edge,
    grad_weights,
    stats,
    terms,
    signs,
):
    """Writes weight and t of each edge of a batch for one head."""
    scores, dots, drops, _, places, _, _, _, _ = work
    heads, drop = shape[3], shape[6]
    zero = zeros_of(scores, LANES)
    before = value is not None  # whether weights are handed out before dropout
    if weighs and not before:
        for q in range(n):
            dots[q] += grad_weights[places[q] * heads + h]
    if drop:
        for q in range(n):
            dots[q] *= drops[h % 4 * BATCH + q]
    if weighs and before:
        for q in range(n):
            dots[q] += grad_weights[places[q] * heads + h]
    top, inverse = stats[row * 2 * heads + h], stats[row * 2 * heads + heads + h]
    total = zero
    for q in range(0, n, LANES):
        inside = tail(zero, n - q)
        s = sub(load(scores, q, zero, None), splat(zero, top))
        a = mul(exp(select(inside, s, zero)), splat(zero, inverse))
        total = add(total, select(inside, mul(a, load(dots, q, zero, None)), zero))
        store(scores, q, a, None)
    delta[at * heads + h] += hsum(total)
    for q in range(n):
        # The sign tells the second pass that the weight was dropped.
        dropped = drop and drops[h % 4 * BATCH + q] == 0
        place = places[q] * 2 * heads + h
        terms[place] = -scores[q] if dropped else scores[q]
        terms[place + heads] = dots[q]


@device
def _second_pass(
    row,
    begin,
    end,
    loop,
    at,
    slot,
    work,
    graph,
    shape,
    back,
    to,
    to_edge,
    delta,
    terms,
    signs,
    lin_parts,
    grad_attr,
    key,
    value,
    att,
    attr,
    scaled,
    edge_query,
    grad_edge,
):
    """Writes the sums of a row, or tile, for the gradients of query and edge query."""
    slopes, kept, blocks, sources, places, starts, rows_at, back_at, _ = work
    idx, permuted, perm, edges, _, skip, offset, back_offset = graph
    masked, channels, width, heads, dim, factor, drop, _, _, keep = shape
    k, stop, first = begin, end + (loop != NO_LOOP), True
    while k < stop:
        n, k = fill(sources, places, k, end, row, skip, loop, idx)
        if n == 0:
            continue
        if dim:
            locate(starts, places, n, row, edges, permuted, perm, offset, dim)
        if back:
            locate(back_at, places, n, row, edges, permuted, perm, back_offset, dim)
        for h in range(heads):
            settle(h, n, heads, places, terms, delta[row * heads + h], kept, slopes, drop, keep)
            base = h * channels
            if att is not None:
                for q in range((n + 3) // 4 * 4):
                    rows_at[q] = (places[q] * heads + h) * ((channels + 7) // 8)
                batch = (slopes, factor, signs, rows_at, n)
                add_slopes(to, at * width + base, first, channels, *batch)
                if lin_parts is not None:
                    start, form = slot * dim * width + base, (masked, channels, width, dim)
                    add_outer(lin_parts, start, attr, starts, *form, *batch)
                    if back:
                        map_back(grad_attr, back_at, h, scaled, blocks, channels, dim, *batch)
            if value is not None:
                for q in range(n):
                    slopes[q] *= factor
                    rows_at[q] = sources[q] * width + base
                batch = (slopes, key, rows_at, n, channels)
                add_weighted(to, at * width + base, first, 1.0, *batch)
                if edge_query is not None:
                    batch = (slopes, attr, starts, n, dim)
                    add_weighted(to_edge, (at * heads + h) * dim, first, 1.0, *batch)
                    if back:
                        batch = (slopes, edge_query, kept, grad_edge)
                        own = (row * heads + h) * dim
                        add_rows(grad_attr, back_at, h == 0, *batch, own, n, dim)
        first = False
    if first:
        clear(to, at * width, width)
        if to_edge is not None:
            clear(to_edge, at * heads * dim, heads * dim)


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


@device
def _flush(slot, parts, sums, size):
    """Moves a slot's recent sums to where they are kept in float64."""
    if parts is not None:
        for f in range(slot * size, (slot + 1) * size):
            sums[f] += parts[f]
            parts[f] = 0


@Entry
def _entry(args):
    values = unpack(args)
    rowptr, idx, perm, tiles, grad_query, grad_edge_query, delta, terms, signs = values[:9]
    att_parts, lin_parts, grad_attr, partial, partial_edge, partial_delta = values[9:15]
    grad, grad_edge, grad_weights, query, key, value, att, stats, attr, lin = values[15:25]
    scaled, edge_query, reals, masked, rows, count, split, heads, channels, dim = values[25:35]
    num_loops, offset, back_offset, seed, limit, drop, chunks = values[35:42]
    permuted, weighs, back = values[42:45]
    lin_sums = values[45]
    items, phase = items_of(args), phase_of(args)
    width, edges = heads * channels, rowptr[rows]
    work = (
        *(scratch(grad_query, 64), scratch(grad_query, 64), scratch(grad_query, 256)),
        *(scratch(tiles, 64), scratch(tiles, 64), scratch(tiles, 64)),
        *(scratch(tiles, 64), scratch(tiles, 64), scratch(tiles, 64)),
    )
    graph = (idx, permuted, perm, edges, edges - 1, num_loops >= 0, offset, back_offset)
    shape = (masked, channels, width, heads, dim, reals[0], drop, seed, limit, reals[1])
    rows_of_nodes = (query, key, value, att, attr, lin, edge_query, grad, grad_edge)
    tables = (*rows_of_nodes, grad_weights, stats, terms, signs)
    sums = (delta, terms, signs, lin_parts, grad_attr)
    sources = (key, value, att, attr, scaled, edge_query, grad_edge)
    item = take(args)
    while item >= 0:
        recent = 0
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
            span = (row, begin, end, loop)
            if phase == 0:
                _first_pass(*span, to_delta, at, work, graph, shape, weighs, *tables)
            if phase == 1 and leads:
                _merge(tile, count, tiles, delta, partial_delta, heads)
            if phase == 2 or tile < 0:
                _second_pass(*span, at, slot, work, graph, shape, back, *to_both, *sums, *sources)
                recent += end - begin
                if recent >= FLUSH:
                    _flush(slot, lin_parts, lin_sums, dim * width)
                    recent = 0
            if phase == 3 and leads:
                _merge(tile, count, tiles, grad_query, partial, width)
                _merge(tile, count, tiles, grad_edge_query, partial_edge, heads * dim)
            if tile < 0 or (phase == 3 and leads):
                _finish(row, slot, grad_query, query, att, att_parts, width)
        if phase == 2:
            _flush(chunks + item, lin_parts, lin_sums, dim * width)
        elif phase == 0 and item >= count:
            _flush(item - count, lin_parts, lin_sums, dim * width)
        item = take(args)


def _run(csr, tensors, factor, heads, dim, num_loops, offsets, dropout, seed, slots):
    rowptr, idx, perm, tiles, split = csr
    reals = numbers(factor, keep_scale(dropout))
    out, rows = tensors["grad_query"], rowptr.shape[0] - 1
    channels = out.shape[1] // heads if heads else 0
    drop = seed is not None
    work = 4 * (idx.shape[0] + rows) * max(heads * channels, 1)
    chunks = min(slots // 2, work // (1 << 17) + 1)
    perm, permuted = present(perm, idx)
    tensors["grad_weights"], weighs = present(tensors["grad_weights"], tensors["terms"])
    tensors["grad_attr"], back = present(tensors["grad_attr"], tensors["terms"])
    given = (rowptr, idx, perm, tiles, *(tensors.get(name) for name in ARGUMENTS))
    lin_sums = dtype(tensors.get("lin_sums"))
    fields = (
        *(dtype(t) for t in given),
        *(torch.float64, masked_field(channels, out.dtype), *(INTEGER,) * 16, lin_sums),
    )
    values = (
        *(address(t) for t in given),
        *(ctypes.addressof(reals), 0, rows, tiles.shape[0], split, heads, channels, dim),
        *(num_loops, *offsets, int(seed) if drop else 0, threshold(dropout), drop, chunks),
        *(permuted, weighs, back, address(tensors.get("lin_sums"))),
    )
    if rows and heads:
        count = tiles.shape[0]
        launch(_entry, fields, values, work, count, phases=4, chunks=chunks, groups=slots // 2)


def gatv2_target(
    csr,
    grad_x_r,
    delta,
    terms,
    signs,
    att_parts,
    lin_parts,
    lin_sums,
    grad_attr,
    grad_loop,
    partial,
    partial_delta,
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
        **{"delta": delta, "terms": terms, "signs": signs, "att_parts": att_parts},
        **{"partial": partial, "partial_delta": partial_delta},
        **{"grad": grad, "grad_weights": grad_weights, "grad_attr": grad_attr},
    }
    if attr is not None:
        tensors |= {"attr": attr, "lin": lin, "scaled": scaled}
        tensors |= {"lin_parts": lin_parts, "lin_sums": lin_sums}
    dim = 0 if lin is None else lin.shape[0]
    offsets = loop_offset(attr, loop_attr), loop_offset(grad_attr, grad_loop)
    _run(csr, tensors, slope, heads, dim, num_loops, offsets, dropout, seed, att_parts.shape[0])


def transformer_target(
    csr,
    grad_query,
    grad_edge_query,
    delta,
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
        **{"delta": delta, "terms": terms, "partial": partial, "partial_delta": partial_delta},
        **{"grad": grad, "grad_weights": grad_weights, "grad_attr": grad_attr},
    }
    if attr is not None:
        tensors |= {"attr": attr, "edge_query": edge_query, "grad_edge": grad_edge}
        tensors |= {"grad_edge_query": grad_edge_query, "partial_edge": partial_edge}
    dim = 0 if attr is None else attr.shape[1]
    _run(csr, tensors, scale, heads, dim, -1, (0, 0), dropout, seed, 128)
