"""transformer on CUDA: see kernels/transformer.cu, transformer_target.cu, transformer_source.cu."""

from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cuda import attention
from pyg_ioaware.engines.cuda.attention import DROPOUT, SHAPE, drop, one_channel
from pyg_ioaware.engines.cuda.launch import GRAPH, ROWS, Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, HeadLayout, Pace, head_layout, pace
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR

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
_BY_TARGET = [*GRAPH, ("scores", "A*"), ("stats", "A*")]
_SIZES = [*ROWS, *SHAPE, ("dim", "i32")]
_DELTA = Kernel(
    "transformer_target",
    "transformer_delta",
    [
        *(*_BY_TARGET, ("grad_weights", "A*"), ("grad_edge", "T*"), ("attr", "T*")),
        *(("seed", "i64*"), ("terms", "A*"), ("partial_delta", "A*"), *_SIZES, *DROPOUT),
    ],
)
_TARGET = Kernel(
    "transformer_target",
    "transformer_target",
    [
        *(*_BY_TARGET, ("grad_weights", "A*"), ("delta", "A*"), ("grad_edge", "T*")),
        *(("key", "T*"), ("attr", "T*"), ("seed", "i64*"), ("terms", "A*")),
        *(("grad_query", "T*"), ("grad_edge_query", "T*"), ("partial", "A*")),
        *(("partial_edge", "A*"), *_SIZES, ("scale", "f64"), *DROPOUT),
    ],
)
_ATTR = Kernel(
    "transformer_target",
    "transformer_attr",
    [
        *(*_BY_TARGET, ("grad_edge", "T*"), ("edge_query", "T*"), ("seed", "i64*")),
        *(("terms", "A*"), ("grad_attr", "T*"), *ROWS),
        *(("heads", "i32"), ("dim", "i32"), ("scale", "f64"), *DROPOUT),
    ],
)
_SOURCE = Kernel(
    "transformer_source",
    "transformer_source",
    [
        *(*GRAPH, ("query", "T*"), ("terms", "A*"), ("grad_key", "T*"), ("partial", "A*")),
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
    grid = plan.blocks(rows + count), plan.slices
    _FORWARD(runtime, macros, grid, THREADS, *tables, *parts, *sizes, *drop(dropout))
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
    scores: Tensor,
    grad_edge: Tensor | None,
    grad_weights: Tensor | None,
    key: Tensor,
    stats: Tensor,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Writes the gradients on the side of the targets, and those of the scores to ``terms``."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = grad_query.size(0), row_width(grad_query)
    dim = 0 if attr is None else attr.size(1)
    if not rows or not heads:
        return
    if not width:
        grad_query, partial, key = one_channel(heads, grad_query, partial, key)
        width = heads
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, key, grad_query, least=_lanes(dim))
    types = types_of(grad_query, rowptr)
    flags = {"DROPOUT": seed is not None, "WEIGHTS": grad_weights is not None}
    laden = seed is not None or grad_weights is not None
    speed = pace("transformer_target", plan, key, idx.numel(), rows, dim > 0, laden)
    macros = specialise(types, plan, speed, **flags, EDGE_VECS=-(-dim // plan.head_lanes))
    sizes, rate = (rows, count, split), drop(dropout)
    shape, delta = (heads, channels, dim), None
    given = (rowptr, idx, perm, tiles, scores, stats)
    if count:
        args = (*given, grad_weights, grad_edge, attr, seed, terms, partial_delta)
        grid = plan.blocks(count), plan.slices
        _DELTA(runtime, macros, grid, THREADS, *args, *sizes, *shape, *rate)
        delta = attention.delta_of(runtime, csr, partial_delta)
    read = (grad_weights, delta, grad_edge, key, attr, seed)
    outs = (terms, grad_query, grad_edge_query, partial, partial_edge)
    grid = plan.blocks(rows + count), plan.slices
    _TARGET(
        *(runtime, macros, grid, THREADS, *given, *read, *outs),
        *(*sizes, *shape, scale, *rate),
    )
    if count:
        merge_sums(runtime, csr, partial, grad_query)
        if grad_edge_query is not None and dim:
            merge_sums(runtime, csr, partial_edge, grad_edge_query)
    if grad_attr is not None:
        plan = HeadLayout(1, 32, 32, 1, 1, 1, False)
        tables = (grad_edge, edge_query, seed, terms, grad_attr)
        grid, flags = (plan.blocks(rows + count), 1), flags | {"WEIGHTS": False}
        macros = specialise(types, plan, Pace(1, 1), **flags, EDGE_VECS=1)
        _ATTR(
            *(runtime, macros, grid, THREADS, *given, *tables),
            *(*sizes, heads, dim, scale, *rate),
        )


def transformer_source(
    runtime: Runtime,
    csr: CSR,
    grad_key: Tensor,
    partial: Tensor,
    query: Tensor,
    terms: Tensor,
    heads: int,
    scale: float,
) -> None:
    """Writes the gradient of the keys."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = grad_key.size(0), row_width(grad_key)
    if not rows or not width:
        return
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, query, grad_key)
    speed = pace("transformer_source", plan, query, csr.idx.numel(), rows)
    macros = specialise(types_of(query, rowptr), plan, speed)
    tables = (rowptr, idx, perm, tiles, query, terms, grad_key, partial)
    sizes = (rows, count, split, heads, channels, scale)
    grid = plan.blocks(rows + count), plan.slices
    _SOURCE(runtime, macros, grid, THREADS, *tables, *sizes)
    if count:
        merge_sums(runtime, csr, partial, grad_key)
