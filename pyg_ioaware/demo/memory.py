"""Peak memory of one call, from the operating system's own count."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable


def status(key: str) -> int | None:
    """A memory figure of ``/proc/self/status`` in bytes; None where there is none."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def process_peak() -> int | None:
    """The most memory that this process has held at any time, in bytes."""
    peak = status("VmHWM")
    if peak is None and sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
    return peak


def peak_of(call: Callable[[], object]) -> int | None:
    """Bytes that `call` needs at its peak beyond what the process holds before it.

    Memory that earlier work freed is handed back to the system first, or it would hide the peak.
    None where the system cannot tell (Linux can).
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again at the present size
    except (OSError, AttributeError, TypeError):
        return None
    before = status("VmRSS")
    call()
    after = status("VmHWM")
    return None if before is None or after is None else max(after - before, 0)
