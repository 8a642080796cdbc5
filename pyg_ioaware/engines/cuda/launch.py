"""Declares, specialises, checks and launches kernels."""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_ioaware.engines import KernelError
from pyg_ioaware.engines.cuda import sources

# The codes of struct for what a kernel takes by value; anything else is a pointer to such.
_CODES = {"i32": "i", "i64": "q", "f32": "f", "f64": "d"}
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_SCALARS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_BITS = {torch.int32: 32, torch.int64: 64}
_PLACES = {8: torch.int8, 16: torch.int16, 32: torch.int32}

# Parameters of most kernels: the rows of a structure, and how many of them.
GRAPH = [("rowptr", "I*"), ("idx", "I*"), ("perm", "I*"), ("tiles", "i64*")]
ORDERED = [("rowptr", "I*"), ("idx", "I*"), ("tiles", "i64*")]  # what edges have is in order
ROWS = [("num_rows", "i64"), ("num_tiles", "i64"), ("split", "i64")]

# Launches a loaded kernel: grid (x, y), threads of a block, stream, address of the arguments.
Launch = Callable[[int, int, int, int, int], None]
Macros = tuple[tuple[str, int], ...]


class Runtime(Protocol):
    """Compiles and runs kernels on one kind of device."""

    def load(self, source: str, name: str, options: tuple[str, ...], device: int) -> Launch:
        """Compiles a kernel for a device."""

    def stream(self, device: int) -> int:
        """The current stream of the device."""


class Kernel:
    r"""A kernel function with its declared parameters.

    Args:
        source (str): The file that it is in, without :obj:`.cu`.
        name (str): Its name.
        params (sequence): Name and type of each parameter: :obj:`"T*"` (storage), :obj:`"A*"`
            (the type of sums), :obj:`"I*"` (indices), :obj:`"P*"` (marks of maxima),
            :obj:`"i32*"`, :obj:`"i64*"`, :obj:`"u8*"`, :obj:`"f64*"`, or :obj:`"i32"`,
            :obj:`"i64"`, :obj:`"f32"`, :obj:`"f64"` by value. Pointers come first, and may be
            :obj:`None`.
    """

    def __init__(self, source: str, name: str, params: Sequence[tuple[str, str]]) -> None:
        self.source, self.name, self.params = source, name, tuple(params)
        self._pointers = [kind for _, kind in params if kind not in _CODES]
        assert all(kind not in _CODES for _, kind in params[: len(self._pointers)])
        codes = [_CODES.get(kind, "Q") for _, kind in params]
        self._struct = struct.Struct("@" + "".join(codes))
        self._offsets = [
            struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize("@" + code)
            for i, code in enumerate(codes)
        ]
        self._loaded: dict[tuple[Any, ...], Launch] = {}
        self._dtypes: dict[Macros, list[torch.dtype]] = {}
        self._local = threading.local()

    def __call__(
        self, runtime: Runtime, macros: Macros, grid: tuple[int, int], threads: int, *args: Any
    ) -> None:
        r"""Launches the kernel on the current stream of its operands' device.

        Args:
            runtime (Runtime): What runs it.
            macros (tuple): The specialisation: names and values.
            grid (tuple): Blocks; nothing is launched if there are none.
            threads (int): Threads of a block.
            *args: The arguments.

        Raises:
            TypeError: If an argument is not what the kernel takes.
        """
        if not grid[0] or not grid[1]:
            return
        values, device = self._pack(macros, args)
        key = (runtime, macros, threads, device)
        launch = self._loaded.get(key)
        if launch is None:
            launch = self._loaded[key] = self._load(runtime, macros, threads, device)
        try:
            buffer, pointers = self._local.memory
        except AttributeError:
            buffer, pointers = self._allocate()
        self._struct.pack_into(buffer, 0, *values)
        launch(*grid, threads, runtime.stream(device), pointers)

    def _load(self, runtime: Runtime, macros: Macros, threads: int, device: int) -> Launch:
        options = tuple(f"-D{name}={value}" for name, value in (*macros, ("THREADS", threads)))
        try:
            return runtime.load(self.source, self.name, options, device)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            dtype = _scalar(macros)
            raise KernelError(f"'{self.name}' with {' '.join(options)}", dtype) from error

    def _pack(self, macros: Macros, args: Sequence[Any]) -> tuple[list[Any], int]:
        """Returns the values to pass, and the device of the tensors among them."""
        types = macros[:3]
        dtypes = self._dtypes.get(types)
        if dtypes is None:
            dtypes = self._dtypes[types] = _dtypes(types, self._pointers)
        if len(args) != len(self.params):
            raise TypeError(f"'{self.name}' takes {len(self.params)} arguments (got {len(args)})")
        pointers = args[: len(dtypes)]
        values, device = [], None
        for tensor, dtype in zip(pointers, dtypes, strict=True):
            if tensor is None:
                values.append(0)
                continue
            place = tensor.get_device()
            if device is None:
                device = place
            if tensor.dtype is not dtype or place != device or not tensor.is_contiguous():
                raise TypeError(self._complaint(pointers, dtypes))
            values.append(tensor.data_ptr())
        if device is None:
            raise TypeError(f"'{self.name}' expects at least one tensor (got none)")
        values += args[len(dtypes) :]
        return values, max(device, 0)

    def _complaint(self, pointers: Sequence[Any], dtypes: Sequence[torch.dtype]) -> str:
        given = [
            f"{name}: '{t.dtype}' for '{dtype}', strides {t.stride()}, '{t.device}'"
            for (name, _), t, dtype in zip(self.params, pointers, dtypes, strict=False)
            if isinstance(t, Tensor)
        ]
        return (
            f"'{self.name}' expects contiguous operands of its dtypes on one device "
            f"(got {'; '.join(given)})"
        )

    def _allocate(self) -> tuple[Any, int]:
        """Memory of this thread for the arguments, and the address of the pointers to them."""
        buffer = ctypes.create_string_buffer(self._struct.size)
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(self._offsets))(*(start + o for o in self._offsets))
        self._local.keep = pointers
        self._local.memory = buffer, ctypes.addressof(pointers)
        memory: tuple[Any, int] = self._local.memory
        return memory


