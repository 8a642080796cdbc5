"""transformer on CUDA: see kernels/transformer.cu."""

import torch
from torch import Tensor

from pyg_ioaware.engines.cuda.launch import Kernel, Macros, Runtime, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, head_layout, merge_blocks
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR
from pyg_ioaware.philox import keep_scale, threshold

_GRAPH = [("rowptr", "I*"), ("idx", "I*"), ("tiles", "i64*")]
_SIZES = [
    *(("num_rows", "i64"), ("num_tiles", "i64"), ("split", "i64")),
    *(("heads", "i32"), ("channels", "i32"), ("scale", "f64")),
]
_DROPOUT = [("threshold", "i64"), ("keep", "f64")]
_FORWARD = Kernel(
    "transformer",
    "transformer",
    [
        *(*_GRAPH, ("query", "T*"), ("key", "T*"), ("value", "T*"), ("seed", "i64*")),
        *(("out", "T*"), ("stats", "A*"), ("scores", "A*")),
        *(("partial", "A*"), ("partial_stats", "A*"), *_SIZES, *_DROPOUT),
    ],
)
_MERGE = Kernel(
    "transformer",
    "transformer_merge",
    [
        *(("tiles", "i64*"), ("partial", "A*"), ("partial_stats", "A*")),
        *(("out", "T*"), ("stats", "A*")),
        *(("num_tiles", "i64"), ("heads", "i32"), ("channels", "i32")),
    ],
)
_TARGET = Kernel(
    "transformer",
    "transformer_target",
    [
        *(*_GRAPH, ("grad", "T*"), ("grad_weights", "A*")),
        *(("query", "T*"), ("key", "T*"), ("value", "T*"), ("stats", "A*"), ("seed", "i64*")),
        *(("grad_query", "T*"), ("terms", "A*"), ("partial", "A*"), ("partial_mass", "A*")),
        *(("partial_delta", "A*"), ("centre", "A*"), *_SIZES, *_DROPOUT),
    ],
)
_SETTLE = Kernel(
    "transformer",
    "transformer_settle",
    [
        *(*_GRAPH, ("delta", "A*"), ("terms", "A*")),
        *(("num_rows", "i64"), ("num_tiles", "i64"), ("split", "i64")),
        *(("heads", "i32"), ("keep", "f64")),
    ],
)
_TARGET_MERGE = Kernel(
    "transformer",
    "transformer_target_merge",
    [
        *(("tiles", "i64*"), ("partial", "A*"), ("partial_mass", "A*"), ("centre", "A*")),
        *(("delta", "A*"), ("grad_query", "T*"), ("num_tiles", "i64")),
        *(("heads", "i32"), ("channels", "i32"), ("scale", "f64")),
    ],
)
_SOURCE = Kernel(
    "transformer",
    "transformer_source",
    [
        *(("rowptr", "I*"), ("idx", "I*"), ("perm", "I*"), ("tiles", "i64*")),
        *(("grad", "T*"), ("query", "T*"), ("terms", "A*")),
        *(("grad_value", "T*"), ("grad_key", "T*"), ("partial", "A*"), *_SIZES),
    ],
)


def _macros(types: Macros, plan: Macros, **flags: bool) -> Macros:
    """Returns a specialisation; flags that a kernel does not have are zero."""
    names = ("KEEP", "DROPOUT", "WEIGHTS", "EDGES")
    return *types, *plan, *((name, int(flags.get(name.lower(), False))) for name in names)


def transformer(
    runtime: Runtime,
    csr: CSR,
    out: Tensor,
    edge_out: Tensor,
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
    rowptr, idx, _, tiles, split = csr
    rows, width = out.shape
    if not rows or not heads:
        return
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, query, key, value, out)
    given = {"keep": scores is not None, "dropout": seed is not None}
    macros = _macros(types_of(out, rowptr), plan.macros, **given)
    tables = (rowptr, idx, tiles, query, key, value, seed, out, stats, scores)
    sizes = (rows, count, split, heads, channels, scale)
    drop = (threshold(dropout), keep_scale(dropout))
    grid = plan.blocks(rows + count), plan.slices
    _FORWARD(runtime, macros, grid, THREADS, *tables, partial, partial_stats, *sizes, *drop)
    if count:
        merged = (tiles, partial, partial_stats, out, stats, count, heads, channels)
        _MERGE(runtime, macros, merge_blocks(count), THREADS, *merged)


def transformer_target(
    runtime: Runtime,
    csr: CSR,
    grad_query: Tensor,
    grad_edge_query: Tensor,
    delta: Tensor,
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
    rowptr, idx, _, tiles, split = csr
    rows, width = query.shape
    if not rows or not heads:
        return
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, grad, query, key, value, grad_query)
    given = {"dropout": seed is not None, "weights": grad_weights is not None}
    macros = _macros(types_of(query, rowptr), plan.macros, **given)
    mass, centre = torch.empty_like(partial), torch.empty_like(partial_delta)
    tables = (grad, grad_weights, query, key, value, stats, seed, grad_query, terms)
    parts = (partial, mass, partial_delta, centre)
    sizes, shape = (rows, count, split), (heads, channels, scale)
    drop = (threshold(dropout), keep_scale(dropout))
    grid, graph = (plan.blocks(rows + count), plan.slices), (rowptr, idx, tiles)
    _TARGET(runtime, macros, grid, THREADS, *graph, *tables, *parts, *sizes, *shape, *drop)
    if count:
        merge_sums(runtime, csr, partial_delta, delta)
        settled = (delta, terms, *sizes, heads, drop[1])
        _SETTLE(runtime, macros, (count, 1), THREADS, *graph, *settled)
        merged = (tiles, partial, mass, centre, delta, grad_query, count, *shape)
        _TARGET_MERGE(runtime, macros, merge_blocks(count), THREADS, *merged)


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
    rows, width = grad_key.shape
    if not rows or not heads:
        return
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, grad, query, grad_value, grad_key)
    macros = _macros(types_of(query, rowptr), plan.macros)
    tables = (rowptr, idx, perm, tiles, grad, query, terms, grad_value, grad_key, partial)
    sizes = (rows, count, split, heads, channels, scale)
    grid = plan.blocks(rows + count), plan.slices
    _SOURCE(runtime, macros, grid, THREADS, *tables, *sizes)
    if count:
        merge_sums(runtime, csr, partial[0], grad_value)
        merge_sums(runtime, csr, partial[1], grad_key)
