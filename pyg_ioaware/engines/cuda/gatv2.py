"""gatv2 on CUDA: see kernels/gatv2.cu, gatv2_target.cu, gatv2_source.cu, gatv2_edges.cu."""

import torch
from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cuda import attention
from pyg_ioaware.engines.cuda.attention import DROPOUT, SHAPE, drop, one_channel
from pyg_ioaware.engines.cuda.launch import (
    GRAPH,
    ORDERED,
    ROWS,
    Kernel,
    Macros,
    Runtime,
    specialise,
    types_of,
)
from pyg_ioaware.engines.cuda.plan import THREADS, head_layout, pace
from pyg_ioaware.engines.cuda.slots import slots_of, sum_slots
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR

_LIN_DEPTH = 4  # features of edges that a block of gatv2_lin takes
_MOST_LIN_SLOTS = 512

_EDGES = [("attr", "T*"), ("loop_attr", "T*"), ("lin", "T*")]
_ROWS = [*ROWS, ("num_loops", "i64")]
_FORWARD = Kernel(
    "gatv2",
    "gatv2",
    [
        *(*GRAPH, ("x_l", "T*"), ("x_r", "T*"), ("att", "T*"), *_EDGES, ("seed", "i64*")),
        *(("out", "T*"), ("stats", "A*"), ("scores", "A*"), ("signs", "u8*")),
        *(("partial", "A*"), ("partial_stats", "A*")),
        *(*_ROWS, *SHAPE, ("dim", "i32"), ("slope", "f64"), *DROPOUT),
    ],
)
_BY_TARGET = [*ORDERED, ("scores", "A*"), ("stats", "A*"), ("grad_weights", "A*")]
_DELTA = Kernel(
    "gatv2_target",
    "gatv2_delta",
    [
        *(*_BY_TARGET, ("seed", "i64*"), ("terms", "A*"), ("partial_delta", "A*")),
        *(*_ROWS, *SHAPE, *DROPOUT),
    ],
)
_TARGET = Kernel(
    "gatv2_target",
    "gatv2_target",
    [
        *(*_BY_TARGET, ("delta", "A*"), ("signs", "u8*"), ("x_r", "T*"), ("att", "T*")),
        *(("seed", "i64*"), ("terms", "A*"), ("grad_x_r", "T*"), ("slots", "f64*")),
        *(("partial", "A*"), *_ROWS, *SHAPE, ("slope", "f64"), *DROPOUT),
    ],
)
_SOURCE = Kernel(
    "gatv2_source",
    "gatv2_source",
    [
        *(*GRAPH, ("terms", "A*"), ("signs", "u8*"), ("x_l", "T*"), ("att", "T*")),
        *(("sums", "A*"), ("grad_x_l", "T*"), ("slots", "f64*"), ("partial", "A*")),
        *(*_ROWS, *SHAPE, ("slope", "f64")),
    ],
)
_EDGE_SIZES = [
    *(("num_edges", "i64"), ("positions", "i64"), *SHAPE),
    *(("dim", "i32"), ("slope", "f64")),
]
_LIN = Kernel(
    "gatv2_edges",
    "gatv2_lin",
    [
        *(("perm", "I*"), ("attr", "T*"), ("loop_attr", "T*"), ("terms", "A*"), ("signs", "u8*")),
        *(("slots", "f64*"), *_EDGE_SIZES),
    ],
)
_ATTR = Kernel(
    "gatv2_edges",
    "gatv2_attr",
    [
        *(("perm", "I*"), ("lin", "T*"), ("att", "T*"), ("terms", "A*"), ("signs", "u8*")),
        *(("grad_attr", "T*"), ("grad_loop", "T*"), *_EDGE_SIZES),
    ],
)


