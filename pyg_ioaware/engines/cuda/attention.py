"""What gatv2 and transformer on CUDA share: see kernels/attention.cu, attention_values.cu."""

from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cuda.launch import GRAPH, ROWS, Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import (
    THREADS,
    head_layout,
    merge_blocks,
    merge_head_layout,
    pace,
)
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR
from pyg_ioaware.philox import keep_scale, threshold

SHAPE = [("heads", "i32"), ("channels", "i32")]
DROPOUT = [("threshold", "i64"), ("keep", "f64")]

_MERGE = Kernel(
    "attention",
    "attention_merge",
    [
        *(("tiles", "i64*"), ("partial", "A*"), ("partial_stats", "A*")),
        *(("out", "T*"), ("stats", "A*"), ("num_tiles", "i64"), *SHAPE),
    ],
)
_VALUES = Kernel(
    "attention_values",
    "attention_values",
    [
        *(*GRAPH, ("grad", "T*"), ("value", "T*"), ("scores", "A*"), ("stats", "A*")),
        *(("seed", "i64*"), ("grad_value", "T*"), ("sums", "A*"), ("terms", "A*")),
        *(("partial", "A*"), *ROWS, ("num_loops", "i64"), *SHAPE, *DROPOUT),
    ],
)


def one_channel(heads: int, *tables: Tensor) -> list[Tensor]:
    """Returns rows of a zero for each head in place of rows of heads without channels.

    The scores are the same, and the kernels write what depends on them alone.
    """
    return [table.new_zeros(table.size(0), heads) for table in tables]


def merge(
    runtime: Runtime,
    csr: CSR,
    partial: Tensor,
    partial_stats: Tensor,
    out: Tensor,
    stats: Tensor | None,
    heads: int,
) -> None:
    """Writes the results of split rows, if there are any, from those of their tiles."""
    count, channels = csr.tiles.size(0), row_width(out) // heads
    if not count:
        return
    plan = merge_head_layout(heads, channels, out)
    macros = specialise(types_of(out, csr.rowptr), plan)
    tables = (csr.tiles, partial, partial_stats, out, stats)
    _MERGE(runtime, macros, merge_blocks(count), THREADS, *tables, count, heads, channels)


def attention_values(
    runtime: Runtime,
    csr: CSR,
    sums: Tensor,
    terms: Tensor,
    partial: Tensor,
    grad: Tensor,
    value: Tensor,
    scores: Tensor,
    stats: Tensor,
    heads: int,
    num_loops: int,
    dropout: float,
    seed: Tensor | None,
    unmerged: bool,
) -> None:
    r"""Writes the gradient of the values, and what that of the scores is made of.

    ``sums`` are of the dtype of sums if more is to be added, and then those of tiles are left in
    ``partial``: ``unmerged``.
    """
    rowptr, idx, perm, tiles, split = csr
    rows, width = value.size(0), row_width(value)
    if not rows or not heads:
        return
    if not width:
        sums, partial, grad, value = one_channel(heads, sums, partial, grad, value)
        width = heads
    count, channels = tiles.size(0), width // heads
    plan = head_layout(heads, channels, grad, value)
    wide = sums.dtype is not value.dtype
    speed = pace("attention_values", plan, grad, idx.numel(), rows, with_more=seed is not None)
    flags = {"LOOPS": num_loops >= 0, "DROPOUT": seed is not None}
    macros = specialise(types_of(value, rowptr), plan, speed, **flags)
    read = (grad, value, scores, stats, seed)
    written = (None if wide else sums, sums if wide else None, terms, partial)
    sizes = (rows, count, split, num_loops, heads, channels)
    grid, graph = (plan.blocks(rows + count), plan.slices), (rowptr, idx, perm, tiles)
    _VALUES(runtime, macros, grid, THREADS, *graph, *read, *written, *sizes, *drop(dropout))
    if count and not unmerged:
        merge_sums(runtime, csr, partial, sums)


def delta_of(runtime: Runtime, csr: CSR, partial_delta: Tensor) -> Tensor:
    """Returns delta of split rows from the parts of their tiles."""
    delta = partial_delta.new_empty(csr.rowptr.numel() - 1, partial_delta.size(1))
    merge_sums(runtime, csr, partial_delta, delta)
    return delta


def drop(dropout: float) -> tuple[int, float]:
    """Returns how the kernels take the probability with which a weight is dropped."""
    return threshold(dropout), keep_scale(dropout)
