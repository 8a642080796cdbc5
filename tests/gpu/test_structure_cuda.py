"""Structures that kernels build on a GPU: as PyTorch builds them, on which stream, after what."""

import gc
import warnings

import pytest
import torch
from graphs import Graph, by_target
from structures import HOSTILE, assert_same, by_pytorch, check, check_graph

from pyg_ioaware import engines
from pyg_ioaware.graph.csr import Adjacency

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def engine():
    return engines.of(torch.device("cuda", torch.cuda.current_device()))


def random_graph(num_nodes, num_edges, hub=0, device="cuda"):
    """Random edges, so many of them to one target, and as many from one source."""
    generator = torch.Generator(device).manual_seed(0)
    edges = torch.randint(0, num_nodes, (2, num_edges), generator=generator, device=device)
    edges[1, :hub] = num_nodes // 2
    edges[0, num_edges - hub :] = 5
    return Graph(edges, num_nodes, num_nodes)


@pytest.mark.parametrize("split", [1, 4, 128])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs(engine, monkeypatch, name, split):
    monkeypatch.setattr(engine, "split", split)
    graph = HOSTILE[name]
    edges = graph.edge_index.cuda()
    for given in (edges, by_target(edges), edges.int()):
        check_graph(engine, Graph(given, graph.num_src, graph.num_dst))


# With more rows than one round of all blocks takes, and a row of more edges than the most tiles of
# the usual length hold.
SIZES = [(300, 40_000, 0), (1_000_000, 3_000_000, 0), (600_000, 2_000_000, 700_000)]


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_random_graphs(engine, size, is_sorted):
    graph = random_graph(*size)
    edges = by_target(graph.edge_index) if is_sorted else graph.edge_index
    check_graph(engine, Graph(edges, graph.num_src, graph.num_dst))
    both = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
    check_graph(engine, Graph(by_target(both), graph.num_src, graph.num_dst))
    gc.collect()
    torch.cuda.empty_cache()


def test_the_same_on_every_run(engine):
    graph = random_graph(50_000, 2_000_000, hub=400_000)
    first = graph.adjacency
    _ = first.by_source_in_place
    for _ in range(10):
        assert_same(graph.adjacency, first)


@pytest.mark.parametrize("value", [-1, 50_000, 2**31, 2**32, -(2**62)])
def test_an_index_out_of_range(engine, value):
    graph = random_graph(50_000, 300_000)
    for edges in (graph.edge_index, by_target(graph.edge_index)):
        for row, place in ((0, 0), (0, 299_999), (1, 0), (1, 123_456), (1, 299_999)):
            bad = edges.clone()
            bad[row, place] = value
            assert Adjacency.from_pair(*bad, 50_000, 50_000) is None
    rowptr, col, _, _, _ = graph.adjacency.by_target
    for array, place in ((rowptr, 0), (rowptr, 25_000), (rowptr, 50_000), (col, 77)):
        given = [rowptr.long(), col.long()]
        given[array is col][place] = value
        assert Adjacency.from_rows(*given, 50_000) is None
    torch.cuda.synchronize()
    check(engine, lambda: graph.adjacency)  # nothing was harmed


def test_a_side_stream(engine):
    graph = random_graph(20_000, 500_000, hub=1000)
    wanted = graph.adjacency
    _ = wanted.by_source_in_place
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = torch.zeros_like(graph.edge_index)
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would run before this
        late.copy_(graph.edge_index)
        found = Adjacency.from_pair(*late, graph.num_src, graph.num_dst)
        _ = found.by_source_in_place
    torch.cuda.current_stream().wait_stream(side)
    assert_same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_edges_not_the_current_one():
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        there = engines.of(torch.device(device))
        graph = random_graph(20_000, 500_000, hub=1000, device=device)
        check_graph(there, graph)
        assert torch.cuda.current_device() == 0


def read_backs(work):
    """Returns how often PyTorch waits for the GPU meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in found)


@pytest.mark.parametrize("hub", [0, 1000])
def test_read_backs(engine, hub):
    graph = random_graph(20_000, 100_000, hub)
    size = graph.num_src, graph.num_dst
    src, dst = by_target(graph.edge_index)
    rowptr, col, _, _, _ = Adjacency.from_pair(src, dst, *size).by_target

    def built(adj):
        return adj, adj.by_source_in_place, adj.by_source

    for adj in (Adjacency.from_pair(src, dst, *size), graph.adjacency):
        built(adj)  # the kernels are loaded by now
    assert read_backs(lambda: Adjacency.from_pair(src, dst, *size)) == 1
    assert read_backs(lambda: Adjacency.from_rows(rowptr, col, graph.num_src)) == 1
    assert read_backs(lambda: graph.adjacency) == 2  # it has to be sorted
    for adj in (Adjacency.from_pair(src, dst, *size), graph.adjacency):
        assert read_backs(lambda adj=adj: built(adj)) == 1
    with by_pytorch(engine):
        assert read_backs(lambda: built(Adjacency.from_pair(src, dst, *size))) > 2
