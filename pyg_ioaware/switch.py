"""Whether a call may be fused: the global patch, single modules, and the scoped switches."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

FLAG = "_pyg_ioaware"


class Flag:
    """Marks an accelerated module, and tells how many live; a pickle holds :obj:`True` for it."""

    alive: ClassVar["weakref.WeakSet[Flag]"] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Flag":
        return Flag()

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (True,)


_disabled: ContextVar[bool] = ContextVar("pyg_ioaware_disabled", default=False)
_forced: ContextVar[bool] = ContextVar("pyg_ioaware_forced", default=False)


@dataclass
class _Switch:
    patched: bool = False
    strict: bool = False


SWITCH = _Switch()


def enabled(module: Any = None) -> bool:
    """Tells whether calls are fused now: everywhere, or because this module is accelerated."""
    if _disabled.get():
        return False
    if SWITCH.patched or _forced.get():
        return True
    return module is not None and FLAG in getattr(module, "__dict__", ())


@contextmanager
def forced() -> Iterator[None]:
    """Fuses everything inside, in this thread and context only, where PyG's functions are ours."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


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
