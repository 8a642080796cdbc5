"""Engines run kernels on tensors that ``ops`` allocated; one per kind of device."""

import importlib.util
import logging
from typing import Any, Protocol

import torch

logger = logging.getLogger("pyg_ioaware")


class Engine(Protocol):
    """Runs named kernels on the tensors of one kind of device."""

    native_dtypes: frozenset[torch.dtype]
    split: int  # rows with more edges are split into tiles of at most so many

    def run(self, kernel: str, csr: Any, *args: Any) -> None:
        """Run ``kernel`` on the structure ``csr``, writing to the output arguments."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New memory on the engine's device, its values not set."""

    def sort_by_key(self, key: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rowptr [n + 1], perm [E])``, int32, of the stable sort of ``key`` in ``[0, n)``."""


_engines: dict[str, Engine | None] = {}


def of(device: torch.device) -> Engine | None:
    """The engine for tensors on ``device``, or None."""
    kind = device.type
    if kind not in _engines:
        _engines[kind] = _load(kind)
    return _engines[kind]


def _load(kind: str) -> Engine | None:
    if kind == "cpu":
        if importlib.util.find_spec("numba") is None:
            logger.warning("the CPU engine needs numba ('pip install numba'); PyG runs as it is")
            return None
        from pyg_ioaware.engines.cpu import engine

        return engine
    return None
