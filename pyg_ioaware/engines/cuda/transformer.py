"""transformer on CUDA: see kernels/transformer.cu, transformer_target.cu, transformer_source.cu."""

import torch
from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cuda import attention
from pyg_ioaware.engines.cuda.attention import DROPOUT, SHAPE, one_channel
from pyg_ioaware.engines.cuda.launch import GRAPH, ROWS, Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, HeadLayout, Pace, head_layout, pace
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR
from pyg_ioaware.philox import keep_scale, threshold

_MOST_FEATURES = 8  # of an edge, that one lane sums where there are lanes enough

_FORWARD = Kernel(
    "transformer",
    "transformer",
    [
        *(*GRAPH, ("query", "T*"), ("key", "T*"), ("value", "T*"), ("attr", "T*")),
        *(("edge_query", "T*"), ("seed", "i64*"), ("out", "T*"), ("edge_out", "T*")),
        *(("stats", "A*"), ("scores", "A*")),
        *(("partial", "A*"), ("partial_edge", "A*"), ("partial_stats", "A*")),
        *(*ROWS, *SHAPE, ("dim", "i32"), ("scale", "f64"), *DROPOUT),
    ],
)
_TARGET = Kernel(
    "transformer_target",
    "transformer_target",
    [
        *(*GRAPH, ("grad", "T*"), ("grad_edge", "T*"), ("grad_weights", "A*")),
        *(("query", "T*"), ("key", "T*"), ("value", "T*"), ("stats", "A*"), ("attr", "T*")),
        *(("edge_query", "T*"), ("seed", "i64*"), ("grad_query", "T*")),
        *(("grad_edge_query", "T*"), ("terms", "A*"), ("partial", "A*"), ("partial_mass", "A*")),
        *(("partial_edge", "A*"), ("partial_edge_mass", "A*")),
        *(("partial_delta", "A*"), ("centre", "A*")),
        *(*ROWS, *SHAPE, ("dim", "i32"), ("scale", "f64"), *DROPOUT),
    ],
)
_ATTR = Kernel(
    "transformer_target",
    "transformer_attr",
    [
        *(*GRAPH, ("grad_edge", "T*"), ("edge_query", "T*"), ("terms", "A*")),
        *(("grad_attr", "T*"), *ROWS, ("heads", "i32"), ("dim", "i32"), ("scale", "f64")),
    ],
)
_SOURCE = Kernel(
    "transformer_source",
    "transformer_source",
    [
        *(*GRAPH, ("grad", "T*"), ("query", "T*"), ("terms", "A*")),
        *(("grad_value", "T*"), ("grad_key", "T*"), ("partial", "A*")),
        *(*ROWS, *SHAPE, ("scale", "f64")),
    ],
)


