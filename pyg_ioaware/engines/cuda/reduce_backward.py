"""Gradients of reduce on CUDA: see kernels/reduce_backward.cu."""

import torch
from torch import Tensor

from pyg_ioaware.engines.cuda.launch import GRAPH, ROWS, Kernel, Runtime, specialise, types_of
from pyg_ioaware.engines.cuda.plan import THREADS, Layout, layout
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR

FEW_HITS = 32  # edges per row beyond which few features of an edge have a hit
_LITTLE = 64 * 2**20  # bytes
_FIRST = 1  # the rule for ties under which a share is the gradient itself

_SIZES = [
    *ROWS,
    *(("width", "i32"), ("heads", "i32"), ("first", "i32"), ("words", "i32")),
]
_SHARES = Kernel(
    "reduce_backward",
    "reduce_shares",
    [
        *(*GRAPH, ("x", "T*"), ("weight", "T*"), ("grad", "T*"), ("arg", "i32*"), ("tied", "u8*")),
        *(("share", "T*"), ("hits", "i32*"), ("counts", "i32*"), *_SIZES),
    ],
)
_GATHERED = [
    *(*GRAPH, ("to_rowptr", "I*"), ("to_idx", "I*"), ("to_perm", "I*")),
    *(("x", "T*"), ("weight", "T*"), ("arg", "i32*"), ("share", "T*"), ("hits", "i32*")),
    *(("dx", "T*"), ("partial", "A*"), *_SIZES),
]
_GATHER = Kernel("reduce_backward", "reduce_gather", _GATHERED)
_GATHER_BITS = Kernel("reduce_backward", "reduce_gather_bits", _GATHERED)
_WEIGHT = Kernel(
    "reduce_backward",
    "reduce_weight",
    [
        *(*GRAPH, ("x", "T*"), ("weight", "T*"), ("arg", "i32*"), ("share", "T*")),
        *(("hits", "i32*"), ("dw", "A*"), *_SIZES),
    ],
)


def reduce_gather(
    runtime: Runtime,
    csr: CSR,
    by_source: CSR | None,
    dx: Tensor | None,
    dw: Tensor | None,
    partial: Tensor,
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    weight: Tensor | None,
    ties: int,
) -> None:
    """Writes the gradient of ``x``, and adds that of ``weight`` to ``dw``, which holds zeros."""
    rowptr, idx, perm, tiles, split = csr
    perm = None if weight is None else perm
    rows, width = grad.shape
    edges, count = idx.numel(), tiles.size(0)
    if not edges or not width:
        if dx is not None:
            dx.zero_()
        return
    heads = 1 if weight is None else weight.shape[1]
    types = types_of(x, rowptr)
    flags = {"WEIGHTED": weight is not None, "TIES": ties}
    share = grad if ties == _FIRST else torch.empty_like(grad)
    # No more bytes of hits than float32 rows of all nodes have, unless it is little.
    words = max(1, min(-(-width // 32), max(4 * rows * width, _LITTLE) // (4 * edges)))
    hits = torch.empty((edges, words), dtype=torch.int32, device=x.device)
    counts = None
    if count and ties != _FIRST:
        counts = torch.empty((count, width), dtype=torch.int32, device=x.device)
    warps = THREADS // 32
    for first in range(0, width, 32 * words):
        sizes = (width, heads, first, words)
        wide = min(width - first, 32 * words)
        tables: tuple[Tensor | None, ...]
        tables = (rowptr, idx, perm, tiles, x, weight, grad, arg, tied, share, hits, counts)
        passes = [(0, rows)] if ties == _FIRST else [(0, rows), (3, rows)]
        if count:
            passes += [(2, count)] if ties == _FIRST else [(1, count), (2, count)]
        for number, warped in passes:
            of_pass = {"SHARES": 1, "PASS": number, "WORDS": min(words, 4)}
            macros = specialise(types, Layout(1, 32, 1, 1), **flags, **of_pass)
            grid = -(-warped // warps), -(-wide // (32 * min(words, 4)))
            _SHARES(runtime, macros, grid, THREADS, *tables, rows, count, split, *sizes)
        if dx is not None and by_source is not None:
            plan = layout(wide, width // heads, x, dx, share)
            macros = specialise(types, plan, **flags)
            parts = by_source.tiles.size(0)
            read = (rowptr, idx, perm, x, weight, arg, share, hits, dx, partial)
            bounds = (dx.size(0), parts, by_source.split)
            gather, grid = _GATHER, (plan.blocks(dx.size(0) + parts), plan.slices)
            if weight is None and edges >= FEW_HITS * rows:
                gather, grid = _GATHER_BITS, (-(-(dx.size(0) + parts) * words // THREADS), 1)
            gather(runtime, macros, grid, THREADS, *by_source[:4], *read, *bounds, *sizes)
        if dw is not None:
            plan = layout(width // heads, 1, x)
            macros = specialise(types, plan, **flags)
            grid = plan.blocks(rows + count), heads
            tables = (rowptr, idx, perm, tiles, x, weight, arg, share, hits, dw)
            _WEIGHT(runtime, macros, grid, THREADS, *tables, rows, count, split, *sizes)
    if dx is not None and by_source is not None and by_source.tiles.size(0):
        merge_sums(runtime, by_source, partial, dx)
