"""What gatv2 and transformer on CUDA share: see kernels/attention.cu, attention_delta.cu."""

from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cuda.launch import ORDERED, ROWS, Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, head_layout, merge_blocks, merge_head_layout
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
_DELTA = Kernel(
    "attention_delta",
    "attention_delta",
    [
        *(("grad", "T*"), ("out", "T*"), ("stats", "A*"), ("extra", "A*"), ("common", "A*")),
        *(("num_rows", "i64"), *SHAPE),
    ],
)
_EXTRA = Kernel(
    "attention_delta",
    "attention_extra",
    [
        *(*ORDERED, ("scores", "A*"), ("stats", "A*"), ("more", "A*"), ("extra", "A*")),
        *(("partial", "A*"), *ROWS, ("num_loops", "i64"), *SHAPE),
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


def attention_delta(
    runtime: Runtime,
    csr: CSR,
    common: Tensor,
    partial: Tensor,
    grad: Tensor,
    out: Tensor,
    scores: Tensor,
    stats: Tensor,
    more: Tensor | None,
    heads: int,
    num_loops: int,
) -> None:
    """Writes what the gradients of the scores of a row have in common."""
    rowptr, idx, _, tiles, split = csr
    rows, width, extra = grad.size(0), row_width(grad), None
    if not rows or not heads:
        return
    if not width:
        grad, out = one_channel(heads, grad, out)
        width = heads
    shape, types = (heads, width // heads), types_of(grad, rowptr)
    plan, count = head_layout(*shape, grad, out), tiles.size(0)
    macros = specialise(types, plan, LOOPS=num_loops >= 0)
    if more is not None:
        extra = stats.new_empty(rows, heads)
        tables = (rowptr, idx, tiles, scores, stats, more, extra, partial)
        sizes, grid = (rows, count, split, num_loops), (plan.blocks(rows + count), plan.slices)
        _EXTRA(runtime, macros, grid, THREADS, *tables, *sizes, *shape)
        if count:
            merge_sums(runtime, csr, partial, extra)
    grid = plan.blocks(rows), plan.slices
    _DELTA(runtime, macros, grid, THREADS, grad, out, stats, extra, common, rows, *shape)


def drop(dropout: float) -> tuple[int, float]:
    """Returns how the kernels take the probability with which a weight is dropped."""
    return threshold(dropout), keep_scale(dropout)
