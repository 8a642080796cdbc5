"""What the cache finds again, what it must not find again, and when it lets go."""

import gc
import weakref

import pytest
import torch
from graphs import DEVICE, FORMS, ON_CPU, SQUARE, Graph, features, random_edges
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    GATConv,
    GCNConv,
    LGConv,
    SAGEConv,
    SGConv,
    TAGConv,
)
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import pyg_ioaware
from pyg_ioaware.graph.cache import CACHE, Cache
from pyg_ioaware.testing import compare

C = 8
N = 6
LAYERS = {
    "GCN": lambda: GCNConv(C, C),
    "GCN_raw": lambda: GCNConv(C, C, normalize=False),
    "GCN_no_loops": lambda: GCNConv(C, C, add_self_loops=False),
    "SG": lambda: SGConv(C, C, K=2),
    "TAG": lambda: TAGConv(C, C),
    "APPNP": lambda: APPNP(2, 0.1),
    "LG": lambda: LGConv(),
    "Cheb": lambda: ChebConv(C, C, 3).to(DEVICE),  # its bias heeds no default device
    "GAT": lambda: GATConv(C, C),
    "SAGE": lambda: SAGEConv(C, C),
    "SAGE_max": lambda: SAGEConv(C, C, aggr="max"),
}
# Stock has no way to run these.
IMPOSSIBLE = {("Cheb", "torch_csr"), ("Cheb", "torch_coo"), ("Cheb", "SparseTensor")}
IMPOSSIBLE |= set() if ON_CPU else {("SAGE_max", "torch_csr")}
KEPT = ["int64", "int32", "EdgeIndex", "EdgeIndex_row", "EdgeIndex_col", "torch_csr"]
KEPT += ["SparseTensor"] if WITH_TORCH_SPARSE else []

with_loops = Graph(torch.tensor([[0, 1, 2, 3, 4, 0, 5], [1, 2, 3, 0, 0, 2, 5]]), N, N)
without_loops = Graph(torch.tensor([[0, 1, 2, 3, 4, 0, 5], [1, 2, 3, 0, 0, 2, 4]]), N, N)


def step(conv, edge_index, *args):
    conv(features(N, C).requires_grad_(), edge_index, *args).sum().backward()


def lookups():
    info = pyg_ioaware.stats()["cache"]
    return info["hits"], info["misses"], info["uncacheable"]


def fresh(form, graph):
    """Makes an adjacency that shares no memory with the graph."""
    copy = Graph(graph.edge_index.clone(), graph.num_src, graph.num_dst)
    return FORMS[form](copy, None)[0]


@pytest.mark.parametrize("graph", [with_loops, without_loops], ids=["loops", "no_loops"])
@pytest.mark.parametrize("form", KEPT)
@pytest.mark.parametrize("layer", LAYERS)
def test_second_call_hits_and_nothing_outlives_the_graph(layer, form, graph, request):
    if (layer, form) in IMPOSSIBLE:
        return
    conv, adj = LAYERS[layer](), fresh(form, graph)
    pyg_ioaware.patch()
    for _ in range(3):  # what stock fills in lazily is there after the first
        step(conv, adj)
    hits, misses, _ = lookups()
    step(conv, adj)
    if layer != "GAT" or isinstance(adj, EdgeIndex) or form.startswith("int"):
        assert lookups()[1] == misses
        assert lookups()[0] > hits
    anchor = weakref.ref(storage_of(adj))
    del adj
    gc.collect()
    assert anchor() is None, "the user's graph is kept alive"
    info = CACHE.info()
    assert (info.entries, info.nbytes) == (0, 0)


def storage_of(adj):
    if isinstance(adj, SparseTensor):
        return adj.storage._col.untyped_storage()
    if isinstance(adj, EdgeIndex):
        return adj._data.untyped_storage()
    return (adj.col_indices() if adj.layout == torch.sparse_csr else adj).untyped_storage()


def test_one_structure_whoever_asks():
    edge_index = random_edges(9, 9, 20)
    first = CACHE.adjacency(edge_index[0], edge_index[1], 9, 9)
    assert CACHE.adjacency(*edge_index, 9, 9) is first
    assert CACHE.adjacency(*edge_index.unbind(), 9, 9) is first
    assert CACHE.adjacency(*edge_index.detach(), 9, 9) is first
    with torch.no_grad():
        assert CACHE.adjacency(*edge_index[:, :], 9, 9) is first
    coo = torch.sparse_coo_tensor(edge_index, torch.ones(20), (9, 9), is_coalesced=True)
    assert CACHE.adjacency(*coo.indices(), 9, 9) is first
    assert CACHE.info().entries == 1
    # Anything that may change the answer is another structure.
    others = [
        CACHE.adjacency(edge_index[1], edge_index[0], 9, 9),
        CACHE.adjacency(*edge_index, 9, 10),
        CACHE.adjacency(*edge_index, 10, 9),
        CACHE.adjacency(*edge_index[:, 1:], 9, 9),
        CACHE.adjacency(*edge_index[:, ::2], 9, 9),
        CACHE.adjacency(*edge_index.clone(), 9, 9),
    ]
    assert len({id(a) for a in [first, *others]}) == 7


