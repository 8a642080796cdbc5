"""Engines run kernels on tensors that ``ops`` allocated; one per kind of device."""

import importlib
import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

logger = logging.getLogger("pyg_ioaware")
NOTES: "ContextVar[Counter[str] | None]" = ContextVar("pyg_ioaware_notes", default=None)
"""Takes what an engine chose, and why, while someone watches."""


@contextmanager
def watch() -> Iterator["Counter[str]"]:
    """Collects what engines choose inside, in this thread and context."""
    chosen = Counter[str]()
    token = NOTES.set(chosen)
    try:
        yield chosen
    finally:
        NOTES.reset(token)


class KernelError(RuntimeError):
    r"""A kernel that cannot be compiled or loaded.

    Args:
        message (str): Which one.
        dtype (torch.dtype): The dtype of the features that it is for.
    """

    def __init__(self, message: str, dtype: torch.dtype) -> None:
        super().__init__(message)
        self.dtype = dtype


class Kernels(dict[str, Callable[..., None]]):
    r"""The functions that run an engine's kernels, by name; their modules are imported at need.

    Args:
        package (str): The engine's package.
        files (dict): The module of each kernel.
    """

    def __init__(self, package: str, files: dict[str, str]) -> None:
        super().__init__()
        self._package, self._files = package, files

    def __missing__(self, kernel: str) -> Callable[..., None]:
        module = importlib.import_module(f"{self._package}.{self._files[kernel]}")
        found: Callable[..., None] = getattr(module, kernel)
        self[kernel] = found
        return found


class Engine(Protocol):
    """Runs named kernels on the tensors of one kind of device."""

    native_dtypes: frozenset[torch.dtype]
    split: int  # rows with more edges are split into tiles of about so many
    broken: dict[torch.dtype, str]  # why nothing of a dtype runs: a kernel could not be compiled
    gathers: bool  # whether it takes gradients of sources from the rows by source only
    # Whether scores with edge features are kept for the backward pass; all are where it gathers.
    keeps_scores: bool
    sums_columns: bool  # whether it sums over rows faster than PyTorch

    def run(self, kernel: str, csr: Any, *args: Any) -> None:
        """Run ``kernel`` on the structure ``csr``, writing to the output arguments."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """New memory on a device, its values not set."""

    def sort_by_key(self, key: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rowptr [n + 1], perm [E])``, int32, of the stable sort of ``key`` in ``[0, n)``."""

    def build(self, name: str, *args: Any) -> Any:
        """What a function of ``graph.build`` returns; NotImplemented to leave it to PyTorch."""


def row_width(x: torch.Tensor) -> int:
    """Returns how many numbers each row holds, whatever its dimensions."""
    return math.prod(x.shape[1:])


# By device: GPUs of one machine may differ. A text says why there is none.
_engines: dict[torch.device, Engine | str] = {}


def of(device: torch.device) -> Engine | None:
    """The engine for tensors on ``device``, or None."""
    found = _engines.get(device)
    if found is None:
        found = _engines[device] = _load(device)
        if isinstance(found, str) and device.type in ("cpu", "cuda"):
            logger.warning("%s; PyG runs as it is", found)
    return None if isinstance(found, str) else found


def why_none(device: torch.device) -> str:
    """Why there is no engine for ``device``."""
    of(device)
    return str(_engines[device])


def _load(device: torch.device) -> Engine | str:
    if device.type == "cpu":
        if importlib.util.find_spec("numba") is None:
            return "the CPU engine needs numba ('pip install numba')"
        from pyg_ioaware.engines.cpu import engine

        return engine
    if device.type == "cuda":
        from pyg_ioaware.engines import cuda

        missing = cuda.missing(device)
        return cuda.engine if missing is None else missing
    return f"no engine for device '{device}'"