@functools.cache
def specialise(types: Macros, *plans: Any, **flags: int) -> Macros:
    r"""Returns the specialisation of a kernel.

    Args:
        types (tuple): What :meth:`types_of` gives.
        *plans (Layout, HeadLayout or Pace): How rows are read.
        **flags: Macros of the kernel's own.
    """
    planned = (macro for plan in plans for macro in plan.macros)
    return *types, *planned, *((name, int(flag)) for name, flag in flags.items())


def types_of(x: Tensor, index: Tensor | None = None) -> Macros:
    """Returns the part of a specialisation that the operands' dtypes choose."""
    return _types(x.dtype, torch.int32 if index is None else index.dtype)


def types_with(mark: Tensor | None, x: Tensor, index: Tensor) -> Macros:
    """Returns the same, and what the dtype of marks of maxima chooses."""
    return *types_of(x, index), ("PLACE_BITS", 32 if mark is None else 8 * mark.element_size())


def types_of_indices(given: Tensor | None = None) -> Macros:
    """Returns the same for a kernel on indices alone, of the dtype of those, else int64."""
    return _types(torch.float32, torch.int64 if given is None else given.dtype)


@functools.cache
def _types(scalar: torch.dtype, index: torch.dtype) -> Macros:
    return ("SCALAR", _SCALARS[scalar]), ("INDEX", _BITS[index])


def _scalar(macros: Macros) -> torch.dtype:
    """Returns the dtype of storage of a specialisation."""
    return {code: dtype for dtype, code in _SCALARS.items()}[macros[0][1]]


def _dtypes(macros: Macros, pointers: Sequence[str]) -> list[torch.dtype]:
    """Returns the dtype behind each pointer, from the first three macros."""
    scalar, places = _scalar(macros), dict(macros[2:3]).get("PLACE_BITS", 32)
    index = {bits: dtype for dtype, bits in _BITS.items()}[macros[1][1]]
    dtypes = {
        "T*": scalar,
        "A*": torch.float64 if scalar is torch.float64 else torch.float32,
        "I*": index,
        "P*": _PLACES[places],
        "i32*": torch.int32,
        "i64*": torch.int64,
        "u8*": torch.uint8,
        "f64*": torch.float64,
    }
    return [dtypes[kind] for kind in pointers]


class CUDARuntime:
    """NVRTC and the driver, through CuPy. See ``Runtime``."""

    def __init__(self) -> None:
        self._local = threading.local()

    def load(self, source: str, name: str, options: tuple[str, ...], device: int) -> Launch:
        """Compiles a kernel for a device, or finds it in CuPy's disk cache."""
        from cupy_backends.cuda.api import driver

        try:
            kernel = self._kernel(source, name, options, device)
        except driver.CUDADriverError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            # The driver has no memory for code where PyTorch keeps all of it.
            torch.cuda.empty_cache()
            try:
                kernel = self._kernel(source, name, options, device)
            except driver.CUDADriverError:
                message = f"no memory on device {device} for the code of '{name}'"
                raise torch.cuda.OutOfMemoryError(message) from error
        function, run, current = kernel.ptr, driver.launchKernel, torch._C._cuda_getDevice

        def launch(
            x: int, y: int, threads: int, stream: int, params: int, _keep: Any = kernel
        ) -> None:
            if current() == device:
                run(function, x, y, 1, threads, 1, 1, 0, stream, params, 0)
            else:
                with torch.cuda.device(device):
                    run(function, x, y, 1, threads, 1, 1, 0, stream, params, 0)

        return launch

    @staticmethod
    def _kernel(source: str, name: str, options: tuple[str, ...], device: int) -> Any:
        import cupy

        folder = f"-I{sources.folder()}", f"-DHEADERS=0x{sources.digest()}"
        options = ("-std=c++17", *folder, *options)
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=sources.text(source), options=options, backend="nvrtc")
            return module.get_function(name).kernel

    def stream(self, device: int) -> int:
        """The current stream of the device."""
        if not getattr(self._local, "has_context", False):
            # A new thread, such as autograd's, has no context before its first runtime call.
            from cupy.cuda import runtime

            runtime.setDevice(torch._C._cuda_getDevice())
            self._local.has_context = True
        stream: int = torch._C._cuda_getCurrentRawStream(device)
        return stream
