"""What ran fused, what ran on stock PyG, and why."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyg_ioaware.forks import hold_over_fork
from pyg_ioaware.switch import SWITCH


class FallbackError(RuntimeError):
    """Raised in strict mode where a call would run on stock PyG; names every reason."""


@dataclass
class LayerCalls:
    r"""How often the aggregations of one kind of layer ran fused, and on stock PyG and why.

    Attributes:
        fused (int): Aggregations that ran fused.
        stock (Counter): Aggregations that ran on stock PyG, by reason.
        formed (Counter): Fused aggregations in layers that formed other messages besides, such
            as attention scores, by what used them.
    """

    fused: int = 0
    stock: "Counter[str]" = field(default_factory=Counter)
    formed: "Counter[str]" = field(default_factory=Counter)


class Record:
    """Counts per layer name; :meth:`watch` collects those of one thread apart."""

    def __init__(self) -> None:
        self.layers: dict[str, LayerCalls] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def fused(self, layer: str) -> None:
        """Notes a fused aggregation; whatever its layer formed besides is settled with it."""
        pending = getattr(self._local, "pending", None)
        with self._lock:
            calls = self._of(layer)
            calls.fused += 1
            if pending is not None:
                self._local.pending = None
                if pending[0] == layer:
                    calls.formed["; ".join(pending[1])] += 1

    def pend(self, layer: str, reason: str) -> None:
        """Notes that a layer formed messages; they count once an aggregation takes them."""
        pending: tuple[str, list[str]] | None = getattr(self._local, "pending", None)
        if pending is None or pending[0] != layer:
            self.settle()
            pending = (layer, [])
            self._local.pending = pending
        if reason not in pending[1]:
            pending[1].append(reason)

    def forget(self) -> None:
        """Drops what is pending: the call has failed, and its messages go nowhere."""
        self._local.pending = None

    def settle(self, strict: bool = False) -> None:
        r"""Counts the pending messages as aggregated by stock PyG.

        Raises:
            FallbackError: If :obj:`strict` and the patch is strict.
        """
        pending = getattr(self._local, "pending", None)
        if pending is None:
            return
        self._local.pending = None
        layer, reasons = pending
        self.stock(layer, reasons, strict)

    def stock(self, layer: str, reasons: list[str], strict: bool = True) -> None:
        r"""Notes an aggregation by stock PyG.

        Raises:
            FallbackError: If :obj:`strict` and the patch is strict.
        """
        text = "; ".join(reasons)
        with self._lock:
            self._of(layer).stock[text] += 1
        if strict and SWITCH.strict and self._seen is None:
            raise FallbackError(
                f"'{layer}' would run on stock PyG, which 'patch(strict=True)' forbids: {text}"
            )

    @contextmanager
    def watch(self) -> Iterator[dict[str, LayerCalls]]:
        """Collects what this thread does inside, and never raises for it."""
        before = self._seen
        self.settle()
        seen: dict[str, LayerCalls] = {}
        self._local.seen = seen
        try:
            yield seen
        finally:
            self.settle()
            self._local.seen = before

    def clear(self) -> None:
        """Forgets all counts."""
        with self._lock:
            self.layers.clear()
        self.forget()

    @property
    def _seen(self) -> "dict[str, LayerCalls] | None":
        seen: dict[str, LayerCalls] | None = getattr(self._local, "seen", None)
        return seen

    def _of(self, layer: str) -> LayerCalls:
        seen = self._seen
        book = self.layers if seen is None else seen  # what is watched counts apart
        calls = book.get(layer)
        return book.setdefault(layer, LayerCalls()) if calls is None else calls


RECORD = Record()
hold_over_fork(RECORD._lock)
