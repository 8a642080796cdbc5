"""transformer on CUDA: see kernels/transformer.cu."""

from torch import Tensor

from pyg_ioaware.engines.cuda.launch import Kernel, Runtime, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, head_layout, merge_blocks
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
    flags = ("KEEP", scores is not None), ("DROPOUT", seed is not None)
    macros = (*types_of(out, rowptr), *plan.macros, *((name, int(flag)) for name, flag in flags))
    tables = (rowptr, idx, tiles, query, key, value, seed, out, stats, scores)
    sizes = (rows, count, split, heads, channels, scale)
    drop = (threshold(dropout), keep_scale(dropout))
    grid = plan.blocks(rows + count), plan.slices
    _FORWARD(runtime, macros, grid, THREADS, *tables, partial, partial_stats, *sizes, *drop)
    if count:
        merged = (tiles, partial, partial_stats, out, stats, count, heads, channels)
        _MERGE(runtime, macros, merge_blocks(count), THREADS, *merged)
