"""spmm on CUDA: see kernels/spmm.cu."""

from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.engines.cuda import cusparse
from pyg_ioaware.engines.cuda.choice import uses_cusparse
from pyg_ioaware.engines.cuda.launch import ORDERED, ROWS, Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, layout, merge_blocks, merge_layout, pace
from pyg_ioaware.graph.csr import CSR

_SPMM = Kernel(
    "spmm",
    "spmm",
    [
        *(*ORDERED, ("x", "T*"), ("weight", "T*"), ("scale", "T*"), ("out", "T*")),
        ("partial", "A*"),
        *ROWS,
        *(("width", "i32"), ("heads", "i32"), ("mean", "i32")),
    ],
)
_MERGE = Kernel(  # also of other sums whose tiles are held in the dtype of sums
    "spmm",
    "spmm_merge",
    [
        *(("rowptr", "I*"), ("tiles", "i64*"), ("partial", "A*"), ("out", "T*")),
        *(("num_tiles", "i64"), ("width", "i32"), ("mean", "i32")),
    ],
)


def spmm(
    runtime: Runtime,
    csr: CSR,
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    partial: Tensor,
    mean: bool,
) -> None:
    """Writes each row's weighted sum, or mean, to ``out``."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = out.shape
    heads = 1 if weight is None else weight.shape[1]
    if not rows or not width:
        return
    if not idx.numel():
        out.zero_()
        return
    weight = in_order(weight, perm)
    if uses_cusparse(csr, x, weight) and cusparse.multiply(
        runtime, csr, out, x, weight, scale, mean
    ):
        return
    plan = layout(width, width // heads, x, out)
    flags = {"WEIGHTED": weighted(weight), "SCALED": scale is not None}
    speed = pace("spmm", plan, x, idx.numel(), rows, weight is not None, heads > 1)
    macros = specialise(types_of(x, rowptr), plan, speed, **flags)
    count = tiles.size(0)
    grid = plan.blocks(rows + count), plan.slices
    tables = (rowptr, idx, tiles, x, weight, scale, out, partial)
    _SPMM(runtime, macros, grid, THREADS, *tables, rows, count, split, width, heads, int(mean))
    if count:
        merged = (rowptr, tiles, partial, out, count, width, int(mean))
        _MERGE(runtime, macros, merge_blocks(count), THREADS, *merged)


def in_order(weight: Tensor | None, perm: Tensor | None) -> Tensor | None:
    """Returns weights in the order of the edges of a structure."""
    # One gather by itself: in a kernel each edge would wait for its place, then for its weight.
    return weight if weight is None or perm is None else weight.index_select(0, perm)


def weighted(weight: Tensor | None) -> int:
    """Returns how many weights an edge has, as a macro: none, one, or 2 for one of each head."""
    return 0 if weight is None else 1 if weight.size(1) == 1 else 2


def merge_sums(runtime: Runtime, csr: CSR, partial: Tensor, out: Tensor) -> None:
    """Writes the sum over the tiles of each split row to ``out``."""
    width, count = row_width(out), csr.tiles.size(0)
    if not width:
        return
    types, plan = types_of(out, csr.rowptr), merge_layout(width, out)
    macros = specialise(types, plan, WEIGHTED=0, SCALED=0)
    merged = (csr.rowptr, csr.tiles, partial, out, count, width, 0)
    _MERGE(runtime, macros, merge_blocks(count), THREADS, *merged)
