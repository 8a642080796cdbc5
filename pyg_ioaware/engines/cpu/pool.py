"""Threads for the kernels: torch's own OpenMP pool.

torch's worker threads spin for milliseconds after each of its operations, and a second pool would
fight them for the cores. Entries take their work from a shared counter, so a thread that comes
late finds nothing to do, and results depend neither on the number of threads nor on their timing.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_forked = False  # OpenMP and Python pools do not survive a fork
_executor: ThreadPoolExecutor | None = None
_executor_lock = threading.Lock()


def _after_fork() -> None:
    global _forked, _executor, _executor_lock
    _forked, _executor, _executor_lock = True, None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _find_gomp() -> Any:
    """``GOMP_parallel`` of the OpenMP library that torch itself is bound to, or None."""
    if not sys.platform.startswith("linux"):
        return None
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    for name in (None, library):  # the process-wide scope first, as the dynamic linker has it
        try:
            found = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.restype = None
        found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return found
    return None


_gomp = _find_gomp()


def _by_python_threads(entry: Callable[[Any], None], block: Any, threads: int) -> None:
    global _executor
    with _executor_lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(os.cpu_count() or 1, "pyg_ioaware")
        executor = _executor
    helpers: list[Future[None]] = [executor.submit(entry, block) for _ in range(threads - 1)]
    entry(block)
    for helper in helpers:
        if not helper.cancel():
            helper.result()


def threads() -> int:
    """Threads a large call gets."""
    return 1 if _forked else torch.get_num_threads()


def run(entry: Any, block: Any, items: int, phase: int, parallel: bool) -> None:
    """Run ``items`` work items of one phase and wait for them."""
    block[0], block[1], block[2] = 0, items, phase
    count = threads() if parallel and items > 1 else 1
    if count == 1:
        entry(block)
    elif _gomp is not None:
        # Always the full team: libgomp ends the threads that a smaller one leaves over.
        _gomp(entry, block, count, 0)
    else:
        _by_python_threads(entry, block, count)
