"""Hostile graphs, the forms of an adjacency, and Hypothesis strategies for both."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from pyg_ioaware.graph.csr import Adjacency

# More edges than any engine gives to one worker, so that the row is split and merged.
HUB_DEGREE = 2100

# TEST_DEVICE=cuda runs the tests of tests/cpu on a GPU: everything is made there.
DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
ON_CPU = DEVICE.type == "cpu"
# TEST_ENGINE=host_cuda runs them on the CUDA kernels, these on the CPU: see tests/host_cuda.
ON_HOST_CUDA = os.environ.get("TEST_ENGINE") == "host_cuda"
BY_NUMBA = ON_CPU and not ON_HOST_CUDA
if not ON_CPU:
    # Without it, no product of matrices is deterministic for PyTorch. It is read once.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_default_device(DEVICE)

BAD_INDEX = "an index out of range ends a process that uses CUDA"
# For tests that give one to stock PyG.
bad_index = pytest.mark.skipif(not ON_CPU, reason=BAD_INDEX)
# On a GPU PyTorch adds what it scatters in another order each time: gradcheck has to allow that.
NONDET_TOL = 0.0 if ON_CPU else 1e-10


@dataclass(frozen=True)
class Graph:
    """Edges from :obj:`num_src` sources to :obj:`num_dst` targets."""

    edge_index: Tensor
    num_src: int
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def adjacency(self) -> Adjacency:
        adj = Adjacency.from_pair(*self.edge_index, self.num_src, self.num_dst)
        assert adj is not None
        return adj

    @property
    def transposed(self) -> "Graph":
        return Graph(self.edge_index.flip(0), self.num_dst, self.num_src)


def _edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2).t().contiguous()


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": "cpu"}
    ends = [torch.randint(n, (num_edges,), **options) for n in (num_src, num_dst)]
    return torch.stack(ends).to(DEVICE)


def shuffled(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator, device="cpu").to(DEVICE)


def copies(graph: Graph, count: int) -> Graph:
    """Returns a graph of unconnected copies of a graph of as many targets as sources."""
    first = torch.arange(count) * graph.num_src
    moved = graph.edge_index.unsqueeze(1) + first.view(-1, 1).to(graph.edge_index.dtype)
    return Graph(moved.flatten(1), count * graph.num_src, count * graph.num_dst)


def by_target(edge_index: Tensor) -> Tensor:
    return edge_index[:, edge_index[1].argsort(stable=True)]


def by_source(edge_index: Tensor) -> Tensor:
    return edge_index[:, edge_index[0].argsort(stable=True)]


def _hub() -> Tensor:
    """One target with edges from very many sources, and one source with edges to as many."""
    others = torch.arange(HUB_DEGREE)
    towards = torch.stack([others, torch.full_like(others, 3)])
    away = torch.stack([torch.full_like(others, 5), others])
    edges = torch.cat([towards, away, random_edges(HUB_DEGREE, HUB_DEGREE, 300)], dim=1)
    return edges[:, shuffled(edges.size(1), seed=7)]


def _strided() -> Tensor:
    """Every other column of a larger tensor, its rows swapped: neither contiguous nor dense."""
    return random_edges(9, 9, 60)[:, ::2].flip(0)[[1, 0]].t().contiguous().t()[:, 1:]


_LOOPS = _edges((0, 0), (1, 1), (1, 1), (2, 0), (0, 2), (3, 1), (2, 2))
_DUPLICATES = _edges((0, 1), (0, 1), (2, 1), (0, 1), (3, 0), (3, 0), (1, 3))

SQUARE: dict[str, Graph] = {
    "no_edges": Graph(_edges(), 4, 4),
    "no_nodes": Graph(_edges(), 0, 0),
    "one_node": Graph(_edges(), 1, 1),
    "one_edge": Graph(_edges((1, 0)), 2, 2),
    "one_loop": Graph(_edges((0, 0)), 1, 1),
    "isolated": Graph(_edges((5, 2), (2, 5), (5, 5), (7, 2)), 10, 10),
    "loops": Graph(_LOOPS, 4, 4),
    "duplicates": Graph(_DUPLICATES, 4, 4),
    "path": Graph(_edges((0, 1), (1, 2), (2, 3), (3, 4)), 5, 5),
    "star": Graph(_edges(*[(i, 0) for i in range(1, 9)], (0, 4)), 9, 9),
    "sorted_by_target": Graph(by_target(random_edges(12, 12, 50)), 12, 12),
    "sorted_by_source": Graph(by_source(random_edges(12, 12, 50)), 12, 12),
    "unsorted": Graph(random_edges(12, 12, 50), 12, 12),
    "strided": Graph(_strided(), 9, 9),
    "int32": Graph(random_edges(12, 12, 50).int(), 12, 12),
    "hub": Graph(_hub(), HUB_DEGREE, HUB_DEGREE),
}

BIPARTITE: dict[str, Graph] = {
    "wide": Graph(random_edges(17, 5, 40), 17, 5),
    "tall": Graph(random_edges(4, 19, 40), 4, 19),
    "no_targets": Graph(_edges(), 6, 0),
    "no_sources": Graph(_edges(), 0, 6),
    "unused_sources": Graph(random_edges(10, 8, 30), 100, 8),
}

GRAPHS: dict[str, Graph] = SQUARE | BIPARTITE


def _edge_index(order: str | None) -> Callable[[Graph, Tensor | None], tuple[Any, Tensor | None]]:
    def make(graph: Graph, weight: Tensor | None) -> tuple[Any, Tensor | None]:
        edges = graph.edge_index
        if order is not None:
            place = edges[0 if order == "row" else 1].argsort(stable=True)
            edges, weight = edges[:, place], None if weight is None else weight[place]
        size = (graph.num_src, graph.num_dst)
        return EdgeIndex(edges.contiguous(), sparse_size=size, sort_order=order), weight

    return make


def _plain(dtype: torch.dtype) -> Callable[[Graph, Tensor | None], tuple[Any, Tensor | None]]:
    def make(graph: Graph, weight: Tensor | None) -> tuple[Any, Tensor | None]:
        return graph.edge_index.to(dtype), weight

    return make


def _torch_sparse(layout: str) -> Callable[[Graph, Tensor | None], tuple[Any, Tensor | None]]:
    def make(graph: Graph, weight: Tensor | None) -> tuple[Any, Tensor | None]:
        value = torch.ones(graph.num_edges) if weight is None else weight
        size = (graph.num_dst, graph.num_src)
        adj = torch.sparse_coo_tensor(graph.edge_index.flip(0), value, size)
        return getattr(adj, f"to_sparse_{layout}")() if layout != "coo" else adj.coalesce(), None

    return make


def _sparse_tensor(graph: Graph, weight: Tensor | None) -> tuple[Any, Tensor | None]:
    source, target = graph.edge_index.long()
    size = (graph.num_dst, graph.num_src)
    return SparseTensor(row=target, col=source, value=weight, sparse_sizes=size), None


# Each makes what a layer takes as 'edge_index', and as 'edge_weight' next to it (None where the
# adjacency holds the values itself).
FORMS: dict[str, Callable[[Graph, Tensor | None], tuple[Any, Tensor | None]]] = {
    "int64": _plain(torch.int64),
    "int32": _plain(torch.int32),
    "EdgeIndex": _edge_index(None),
    "EdgeIndex_row": _edge_index("row"),
    "EdgeIndex_col": _edge_index("col"),
    "torch_csr": _torch_sparse("csr"),
    "torch_coo": _torch_sparse("coo"),
    "torch_csc": _torch_sparse("csc"),
}
if WITH_TORCH_SPARSE:
    FORMS["SparseTensor"] = _sparse_tensor


@st.composite
def graphs(draw: st.DrawFn, square: bool = True, max_nodes: int = 9, max_edges: int = 30) -> Graph:
    """Draws graphs in which nothing is special, and so at times everything."""
    num_src = draw(st.integers(1, max_nodes))
    num_dst = num_src if square else draw(st.integers(1, max_nodes))
    pair = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    edges = _edges(*draw(st.lists(pair, max_size=max_edges)))
    order = draw(st.sampled_from([lambda e: e, by_target, by_source]))
    return Graph(order(edges), num_src, num_dst)


def features(n: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    return torch.randn(n, *shape, dtype=torch.float64, **options).to(DEVICE, dtype)
