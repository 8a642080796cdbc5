"""reduce on CUDA: see kernels/reduce.cu."""

from torch import Tensor

from pyg_ioaware.engines.cuda.launch import ORDERED, ROWS, Kernel, Runtime, specialise, types_with
from pyg_ioaware.engines.cuda.plan import THREADS, layout, merge_blocks, pace
from pyg_ioaware.engines.cuda.spmm import in_order, weighted
from pyg_ioaware.graph.csr import CSR

_REDUCE = Kernel(
    "reduce",
    "reduce",
    [
        *(*ORDERED, ("x", "T*"), ("weight", "T*"), ("out", "T*"), ("mark", "P*")),
        *(("partial", "A*"), ("partial_mark", "i32*")),
        *ROWS,
        *(("width", "i32"), ("heads", "i32")),
    ],
)
_MERGE = Kernel(
    "reduce",
    "reduce_merge",
    [
        *(("tiles", "i64*"), ("partial", "A*"), ("partial_mark", "i32*")),
        *(("out", "T*"), ("mark", "P*"), ("num_tiles", "i64"), ("width", "i32")),
    ],
)


def paired(weight: Tensor | None, x: Tensor, out: Tensor) -> bool:
    """Tells whether the forward pass may compare two numbers at once."""
    if weight is not None or x.element_size() != 2:
        return False
    return layout(out.size(1), out.size(1), x, out).vec % 2 == 0


def reduce(
    runtime: Runtime,
    csr: CSR,
    out: Tensor,
    mark: Tensor | None,
    _tied: None,
    x: Tensor,
    weight: Tensor | None,
    partial: Tensor,
    partial_mark: Tensor,
    is_max: bool,
    ties: int,
) -> None:
    """Reduces each row's messages to ``out``, and tells in ``mark`` who shares the gradient."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = out.shape
    if not rows or not width:
        return
    if not idx.numel():
        out.zero_()
        if mark is not None:
            mark.zero_()
        return
    heads, weight = 1 if weight is None else weight.shape[1], in_order(weight, perm)
    plan = layout(width, width // heads, x, out)
    flags = {"WITH_MARK": mark is not None, "TIES": ties, "MINIMUM": not is_max}
    flags["PAIRED"] = paired(weight, x, out)
    speed = pace("reduce", plan, x, idx.numel(), rows, weight is not None)
    macros = specialise(
        types_with(mark, x, rowptr), plan, speed, WEIGHTED=weighted(weight), **flags
    )
    count = tiles.size(0)
    tables = (rowptr, idx, tiles, x, weight, out, mark)
    sizes = (rows, count, split, width, heads)
    grid = plan.blocks(rows + count), plan.slices
    _REDUCE(runtime, macros, grid, THREADS, *tables, partial, partial_mark, *sizes)
    if count:
        merged = (tiles, partial, partial_mark, out, mark, count, width)
        _MERGE(runtime, macros, merge_blocks(count), THREADS, *merged)
