"""CPU engine: Numba kernels on torch's own threads. Numba is imported at the first call."""

from typing import Any

import torch

from pyg_ioaware.engines import Kernels
from pyg_ioaware.engines.cpu import memory

_FILES = {
    "spmm": "spmm",
    "sddmm": "sddmm",
    "reduce": "reduce",
    "reduce_backward": "reduce_backward",
    "reduce_backward_weight": "reduce_backward",
    "gatv2": "attention_forward",
    "transformer": "attention_forward",
    "gatv2_target": "attention_target",
    "transformer_target": "attention_target",
    "gatv2_source": "attention_source",
    "transformer_source": "attention_source",
}


class CPUEngine:
    """See ``engines.Engine``."""

    native_dtypes = frozenset({torch.float32, torch.float64})
    split = 512  # edges beyond which a row is split into tiles
    gathers = False
    sums_columns = False
    keeps_scores = True

    def __init__(self) -> None:
        self.broken: dict[torch.dtype, str] = {}
        self._kernels = Kernels(__name__, _FILES)

    def run(self, kernel: str, csr: Any, *args: Any) -> None:
        """Run ``kernel`` on ``csr``; the signatures are in the file of each kernel."""
        self._kernels[kernel](csr, *args)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns new memory for a result."""
        return memory.empty(shape, dtype)

    def sort_by_key(self, key: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rowptr [n + 1], perm [E])``, int32, of the stable sort of ``key`` in ``[0, n)``."""
        from pyg_ioaware.engines.cpu.sort import sort_by_key

        found: tuple[torch.Tensor, torch.Tensor] = sort_by_key(key, n)  # type: ignore[no-untyped-call]
        return found

    def build(self, name: str, *args: Any) -> Any:
        """Leaves it to PyTorch, and to ``sort_by_key``."""
        return NotImplemented


engine = CPUEngine()
