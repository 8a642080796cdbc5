"""Compressed rows of a graph: by target, and by source where a gradient needs it."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_ioaware.graph.build import Built, build_pair, build_rows, build_transpose
from pyg_ioaware.graph.ordered import OrderedWeights
from pyg_ioaware.graph.streams import Made, made_now, tensors_of


class CSR(NamedTuple):
    r"""Rows of a graph in the order in which a kernel walks them.

    Attributes:
        rowptr (torch.Tensor): Row pointers of shape :obj:`[N + 1]`.
        idx (torch.Tensor): The other end of each edge, of shape :obj:`[E]`.
        perm (torch.Tensor, optional): The input edge at each position, of shape :obj:`[E]`;
            :obj:`None` where that is the position itself.
        tiles (torch.Tensor): The tiles of the rows that are split, of shape :obj:`[T, 4]`; see
            :func:`~pyg_ioaware.graph.tiles.split_rows`.
        split (int): Rows with more edges than this are split.
    """

    rowptr: Tensor
    idx: Tensor
    perm: Tensor | None
    tiles: Tensor
    split: int


class Adjacency:
    r"""The structure of one graph with :obj:`num_src` sources and :obj:`num_dst` targets.

    It owns all its arrays: no tensor of the user is kept alive by it. Index arrays are int32
    while the sizes allow. The rows by source are built at the first gradient.
    """

    def __init__(self, by_target: CSR, num_src: int, longest: int) -> None:
        self.num_src = num_src
        self.longest = longest  # edges of the longest row by target
        self.num_dst = by_target.rowptr.numel() - 1
        self.num_edges = by_target.idx.numel()
        self.by_target = by_target
        self._parts: dict[Hashable, tuple[Any, Made | None]] = {}
        self._weights = {False: OrderedWeights(), True: OrderedWeights()}

    @classmethod
    def from_pair(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> "Adjacency | None":
        r"""Builds the structure of the edges :obj:`src[e] -> dst[e]`.

        Args:
            src (torch.Tensor): Source of each edge, of shape :obj:`[E]`.
            dst (torch.Tensor): Target of each edge, of shape :obj:`[E]`.
            num_src (int): The number of source nodes.
            num_dst (int): The number of target nodes.

        Returns:
            Adjacency, optional: The structure, or :obj:`None` if an index is out of range.
        """
        return cls._of(build_pair(src, dst, num_src, num_dst), num_src)

    @classmethod
    def from_rows(cls, rowptr: Tensor, col: Tensor, num_src: int) -> "Adjacency | None":
        r"""Builds the structure from rows that are sorted by target already.

        Args:
            rowptr (torch.Tensor): Row pointers of shape :obj:`[num_dst + 1]`.
            col (torch.Tensor): Source of each edge, of shape :obj:`[E]`.
            num_src (int): The number of source nodes.

        Returns:
            Adjacency, optional: The structure, or :obj:`None` if an index is out of range.
        """
        return cls._of(build_rows(rowptr, col, num_src), num_src)

    @classmethod
    def _of(cls, built: Built | None, num_src: int) -> "Adjacency | None":
        return None if built is None else cls(CSR(*built[:-1]), num_src, built.longest)

    def csr(self, transposed: bool) -> CSR:
        """Returns the rows by source if :obj:`transposed`, else those by target."""
        return self.by_source if transposed else self.by_target

    def weighted(self, weight: Tensor, transposed: bool) -> tuple[CSR, Tensor]:
        r"""Returns rows, and weights in an order that fits their :obj:`perm`.

        Args:
            weight (torch.Tensor): Weights in the order of the input edges, of shape
                :obj:`[E, H]`, that no gradient is taken of.
            transposed (bool): If set, the rows by source are meant.
        """
        csr = self.csr(transposed)
        if csr.perm is None:
            return csr, weight
        ordered = self._weights[transposed].get(weight, csr.perm)
        return (csr, weight) if ordered is None else (csr._replace(perm=None), ordered)

    @property
    def by_source(self) -> CSR:
        """The rows of the transpose; :obj:`idx` holds targets, :obj:`perm` the input edges."""
        found: CSR = self._part("by_source", self._transpose)
        return found

    @property
    def by_source_in_place(self) -> CSR:
        """The rows of the transpose; :obj:`perm` holds positions in the rows by target."""
        if self.by_target.perm is None:
            return self.by_source
        found: CSR = self._part("by_source_in_place", self._transpose_in_place)
        return found

    @property
    def places(self) -> Tensor:
        """The place in its row by target of each edge of the rows by source."""
        found: Tensor = self._part("places", self._find_places)
        return found

    def inv_degree(self, dtype: torch.dtype) -> Tensor:
        """Returns one over the in-degree of each target (1 where it is 0), of shape [num_dst]."""

        def build() -> Tensor:
            return self.by_target.rowptr.diff().clamp(min=1).to(dtype).reciprocal()

        found: Tensor = self._part(dtype, build)
        return found

    def _part(self, name: Hashable, build: Callable[[], Any]) -> Any:
        """Returns what is built when it is first asked for."""
        # No lock: a fork or a finaliser would find it taken. Two threads at once build it twice.
        kept = self._parts.get(name)
        if kept is None:
            with torch.inference_mode(False), torch.no_grad():
                kept = self._parts[name] = (build(), made_now(self.by_target.rowptr.device))
        value, made = kept
        if made is not None:
            made.wait(value)
        return value

    def _transpose_in_place(self) -> CSR:
        rowptr, idx, perm, _, _ = self.by_target
        if perm is None or "by_source" not in self._parts:
            return CSR(*build_transpose(rowptr, idx, self.num_src)[:-1])
        csr = self.by_source
        place = torch.empty_like(csr.idx)
        place[perm.long()] = torch.arange(self.num_edges, dtype=place.dtype, device=place.device)
        return csr._replace(perm=place if csr.perm is None else place[csr.perm.long()])

    def _find_places(self) -> Tensor:
        csr = self.by_source_in_place
        assert csr.perm is not None
        return csr.perm - self.by_target.rowptr.index_select(0, csr.idx)

    def _transpose(self) -> CSR:
        perm, kept = self.by_target.perm, "by_source_in_place" in self._parts
        csr = self.by_source_in_place if kept else self._transpose_in_place()
        if perm is None or csr.perm is None:
            return csr
        return csr._replace(perm=perm.index_select(0, csr.perm))

    def edges(self) -> tuple[Tensor, Tensor]:
        """Returns source and target at each position of the rows by target, as int64."""
        rowptr, idx, _, _, _ = self.by_target
        row = torch.arange(self.num_dst, device=idx.device)
        return idx.long(), row.repeat_interleave(rowptr.diff(), output_size=self.num_edges)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds now, the rows by source included once they exist."""
        values = [self.by_target, *(value for value, _ in list(self._parts.values()))]
        found = [t for value in values for t in tensors_of(value)]
        found += [t for weights in self._weights.values() for t in weights.tensors]
        return list({id(t): t for t in found}.values())

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(t.nbytes for t in self.tensors)

    def __repr__(self) -> str:
        return f"Adjacency({self.num_src} -> {self.num_dst}, num_edges={self.num_edges})"
