"""Sums over rows on CUDA: see kernels/column_sums.cu."""

from torch import Tensor

from pyg_ioaware.engines.cuda.launch import Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, Pace, layout
from pyg_ioaware.engines.cuda.slots import slots_of, sum_slots

_SUMS = Kernel(
    "column_sums",
    "column_sums",
    [("x", "T*"), ("slots", "f64*"), ("num_rows", "i64"), ("width", "i32")],
)
_PACE = Pace(4, 1)
_MOST_SLOTS = 1024  # some eight blocks for each multiprocessor of a large GPU


def column_sums(runtime: Runtime, csr: None, out: Tensor, x: Tensor) -> None:
    """Writes the sum of each column, in double."""
    (rows, width), plan = x.shape, layout(x.size(1), x.size(1), x)
    blocks = slots_of(plan, -(-rows // _PACE.batch), _MOST_SLOTS)
    if not blocks or not width:
        out.zero_()
        return
    slots = out.new_empty(blocks, width)
    macros = specialise(types_of(x), plan, _PACE)
    _SUMS(runtime, macros, (blocks, plan.slices), THREADS, x, slots, rows, width)
    sum_slots(slots, out)
