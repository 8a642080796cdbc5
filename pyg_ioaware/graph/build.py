"""Builds rows of edges: by the kernels of an engine that has some for it, else by PyTorch.

Engines have functions of the same names, which take and give the same.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_ioaware import engines
from pyg_ioaware.graph.tiles import split_rows

_INT32_MAX = 2**31 - 1


class Built(NamedTuple):
    r"""The fields of :class:`~pyg_ioaware.graph.csr.CSR`, and the edges of the longest row."""

    rowptr: Tensor
    idx: Tensor
    perm: Tensor | None
    tiles: Tensor
    split: int
    longest: int


def build_pair(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Built | None:
    r"""Builds the rows by target of the edges :obj:`src[e] -> dst[e]`.

    Args:
        src (torch.Tensor): Source of each edge, of shape :obj:`[E]`.
        dst (torch.Tensor): Target of each edge, of shape :obj:`[E]`.
        num_src (int): The number of source nodes.
        num_dst (int): The number of target nodes.

    Returns:
        Built, optional: The rows, or :obj:`None` if an index is out of range.
    """
    index = _index_dtype(num_src, num_dst, src.numel())
    made: Built | None = _by_engine("build_pair", index, src, dst, num_src, num_dst)
    if made is not NotImplemented:
        return made
    is_sorted = True
    if src.numel() > 0:
        lo, hi = torch.aminmax(src)
        lo_dst, hi_dst = torch.aminmax(dst)
        ordered = (dst[1:] >= dst[:-1]).all()
        facts = torch.stack([lo.long(), hi.long(), lo_dst.long(), hi_dst.long(), ordered.long()])
        lo_, hi_, lo_dst_, hi_dst_, is_sorted = facts.tolist()  # the only read-back
        if lo_ < 0 or hi_ >= num_src or lo_dst_ < 0 or hi_dst_ >= num_dst:
            return None
    if is_sorted:
        rowptr = _compress(dst.contiguous(), num_dst, index)
        return _built(rowptr, src.to(index, copy=True).contiguous(), None)
    rowptr, perm = _sort(dst, num_dst, index)
    return _built(rowptr, src[perm].to(index), perm)


def build_rows(rowptr: Tensor, col: Tensor, num_src: int) -> Built | None:
    r"""Builds the same from rows that are sorted by target already.

    Args:
        rowptr (torch.Tensor): Row pointers of shape :obj:`[num_dst + 1]`.
        col (torch.Tensor): Source of each edge, of shape :obj:`[E]`.
        num_src (int): The number of source nodes.
    """
    num_dst, num_edges = rowptr.numel() - 1, col.numel()
    index = _index_dtype(num_src, num_dst, num_edges)
    made: Built | None = _by_engine("build_rows", index, rowptr, col, num_src)
    if made is not NotImplemented:
        return made
    bad = [(rowptr.diff() < 0).any(), rowptr[0] != 0, rowptr[-1] != num_edges]
    if num_edges > 0:
        lo, hi = torch.aminmax(col)
        bad += [lo < 0, hi >= num_src]
    if bool(torch.stack(bad).any()):
        return None
    # A copy even where the dtype fits: the user's arrays must be free to die or change.
    return _built(rowptr.to(index, copy=True), col.to(index, copy=True), None)


def build_transpose(rowptr: Tensor, idx: Tensor, num_src: int) -> Built:
    r"""Builds the rows by source.

    Args:
        rowptr (torch.Tensor): Row pointers by target of shape :obj:`[num_dst + 1]`.
        idx (torch.Tensor): Source of each edge, of shape :obj:`[E]`.
        num_src (int): The number of source nodes.

    Returns:
        Built: The rows, with :obj:`perm` the positions in the rows by target. An array that is
        the same in both directions is the one given: a symmetric graph is held once.
    """
    made: Built = _by_engine("build_transpose", rowptr.dtype, rowptr, idx, num_src)
    if made is not NotImplemented:
        return made
    num_dst = rowptr.numel() - 1
    rowptr_t, order = _sort(idx, num_src, rowptr.dtype)
    row = torch.arange(num_dst, dtype=idx.dtype, device=idx.device)
    idx_t = row.repeat_interleave(rowptr.diff(), output_size=idx.numel())[order]
    if num_src == num_dst and torch.equal(rowptr_t, rowptr):
        rowptr_t = rowptr
        if torch.equal(idx_t, idx):
            idx_t = idx
    return _built(rowptr_t, idx_t, order)


def _by_engine(name: str, index: torch.dtype, *args: Any) -> Any:
    """Returns what the engine builds, NotImplemented if PyTorch is to build it."""
    engine = engines.of(args[0].device)
    if engine is None or index != torch.int32:
        return NotImplemented
    return engine.build(name, *args)


def _index_dtype(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) <= _INT32_MAX else torch.int64


def _built(rowptr: Tensor, idx: Tensor, perm: Tensor | None) -> Built:
    engine = engines.of(rowptr.device)
    split = _INT32_MAX if engine is None else engine.split
    tiles, split, longest = split_rows(rowptr, split)
    return Built(rowptr, idx, perm, tiles, split, longest)


def _compress(key: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return torch._convert_indices_from_coo_to_csr(key, n, out_int32=dtype == torch.int32)


def _sort(key: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sorts keys in [0, n) stably; returns row pointers and the key's place at each position."""
    engine = engines.of(key.device)
    if engine is not None and dtype == torch.int32:
        return engine.sort_by_key(key.contiguous(), n)
    key, perm = torch.sort(key, stable=True)
    return _compress(key, n, dtype), perm.to(dtype)
