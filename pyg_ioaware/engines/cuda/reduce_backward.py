"""Gradients of reduce on CUDA: see kernels/reduce_hits.cu, reduce_ties.cu, reduce_backward.cu."""

import torch
from torch import Tensor

from pyg_ioaware.engines.cuda.launch import GRAPH, ROWS, Kernel, Runtime, specialise, types_with
from pyg_ioaware.engines.cuda.plan import THREADS, Layout, layout, merge_blocks, pace
from pyg_ioaware.engines.cuda.spmm import merge_sums
from pyg_ioaware.graph.csr import CSR

FEW_HITS = 32  # edges per row beyond which few features of an edge have a hit
_LITTLE = 64 * 2**20  # bytes
_MOST_BLOCKS = 4096  # of a launch that finds little to do
_FIRST = 1  # the rule for ties under which a share is the gradient itself
_WARP = Layout(1, 32, 1, 1)

_WORDS = [("first", "i32"), ("words", "i32")]
_WIDTH = [("width", "i32"), ("heads", "i32")]
_MESSAGES = [("x", "T*"), ("weight", "T*")]
_SHARES = [("grad", "T*"), ("tied", "u8*"), ("share", "T*"), ("hits", "i32*")]
_HITS = Kernel(
    "reduce_hits",
    "reduce_hits",
    [
        *(("rowptr", "I*"), ("tiles", "i64*"), ("grad", "T*"), ("arg", "P*")),
        *(("tied", "u8*"), ("hits", "i32*"), *ROWS, ("width", "i32"), *_WORDS),
    ],
)
_TIED = [
    *(*GRAPH, *_MESSAGES, ("grad", "T*"), ("arg", "P*"), ("tied", "u8*"), ("share", "T*")),
    *(("hits", "i32*"), ("counts", "i32*")),
]
_TIES = Kernel("reduce_ties", "reduce_ties", [*_TIED, *ROWS, *_WIDTH, *_WORDS])
_TIES_MERGE = Kernel(
    "reduce_ties", "reduce_ties_merge", [*_TIED, ("num_tiles", "i64"), *_WIDTH, *_WORDS]
)
_GATHERED = [
    *(*GRAPH, ("to_rowptr", "I*"), ("to_idx", "I*"), ("to_perm", "I*"), *_MESSAGES),
    *(("arg", "P*"), *_SHARES, ("dx", "T*"), ("partial", "A*"), *ROWS, *_WIDTH, *_WORDS),
]
_GATHER = Kernel("reduce_backward", "reduce_gather", _GATHERED)
_GATHER_BITS = Kernel("reduce_backward", "reduce_gather_bits", _GATHERED)
_WEIGHT = Kernel(
    "reduce_backward",
    "reduce_weight",
    [*GRAPH, *_MESSAGES, ("arg", "P*"), *_SHARES, ("dw", "A*"), *ROWS, *_WIDTH, *_WORDS],
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
    types = types_with(arg, x, rowptr)
    flags = {"WEIGHTED": weight is not None, "TIES": ties}
    # Where no edges of a row tie, its shares are the gradients.
    share = None if ties == _FIRST else torch.empty_like(grad)
    # No more bytes of hits than float32 rows of all nodes have, unless it is little.
    words = max(1, min(-(-width // 32), max(4 * rows * width, _LITTLE) // (4 * edges)))
    hits = torch.empty((edges, words), dtype=torch.int32, device=x.device)
    counts = None
    if count and ties != _FIRST:
        counts = torch.empty((count, width), dtype=torch.int32, device=x.device)
    shares, items = (grad, tied, share, hits), (rows, count, split)
    for first in range(0, width, 32 * words):
        shape, part = (width, heads), (first, words)
        wide = min(width - first, 32 * words)
        macros = specialise(types, _WARP, TIES=ties, WEIGHTED=0, WORDS=min(words, 4))
        grid = _WARP.blocks(rows + count), -(-words // min(words, 4))
        tables = (rowptr, tiles, grad, arg, tied, hits)
        _HITS(runtime, macros, grid, THREADS, *tables, *items, width, *part)
        if share is not None:
            plan = layout(wide, width // heads, x, grad, share)
            macros = specialise(types, plan, **flags)
            tied_rows = (rowptr, idx, perm, tiles, x, weight, grad, arg, tied, share, hits, counts)
            grid = min(_MOST_BLOCKS, plan.blocks(rows + count)), plan.slices
            _TIES(runtime, macros, grid, THREADS, *tied_rows, *items, *shape, *part)
            if count:
                sizes = (count, *shape, *part)
                _TIES_MERGE(runtime, macros, merge_blocks(count), THREADS, *tied_rows, *sizes)
        if dx is not None and by_source is not None:
            gather, plan = _GATHER, layout(wide, width // heads, x, dx, grad)
            speed, parts = (
                pace("reduce_gather", plan, grad, edges, dx.size(0)),
                by_source.tiles.size(0),
            )
            macros = specialise(types, plan, speed, **flags)
            grid = plan.blocks(dx.size(0) + parts), plan.slices
            if weight is None and edges >= FEW_HITS * rows:
                together = 4 if words % 4 == 0 else 2 - words % 2
                gather, macros = _GATHER_BITS, specialise(types, _WARP, **flags, WORDS=together)
                grid = _WARP.blocks(dx.size(0) + parts), words // together
            read = (rowptr, idx, perm, x, weight, arg, *shares, dx, partial)
            bounds = (dx.size(0), parts, by_source.split)
            gather(runtime, macros, grid, THREADS, *by_source[:4], *read, *bounds, *shape, *part)
        if dw is not None:
            plan = layout(width // heads, 1, x)
            macros = specialise(types, plan, **flags)
            grid = plan.blocks(rows + count), heads
            of_weight = (rowptr, idx, perm, tiles, x, weight, arg, *shares, dw)
            _WEIGHT(runtime, macros, grid, THREADS, *of_weight, *items, *shape, *part)
    if dx is not None and by_source is not None and by_source.tiles.size(0):
        merge_sums(runtime, by_source, partial, dx)
