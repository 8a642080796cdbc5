"""transformer on CUDA: see kernels/transformer.cu, transformer_source.cu, and so on."""

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
_MORE = Kernel(
    "transformer_edges",
    "transformer_more",
    [
        *(*GRAPH, ("grad_edge", "T*"), ("grad_weights", "A*"), ("attr", "T*")),
        *(("seed", "i64*"), ("more", "A*"), *ROWS, *SHAPE, ("dim", "i32"), *DROPOUT),
    ],
)
_TARGET = Kernel(
    "transformer_target",
    "transformer_target",
    [
        *(*GRAPH, ("key", "T*"), ("attr", "T*"), ("terms", "A*"), ("grad_query", "T*")),
        *(("grad_edge_query", "T*"), ("partial", "A*"), ("partial_edge", "A*")),
        *(*ROWS, *SHAPE, ("dim", "i32"), ("scale", "f64")),
    ],
)
_ATTR = Kernel(
    "transformer_edges",
    "transformer_attr",
    [
        *(*GRAPH, ("scores", "A*"), ("stats", "A*"), ("grad_edge", "T*"), ("edge_query", "T*")),
        *(("seed", "i64*"), ("terms", "A*"), ("grad_attr", "T*"), *ROWS),
        *(("heads", "i32"), ("dim", "i32"), ("scale", "f64"), *DROPOUT),
    ],
)
_SOURCE = Kernel(
    "transformer_source",
    "transformer_source",
    [
        *(*GRAPH, ("grad", "T*"), ("query", "T*"), ("value", "T*"), ("scores", "A*")),
        *(("common", "A*"), ("more", "A*"), ("seed", "i64*"), ("terms", "A*")),
        *(("grad_value", "T*"), ("grad_key", "T*"), ("partial", "A*")),
        *(*ROWS, *SHAPE, ("scale", "f64"), *DROPOUT),
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


def transformer_more(
    runtime: Runtime,
    csr: CSR,
    more: Tensor,
    grad_edge: Tensor,
    grad_weights: Tensor | None,
    attr: Tensor,
    heads: int,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Writes what features and gradients of weights add to the gradient of each weight."""
    rowptr, idx, perm, tiles, split = csr
    rows, count, dim = rowptr.numel() - 1, tiles.size(0), attr.size(1)
    if not rows or not heads:
        return
    plan = head_layout(heads, 1, attr[:0], least=_lanes(dim))
    speed, flags = Pace(4, 1), {"DROPOUT": seed is not None}
    macros = specialise(types_of(attr, rowptr), plan, speed, **flags, EDGE_VECS=1)
    tables = (rowptr, idx, perm, tiles, grad_edge, grad_weights, attr, seed, more)
    sizes = (rows, count, split, heads, 1, dim, *drop(dropout))
    _MORE(runtime, macros, (plan.blocks(rows + count), plan.slices), THREADS, *tables, *sizes)


def transformer_target(
    runtime: Runtime,
    csr: CSR,
    grad_query: Tensor,
    grad_edge_query: Tensor | None,
    grad_attr: Tensor | None,
    partial: Tensor,
    partial_edge: Tensor,
    key: Tensor,
    terms: Tensor,
    scores: Tensor,
    stats: Tensor,
    grad_edge: Tensor | None,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Writes the gradients on the side of the targets, and those of edges, from ``terms``."""
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
    speed = pace("transformer_target", plan, key, idx.numel(), rows, dim > 0)
    macros = specialise(types, plan, speed, EDGE_VECS=-(-dim // plan.head_lanes))
    graph, sizes = (rowptr, idx, perm, tiles), (rows, count, split)
    tables = (key, attr, terms, grad_query, grad_edge_query, partial, partial_edge)
    grid = plan.blocks(rows + count), plan.slices
    _TARGET(
        *(runtime, macros, grid, THREADS, *graph, *tables),
        *(*sizes, heads, channels, dim, scale),
    )
    if count:
        merge_sums(runtime, csr, partial, grad_query)
        if grad_edge_query is not None and dim:
            merge_sums(runtime, csr, partial_edge, grad_edge_query)
    if grad_attr is not None:
        plan = HeadLayout(1, 32, 32, 1, 1, 1, False)
        macros = specialise(types, plan, Pace(1, 1), DROPOUT=seed is not None, EDGE_VECS=1)
        edge_tables = (scores, stats, grad_edge, edge_query, seed, terms, grad_attr)
        _ATTR(
            *(runtime, macros, (plan.blocks(rows + count), 1), THREADS, *graph, *edge_tables),
            *(*sizes, heads, dim, scale, *drop(dropout)),
        )


def transformer_source(
    runtime: Runtime,
    csr: CSR,
    grad_value: Tensor,
    grad_key: Tensor,
    partial: Tensor,
    terms: Tensor,
    grad: Tensor,
    query: Tensor,
    value: Tensor,
    scores: Tensor,
    common: Tensor,
    more: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Writes the gradients of keys and values, and those of the scores to ``terms``."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = grad_key.size(0), row_width(grad_key)
    if not rows or not heads:
        return
    if not width:
        grad_value, grad_key, grad = one_channel(heads, grad_value, grad_key, grad)
        query, value = one_channel(heads, query, value)
        partial, width = partial.new_zeros(2 * tiles.size(0), heads), heads
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, grad, query, value, grad_value, grad_key)
    laden = seed is not None or more is not None
    speed = pace("transformer_source", plan, grad, idx.numel(), rows, with_more=laden)
    flags = {"DROPOUT": seed is not None, "MORE": more is not None}
    macros = specialise(types_of(query, rowptr), plan, speed, **flags)
    read = (rowptr, idx, perm, tiles, grad, query, value, scores, common, more, seed)
    written = (terms, grad_value, grad_key, partial)
    sizes = (rows, count, split, heads, channels, scale, *drop(dropout))
    grid = plan.blocks(rows + count), plan.slices
    _SOURCE(runtime, macros, grid, THREADS, *read, *written, *sizes)
    if count:
        values, keys = partial.view(2, count, width)
        merge_sums(runtime, csr, values, grad_value)
        merge_sums(runtime, csr, keys, grad_key)
