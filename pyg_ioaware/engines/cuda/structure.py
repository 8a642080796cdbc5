"""Structures on CUDA: see kernels/structure.cu, and graph/build.py for what is taken and given."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_ioaware.engines.cuda.launch import Kernel, Runtime, types_of_indices
from pyg_ioaware.engines.cuda.plan import THREADS
from pyg_ioaware.graph.build import Built
from pyg_ioaware.graph.tiles import MOST_TILES, stretched, widest

_MOST_BLOCKS = 4096  # of threads that go through edges
_MOST_CHUNKS = 2048  # of rows, a block each

_READ = Kernel(
    "structure",
    "structure_read",
    [
        *(("src", "I*"), ("dst", "I*"), ("source", "i32*"), ("target", "i32*"), ("facts", "i64*")),
        *(("num_edges", "i64"), ("num_src", "i64"), ("num_dst", "i64")),
    ],
)
_CUT = [
    *(("num_rows", "i64"), ("chunk", "i64"), ("split", "i64"), ("most", "i64"), ("widest", "i64"))
]
_ROWS = Kernel(
    "structure",
    "structure_rows",
    [
        *(("keys", "i32*"), ("given", "I*"), ("other", "i32*"), ("rowptr", "i32*")),
        *(("counts", "i64*"), ("facts", "i64*"), ("num_edges", "i64"), *_CUT),
    ],
)
_TILES = Kernel(
    "structure",
    "structure_tiles",
    [("rowptr", "i32*"), ("counts", "i64*"), ("tiles", "i64*"), *_CUT],
)
_TARGETS = Kernel(
    "structure",
    "structure_targets",
    [("rowptr", "i32*"), ("target", "i32*"), ("num_edges", "i64"), ("num_rows", "i64")],
)
_ORDER = Kernel(
    "structure",
    "structure_order",
    [
        *(("order", "i64*"), ("ends", "i32*"), ("other", "i32*")),
        *(("idx", "i32*"), ("perm", "i32*"), ("facts", "i64*"), ("num_edges", "i64")),
    ],
)


class _Facts(NamedTuple):
    """What the kernels find out, in the order of theirs."""

    outside: int
    unsorted: int
    other_rows: int
    other_ends: int
    longest: int
    tiles: int


class _Rows:
    r"""Row pointers, and the tiles of long rows.

    Args:
        runtime (Runtime): What runs the kernels.
        split (int): Rows with more edges than this are split.
        facts (torch.Tensor): Takes what is found out.
        num_edges (int): The number of edges.
        num_rows (int): The number of rows.
        keys (torch.Tensor, optional): The row of each edge. If they are not sorted, row pointers
            and facts mean nothing.
        given (torch.Tensor, optional): The user's row pointers.
        other (torch.Tensor, optional): Row pointers to compare with.
    """

    def __init__(
        self,
        runtime: Runtime,
        split: int,
        facts: Tensor,
        num_edges: int,
        num_rows: int,
        keys: Tensor | None = None,
        given: Tensor | None = None,
        other: Tensor | None = None,
    ) -> None:
        chunk = THREADS * -(-(num_rows + 1) // (THREADS * _MOST_CHUNKS))
        self._runtime, self._cut = runtime, (num_rows, chunk, split, MOST_TILES, widest(split))
        self.rowptr = _ints(facts, num_rows + 1)
        self._counts = facts.new_empty(-(-(num_rows + 1) // chunk))
        operands = (keys, given, other, self.rowptr, self._counts, facts, num_edges)
        grid = self._counts.numel(), 1
        _ROWS(runtime, types_of_indices(given), grid, THREADS, *operands, *self._cut)

    def built(
        self, idx: Tensor, perm: Tensor | None, found: _Facts, rowptr: Tensor | None = None
    ) -> Built:
        """Returns the rows, once their facts were read; :obj:`rowptr` are others that are equal."""
        split = self._cut[2]
        if found.longest <= stretched(split):
            found, split = found._replace(tiles=0), stretched(split)
        tiles = self._counts.new_empty((found.tiles, 4))
        if found.tiles:
            grid = self._counts.numel(), 1
            operands = (self.rowptr, self._counts, tiles)
            _TILES(self._runtime, types_of_indices(), grid, THREADS, *operands, *self._cut)
        rowptr = self.rowptr if rowptr is None else rowptr
        return Built(rowptr, idx, perm, tiles, split, found.longest)


def build_pair(
    runtime: Runtime, split: int, src: Tensor, dst: Tensor, num_src: int, num_dst: int
) -> Built | None:
    """Builds rows of edges; those that are sorted take one read-back, others two."""
    src, dst = _alike(src, dst)
    num_edges, facts = src.numel(), _no_facts(src)
    source, target = _ints(src, num_edges), _ints(src, num_edges)
    operands = (src, dst, source, target, facts, num_edges, num_src, num_dst)
    _READ(runtime, types_of_indices(src), _over(num_edges), THREADS, *operands)
    by_target = _Rows(runtime, split, facts, num_edges, num_dst, target)
    found = _read_back(facts)
    if found.outside:
        return None
    if not found.unsorted:
        return by_target.built(source, None, found)
    target, order = torch.sort(target, stable=True)
    facts.zero_()
    by_target = _Rows(runtime, split, facts, num_edges, num_dst, target)
    idx, perm = _ordered(runtime, order, source, facts)
    return by_target.built(idx, perm, _read_back(facts))


def build_rows(
    runtime: Runtime, split: int, rowptr: Tensor, col: Tensor, num_src: int
) -> Built | None:
    """Builds rows of row pointers, with one read-back."""
    rowptr, col = _alike(rowptr, col)
    num_edges, facts = col.numel(), _no_facts(col)
    idx = _ints(col, num_edges)
    operands = (col, None, idx, None, facts, num_edges, num_src, 0)
    _READ(runtime, types_of_indices(col), _over(num_edges), THREADS, *operands)
    by_target = _Rows(runtime, split, facts, num_edges, rowptr.numel() - 1, given=rowptr)
    found = _read_back(facts)
    return None if found.outside else by_target.built(idx, None, found)


def build_transpose(
    runtime: Runtime, split: int, rowptr: Tensor, idx: Tensor, num_src: int
) -> Built:
    """Builds the rows by source, with one read-back."""
    num_edges, num_dst, facts = idx.numel(), rowptr.numel() - 1, _no_facts(idx)
    keys, order = torch.sort(idx, stable=True)
    square = num_src == num_dst
    by_source = _Rows(
        runtime, split, facts, num_edges, num_src, keys, other=rowptr if square else None
    )
    target = _ints(idx, num_edges)
    operands = (rowptr, target, num_edges, num_dst)
    _TARGETS(runtime, types_of_indices(), _over(num_edges), THREADS, *operands)
    idx_t, perm = _ordered(runtime, order, target, facts, idx if square else None)
    found = _read_back(facts)
    if not square or found.other_rows:
        return by_source.built(idx_t, perm, found)
    return by_source.built(idx_t if found.other_ends else idx, perm, found, rowptr)


def _ordered(
    runtime: Runtime, order: Tensor, ends: Tensor, facts: Tensor, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns ends of edges in an order, and that; notes whether they equal others."""
    num_edges = order.numel()
    idx, perm = _ints(ends, num_edges), _ints(ends, num_edges)
    operands = (order, ends, other, idx, perm, facts, num_edges)
    _ORDER(runtime, types_of_indices(), _over(num_edges), THREADS, *operands)
    return idx, perm


def _alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both contiguous, and of one dtype that kernels take."""
    same = first.dtype == second.dtype and first.dtype in (torch.int32, torch.int64)
    dtype = first.dtype if same else torch.int64
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


def _no_facts(like: Tensor) -> Tensor:
    return torch.zeros(len(_Facts._fields), dtype=torch.int64, device=like.device)


def _read_back(facts: Tensor) -> _Facts:
    return _Facts(*facts.tolist())


def _ints(like: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int32, device=like.device)


def _over(num_edges: int) -> tuple[int, int]:
    """Returns the grid of a kernel that goes through edges."""
    return min(-(-num_edges // THREADS), _MOST_BLOCKS), 1
