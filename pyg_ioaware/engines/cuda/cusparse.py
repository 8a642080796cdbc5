"""Products by NVIDIA's cuSPARSE; descriptors, workspace and analysis are kept per structure."""

import ctypes
import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_ioaware.engines import logger
from pyg_ioaware.engines.cuda.launch import Runtime
from pyg_ioaware.forks import hold_over_fork
from pyg_ioaware.graph.csr import CSR
from pyg_ioaware.graph.streams import is_capturing

_NAMES = ("libcusparse.so.12", "libcusparse.so", "cusparse64_12.dll")
_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 14}
_INDICES = {torch.int32: 2, torch.int64: 3}
_AS_IT_IS, _ROW_ORDER = 0, 2
_FASTEST, _DETERMINISTIC = 6, 12  # CUSPARSE_SPMM_CSR_ALG2 is made for rows, ALG3 repeats its bits
_WIDEST = 16  # bytes of one access

_lock = threading.Lock()  # descriptors are changed for each call
hold_over_fork(_lock)


_refused: dict[torch.dtype, str] = {}


class CuSparseError(RuntimeError):
    """A call of cuSPARSE that failed."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Returns the library that came with PyTorch, if it can be loaded."""
    for name in _NAMES:
        try:
            found = ctypes.CDLL(name)
            found.cusparseGetErrorString.restype = ctypes.c_char_p
            return found
        except (AttributeError, OSError):
            continue
    return None


def _call(name: str, *args: Any) -> None:
    library = _library()
    assert library is not None
    status = getattr(library, f"cusparse{name}")(*args)
    if status:
        said = library.cusparseGetErrorString(status).decode()
        raise CuSparseError(f"'cusparse{name}' fails: {said} ({status})")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    _call("Create", ctypes.byref(found))
    return found


class _Product:
    r"""One product, prepared.

    Args:
        csr (CSR): The structure.
        x (torch.Tensor): Rows like those that are summed.
        out (torch.Tensor): Rows like the sums.
        algorithm (int): The algorithm.
        handle (ctypes.c_void_p): The handle, set to the current stream.
        analysed (bool): Whether the structure is analysed once for all calls.
    """

    def __init__(
        self,
        csr: CSR,
        x: Tensor,
        out: Tensor,
        algorithm: int,
        handle: ctypes.c_void_p,
        analysed: bool,
    ) -> None:
        self._rowptr = csr.rowptr  # the columns outlive this, which hangs on them
        self._ones: Tensor | None = None
        wide = x.dtype is torch.float64
        number = ctypes.c_double if wide else ctypes.c_float
        self._numbers = number(1.0), number(0.0)
        kind, index = _TYPES[x.dtype], _INDICES[csr.idx.dtype]
        rows, width = out.shape
        self._matrix, self._x, self._out = made = [ctypes.c_void_p() for _ in range(3)]
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        _call(
            "CreateCsr",
            *(ctypes.byref(made[0]), i64(rows), i64(x.size(0)), i64(csr.idx.numel())),
            *(pointer(t.data_ptr()) for t in (csr.rowptr, csr.idx, x)),
            *(index, index, 0, kind),
        )
        weakref.finalize(self, _call, "DestroySpMat", made[0]).atexit = False
        for place, table in zip(made[1:], (x, out), strict=True):
            shape = i64(table.size(0)), i64(width), i64(width)
            address = pointer(table.data_ptr())
            _call("CreateDnMat", ctypes.byref(place), *shape, address, kind, _ROW_ORDER)
            weakref.finalize(self, _call, "DestroyDnMat", place).atexit = False
        one, zero = (ctypes.byref(n) for n in self._numbers)
        self._operands = (
            *(_AS_IT_IS, _AS_IT_IS, one, self._matrix, self._x, zero, self._out),
            *(_TYPES[torch.float64 if wide else torch.float32], algorithm),
        )
        size = ctypes.c_size_t()
        _call("SpMM_bufferSize", handle, *self._operands, ctypes.byref(size))
        self._workspace = torch.empty(size.value, dtype=torch.uint8, device=x.device)
        if analysed:
            self._point(self.ones(x, csr), x, out)
            _call("SpMM_preprocess", handle, *self._operands, self._address)

    @property
    def _address(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._workspace.data_ptr())

    def ones(self, x: Tensor, csr: CSR) -> Tensor:
        """Returns the values of a matrix without weights: it has no form without values."""
        if self._ones is None:
            self._ones = x.new_ones(csr.idx.numel())
        return self._ones

    def _point(self, values: Tensor, x: Tensor, out: Tensor) -> None:
        _call("SpMatSetValues", self._matrix, ctypes.c_void_p(values.data_ptr()))
        for place, table in ((self._x, x), (self._out, out)):
            _call("DnMatSetValues", place, ctypes.c_void_p(table.data_ptr()))

    def run(self, handle: ctypes.c_void_p, values: Tensor, x: Tensor, out: Tensor) -> None:
        self._point(values, x, out)
        _call("SpMM", handle, *self._operands, self._address)


