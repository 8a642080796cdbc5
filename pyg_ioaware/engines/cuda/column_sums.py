"""Sums over rows on CUDA: see kernels/column_sums.cu."""

import torch
from torch import Tensor

from pyg_ioaware.engines.cuda.launch import Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, Pace, layout

_SUMS = Kernel(
    "column_sums",
    "column_sums",
    [("x", "T*"), ("slots", "f64*"), ("num_rows", "i64"), ("width", "i32")],
)
_PACE = Pace(4, 1)
_MOST_SLOTS = 960  # some seven blocks for each multiprocessor of a large GPU


def column_sums(runtime: Runtime, csr: None, out: Tensor, x: Tensor) -> None:
    """Writes the sum of each column, in double."""
    (rows, width), plan = x.shape, layout(x.size(1), x.size(1), x)
    blocks = min(_MOST_SLOTS, plan.blocks(-(-rows // _PACE.batch)))
    if not blocks or not width:
        out.zero_()
        return
    slots = out.new_empty(blocks, width)
    macros = specialise(types_of(x, torch.empty(0, dtype=torch.int32)), plan, _PACE)
    _SUMS(runtime, macros, (blocks, plan.slices), THREADS, x, slots, rows, width)
    torch.sum(slots, 0, out=out)
