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
    return _layout(width, unit, *_size_and_address(tables))


def _size_and_address(tables: tuple[Tensor, ...]) -> tuple[int, int]:
    """Returns the bytes of a number, and of an access at the most those off which a table lies."""
    address = 0
    for table in tables:
        address |= table.data_ptr()
    return tables[0].element_size(), address % _WIDEST


@functools.cache
def _layout(width: int, unit: int, size: int, address: int) -> Layout:
    vec = max(1, _WIDEST // size)
    while vec > 1 and (unit % vec or address % (vec * size)):
        vec //= 2
    accesses = max(1, -(-width // vec))
    lanes = min(32, 1 << (accesses - 1).bit_length())
    vectors = min(_MOST_VECTORS, -(-accesses // lanes))
    return Layout(vec, lanes, vectors, -(-accesses // (lanes * vectors)))


class HeadLayout(NamedTuple):
    r"""How the heads of a row are read.

    Attributes:
        vec (int): Numbers of one access.
        lanes (int): Lanes of a group, a power of two up to 32.
        head_lanes (int): Lanes that share a head, a power of two.
        head_vectors (int): Accesses of one lane to one head.
        vectors (int): Accesses of one lane.
        slices (int): Groups that share a row.
        filled (bool): Whether no lane has an access beyond a head, or the row.
    """

    vec: int
    lanes: int
    head_lanes: int
    head_vectors: int
    vectors: int
    slices: int
    filled: bool

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """The specialisation."""
        return (
            *(("VEC", self.vec), ("LANES", self.lanes), ("NV", self.vectors)),
            *(("HEAD_LANES", self.head_lanes), ("HEAD_VECS", self.head_vectors)),
            ("FILLED", int(self.filled)),
        )

    def blocks(self, groups: int) -> int:
        """Returns the number of blocks for so many groups."""
        return -(-groups * self.lanes // THREADS)


def head_layout(heads: int, channels: int, *tables: Tensor, least: int = 1) -> HeadLayout:
    r"""Chooses how rows of several heads are read, a head by one group.

    Args:
        heads (int): The number of heads.
        channels (int): Numbers of a head.
        *tables (torch.Tensor): The tables whose rows are accessed, of one dtype.
        least (int, optional): The least number of lanes that share a head. (default: :obj:`1`)
    """
    return _head_layout(heads, channels, *_size_and_address(tables), least)


@functools.cache
def _head_layout(heads: int, channels: int, size: int, address: int, least: int) -> HeadLayout:
    vec = _layout(channels, channels, size, address).vec
    accesses = -(-channels // vec)
    head_lanes = min(32, _power_of_two(max(accesses, least)))
    head_vectors = -(-accesses // head_lanes)
    side = min(32 // head_lanes, _power_of_two(heads))
    rounds = -(-heads // side)
    slots = 1 if head_vectors > 1 else min(_MOST_VECTORS, rounds)
    slices = -(-rounds // slots)
    filled = accesses == head_lanes * head_vectors and heads == side * slots * slices
    lanes, vectors = head_lanes * side, slots * head_vectors
    return HeadLayout(vec, lanes, head_lanes, head_vectors, vectors, slices, filled)


def _power_of_two(n: int) -> int:
    """Returns the least power of two that is not less."""
    return 1 << (n - 1).bit_length()


def merge_blocks(num_tiles: int) -> tuple[int, int]:
    """Returns the grid of a kernel that merges so many tiles."""
    return -(-num_tiles // (THREADS // 32)), 1
