"""Whether a call may be fused: the global patch, single modules, and the scoped switches."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

FLAG = "_pyg_ioaware"

_disabled: ContextVar[bool] = ContextVar("pyg_ioaware_disabled", default=False)


@dataclass
class _Switch:
    patched: bool = False
    strict: bool = False


SWITCH = _Switch()


def enabled(module: Any = None) -> bool:
    """Tells whether calls are fused now: everywhere, or because this module is accelerated."""
    if _disabled.get():
        return False
    return SWITCH.patched or (module is not None and FLAG in getattr(module, "__dict__", ()))


def is_disabled() -> bool:
    """Tells whether this context has switched everything off."""
    return _disabled.get()


@contextmanager
def disabled() -> Iterator[None]:
    r"""Runs everything inside on stock PyG, in this thread and context only.

    .. code-block:: python

        with pyg_ioaware.disabled():
            out = model(x, edge_index)
    """
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)
