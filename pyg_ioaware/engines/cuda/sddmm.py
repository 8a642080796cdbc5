"""sddmm on CUDA: see kernels/sddmm.cu."""

from torch import Tensor

from pyg_ioaware.engines.cuda.launch import GRAPH, ROWS, Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, layout
from pyg_ioaware.graph.csr import CSR

_SDDMM = Kernel(
    "sddmm",
    "sddmm",
    [
        *GRAPH,
        *(("a", "T*"), ("b", "T*"), ("out", "T*")),
        *ROWS,
        *(("channels", "i32"), ("heads", "i32"), ("mean", "i32")),
    ],
)


def sddmm(runtime: Runtime, csr: CSR, out: Tensor, a: Tensor, b: Tensor, mean: bool) -> None:
    """Writes one dot product per edge and head, in the order of the input edges, to ``out``."""
    rowptr, idx, perm, tiles, split = csr
    rows, count = a.size(0), tiles.size(0)
    edges, heads = out.shape
    if not edges or not heads:
        return
    channels = a.size(1) // heads
    plan = layout(channels, channels, a, b)
    macros = specialise(types_of(a, rowptr), plan)
    grid = plan.blocks(rows + count), heads
    sizes = (rows, count, split, channels, heads, int(mean))
    _SDDMM(runtime, macros, grid, THREADS, rowptr, idx, perm, tiles, a, b, out, *sizes)
