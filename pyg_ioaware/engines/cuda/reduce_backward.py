"""Gradients of reduce on CUDA: see kernels/reduce_backward.cu."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_ioaware.engines.cuda.launch import (
    GRAPH,
    ORDERED,
    ROWS,
    Kernel,
    Runtime,
    specialise,
    types_with,
)
from pyg_ioaware.engines.cuda.plan import THREADS, Layout, layout, merge_layout, pace, scan_layout
from pyg_ioaware.engines.cuda.reduce import paired
from pyg_ioaware.engines.cuda.spmm import in_order, merge_sums, weighted
from pyg_ioaware.graph.csr import CSR
from pyg_ioaware.graph.streams import is_capturing

# Edges of a row from which marks are scanned before anything else is read, and those where the
# gradients do not fit in the L2 cache.
SCANNED, SCANNED_AFAR = 256, 32
_CACHE = 64 << 20  # bytes, about
_EVEN = 0  # the rule for ties under which what is not finite reaches all edges
_MOST_BLOCKS = 4096  # of a launch that has nothing to do as a rule
_FLAGS = 64  # set to zero by one launch

_TABLES = [("x", "T*"), ("weight", "T*"), ("mark", "P*"), ("grad", "T*"), ("best", "T*")]
_GATHER = Kernel(
    "reduce_backward",
    "reduce_gather",
    [
        *(*ORDERED, ("place", "I*"), *_TABLES, ("share", "T*"), ("dx", "T*"), ("partial", "A*")),
        *(("unusual", "i32*"), *ROWS, ("width", "i32"), ("heads", "i32"), ("strict", "i32")),
    ],
)
_FOLD = Kernel("reduce_scan", "reduce_fold", [("mark", "P*"), ("folded", "u8*"), ("count", "i64")])
_SCAN = Kernel(
    "reduce_scan",
    "reduce_scan",
    [
        *(*ORDERED, ("place", "I*"), ("x", "T*"), ("mark", "P*"), ("folded", "u8*")),
        *(("grad", "T*"), ("best", "T*"), ("dx", "T*"), ("partial", "A*"), ("unusual", "i32*")),
        *(*ROWS, ("width", "i32")),
    ],
)
_SHARE = Kernel(
    "reduce_backward",
    "reduce_share",
    [*(("grad", "T*"), ("mark", "P*"), ("share", "T*"), ("unusual", "i32*"), ("count", "i64"))],
)
_WEIGHT = Kernel(
    "reduce_backward",
    "reduce_weight",
    [*GRAPH, *_TABLES, ("dw", "A*"), *ROWS, ("channels", "i32"), ("heads", "i32")],
)


def reduce_gather(
    runtime: Runtime,
    by_source: CSR,
    place: Tensor | None,
    dx: Tensor,
    partial: Tensor,
    grad: Tensor,
    mark: Tensor,
    best: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    ties: int,
) -> None:
    """Writes the gradient of ``x``; without places, marks are how many edges share."""
    rowptr, idx, perm, tiles, split = by_source
    rows, width = dx.shape
    edges, count = idx.numel(), tiles.size(0)
    if not edges or not width:
        dx.zero_()
        return
    heads, weight = 1 if weight is None else weight.shape[1], in_order(weight, perm)
    plan = layout(width, width // heads, *(t for t in (x, dx, grad, best) if t is not None))
    speed = pace("reduce_gather", plan, grad, edges, rows, weight is not None, place is None)
    flags = {"WEIGHTED": weighted(weight), "TIES": ties}
    flags["PAIRED"] = best is not None and paired(weight, x, best)
    macros = specialise(types_with(mark, x, rowptr), plan, speed, **flags)
    unusual = _flag(runtime, x) if ties == _EVEN else None
    share = None
    if place is None:
        share = _shares(runtime, grad, mark, rowptr, unusual, ties)
    tables = (rowptr, idx, tiles, place, x, weight, mark, grad, best, share, dx, partial, unusual)
    sizes = (rows, count, split, width, heads)
    blocks = plan.blocks(rows + count)
    far = grad.numel() * grad.element_size() > _CACHE
    scanned = edges >= (SCANNED_AFAR if far else SCANNED) * mark.size(0)
    if scanned and place is not None and weight is None:
        read = (place, x, mark, grad, best, dx, partial, unusual)
        _scan(runtime, by_source, *read, ties)
    else:
        _GATHER(runtime, macros, (blocks, plan.slices), THREADS, *tables, *sizes, 0)
    if place is not None and unusual is not None:
        grid = min(blocks, _MOST_BLOCKS), plan.slices
        _GATHER(runtime, macros, grid, THREADS, *tables, *sizes, 1)
    if count:
        merge_sums(runtime, by_source, partial, dx)


# By device and stream: none is handed out twice, and each was set on the stream that reads it.
_flags: dict[tuple[torch.device, int], tuple[Tensor, Iterator[int]]] = {}


def _flag(runtime: Runtime, x: Tensor) -> Tensor:
    """Returns a number on the device of a tensor that is zero to what runs there next."""
    device = x.device
    if is_capturing(device):  # each replay has to set it anew
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, runtime.stream(max(x.get_device(), 0))
    flags, left = _flags.get(key, (x, iter(())))
    at = next(left, None)
    if at is None:
        flags = torch.zeros(_FLAGS, dtype=torch.int32, device=device)
        _flags[key] = flags, iter(range(1, _FLAGS))
        at = 0
    return flags[at : at + 1]


def _scan(
    runtime: Runtime,
    by_source: CSR,
    place: Tensor,
    x: Tensor,
    mark: Tensor,
    grad: Tensor,
    best: Tensor | None,
    dx: Tensor,
    partial: Tensor,
    unusual: Tensor | None,
    ties: int,
) -> None:
    rowptr, idx, _, tiles, split = by_source
    (rows, width), count = dx.shape, tiles.size(0)
    types, flags = types_with(mark, x, rowptr), {"WEIGHTED": 0, "TIES": ties, "PAIRED": 0}
    folds = mark.element_size() > 1
    folded = torch.empty_like(mark, dtype=torch.uint8) if folds else mark.view(torch.uint8)
    plan = scan_layout(width, folded)
    macros = specialise(types, plan, pace("reduce_scan", plan, grad, idx.numel(), rows), **flags)
    if folds:
        grid = _each_once(mark, plan)
        _FOLD(runtime, macros, grid, THREADS, mark, folded, mark.numel())
    grid = plan.blocks(rows + count), plan.slices
    tables = (rowptr, idx, tiles, place, x, mark, folded, grad, best, dx, partial, unusual)
    _SCAN(runtime, macros, grid, THREADS, *tables, rows, count, split, width)


def _shares(
    runtime: Runtime, grad: Tensor, mark: Tensor, index: Tensor, unusual: Tensor | None, ties: int
) -> Tensor:
    """Returns what each edge that shares gets of each gradient."""
    share = torch.empty_like(grad)
    plan = merge_layout(grad.size(1), grad, share)
    macros = specialise(types_with(mark, grad, index), plan, WEIGHTED=0, TIES=ties, PAIRED=0)
    grid = _each_once(grad, plan)
    _SHARE(runtime, macros, grid, THREADS, grad, mark, share, unusual, grad.numel())
    return share


def _each_once(table: Tensor, plan: Layout) -> tuple[int, int]:
    """Returns the grid of a kernel that takes each number of a table once, an access a thread."""
    return -(-table.numel() // (plan.vec * THREADS)), 1


def reduce_weight(
    runtime: Runtime,
    csr: CSR,
    dw: Tensor,
    grad: Tensor,
    mark: Tensor,
    best: Tensor | None,
    x: Tensor,
    weight: Tensor,
    ties: int,
) -> None:
    """Writes the gradient of ``weight``."""
    rowptr, idx, perm, tiles, split = csr
    rows, width = grad.shape
    if not idx.numel() or not width:
        dw.zero_()
        return
    heads = weight.shape[1]
    channels, count = width // heads, tiles.size(0)
    plan = layout(channels, channels, *(t for t in (x, grad, best) if t is not None))
    macros = specialise(
        types_with(mark, x, rowptr), plan, WEIGHTED=weighted(weight), TIES=ties, PAIRED=0
    )
    tables = (rowptr, idx, perm, tiles, x, in_order(weight, perm), mark, grad, best, dw)
    grid = plan.blocks(rows + count), heads
    _WEIGHT(runtime, macros, grid, THREADS, *tables, rows, count, split, channels, heads)
