"""How rows are spread over lanes, and how many edges are taken at once: pure functions of shapes,
alignment and degrees.
"""

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
        filled (bool): Whether no lane has an access beyond a row.
    """

    vec: int
    lanes: int
    vectors: int
    slices: int
    filled: bool

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """The specialisation."""
        return (
            *(("VEC", self.vec), ("LANES", self.lanes), ("NV", self.vectors)),
            ("FILLED", int(self.filled)),
        )

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
    slices = -(-accesses // (lanes * vectors))
    return Layout(vec, lanes, vectors, slices, width == vec * lanes * vectors * slices)


def merge_layout(width: int, *tables: Tensor) -> Layout:
    """Chooses how a kernel that merges tiles reads rows: a warp at a time, whatever their width."""
    return Layout(layout(width, width, *tables).vec, 32, 1, 1, False)


def scan_layout(width: int, mark: Tensor) -> Layout:
    """Chooses how a kernel that looks for marks reads rows of them: one access a lane."""
    found = layout(width, width, mark)
    return found._replace(vectors=1, slices=found.slices * found.vectors)


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
            ("WHOLE", int(self.filled and self.slices == 1)),
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


def merge_head_layout(heads: int, channels: int, *tables: Tensor) -> HeadLayout:
    """Chooses the same for rows of several heads."""
    return HeadLayout(head_layout(heads, channels, *tables).vec, 32, 32, 1, 1, 1, False)


class Pace(NamedTuple):
    r"""How a group goes through the edges of a row.

    Attributes:
        batch (int): Edges whose rows are asked for before any is used, a power of two.
        resident (int): Blocks that a multiprocessor holds at the least, which bounds registers.
    """

    batch: int
    resident: int

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """The specialisation."""
        return ("BATCH", self.batch), ("RESIDENT", self.resident)


_SHORT, _LONG = 6, 32  # mean numbers of edges of a row
_FEW = 4  # lanes


def pace(
    kernel: str,
    plan: Layout | HeadLayout,
    table: Tensor,
    edges: int,
    rows: int,
    with_features: bool = False,
    with_more: bool = False,
) -> Pace:
    r"""Chooses how many edges a kernel takes at once.

    More edges at once hide more of the memory's latency, but need registers, and most of a batch
    is empty where rows are shorter. The numbers are the fastest on an H200, some of which spill a
    few registers (``registers.csv`` tells); of wide rows, those that fit.

    Args:
        kernel (str): Its name.
        plan (Layout or HeadLayout): How rows are read.
        table (torch.Tensor): What is gathered.
        edges (int): The number of edges.
        rows (int): The number of rows.
        with_features (bool, optional): Whether edges have features, or weights.
            (default: :obj:`False`)
        with_more (bool, optional): Whether weights are dropped, have gradients of their own, or
            are those of several heads, or maxima are found again.
            (default: :obj:`False`)
    """
    length = (edges >= _SHORT * rows) + (edges >= _LONG * rows)
    # A lane has several edges of a batch as its own where few lanes share a head.
    narrow = isinstance(plan, HeadLayout) and plan.head_lanes < _FEW
    return _pace(
        *(kernel, plan.vec, plan.vectors, table.element_size(), length),
        *(with_features, with_more, narrow),
    )


@functools.cache
def _pace(
    kernel: str,
    vec: int,
    vectors: int,
    size: int,
    length: int,
    features: bool,
    more: bool,
    narrow: bool,
) -> Pace:
    """The same; length is 0 where rows are short, 2 where they are long, else 1."""
    short = length == 0
    if kernel == "spmm" and vectors == 1 and size <= 4 and not more:
        return _SUMS[features, size][length]
    if kernel in ("spmm", "reduce"):
        return Pace(8 if vectors == 1 and not short and not features else 4, 1)
    if kernel == "reduce_gather":
        lean = vectors == 1 and not features
        return Pace(4, (7 if more or size == 2 else 8) if lean else 1)
    if kernel == "reduce_scan":
        return Pace(2, 10 if size == 4 else 8)
    lean = vectors == 1 and size <= 4 and not features
    if lean and vec * size == _WIDEST:
        batch, resident = _ATTENTION[kernel, size][length]
        return Pace(batch, max(1, resident - more - 2 * narrow))
    if kernel in _ORDERED:
        return Pace(8, 8 if size <= 4 and vectors == 1 else 1)
    if kernel.startswith("transformer"):  # whose lanes hold numbers as they are stored
        batch = _most(vec * vectors * size // 4, 2, 2 if short else 4, 8)
    else:  # or in the type of sums
        batch = _most(vec * vectors * max(size, 4) // 4 * (1 + features), 0, 8, 16)
    return Pace(batch, 4 if size <= 4 and not features else 1)


# Where rows are short, neither, and long: what is fastest where a lane has one access of 16 bytes.
# By whether edges have weights, and by the bytes of a number:
_SUMS: dict[tuple[bool, int], tuple[Pace, Pace, Pace]] = {
    (False, 4): (Pace(4, 16), Pace(8, 12), Pace(16, 8)),
    (False, 2): (Pace(4, 16), Pace(8, 12), Pace(8, 8)),
    (True, 4): (Pace(2, 16), Pace(4, 12), Pace(8, 8)),
    (True, 2): (Pace(2, 16), Pace(4, 10), Pace(8, 8)),
}
# By the kernel, and the same:
_ATTENTION = {
    ("gatv2", 4): ((4, 7), (4, 7), (8, 6)),
    ("gatv2", 2): ((4, 7), (4, 7), (4, 7)),
    ("gatv2_kept", 4): ((2, 10), (4, 8), (8, 6)),
    ("gatv2_kept", 2): ((4, 5), (4, 5), (4, 5)),
    ("attention_values", 4): ((2, 10), (4, 9), (8, 6)),
    ("attention_values", 2): ((2, 10), (4, 8), (8, 5)),
    ("gatv2_target", 4): ((4, 16), (16, 8), (16, 8)),
    ("gatv2_target", 2): ((4, 12), (16, 8), (16, 8)),
    ("gatv2_source", 4): ((4, 16), (16, 8), (16, 8)),
    ("gatv2_source", 2): ((4, 12), (16, 9), (16, 9)),
    ("transformer", 4): ((2, 10), (4, 9), (4, 9)),
    ("transformer", 2): ((2, 10), (4, 8), (4, 8)),
    ("transformer_target", 4): ((2, 12), (8, 8), (8, 8)),
    ("transformer_target", 2): ((2, 12), (8, 8), (8, 8)),
    ("transformer_source", 4): ((2, 8), (8, 8), (8, 8)),
    ("transformer_source", 2): ((2, 8), (8, 8), (8, 8)),
}
_ORDERED = ("gatv2_target", "gatv2_source")  # gather no rows


def _most(words: int, eight: int, four: int, two: int) -> int:
    """Returns the batch by how many words of each edge its rows take in a lane."""
    return 8 if words <= eight else 4 if words <= four else 2 if words <= two else 1


def _power_of_two(n: int) -> int:
    """Returns the least power of two that is not less."""
    return 1 << (n - 1).bit_length()


def merge_blocks(num_tiles: int) -> tuple[int, int]:
    """Returns the grid of a kernel that merges so many tiles."""
    return -(-num_tiles // (THREADS // 32)), 1
