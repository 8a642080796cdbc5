"""What gatv2 and transformer on CUDA share: see kernels/attention.cu."""

from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cuda.launch import ROWS, Kernel, Macros, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, HeadLayout, merge_blocks, merge_head_layout
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR

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
_SETTLE = Kernel(
    "attention",
    "attention_settle",
    [
        *(("rowptr", "I*"), ("tiles", "i64*"), ("delta", "A*"), ("terms", "A*")),
        *(*ROWS, ("num_loops", "i64"), ("heads", "i32"), ("keep", "f64")),
    ],
)
_TARGET_MERGE = Kernel(
    "attention",
    "attention_target_merge",
    [
        *(("tiles", "i64*"), ("partial", "A*"), ("partial_mass", "A*"), ("centre", "A*")),
        *(("delta", "A*"), ("att", "T*"), ("out", "T*")),
        *(("num_tiles", "i64"), *SHAPE, ("factor", "f64")),
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
    macros = specialise(types_of(out, csr.rowptr), plan, LOOPS=0, DROPOUT=0)
    tables = (csr.tiles, partial, partial_stats, out, stats)
    _MERGE(runtime, macros, merge_blocks(count), THREADS, *tables, count, heads, channels)


def settle(
    runtime: Runtime,
    csr: CSR,
    partial_delta: Tensor,
    terms: Tensor,
    types: Macros,
    num_loops: int,
    keep: float | None,
) -> Tensor:
    """Returns delta of split rows, and writes with it the terms of their edges.

    ``keep`` is the factor of the weights that dropout keeps, None without dropout.
    """
    count, heads = partial_delta.shape
    delta = partial_delta.new_empty(csr.rowptr.numel() - 1, heads)
    merge_sums(runtime, csr, partial_delta, delta)
    plan = HeadLayout(1, 32, 32, 1, 1, 1, False)
    macros = specialise(types, plan, LOOPS=num_loops >= 0, DROPOUT=keep is not None)
    sizes = (csr.rowptr.numel() - 1, count, csr.split, num_loops, heads)
    tables = (csr.rowptr, csr.tiles, delta, terms)
    _SETTLE(runtime, macros, (count, 1), THREADS, *tables, *sizes, 1.0 if keep is None else keep)
    return delta


def merge_target(
    runtime: Runtime,
    csr: CSR,
    partial: Tensor,
    mass: Tensor,
    centre: Tensor,
    delta: Tensor,
    att: Tensor | None,
    out: Tensor,
    factor: float,
) -> None:
    """Writes the gradients of split rows from the two sums of their tiles."""
    count, heads = csr.tiles.size(0), delta.size(1)
    channels = row_width(out) // heads
    plan = merge_head_layout(heads, channels, *((out,) if att is None else (out, att)))
    macros = specialise(types_of(out, csr.rowptr), plan, LOOPS=0, DROPOUT=0)
    tables = (csr.tiles, partial, mass, centre, delta, att, out)
    grid = merge_blocks(count)
    _TARGET_MERGE(runtime, macros, grid, THREADS, *tables, count, heads, channels, factor)