def gatv2(
    runtime: Runtime,
    csr: CSR,
    out: Tensor,
    stats: Tensor,
    scores: Tensor | None,
    signs: Tensor | None,
    partial: Tensor,
    partial_stats: Tensor,
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    attr: Tensor | None,
    loop_attr: Tensor | None,
    lin: Tensor | None,
    heads: int,
    num_loops: int,
    slope: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Attends to each row's sources by an MLP of both ends."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = out.size(0), row_width(out)
    if not rows or not heads:
        return
    if not width:
        out, partial, x_l, x_r = one_channel(heads, out, partial, x_l, x_r)
        att = att.new_zeros(heads)
        attr = loop_attr = lin = signs = None
        width = heads
    count, channels, dim = tiles.size(0), width // heads, 0 if lin is None else lin.size(0)
    plan = head_layout(heads, channels, x_l, x_r, att, out, *(() if lin is None else (lin,)))
    flags = {"KEEP": scores is not None, "SIGNS": signs is not None}
    flags |= {"DROPOUT": seed is not None, "LOOPS": num_loops >= 0, "EDGES": dim > 0}
    name = "gatv2" if signs is None else "gatv2_kept"
    speed = pace(name, plan, x_l, idx.numel(), rows, dim > 0, seed is not None)
    macros = specialise(types_of(out, rowptr), plan, speed, **flags)
    tables = (x_l, x_r, att, attr, loop_attr, lin, seed)
    sizes, shape = (rows, count, split, num_loops), (heads, channels)
    grid, graph = (plan.blocks(rows + count), plan.slices), (rowptr, idx, perm, tiles)
    written = (out, stats, scores, signs, partial, partial_stats)
    values = (*sizes, *shape, dim, slope, *drop(dropout))
    _FORWARD(runtime, macros, grid, THREADS, *graph, *tables, *written, *values)
    attention.merge(runtime, csr, partial, partial_stats, out, stats, heads)


def gatv2_target(
    runtime: Runtime,
    csr: CSR,
    grad_x_r: Tensor,
    terms: Tensor,
    att_parts: Tensor,
    lin_parts: Tensor | None,
    grad_attr: Tensor | None,
    grad_loop: Tensor | None,
    partial: Tensor,
    partial_delta: Tensor,
    scores: Tensor,
    signs: Tensor,
    grad_weights: Tensor | None,
    x_r: Tensor,
    att: Tensor,
    stats: Tensor,
    attr: Tensor | None,
    loop_attr: Tensor | None,
    lin: Tensor | None,
    heads: int,
    num_loops: int,
    slope: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Writes the gradients on the side of the targets, and those of the scores to ``terms``."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = x_r.size(0), row_width(x_r)
    if not rows or not width:
        for written in (att_parts, lin_parts, grad_attr, grad_loop):
            if written is not None:
                written.zero_()
        return
    count, channels, dim = tiles.size(0), width // heads, 0 if lin is None else lin.size(0)
    tables = (x_r, att, grad_x_r, *(() if lin is None else (lin,)))
    plan, types = head_layout(heads, channels, *tables), types_of(x_r, rowptr)
    flags = {"DROPOUT": seed is not None, "WEIGHTS": grad_weights is not None}
    speed = pace("gatv2_target", plan, x_r, idx.numel(), rows)
    macros = specialise(types, plan, speed, **flags, LOOPS=num_loops >= 0)
    sizes, rate = (rows, count, split, num_loops, heads, channels), drop(dropout)
    given = (rowptr, idx, tiles, scores, stats, grad_weights)
    delta = None
    if count:
        grid = plan.blocks(count), plan.slices
        _DELTA(runtime, macros, grid, THREADS, *given, seed, terms, partial_delta, *sizes, *rate)
        delta = attention.delta_of(runtime, csr, partial_delta)
    blocks = slots_of(plan, rows + count)
    slots = att_parts.new_empty(blocks, width)
    args = (*given, delta, signs, x_r, att, seed, terms, grad_x_r, slots, partial)
    _TARGET(runtime, macros, (blocks, plan.slices), THREADS, *args, *sizes, slope, *rate)
    if count:
        merge_sums(runtime, csr, partial, grad_x_r)
    sum_slots(slots, att_parts)
    if lin is None or lin_parts is None or not dim:
        return
    positions = terms.size(0)
    if not positions:
        lin_parts.zero_()
        return
    edges = (terms, signs)
    counts = (idx.numel(), positions, heads, channels, dim, slope)
    vec, slices = min(plan.vec, 4), -(-width // (32 * min(plan.vec, 4)))
    blocks = max(1, min(_MOST_LIN_SLOTS, positions // max(dim, 64)))
    slots = lin_parts.new_empty(blocks, dim, width)
    macros = (*types, *_flat(vec, 1, 1))
    grid = blocks, slices * -(-dim // _LIN_DEPTH)
    _LIN(runtime, macros, grid, THREADS, perm, attr, loop_attr, *edges, slots, *counts)
    torch.sum(slots, 0, keepdim=True, out=lin_parts)
    if grad_attr is not None:
        vectors = -(-width // (32 * plan.vec))
        words = vectors * plan.vec * terms.element_size() // 4
        batch = 8 if words <= 4 else 4 if words <= 8 else 2 if words <= 16 else 1
        macros, warps = (*types, *_flat(plan.vec, vectors, batch)), -(-positions // batch)
        grid = -(-warps * 32 // THREADS), 1
        _ATTR(
            *(runtime, macros, grid, THREADS, perm, lin, att),
            *(*edges, grad_attr, grad_loop, *counts),
        )


def _flat(vec: int, vectors: int, batch: int) -> Macros:
    """Returns the specialisation of a row whose heads do not matter, in all lanes of a warp."""
    lanes = (("LANES", 32), ("HEAD_LANES", 32), ("HEAD_VECS", vectors), ("FILLED", 0))
    return ("VEC", vec), ("NV", vectors), ("BATCH", batch), *lanes


def gatv2_source(
    runtime: Runtime,
    csr: CSR,
    grad_x_l: Tensor,
    att_parts: Tensor,
    sums: Tensor,
    partial: Tensor,
    x_l: Tensor,
    att: Tensor,
    terms: Tensor,
    signs: Tensor,
    heads: int,
    num_loops: int,
    slope: float,
) -> None:
    """Adds the gradient of the scores to that of the values, which ``sums`` hold."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = x_l.size(0), row_width(x_l)
    if not rows or not width:
        att_parts.zero_()
        return
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, x_l, att, grad_x_l)
    speed = pace("gatv2_source", plan, x_l, idx.numel(), rows)
    macros = specialise(types_of(x_l, rowptr), plan, speed, LOOPS=num_loops >= 0)
    blocks = slots_of(plan, rows + count)
    slots = att_parts.new_empty(blocks, width)
    read = (rowptr, idx, perm, tiles, terms, signs, x_l, att, sums)
    sizes = (rows, count, split, num_loops, heads, channels, slope)
    grid = blocks, plan.slices
    _SOURCE(runtime, macros, grid, THREADS, *read, grad_x_l, slots, partial, *sizes)
    sum_slots(slots, att_parts)
    if count:
        merge_sums(runtime, csr, partial, grad_x_l)
