"""Fused, memory-saving message passing for PyTorch Geometric; see :meth:`patch`."""

from typing import Any

from pyg_ioaware.engines.cuda.choice import preferred_spmm
from pyg_ioaware.explain import Explanation, explain
from pyg_ioaware.patch import accelerate, decelerate, is_patched, patch, patched, unpatch
from pyg_ioaware.prepare import cache_limits, clear_cache, invalidate, prepare, stats
from pyg_ioaware.record import FallbackError
from pyg_ioaware.switch import disabled

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "FallbackError",
    "accelerate",
    "cache_limits",
    "clear_cache",
    "decelerate",
    "disabled",
    "explain",
    "invalidate",
    "is_patched",
    "nn",
    "patch",
    "patched",
    "preferred_spmm",
    "prepare",
    "stats",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    # The layers are imported when they are asked for.
    if name == "nn":
        import importlib

        return importlib.import_module("pyg_ioaware.nn")
    raise AttributeError(f"module 'pyg_ioaware' has no attribute '{name}'")
