"""How a call is cut into work items, the same for every row kernel.

Phase 0: one item per hub tile, then chunks of whole rows of about equal edges + rows. Phase 1 and
any further: groups of tiles, each merging the partials of the rows whose first tile it holds, in
tile order.
Chunk borders are found by binary search when the item is taken; results do not depend on them.
"""

# mypy: ignore-errors
import ctypes

from .jit import HEAD, device
from .pool import run, threads

GRAIN = 1 << 15  # element operations worth one work item
SERIAL = 3 * GRAIN  # less than this is run by the caller alone


@device
def first_row(rowptr, rows, chunk, chunks):
    """The first row of a chunk."""
    goal = (rowptr[rows] + rows) * chunk // chunks
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        if rowptr[middle] + middle < goal:
            low = middle + 1
        else:
            high = middle
    return low


@device
def rows_of(item, items, rowptr, rows, tiles, count):
    """The range of rows of an item of phase 0: the row of a tile, or a chunk of rows."""
    if item < count:
        return tiles[4 * item], tiles[4 * item] + 1
    first = first_row(rowptr, rows, item - count, items - count)
    return first, first_row(rowptr, rows, item - count + 1, items - count)


def block_of(values):
    """The block of an entry; see ``jit``."""
    return (ctypes.c_int64 * (HEAD + len(values)))(0, 0, 0, 0, 0, 0, 0, 0, *values)


def launch(entry, fields, values, work, tiles, phases=1, chunks=None, groups=64):
    """Run ``entry`` over tiles and chunks, then over groups of tiles in each further phase.

    ``work`` is in element operations. A kernel that sums over items names the number of chunks
    and groups, so that its result does not depend on the number of threads.
    """
    function = entry(fields)
    block = block_of(values)
    parallel = work > SERIAL
    if chunks is None:
        chunks = min(16 * threads(), work // GRAIN + 1) if parallel else 1
    run(function, block, tiles + chunks, 0, parallel)
    for phase in range(1, phases if tiles else 1):
        run(function, block, min(tiles, groups), phase, parallel)


def address(tensor):
    """The address of a tensor's data; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def dtype(tensor):
    """The field of an optional tensor."""
    return None if tensor is None else tensor.dtype
