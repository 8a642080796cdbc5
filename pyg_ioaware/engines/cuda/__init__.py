"""CUDA engine: kernels compiled by NVRTC at their first use, on torch's current stream."""

import importlib.util
import tempfile
from typing import Any

import torch

from pyg_ioaware.engines import KernelError, Kernels, logger
from pyg_ioaware.engines.cuda import sources
from pyg_ioaware.engines.cuda.launch import CUDARuntime, Runtime

_FILES = {
    "spmm": "spmm",
    "sddmm": "sddmm",
    "column_sums": "column_sums",
    "reduce": "reduce",
    "reduce_gather": "reduce_backward",
    "reduce_weight": "reduce_backward",
    "attention_values": "attention",
    "gatv2": "gatv2",
    "gatv2_target": "gatv2",
    "gatv2_source": "gatv2",
    "transformer": "transformer",
    "transformer_target": "transformer",
    "transformer_source": "transformer",
    "build_pair": "structure",
    "build_rows": "structure",
    "build_transpose": "structure",
}
_OLDEST = (7, 5)  # compute capability


class CUDAEngine:
    """See ``engines.Engine``."""

    native_dtypes = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
    split = 128  # edges beyond which a row is split into tiles
    gathers = True
    sums_columns = True
    keeps_scores = False

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.broken: dict[torch.dtype, str] = {}
        self._builds = True
        self._kernels = Kernels(__name__, _FILES)

    def run(self, kernel: str, csr: Any, *args: Any) -> None:
        """Run ``kernel`` on ``csr``; the signatures are in the file of each kernel."""
        try:
            self._kernels[kernel](self.runtime, csr, *args)
        except KernelError as error:
            self._note(error)
            raise

    def _note(self, error: KernelError) -> None:
        """Gives up on a dtype, and says once where the compiler's messages are."""
        dtype = error.dtype
        if dtype in self.broken:
            return
        log = _written(error)
        self.broken[dtype] = f"a CUDA kernel for '{dtype}' that does not compile (see '{log}')"
        logger.warning("%s; PyG runs as it is from now on", self.broken[dtype])

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns new memory for a result."""
        return torch.empty(shape, dtype=dtype, device=device)

    def sort_by_key(self, key: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rowptr [n + 1], perm [E])``, int32, of the stable sort of ``key`` in ``[0, n)``."""
        key, perm = torch.sort(key.int(), stable=True)
        rowptr = torch._convert_indices_from_coo_to_csr(key, n, out_int32=True)
        return rowptr, perm.int()

    def build(self, name: str, *args: Any) -> Any:
        """Builds rows by kernels, unless one of them does not compile."""
        if not self._builds:
            return NotImplemented
        try:
            return self._kernels[name](self.runtime, self.split, *args)
        except KernelError as error:
            self._builds = False
            why = f"a CUDA kernel that does not compile (see '{_written(error)}')"
            logger.warning("%s; PyTorch builds structures from now on", why)
            return NotImplemented


def _written(error: KernelError) -> str:
    """Writes what the compiler says to a file, and returns its path."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="pyg_ioaware_", suffix=".log", delete=False
    ) as log:
        log.write(f"{error}\n{error.__cause__}\n")
    return log.name


engine = CUDAEngine(CUDARuntime())


def missing(device: torch.device) -> str | None:
    """What keeps the engine from running on ``device``, or None."""
    if torch.version.hip is not None or torch.version.cuda is None:
        return f"no engine for '{device}' of a build of PyTorch without CUDA"
    if importlib.util.find_spec("cupy") is None:
        package = f"cupy-cuda{torch.version.cuda.split('.')[0]}x"
        return f"the CUDA engine needs CuPy ('pip install {package}')"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return f"no engine for '{device}' of compute capability {capability[0]}.{capability[1]}"
    try:
        sources.folder()
    except FileNotFoundError as error:
        return str(error)
    return None
