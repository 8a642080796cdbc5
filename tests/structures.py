"""Graphs whose structures are hard to build, and a comparison with what PyTorch builds of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from graphs import GRAPHS, Graph, by_target, random_edges
from torch import Tensor

from pyg_ioaware.engines.cuda import CUDAEngine
from pyg_ioaware.graph.csr import CSR, Adjacency


@contextmanager
def by_pytorch(engine: CUDAEngine) -> Iterator[None]:
    """Lets PyTorch build structures."""
    engine._builds = False
    try:
        yield
    finally:
        engine._builds = True


def rows_of(*degrees: int) -> Graph:
    """Rows of so many edges, in order, from sources out of order, one of them a hub."""
    dst = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
    src = random_edges(90, 1, dst.numel())[0]
    src[::3] = 7
    return Graph(torch.stack([src, dst]), 90, len(degrees))


def _symmetric() -> Graph:
    edges = random_edges(30, 30, 80)
    return Graph(by_target(torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)), 30, 30)


HOSTILE = {
    **{name: graph for name, graph in GRAPHS.items() if name != "hub"},
    "all_to_one": Graph(torch.stack([torch.arange(700) % 5, torch.full((700,), 2)]), 5, 4),
    "all_to_the_only_node": Graph(torch.zeros(2, 400, dtype=torch.long), 1, 1),
    "around_the_split": rows_of(127, 0, 128, 129, 0, 0, 255, 256, 257, 1, 384, 385),
    "hubs_in_many_blocks": rows_of(*([0, 2, 5, 1, 9] * 80)),
    "one_step_back": Graph(torch.stack([torch.arange(64), torch.arange(64) % 32]), 64, 32),
    "last_rows_are_empty": rows_of(3, 4, *[0] * 300),
    "symmetric": _symmetric(),
    "symmetric_in_another_order": Graph(by_target(_symmetric().edge_index.flip(1)), 30, 30),
    "cycle": Graph(torch.tensor([[1, 2, 3, 0], [0, 1, 2, 3]]), 4, 4),
}


def assert_same(found: Adjacency | None, wanted: Adjacency | None) -> None:
    """Compares all that structures hold, and which arrays serve both directions."""
    assert found is not None
    assert wanted is not None
    for name in ("num_src", "num_dst", "num_edges", "longest"):
        assert getattr(found, name) == getattr(wanted, name), name
    for rows in ("by_target", "by_source_in_place", "by_source"):
        mine, other = getattr(found, rows), getattr(wanted, rows)
        for name, a, b in zip(CSR._fields, mine, other, strict=True):
            if isinstance(b, Tensor):
                assert (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape), (rows, name)
                assert torch.equal(a, b), (rows, name)
                there = getattr(found.by_target, name), getattr(wanted.by_target, name)
                assert (a is there[0]) == (b is there[1]), (rows, name)
            else:
                assert a == b, (rows, name)


def check(engine: CUDAEngine, build: Callable[[], Adjacency | None]) -> None:
    """Compares what kernels build with what PyTorch builds."""
    found = build()
    if found is not None:
        _ = found.by_source_in_place
    assert engine._builds, "a kernel did not compile"
    with by_pytorch(engine):
        wanted = build()
        if wanted is not None:
            _ = wanted.by_source_in_place
        assert_same(found, wanted)


def check_graph(engine: CUDAEngine, graph: Graph) -> None:
    """The same from the edges of a graph, from its rows, and from those of its transpose."""
    src, dst = graph.edge_index
    check(engine, lambda: Adjacency.from_pair(src, dst, graph.num_src, graph.num_dst))
    check(engine, lambda: Adjacency.from_pair(dst, src, graph.num_dst, graph.num_src))
    rowptr, col, _, _, _ = graph.adjacency.by_target
    for dtype in (torch.int64, torch.int32):
        rows = rowptr.to(dtype), col.to(dtype)
        check(engine, lambda rows=rows: Adjacency.from_rows(*rows, graph.num_src))
