"""Engines run kernels on tensors that ``ops`` allocated; one per kind of device."""

from typing import Any, Protocol

import torch


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


def of(device: torch.device) -> Engine | None:
    """The engine for tensors on ``device``, or None."""
    if device.type == "cpu":
        from .cpu import engine

        return engine
    return None
