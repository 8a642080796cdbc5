"""How a call is timed: in turns with others, by the device's clock or the host's."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.providers import Scope
from pyg_ioaware.demo import memory

SLEEP = 6_000_000
"""Cycles for which a GPU waits before a timed call, so that the host runs ahead meanwhile."""
FLUSH = 2**28
"""Bytes that are written to empty the L2 cache: several times that of any GPU."""
TURN = 0.02
"""Seconds that one provider runs at a time, at the least one call."""


@dataclass(frozen=True)
class Step:
    r"""One timed call.

    Attributes:
        run (callable): What is timed; it is given what `prepare` returns.
        prepare (callable): What has to run before each call, untimed.
        scope (callable): Makes the context of both.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    scope: Scope = contextlib.nullcontext


class Clock:
    """The host's clock; what a device still has to do is waited for."""

    l2 = "warm"

    def sync(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def sample(self, step: Step) -> float:
        """Returns the milliseconds of one call."""
        given = step.prepare()
        self.sync()
        start = time.perf_counter()
        kept = step.run(given)
        self.sync()
        end = time.perf_counter()
        del kept  # freeing memory is not timed
        return 1e3 * (end - start)


class HostClock(Clock):
    """The host's time for a call: until it returns, whatever the device still has to do."""

    def sample(self, step: Step) -> float:
        given = step.prepare()
        self.sync()
        start = time.perf_counter()
        kept = step.run(given)
        end = time.perf_counter()
        self.sync()
        del kept
        return 1e3 * (end - start)


class CudaClock(Clock):
    r"""The device's time between two events, with work queued ahead of them.

    Args:
        l2 (str): :obj:`"cold"` if the L2 cache is emptied before each call.
    """

    def __init__(self, l2: str) -> None:
        self.l2 = l2

    def sample(self, step: Step) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        given = step.prepare()
        torch.cuda._sleep(SLEEP)
        if self.l2 == "cold":
            torch.empty(FLUSH, dtype=torch.uint8, device="cuda").zero_()
        begin.record()
        kept = step.run(given)
        end.record()
        torch.cuda.synchronize()
        del kept
        return float(begin.elapsed_time(end))


def clocks(device: str, mode: str, l2: tuple[str, ...]) -> list[Clock]:
    """Returns the clocks that a mode is timed by."""
    if mode == "host":
        return [HostClock()]
    return [CudaClock(cache) for cache in l2] if device == "cuda" else [Clock()]


def turns(
    steps: dict[str, Step], clock: Clock, seconds: float, least: int
) -> dict[str, list[float]]:
    r"""Times steps in turn, so that a slow phase of the machine hits all of them.

    Args:
        steps (dict): The steps.
        clock (Clock): The clock.
        seconds (float): The time to spend on each.
        least (int): How often each runs at the least.

    Returns:
        dict: Milliseconds of each run.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    batch = {}
    for name, step in steps.items():
        with step.scope():
            clock.sample(step)
            took = clock.sample(step) / 1e3
        batch[name] = max(1, min(least, int(TURN / max(took, 1e-6))))
    end = time.perf_counter() + seconds * len(steps)
    while steps and (time.perf_counter() < end or min(map(len, times.values())) < least):
        for name, step in steps.items():
            with step.scope():
                if batch[name] > 1:  # the first of short calls finds caches cold
                    clock.sample(step)
                times[name] += [clock.sample(step) for _ in range(batch[name])]
    return times


def summary(times: list[float]) -> dict[str, Any]:
    """Returns the median and the quartiles as columns."""
    times = times if len(times) > 1 else times * 2
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        **{"median_ms": f"{middle:.4f}", "q1_ms": f"{low:.4f}", "q3_ms": f"{high:.4f}"},
        "runs": len(times),
    }


def peak(step: Step, device: str) -> dict[str, Any]:
    """Returns the peak memory of a step in MiB: beyond what was held before, and in all."""
    gc.collect()
    with step.scope():
        given = step.prepare()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step.run(given)
            torch.cuda.synchronize()
            total = torch.cuda.max_memory_allocated()
            beyond: int | None = total - before
        else:
            beyond = memory.peak_of(lambda: step.run(given))
            total = memory.process_peak() or 0
    if beyond is None:  # the system does not tell
        return {}
    return {"peak_mib": f"{beyond / 2**20:.1f}", "total_mib": f"{total / 2**20:.1f}"}
