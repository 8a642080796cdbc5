"""Sums that each block of a launch writes to a slot of its own, and the sums over these."""

import torch
from torch import Tensor

from pyg_ioaware.engines.cuda.plan import HeadLayout, Layout

MOST_SLOTS = 8192
_SUMMED = 64  # slots, by one thread, where there are many
_MANY = 1024


def slots_of(plan: Layout | HeadLayout, items: int, most: int = MOST_SLOTS) -> int:
    r"""Returns how many blocks take so many items, and each write sums: if many, a multiple.

    Args:
        plan (Layout or HeadLayout): How rows are read.
        items (int): The number of items.
        most (int, optional): The most blocks. (default: :obj:`8192`)
    """
    blocks = min(most, plan.blocks(items))
    return blocks if blocks < _MANY else -(-blocks // _SUMMED) * _SUMMED


def sum_slots(slots: Tensor, out: Tensor) -> None:
    """Writes the sum over rows: of many by parts, for few columns are few threads."""
    if slots.size(0) >= _MANY:
        slots = slots.view(-1, _SUMMED, out.numel()).sum(1)
    torch.sum(slots, 0, keepdim=out.dim() > 1, out=out)
