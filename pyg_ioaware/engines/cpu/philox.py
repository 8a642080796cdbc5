"""The random words of ops.philox, one counter at a time."""

# mypy: ignore-errors
import numpy as np

from pyg_ioaware.engines.cpu.jit import device

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@device
def words(position, block, seed):
    """Returns the four words of a counter, as uint64."""
    counter, key = np.uint64(position), np.uint64(seed)
    c0, c1 = counter & _WORD, counter >> _HALF
    c2, c3 = np.uint64(block), np.uint64(0)
    k0, k1 = key & _WORD, key >> _HALF
    for _ in range(10):
        first, second = c0 * _M0, c2 * _M1
        c0, c1 = (second >> _HALF) ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> _HALF) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3
