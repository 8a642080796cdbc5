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
        *(*ORDERED, ("grad", "T*"), ("out", "T*"), ("scores", "A*"), ("stats", "A*")),
        *(("more", "A*"), ("delta", "A*"), ("partial", "A*"), *ROWS, ("num_loops", "i64"), *SHAPE),
    ],
)
_ENDLESS = 2**62  # rows of so many edges are split


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
    delta: Tensor,
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
    rows, width = grad.size(0), row_width(grad)
    if not rows or not heads:
        return
    if not width:
        grad, out = one_channel(heads, grad, out)
        width = heads
    plan, count = head_layout(heads, width // heads, grad, out), tiles.size(0)
    if more is None:  # rows are short then, whatever the number of their edges
        count, split = 0, _ENDLESS
    flags = {"LOOPS": num_loops >= 0, "MORE": more is not None}
    macros = specialise(types_of(grad, rowptr), plan, **flags)
    tables = (rowptr, idx, tiles, grad, out, scores, stats, more, delta, partial)
    sizes = (rows, count, split, num_loops, heads, width // heads)
    grid = plan.blocks(rows + count), plan.slices
    _DELTA(runtime, macros, grid, THREADS, *tables, *sizes)
    if count:
        merge_sums(runtime, csr, partial, delta)


def drop(dropout: float) -> tuple[int, float]:
    """Returns how the kernels take the probability with which a weight is dropped."""
    return threshold(dropout), keep_scale(dropout)