def test_layers_of_a_model_share_one_structure():
    convs = [SAGEConv(C, C, aggr=a) for a in ("sum", "mean", "max", "min", ["sum", "max"])]
    convs += [TAGConv(C, C, normalize=False), GCNConv(C, C, normalize=False)]
    edge_index = with_loops.edge_index
    pyg_ioaware.patch()
    for conv in convs:
        step(conv, edge_index)
    assert CACHE.info().entries == 1
    assert lookups()[1] == 1


def test_two_flows_are_two_structures():
    edge_index, x = with_loops.edge_index, features(N, C)
    for flow in ("source_to_target", "target_to_source") * 2:
        compare(SAGEConv(C, C, flow=flow), x, edge_index)
        compare(GCNConv(C, C, flow=flow), x, edge_index)


IN_PLACE = {
    "setitem": lambda e: e.__setitem__((0, 0), 3),
    "slice": lambda e: e.__setitem__(slice(None), OTHER),
    "row_view": lambda e: e[0].__setitem__(0, 3),
    "column_view": lambda e: e.t()[0].copy_(torch.tensor([3, 3])),
    "unbind": lambda e: e.unbind(0)[0].fill_(2),
    "detach": lambda e: e.detach().__setitem__((1, 0), 4),
    "copy": lambda e: e.copy_(OTHER),
    "fill": lambda e: e.fill_(1),
    "clamp": lambda e: e.clamp_(max=2),
    "index_put": lambda e: e.index_put_((torch.tensor([0]), torch.tensor([0])), torch.tensor(3)),
    "masked_fill": lambda e: e.masked_fill_(with_loops.edge_index == 4, 2),
    "scatter": lambda e: e.scatter_(1, torch.zeros(2, 1).long(), torch.full((2, 1), 3)),
    "out": lambda e: torch.add(OTHER, 0, out=e),
    "new_data": lambda e: setattr(e, "data", OTHER.clone()),
}
OTHER = torch.tensor([[1, 1, 2, 3, 4, 5, 5], [0, 2, 3, 1, 0, 2, 5]])
OF_EDGE_INDEX = {
    "as_tensor": lambda e: e.as_tensor().__setitem__((0, 0), 3),
    "as_tensor_row": lambda e: e.as_tensor()[1].copy_(OTHER[1]),
    "data": lambda e: e._data.copy_(OTHER),
    "data_row": lambda e: e._data[0].fill_(2),
}
CHANGES = [(torch.Tensor, name) for name in IN_PLACE]
CHANGES += [(EdgeIndex, n) for n in (IN_PLACE | OF_EDGE_INDEX) if n not in ("detach", "new_data")]


@pytest.mark.parametrize(("kind", "change"), CHANGES)
@pytest.mark.parametrize("layer", ["GCN", "SG", "Cheb", "GAT", "SAGE", "SAGE_max"])
def test_in_place_change_is_seen(layer, kind, change):
    conv, x = LAYERS[layer](), features(N, C)
    edge_index = with_loops.edge_index.clone()
    if kind is EdgeIndex:
        edge_index = EdgeIndex(edge_index, sparse_size=(N, N))
    with pyg_ioaware.patched(), torch.no_grad():
        before = conv(x, edge_index), conv(x, edge_index)
        (IN_PLACE | OF_EDGE_INDEX)[change](edge_index)
        after = conv(x, edge_index)
    with torch.no_grad():
        expected = conv(x, edge_index)
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(before[1], expected)


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch_sparse")
@pytest.mark.parametrize("part", ["_col", "_value"])
@pytest.mark.parametrize("layer", ["GCN", "GCN_raw", "SAGE_max"])
def test_in_place_change_of_a_sparse_tensor_is_seen(layer, part):
    conv, x = LAYERS[layer](), features(N, C)
    adj_t = FORMS["SparseTensor"](with_loops, torch.arange(1.0, 8))[0]
    with pyg_ioaware.patched(), torch.no_grad():
        for _ in range(3):
            conv(x, adj_t)
        tensor = getattr(adj_t.storage, part)
        tensor.copy_(tensor.flip(0))
        after = conv(x, adj_t)
    with torch.no_grad():
        torch.testing.assert_close(after, conv(x, adj_t))