def transformer(
    runtime: Runtime,
    csr: CSR,
    out: Tensor,
    edge_out: Tensor | None,
    stats: Tensor,
    scores: Tensor | None,
    partial: Tensor,
    partial_edge: Tensor,
    partial_stats: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Attends to each row's sources by dot products."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = out.size(0), row_width(out)
    dim = 0 if attr is None else attr.size(1)
    if not rows or not heads:
        return
    if not width:
        out, partial, query, key, value = one_channel(heads, out, partial, query, key, value)
        width = heads
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, query, key, value, out, least=_lanes(dim))
    flags = {"KEEP": scores is not None, "DROPOUT": seed is not None}
    vectors = -(-dim // plan.head_lanes)
    speed = pace("transformer", plan, key, idx.numel(), rows, dim > 0, seed is not None)
    macros = specialise(types_of(out, rowptr), plan, speed, **flags, EDGE_VECS=vectors)
    tables = (rowptr, idx, perm, tiles, query, key, value, attr, edge_query, seed, out, edge_out)
    parts = (stats, scores, partial, partial_edge, partial_stats)
    sizes = (rows, count, split, heads, channels, dim, scale)
    drop = (threshold(dropout), keep_scale(dropout))
    grid = plan.blocks(rows + count), plan.slices
    _FORWARD(runtime, macros, grid, THREADS, *tables, *parts, *sizes, *drop)
    attention.merge(runtime, csr, partial, partial_stats, out, stats, heads)
    if edge_out is not None and dim:
        attention.merge(runtime, csr, partial_edge, partial_stats, edge_out, None, heads)


def _lanes(dim: int) -> int:
    """Returns how many lanes share a head at least, so that none has many features of an edge."""
    return -(-dim // _MOST_FEATURES)


def transformer_target(
    runtime: Runtime,
    csr: CSR,
    grad_query: Tensor,
    grad_edge_query: Tensor | None,
    terms: Tensor,
    grad_attr: Tensor | None,
    partial: Tensor,
    partial_edge: Tensor,
    partial_delta: Tensor,
    grad: Tensor,
    grad_edge: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stats: Tensor,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Writes the gradients on the side of the targets, and what those of the sources need."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = query.size(0), row_width(query)
    dim = 0 if attr is None else attr.size(1)
    if not rows or not heads:
        return
    if not width:
        grad, grad_query, partial = one_channel(heads, grad, grad_query, partial)
        query, key, value = one_channel(heads, query, key, value)
        width = heads
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, grad, query, key, value, grad_query, least=_lanes(dim))
    types = types_of(query, rowptr)
    flags = {"DROPOUT": seed is not None, "WEIGHTS": grad_weights is not None}
    laden = seed is not None or grad_weights is not None
    speed = pace("transformer_target", plan, key, idx.numel(), rows, dim > 0, laden)
    macros = specialise(types, plan, speed, **flags, EDGE_VECS=-(-dim // plan.head_lanes))
    sums = (partial, partial_edge, partial_delta)
    mass, edge_mass, centre = (torch.empty_like(t) if count else t for t in sums)
    tables = (grad, grad_edge, grad_weights, query, key, value, stats, attr, edge_query, seed)
    written = (grad_query, grad_edge_query, terms)
    parts = (partial, mass, partial_edge, edge_mass, partial_delta, centre)
    sizes, shape = (rows, count, split), (heads, channels, dim, scale)
    drop = (threshold(dropout), keep_scale(dropout))
    grid, graph = (plan.blocks(rows + count), plan.slices), (rowptr, idx, perm, tiles)
    values = (*sizes, *shape, *drop)
    _TARGET(runtime, macros, grid, THREADS, *graph, *tables, *written, *parts, *values)
    if count:
        keep = None if seed is None else drop[1]
        delta = attention.settle(runtime, csr, partial_delta, terms, types, -1, keep)
        merged = [(partial, mass, grad_query), (partial_edge, edge_mass, grad_edge_query)]
        for row_sums, masses, grad_row in merged[: 2 if dim else 1]:
            assert grad_row is not None
            common = (centre, delta, None, grad_row, scale)
            attention.merge_target(runtime, csr, row_sums, masses, *common)
    if grad_attr is not None:
        plan = HeadLayout(1, 32, 32, 1, 1, 1, False)
        read = (grad_edge, edge_query, terms, grad_attr)
        grid = plan.blocks(rows + count), 1
        macros = specialise(types, plan, Pace(1, 1), DROPOUT=0, WEIGHTS=0, EDGE_VECS=1)
        _ATTR(runtime, macros, grid, THREADS, *graph, *read, *sizes, heads, dim, scale)


def transformer_source(
    runtime: Runtime,
    csr: CSR,
    grad_value: Tensor,
    grad_key: Tensor,
    partial: Tensor,
    grad: Tensor,
    query: Tensor,
    terms: Tensor,
    heads: int,
    scale: float,
) -> None:
    """Writes the gradients of keys and values."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = grad_key.size(0), row_width(grad_key)
    if not rows or not width:
        return
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, grad, query, grad_value, grad_key)
    speed = pace("transformer_source", plan, grad, csr.idx.numel(), rows)
    macros = specialise(types_of(query, rowptr), plan, speed)
    tables = (rowptr, idx, perm, tiles, grad, query, terms, grad_value, grad_key, partial)
    sizes = (rows, count, split, heads, channels, scale)
    grid = plan.blocks(rows + count), plan.slices
    _SOURCE(runtime, macros, grid, THREADS, *tables, *sizes)
    if count:
        values, keys = partial.view(2, count, width)
        merge_sums(runtime, csr, values, grad_value)
        merge_sums(runtime, csr, keys, grad_key)
