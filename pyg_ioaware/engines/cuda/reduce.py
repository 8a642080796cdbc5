"""reduce on CUDA: see kernels/reduce.cu."""

from torch import Tensor

from pyg_ioaware.engines.cuda.launch import GRAPH, ROWS, Kernel, Runtime, specialise, types_with
from pyg_ioaware.engines.cuda.plan import THREADS, layout, merge_blocks, pace
from pyg_ioaware.graph.csr import CSR

_REDUCE = Kernel(
    "reduce",
    "reduce",
    [
        *GRAPH,
        *(("x", "T*"), ("weight", "T*"), ("out", "T*"), ("arg", "P*"), ("tied", "u8*")),
        *(("partial", "A*"), ("partial_arg", "i32*")),
        *ROWS,
        *(("width", "i32"), ("heads", "i32")),
    ],
)
_MERGE = Kernel(
    "reduce",
    "reduce_merge",
    [
        *(("tiles", "i64*"), ("partial", "A*"), ("partial_arg", "i32*")),
        *(("out", "T*"), ("arg", "P*"), ("tied", "u8*")),
        *(("num_tiles", "i64"), ("width", "i32")),
    ],
)


def reduce(
    runtime: Runtime,
    csr: CSR,
    out: Tensor,
    arg: Tensor | None,
    tied: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    partial: Tensor,
    partial_arg: Tensor,
    is_max: bool,
) -> None:
    """Reduces each row's messages to ``out``, and tells in ``arg`` where the results come from."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = out.shape
    if tied is not None:
        tied.zero_()
    if not rows or not width:
        return
    if not idx.numel():
        out.zero_()
        if arg is not None:
            arg.zero_()
        return
    heads = 1 if weight is None else weight.shape[1]
    plan = layout(width, width // heads, x, out)
    flags = {"WEIGHTED": weight is not None, "WITH_ARG": arg is not None, "MINIMUM": not is_max}
    speed = pace("reduce", plan, x, idx.numel(), rows, weight is not None)
    macros = specialise(types_with(arg, x, rowptr), plan, speed, **flags)
    count = tiles.size(0)
    tables = (rowptr, idx, None if weight is None else perm, tiles, x, weight, out, arg, tied)
    sizes = (rows, count, split, width, heads)
    grid = plan.blocks(rows + count), plan.slices
    _REDUCE(runtime, macros, grid, THREADS, *tables, partial, partial_arg, *sizes)
    if count:
        merged = (tiles, partial, partial_arg, out, arg, tied, count, width)
        _MERGE(runtime, macros, merge_blocks(count), THREADS, *merged)
