"""The random words of pyg_ioaware.philox, one counter at a time."""

# mypy: ignore-errors
import numpy as np

from pyg_ioaware.engines.cpu.jit import device
from pyg_ioaware.philox import INCREMENTS, MULTIPLIERS, ROUNDS

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(INCREMENTS[0]), np.uint64(INCREMENTS[1])
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@device
def words(position, block, seed):
    """Returns the four words of a counter, as uint64."""
    counter, key = np.uint64(position), np.uint64(seed)
    c0, c1 = counter & _WORD, counter >> _HALF
    c2, c3 = np.uint64(block), np.uint64(0)
    k0, k1 = key & _WORD, key >> _HALF
    for _ in range(ROUNDS):
        first, second = c0 * _M0, c2 * _M1
        c0, c1 = (second >> _HALF) ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> _HALF) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3
