"""Tiles of the rows that are too long for one worker."""

import torch
from torch import Tensor


def split_rows(rowptr: Tensor, split: int) -> Tensor:
    r"""Cuts every row with more than :obj:`split` edges into tiles of at most :obj:`split` edges.

    Args:
        rowptr (torch.Tensor): Row pointers of shape :obj:`[N + 1]`.
        split (int): The largest number of edges that one tile holds.

    Returns:
        torch.Tensor: Rows :obj:`(row, begin, end, part)` of shape :obj:`[T, 4]`, where
        :obj:`part` is the number of the tile. The tiles of a row are consecutive and in order,
        so that merging them in order gives the same result on every run.
    """
    degree = rowptr.diff()
    rows = (degree > split).nonzero().view(-1)
    if rows.numel() == 0:
        return torch.empty((0, 4), dtype=torch.long, device=rowptr.device)
    parts = (degree[rows].long() + split - 1) // split
    row = rows.repeat_interleave(parts)
    part = torch.arange(row.numel(), device=rowptr.device)
    first = (parts.cumsum(0) - parts).repeat_interleave(parts)
    begin = rowptr[row].long() + (part - first) * split
    end = torch.minimum(begin + split, rowptr[row + 1].long())
    return torch.stack([row, begin, end, part], dim=1)
