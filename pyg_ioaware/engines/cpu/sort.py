"""sort_by_key: a stable counting sort of E keys in [0, n).

Mapping   the keys are cut into chunks, one per thread; each counts its keys, the counts become the
          places where each (key, chunk) starts, and each chunk then places its own edges
Traffic   the keys twice, rowptr, perm, and one count per key and chunk
Numerics  exact; the same whatever the number of chunks
"""

# mypy: ignore-errors
import torch

from pyg_ioaware.engines.cpu.jit import INTEGER, Entry, phase_of, take, unpack
from pyg_ioaware.engines.cpu.pool import run, threads
from pyg_ioaware.engines.cpu.rows import SERIAL, block_of

COUNT, PLACE, SCATTER = 0, 1, 2


@Entry
def _entry(args):
    key, rowptr, perm, counts, edges, n, chunks = unpack(args)
    phase, item = phase_of(args), take(args)
    while item >= 0:
        first, stop = item * edges // chunks, (item + 1) * edges // chunks
        mine = item * n
        if phase == COUNT:
            for k in range(mine, mine + n):
                counts[k] = 0
            for e in range(first, stop):
                counts[mine + key[e]] += 1
        elif phase == PLACE:
            total = 0
            for k in range(n):
                rowptr[k] = total
                for chunk in range(chunks):
                    count = counts[chunk * n + k]
                    counts[chunk * n + k] = total
                    total += count
            rowptr[n] = total
        else:
            for e in range(first, stop):
                at = mine + key[e]
                perm[counts[at]] = e
                counts[at] += 1
        item = take(args)


def sort_by_key(key, n):
    """Return ``(rowptr [n + 1], perm [E])``, int32; ``key`` must lie in ``[0, n)``."""
    edges = key.shape[0]
    parallel = edges > SERIAL
    chunks = max(1, min(threads(), 2 * edges // max(n, 1))) if parallel else 1
    rowptr = key.new_empty(n + 1, dtype=torch.int32)
    perm = key.new_empty(edges, dtype=torch.int32)
    counts = key.new_empty(chunks * n, dtype=torch.int32)
    tensors = (key, rowptr, perm, counts)
    function = _entry((*(t.dtype for t in tensors), *(INTEGER,) * 3))
    block = block_of((*(t.data_ptr() for t in tensors), edges, n, chunks))
    run(function, block, chunks, COUNT, parallel)
    run(function, block, 1, PLACE, False)
    run(function, block, chunks, SCATTER, parallel)
    return rowptr, perm
