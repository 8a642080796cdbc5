"""How the features of a row are spread over lanes: a pure function of shapes and alignment."""

import functools
from typing import NamedTuple

from torch import Tensor

THREADS = 128
_WIDEST = 16  # bytes of one access
_MOST_VECTORS = 2  # accesses of a lane, beyond which a row is spread over several blocks


class Layout(NamedTuple):
    r"""How a row is read.

    Attributes:
        vec (int): Numbers of one access.
        lanes (int): Lanes of a group, a power of two up to 32.
        vectors (int): Accesses of one lane.
        slices (int): Groups that share a row.
    """

    vec: int
    lanes: int
    vectors: int
    slices: int

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """The specialisation."""
        return ("VEC", self.vec), ("LANES", self.lanes), ("NV", self.vectors)

    def blocks(self, groups: int) -> int:
        """Returns the number of blocks for so many groups."""
        return -(-groups * self.lanes // THREADS)


def layout(width: int, unit: int, *tables: Tensor) -> Layout:
    r"""Chooses how rows of numbers are read.

    Args:
        width (int): Numbers of a row.
        unit (int): Numbers that an access must not cross: the channels of a head, or a row.
        *tables (torch.Tensor): The tables whose rows are accessed, of one dtype.
    """
    address = 0
    for table in tables:
        address |= table.data_ptr()
    return _layout(width, unit, tables[0].element_size(), address % _WIDEST)


@functools.cache
def _layout(width: int, unit: int, size: int, address: int) -> Layout:
    vec = max(1, _WIDEST // size)
    while vec > 1 and (unit % vec or address % (vec * size)):
        vec //= 2
    accesses = max(1, -(-width // vec))
    lanes = min(32, 1 << (accesses - 1).bit_length())
    vectors = min(_MOST_VECTORS, -(-accesses // lanes))
    return Layout(vec, lanes, vectors, -(-accesses // (lanes * vectors)))


def merge_blocks(num_tiles: int) -> tuple[int, int]:
    """Returns the grid of a kernel that merges so many tiles."""
    return -(-num_tiles // (THREADS // 32)), 1