def test_in_place_change_of_a_torch_csr_is_seen():
    conv, x = GCNConv(C, C), features(N, C)
    adj_t = FORMS["torch_csr"](with_loops, torch.arange(1.0, 8))[0]
    with pyg_ioaware.patched(), torch.no_grad():
        for _ in range(3):
            conv(x, adj_t)
        adj_t.values()[:3] = 9.0
        after = conv(x, adj_t)
    with torch.no_grad():
        torch.testing.assert_close(after, conv(x, adj_t))


@pytest.mark.parametrize("layer", ["GCN", "SAGE"])
def test_edge_index_of_equal_data_and_other_size(layer):
    """What an EdgeIndex says about itself is part of the question."""
    data = with_loops.edge_index
    for size in (N, N + 3, N):
        edge_index = EdgeIndex(data, sparse_size=(size, size))
        compare(LAYERS[layer](), features(size, C), edge_index)
        compare(LGConv(), features(size, C), edge_index)


def test_write_that_pytorch_does_not_count():
    """Documented: it needs 'invalidate', and the verify mode finds it."""
    conv, x, edge_index = SAGEConv(C, C), features(N, C), with_loops.edge_index.clone()
    pyg_ioaware.patch()
    conv(x, edge_index)
    edge_index.data[0, 0] = 3
    assert pyg_ioaware.invalidate(edge_index) == 1
    after = conv(x, edge_index)
    pyg_ioaware.unpatch()
    torch.testing.assert_close(after, conv(x, edge_index))


@pytest.fixture
def verifying():
    pyg_ioaware.cache_limits(verify=True)
    yield
    pyg_ioaware.cache_limits(verify=False)


needs_cpu = pytest.mark.skipif(not ON_CPU, reason="NumPy has no view of memory on a GPU")


@pytest.mark.parametrize("write", ["data", pytest.param("numpy", marks=needs_cpu)])
@pytest.mark.parametrize("layer", ["GCN", "SAGE", "Cheb"])
@pytest.mark.usefixtures("verifying")
def test_verify_mode_raises_on_uncounted_writes(layer, write):
    conv, x, edge_index = LAYERS[layer](), features(N, C), with_loops.edge_index.clone()
    pyg_ioaware.patch()
    conv(x, edge_index)
    conv(x, edge_index)
    if write == "data":
        edge_index.data[0, 0] = 3
    else:
        edge_index.numpy()[0, 0] = 3
    with pytest.raises(RuntimeError, match="invalidate"):
        conv(x, edge_index)
    conv(x, edge_index)  # the stale entry is gone
    edge_index[0, 0] = 4  # a counted write is no error
    conv(x, edge_index)


@pytest.mark.parametrize("form", KEPT)
def test_invalidate_drops_all_that_was_derived(form):
    pyg_ioaware.patch()
    adj = fresh(form, with_loops)
    for layer in ("GCN", "SAGE", "SAGE_max", "TAG"):
        if (layer, form) not in IMPOSSIBLE:
            step(LAYERS[layer](), adj)
    assert CACHE.info().entries > 0
    assert pyg_ioaware.invalidate(adj) > 0
    assert CACHE.info().entries == 0
    with pytest.raises(ValueError, match="expects a graph"):
        pyg_ioaware.invalidate("no graph")


@pytest.mark.parametrize("layer", ["GCN", "SAGE", "SAGE_max"])
def test_inference_mode_graphs_are_never_kept(layer):
    conv, x = LAYERS[layer](), features(N, 64)[:, :C]
    with pyg_ioaware.patched(), torch.inference_mode():
        edge_index = with_loops.edge_index.clone()
        outs = []
        for _ in range(2):
            outs.append(conv(x, edge_index))
            edge_index[0, 0] = (edge_index[0, 0] + 1) % N
        assert CACHE.info().entries == 0
    with torch.inference_mode():
        edge_index = with_loops.edge_index.clone()
        for out in outs:
            torch.testing.assert_close(out, conv(x, edge_index))
            edge_index[0, 0] = (edge_index[0, 0] + 1) % N


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("layer", LAYERS)
def test_structure_of_an_evaluation_serves_training(layer, mode):
    """What is built first in inference mode must be fit for a gradient later."""
    conv, edge_index = LAYERS[layer](), with_loops.edge_index.clone()
    x = features(N, C).requires_grad_()
    with pyg_ioaware.patched(), mode():
        conv(x, edge_index)
    misses = lookups()[1]
    compare(conv, x, edge_index)
    assert lookups()[1] == misses
    with pyg_ioaware.patched(), mode():  # and the other way round
        conv(x, edge_index)
    assert lookups()[1] == misses


