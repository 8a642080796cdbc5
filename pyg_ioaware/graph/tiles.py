"""Tiles of the rows that are too long for one worker."""

import torch
from torch import Tensor

MOST_TILES = 2048  # of one row; those of a longer row are longer
LONGEST_TILE = 2**15  # edges, about; kernels count them in 16 bits
_STRETCH = 2  # times the edges of a tile, up to which no row is worth the launches that merge it


def widest(split: int) -> int:
    """Returns how many times :obj:`split` a tile holds at the most."""
    return max(LONGEST_TILE // split, 1)


def stretched(split: int) -> int:
    """Returns how many edges the longest row of a graph may have for all to stay whole."""
    return _STRETCH * split


def split_rows(rowptr: Tensor, split: int) -> tuple[Tensor, int, int]:
    r"""Cuts every row with more than :obj:`split` edges into tiles of about :obj:`split` edges.

    Where no row has more than :meth:`stretched` edges, all stay whole.

    Args:
        rowptr (torch.Tensor): Row pointers of shape :obj:`[N + 1]`.
        split (int): The largest number of edges that one tile holds; a multiple of it in rows of
            more than :obj:`MOST_TILES` such tiles, up to :obj:`LONGEST_TILE`.

    Returns:
        tuple: Rows :obj:`(row, begin, end, parts)` of shape :obj:`[T, 4]`, where :obj:`parts` is
        the number of tiles of the row on its first tile, and zero on the others, the number of
        edges beyond which rows are split in the end, and that of the longest row. The tiles of a
        row are consecutive and in order, so that merging them in order gives the same result on
        every run.
    """
    degree = rowptr.diff()
    longest = int(degree.max()) if degree.numel() else 0
    if longest <= stretched(split):
        none = torch.empty((0, 4), dtype=torch.long, device=rowptr.device)
        return none, stretched(split), longest
    degree = degree.long()
    times = (degree + split * MOST_TILES - 1) // (split * MOST_TILES)
    size = split * times.clamp(min=1, max=widest(split))
    parts = torch.where(degree > split, (degree + size - 1) // size, 0)
    total = int(parts.sum())
    rows = torch.arange(degree.numel(), device=rowptr.device)
    row = rows.repeat_interleave(parts, output_size=total)
    part = torch.arange(total, device=rowptr.device) - (parts.cumsum(0) - parts)[row]
    begin = rowptr[row].long() + part * size[row]
    end = torch.minimum(begin + size[row], rowptr[row + 1].long())
    first = torch.where(part == 0, parts[row], 0)
    return torch.stack([row, begin, end, first], dim=1), split, longest