# By the columns of a structure: what was made for it goes when they do.
_products: WeakIdKeyDictionary = WeakIdKeyDictionary()


def why_not(csr: CSR, x: Tensor, weight: Tensor | None) -> str | None:
    """Returns why cuSPARSE cannot form a product, or None."""
    if not x.is_cuda:
        return "the tensors are not on a GPU"
    if weight is not None and weight.size(1) > 1:
        return "cuSPARSE has no weights per head"
    if x.data_ptr() % _WIDEST:
        return f"cuSPARSE takes no rows off {_WIDEST} bytes"
    if x.dtype not in _TYPES or csr.idx.dtype not in _INDICES:
        return f"cuSPARSE has no form for '{x.dtype}'"
    if _library() is None:
        return "cuSPARSE cannot be loaded"
    return _refused.get(x.dtype)


def multiply(
    runtime: Runtime,
    csr: CSR,
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    mean: bool,
) -> bool:
    """Writes each row's weighted sum, or mean, to ``out``; returns whether cuSPARSE did it.

    Weights are in the order of the rows.
    """
    device = x.get_device()
    if scale is not None:
        x = x * scale.view(-1, 1)
    try:
        with torch.cuda.device(device), _lock:
            product, handle = _prepared(runtime, csr, out, x)
            product.run(handle, product.ones(x, csr) if weight is None else weight, x, out)
    except CuSparseError as error:
        _refused[x.dtype] = str(error)
        logger.warning("%s; kernels of this package run instead for '%s'", error, x.dtype)
        return False
    if mean:
        out.div_(csr.rowptr.diff().clamp_(min=1).view(-1, 1))
    return True


def _prepared(
    runtime: Runtime, csr: CSR, out: Tensor, x: Tensor
) -> tuple[_Product, ctypes.c_void_p]:
    """Returns a product, and the handle on the current stream of the current device."""
    stream, handle = runtime.stream(x.get_device()), _handle(x.get_device())
    _call("SetStream", handle, ctypes.c_void_p(stream))
    deterministic = torch.are_deterministic_algorithms_enabled()
    algorithm = _DETERMINISTIC if deterministic else _FASTEST
    if is_capturing(x.device):  # the captured graph keeps the memory, no other call may use it
        return _Product(csr, x, out, algorithm, handle, analysed=False), handle
    kept = _products.setdefault(csr.idx, {})
    # Each stream has its own workspace: calls on two of them may run at once.
    key = csr.rowptr.data_ptr(), x.size(0), *out.shape, x.dtype, algorithm, stream
    product = kept.get(key)
    if product is None:
        # Rows of many edges make the deterministic one read bad memory once it has analysed.
        product = _Product(csr, x, out, algorithm, handle, analysed=not deterministic)
        kept[key] = product
    return product, handle