# The limits, on a cache of its own.


def put(cache, tensor, nbytes):
    return cache.get("value", (tensor,), object, lambda value: nbytes)


def test_limits_drop_the_least_recently_used():
    cache = Cache(max_bytes=100, max_entries=3)
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    for tensor in (a, b, c):
        put(cache, tensor, 10)
    put(cache, a, 10)  # used again, so b is the oldest
    put(cache, d, 10)
    assert [cache.holds(t) for t in (a, b, c, d)] == [True, False, True, True]
    put(cache, b, 85)
    assert [cache.holds(t) for t in (a, b, c, d)] == [False, True, False, True]
    assert cache.info().nbytes == 95
    put(cache, a, 1000)  # too large for the limit, and yet the newest stays
    assert [cache.holds(t) for t in (a, b, c, d)] == [True, False, False, False]
    cache.limit(max_bytes=5)
    assert cache.holds(a)
    put(cache, c, 1)
    assert (cache.info().entries, cache.info().nbytes) == (1, 1)


def test_limits_of_the_package():
    before = CACHE.max_bytes, CACHE.max_entries
    try:
        pyg_ioaware.cache_limits(max_entries=2)
        graphs = [random_edges(N, N, 9, seed=s) for s in range(4)]
        pyg_ioaware.patch()
        for edge_index in graphs:
            step(LAYERS["SAGE"](), edge_index)
        assert [CACHE.holds(g) for g in graphs] == [False, False, True, True]
        pyg_ioaware.cache_limits(max_bytes=0)
        assert [CACHE.holds(g) for g in graphs] == [False, False, False, True]
        for layer in LAYERS:  # nothing fits, all still works
            compare(LAYERS[layer](), features(N, C), graphs[0])
        with pytest.raises(ValueError, match="max_bytes"):
            pyg_ioaware.cache_limits(max_bytes=-1)
        with pytest.raises(ValueError, match="max_entries"):
            pyg_ioaware.cache_limits(max_entries=-1)
    finally:
        CACHE.limit(*before)


def test_bytes_are_those_of_the_structure():
    adj = CACHE.adjacency(*SQUARE["unsorted"].edge_index, 12, 12)
    _ = adj.by_source
    held = CACHE.info().nbytes
    assert adj.nbytes <= held <= 2 * adj.nbytes
    pyg_ioaware.clear_cache()
    assert (CACHE.info().entries, CACHE.info().nbytes) == (0, 0)


def test_edges_and_their_rows_are_one_entry() -> None:
    cache, edges = Cache(), random_edges(N, N, 20)
    adj = cache.adjacency(edges[0], edges[1], N, N)
    assert all(cache.edges(edges, True, N, N) is adj for _ in range(3))
    assert cache.edges(edges.view(2, -1), True, N, N) is adj
    assert (cache.info().hits, cache.info().misses) == (4, 1)
    backwards = cache.edges(edges, False, N, N)
    assert backwards is not adj
    assert cache.edges(edges, False, N, N) is backwards
    assert cache.edges(edges, True, N, N + 1) is not adj
    assert cache.edges(edges[:, 1:], True, N, N) is not adj
    edges.add_(0)
    changed = cache.edges(edges, True, N, N)
    assert changed is not adj
    assert cache.edges(edges, True, N, N) is changed
    cache.invalidate(edges)
    assert cache.edges(edges, True, N, N) is not changed


def _found_twice(cache: Cache, edges: torch.Tensor) -> weakref.ref:
    cache.edges(edges, True, N, N)
    return weakref.ref(cache.edges(edges, True, N, N))


@pytest.mark.parametrize("let_go", [Cache.clear, lambda cache: cache.limit(max_entries=1)])
def test_what_is_dropped_is_not_found_by_its_edges(let_go) -> None:
    cache, edges = Cache(), random_edges(N, N, 20)
    kept = _found_twice(cache, edges)
    other = random_edges(N, N, 9, seed=1)
    cache.edges(other, True, N, N)
    let_go(cache)
    gc.collect()
    assert kept() is None


def test_edges_that_die_are_let_go() -> None:
    cache, edges = Cache(), random_edges(N, N, 20)
    kept = _found_twice(cache, edges)
    del edges
    gc.collect()
    assert cache.info().entries == 0
    assert kept() is None
