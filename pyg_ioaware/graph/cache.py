"""The cache: what was derived from a tensor, for as long as that tensor lives unchanged."""

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_ioaware.forks import hold_over_fork
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.graph.identity import Identity, identity, rows_of, unwrap
from pyg_ioaware.graph.streams import Made, is_capturing, made_now

logger = logging.getLogger("pyg_ioaware")

_Key = tuple[Hashable, tuple[Hashable, ...]]


@dataclass(eq=False)
class _Entry:
    key: _Key
    refs: tuple["weakref.ref[Any]", ...]
    versions: tuple[Hashable, ...]
    value: Any
    nbytes: int
    made: Made | None = None
    checksums: tuple[int, ...] | None = None
    alias: Hashable = None  # see Cache.edges


@dataclass
class CacheInfo:
    """A snapshot of the cache."""

    hits: int
    misses: int
    entries: int
    nbytes: int
    uncacheable: int = field(default=0)


class Cache:
    r"""Values derived from tensors, keyed by the weak identity and the version of those tensors.

    An entry dies with the memory of any of its tensors, is replaced when one of them changed in
    place, and is dropped, least recently used first, when the cache holds more than
    :obj:`max_bytes` or :obj:`max_entries` (the newest entry always stays). All methods may be
    called from any thread, and on any CUDA stream. What is used while a CUDA graph is captured is
    held until the cache is cleared.

    Args:
        max_bytes (int, optional): Largest sum of bytes held. (default: 4 GiB)
        max_entries (int, optional): Largest number of entries. (default: :obj:`512`)
    """

    def __init__(self, max_bytes: int = 4 * 2**30, max_entries: int = 512) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.verify = False
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._latest: _Key | None = None  # the last of them
        self._aliases: dict[Hashable, _Entry] = {}
        self._nbytes = 0
        self._dead: deque[tuple[_Key, weakref.ref[Any]]] = deque()
        self._pinned: dict[int, Any] = {}
        self._lock = threading.RLock()
        self._hits = self._misses = self._uncacheable = 0

    def get(
        self,
        what: Hashable,
        anchors: Sequence[Tensor],
        build: Callable[[], Any],
        size: Callable[[Any], int],
        usable: Callable[[Any], bool] | None = None,
    ) -> Any:
        r"""Returns the value derived from :obj:`anchors`, building it if need be.

        Args:
            what (Hashable): Names the value, options included.
            anchors (sequence): The tensors that it is derived from.
            build (callable): Builds the value; it must hold none of the anchors' memory.
            size (callable): The bytes to count for a value.
            usable (callable): Tells whether a held value may still be handed out.

        Returns:
            Any: The value, or :obj:`None` where it would have to be built while a CUDA graph is
            captured, which allows no read-back.
        """
        ids = [identity(t) for t in anchors]
        if None in ids:
            self._uncacheable += 1
            return None if is_capturing(anchors[0].device) else self._run(build)
        known: list[Identity] = [i for i in ids if i is not None]
        with self._lock:
            entry = self._find(what, known, usable)
            if entry is not None:
                if self.verify:
                    self._check(entry, anchors)
                self._hand_over(entry)
                return entry.value
            self._drop(_key(what, known))
            self._misses += 1
        if is_capturing(anchors[0].device):
            return None
        value = self._run(build)
        self._put(what, known, value, size(value), anchors)
        return value

    def edges(
        self, edge_index: Tensor, forwards: bool, num_src: int, num_dst: int
    ) -> Adjacency | None:
        r"""Returns the structure of edges of shape :obj:`[2, E]`; see :meth:`adjacency`.

        Args:
            edge_index (torch.Tensor): The edges, of no other type.
            forwards (bool): Whether they run from the first row to the second.
            num_src (int): The number of source nodes.
            num_dst (int): The number of target nodes.
        """
        whole = None if self.verify else identity(edge_index)
        if whole is not None:
            with self._lock:
                entry = self._find_edges(whole, forwards, num_src, num_dst)
                if entry is not None:
                    self._hand_over(entry)
                    found: Adjacency | None = entry.value
                    return found
        first, second = edge_index[0], edge_index[1]
        src, dst = (first, second) if forwards else (second, first)
        return self.adjacency(src, dst, num_src, num_dst)

    def adjacency(self, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> Adjacency | None:
        r"""Returns the structure of the edges :obj:`src[e] -> dst[e]`.

        Whoever asks with the same memory gets the same structure: with :obj:`edge_index[0]` and
        :obj:`edge_index[1]`, or with the two vectors of a COO matrix.

        Returns:
            Adjacency, optional: :obj:`None` if an index is out of range, or see :meth:`get`.
        """
        value: Adjacency | None = self.get(
            ("pair", num_src, num_dst),
            (src, dst),
            lambda: Adjacency.from_pair(unwrap(src), unwrap(dst), num_src, num_dst),
            _adjacency_bytes,
        )
        return value

    def adjacency_rows(self, rowptr: Tensor, col: Tensor, num_src: int) -> Adjacency | None:
        """Returns the structure of rows that are sorted by target; see Adjacency.from_rows."""
        value: Adjacency | None = self.get(
            ("rows", num_src),
            (rowptr, col),
            lambda: Adjacency.from_rows(rowptr, col, num_src),
            _adjacency_bytes,
        )
        return value

    def elements(self, index: Tensor, num_sets: int) -> Adjacency | None:
        """Returns the structure in which element e is an edge from e to :obj:`index[e]`."""

        def build() -> Adjacency | None:
            places = torch.arange(index.numel(), device=index.device)
            return Adjacency.from_pair(places, unwrap(index), index.numel(), num_sets)

        value: Adjacency | None = self.get(
            ("elements", num_sets), (index,), build, _adjacency_bytes
        )
        return value

    def unused(self, index: Tensor, num_nodes: int) -> Tensor | None:
        """Returns the nodes that an index, which is in range, does not name."""
        index = unwrap(index)

        def build() -> Tensor:
            used = torch.zeros(num_nodes, dtype=torch.bool, device=index.device)
            return (~used.index_fill_(0, index.long(), True)).nonzero().view(-1)

        value: Tensor | None = self.get(
            ("unused", num_nodes), (index,), build, lambda value: value.nbytes
        )
        return value

    def holds(self, tensor: Tensor) -> bool:
        """Tells whether anything derived from this tensor's memory is held."""
        storage = unwrap(tensor).untyped_storage()
        with self._lock:
            self._drain()
            return any(r() is storage for e in self._entries.values() for r in e.refs)

    def invalidate(self, tensor: Tensor) -> int:
        """Drops all that was derived from this tensor's memory; returns how many entries."""
        storage = unwrap(tensor).untyped_storage()
        with self._lock:
            keys = [k for k, e in self._entries.items() if any(r() is storage for r in e.refs)]
            for key in keys:
                self._drop(key)
        return len(keys)

    def clear(self) -> None:
        """Drops everything and sets the counters back."""
        with self._lock:
            self._entries.clear()
            self._aliases.clear()
            self._pinned.clear()
            self._dead.clear()
            self._nbytes = self._hits = self._misses = self._uncacheable = 0

    def reset_counters(self) -> None:
        """Sets the counters back and keeps the entries."""
        with self._lock:
            self._hits = self._misses = self._uncacheable = 0

    def info(self) -> CacheInfo:
        """Returns a snapshot of the counters."""
        with self._lock:
            self._drain()
            return CacheInfo(
                self._hits, self._misses, len(self._entries), self._nbytes, self._uncacheable
            )

    def limit(self, max_bytes: int | None = None, max_entries: int | None = None) -> None:
        """Sets new limits and applies them at once."""
        for name, value in (("max_bytes", max_bytes), ("max_entries", max_entries)):
            if value is not None and value < 0:
                raise ValueError(f"'{name}' must not be negative (got {value})")
        with self._lock:
            self.max_bytes = self.max_bytes if max_bytes is None else max_bytes
            self.max_entries = self.max_entries if max_entries is None else max_entries
            self._evict()

    def _find_edges(
        self, whole: Identity, forwards: bool, num_src: int, num_dst: int
    ) -> _Entry | None:
        """Finds the entry of a pair of rows, by the edges as a whole once it was found so."""
        alias = (forwards, num_src, num_dst, whole.view)
        entry = self._aliases.get(alias)
        if entry is not None and not self._dead and self._is_of(entry, (whole, whole)):
            return self._use(entry)
        entry = self._find(("pair", num_src, num_dst), rows_of(whole)[:: 1 if forwards else -1])
        if entry is not None and entry.alias is None:
            entry.alias, self._aliases[alias] = alias, entry
        return entry

    def _find(
        self,
        what: Hashable,
        known: Sequence[Identity],
        usable: Callable[[Any], bool] | None = None,
    ) -> _Entry | None:
        """Returns the entry that may be handed out, if there is one; the lock is held."""
        if self._dead:
            self._drain()
        entry = self._entries.get(_key(what, known))
        if entry is None or (usable is not None and not usable(entry.value)):
            return None
        return self._use(entry) if self._is_of(entry, known) else None

    @staticmethod
    def _is_of(entry: _Entry, known: Sequence[Identity]) -> bool:
        """Tells whether an entry is of this very memory, unchanged."""
        for ref, version, i in zip(entry.refs, entry.versions, known, strict=True):
            if ref() is not i.storage or version != i.version:
                return False
        return True

    def _use(self, entry: _Entry) -> _Entry:
        if self._latest is not entry.key:
            self._entries.move_to_end(entry.key)
            self._latest = entry.key
        self._hits += 1
        return entry

    @staticmethod
    def _run(build: Callable[[], Any]) -> Any:
        # A value outlives the mode in which it was first asked for.
        with torch.inference_mode(False), torch.no_grad():
            return build()

    def _put(
        self,
        what: Hashable,
        known: Sequence[Identity],
        value: Any,
        nbytes: int,
        anchors: Sequence[Tensor],
    ) -> None:
        # The collector may run a callback inside our lock, so a callback only takes a note.
        key, dead, refs = _key(what, known), self._dead, []
        for i in known:
            refs.append(weakref.ref(i.storage, lambda ref: dead.append((key, ref))))
        versions = tuple(i.version for i in known)
        made = made_now(unwrap(anchors[0]).device)
        entry = _Entry(key, tuple(refs), versions, value, nbytes, made)
        if self.verify:
            entry.checksums = tuple(_checksum(t) for t in anchors)
        with self._lock:
            self._drop(key)
            self._entries[key] = entry
            self._latest = key
            self._nbytes += nbytes
            self._evict()

    def _hand_over(self, entry: _Entry) -> None:
        """Prepares a value for the current stream, and for a graph that is being captured there."""
        if entry.made is None:
            return
        entry.made.wait(entry.value)
        if torch.cuda.is_current_stream_capturing():
            self._pinned[id(entry.value)] = entry.value

    def _evict(self) -> None:
        while len(self._entries) > 1 and (
            self._nbytes > self.max_bytes or len(self._entries) > max(self.max_entries, 1)
        ):
            self._drop(next(iter(self._entries)))

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes
            self._aliases.pop(entry.alias, None)

    def _drain(self) -> None:
        while self._dead:
            try:
                key, ref = self._dead.popleft()
            except IndexError:
                return  # another thread was faster
            entry = self._entries.get(key)
            if entry is not None and any(r is ref for r in entry.refs):
                self._drop(key)
            # What an entry derived dies with it, and takes further entries along in this loop.
            entry = None

    def _check(self, entry: _Entry, anchors: Sequence[Tensor]) -> None:
        if entry.checksums != tuple(_checksum(t) for t in anchors):
            for tensor in anchors:
                self.invalidate(tensor)
            raise RuntimeError(
                "A tensor that a cached graph structure was built from has changed in a way that "
                "PyTorch does not count (got other values at the same version). Call "
                "'pyg_ioaware.invalidate(edge_index)' after writing through '.data', a NumPy "
                "alias or a raw pointer"
            )


def _key(what: Hashable, known: Sequence[Identity]) -> _Key:
    return what, tuple([i.view for i in known])


def _adjacency_bytes(adj: Adjacency | None) -> int:
    # The rows by source, and what tells their edges' places, are counted before they exist: an
    # entry's charge never moves.
    return 0 if adj is None else 2 * (adj.nbytes + adj.by_target.idx.nbytes)


def _checksum(tensor: Tensor) -> int:
    flat = unwrap(tensor).detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.double().view(torch.long)
    weight = torch.arange(1, flat.numel() + 1, device=flat.device)
    return int((flat.long() * (2 * weight + 1)).sum())


def in_range(index: Tensor, num_nodes: int) -> bool:
    """Tells whether an index names nodes of a graph of this size only."""
    index = unwrap(index)

    def build() -> bool:
        if index.numel() == 0:
            return True
        lo, hi = torch.aminmax(index)
        return not bool((lo < 0) | (hi >= num_nodes))

    found: bool | None = FACTS.get(("range", num_nodes), (index,), build, lambda value: 0)
    return bool(found)


CACHE = Cache()  # structures, and tensors derived from graphs
FACTS = Cache()  # what was found out about graphs, of no size
hold_over_fork(CACHE._lock)
hold_over_fork(FACTS._lock)
