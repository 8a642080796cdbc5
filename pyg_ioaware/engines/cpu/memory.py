"""Fresh memory for large results, in huge pages where the system grants them on request.

A large tensor is new memory at every call, and touching it page by page costs several times what
a kernel needs to fill it; huge pages make that cost vanish.
"""

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

_LEAST = 4 * 2**20  # bytes; smaller blocks are recycled by the allocator with their pages
_MADV_HUGEPAGE = 14


def _find_madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_int
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


_madvise = _find_madvise()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor whose values nobody has set."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if out.nbytes >= _LEAST and _madvise is not None:
        page = mmap.PAGESIZE
        begin = -(-out.data_ptr() // page) * page
        end = (out.data_ptr() + out.nbytes) // page * page
        _madvise(begin, end - begin, _MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return out
