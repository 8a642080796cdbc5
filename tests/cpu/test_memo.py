"""Derived graphs: what is handed out again, and what must not be."""

import pytest
import torch
from graphs import DEVICE, SQUARE, features, random_edges
from torch.autograd import forward_ad
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    GATConv,
    GCN2Conv,
    GCNConv,
    LGConv,
    PointNetConv,
    SGConv,
    TAGConv,
)
from torch_geometric.nn.conv import cheb_conv, gat_conv, gcn_conv

import pyg_ioaware
from pyg_ioaware.graph.cache import CACHE
from pyg_ioaware.testing import compare

C = 8
N = 9


@pytest.fixture
def edge_index():
    return random_edges(N, N, 30)


@pytest.fixture(autouse=True)
def _patched():
    pyg_ioaware.patch()


def gcn_norm(*args, **kwargs):
    return gcn_conv.gcn_norm(*args, **kwargs)  # as the layers find it


def misses():
    return pyg_ioaware.stats()["cache"]["misses"]


def test_same_tensors_again(edge_index):
    first, second = (gcn_norm(edge_index, None, N) for _ in range(2))
    assert first[0] is second[0]
    assert first[1] is second[1]
    weight = torch.rand(30)
    first, second = (gcn_norm(edge_index, weight, N) for _ in range(2))
    assert first[0] is second[0]
    assert first[1] is second[1]
    weight *= 2
    assert gcn_norm(edge_index, weight, N)[1] is not first[1]


OPTIONS = [
    {"edge_weight": None, "num_nodes": N},
    {"edge_weight": None, "num_nodes": N, "improved": True},
    {"edge_weight": None, "num_nodes": N + 1},
    {"edge_weight": None, "num_nodes": N, "add_self_loops": False},
    {"edge_weight": None, "num_nodes": N, "flow": "target_to_source"},
    {"edge_weight": None, "num_nodes": N, "dtype": torch.float64},
    {"edge_weight": torch.ones(30), "num_nodes": N},
    {"edge_weight": torch.ones(30).double(), "num_nodes": N},
    {"edge_weight": torch.full((30,), 2.0), "num_nodes": N},
]


def test_options_are_part_of_the_question(edge_index):
    with pyg_ioaware.disabled():
        stock = [gcn_norm(edge_index, **o) for o in OPTIONS]
    for _ in range(2):
        for options, expected in zip(OPTIONS, stock, strict=True):
            found = gcn_norm(edge_index, **options)
            assert [t.dtype for t in found] == [t.dtype for t in expected]
            torch.testing.assert_close(found, expected)
    assert CACHE.info().entries == len(OPTIONS)


def test_other_functions_and_their_options(edge_index):
    for module, name, calls in (
        (gat_conv, "remove_self_loops", [(edge_index,), (edge_index, torch.rand(30, 2))]),
        (gat_conv, "add_self_loops", [(edge_index, None, f, N) for f in (1.0, 1, "mean", None)]),
        (cheb_conv, "get_laplacian", [(edge_index, None, n) for n in (None, "sym", "rw")]),
    ):
        function = getattr(module, name)
        for args in calls * 2:
            torch.testing.assert_close(function(*args), function.__wrapped__(*args))
            torch.testing.assert_close(function(*args), function(*args))


def test_nothing_is_kept_twice(edge_index):
    """What one memoised function calls on the way is not kept besides its result."""
    gcn_norm(edge_index, None, N)
    assert CACHE.info().entries == 1


LAYERS = {
    "GCN": lambda: GCNConv(C, C),
    "GCN_improved": lambda: GCNConv(C, C, improved=True),
    "GCN_no_loops": lambda: GCNConv(C, C, add_self_loops=False),
    "GCN_t2s": lambda: GCNConv(C, C, flow="target_to_source"),
    "SG": lambda: SGConv(C, C, K=2),
    "TAG": lambda: TAGConv(C, C),
    "APPNP": lambda: APPNP(2, 0.1),
    "LG": LGConv,
    "Cheb": lambda: ChebConv(C, C, 3).to(DEVICE),  # its bias heeds no default device
    "Cheb_rw": lambda: ChebConv(C, C, 3, normalization="rw"),
    "Cheb_none": lambda: ChebConv(C, C, 3, normalization=None),
}
CALLS = {"Cheb_rw": {"lambda_max": torch.tensor(1.5)}, "Cheb_none": {"lambda_max": 3.0}}


def test_layers_with_different_options_share_a_graph(edge_index):
    """One graph and many questions, twice over: nobody gets another's answer."""
    for _ in range(2):
        for name, make in LAYERS.items():
            for dtype in (torch.float32, torch.float64):
                x = features(N, C, dtype=dtype).requires_grad_()
                compare(make().to(dtype), x, edge_index, **CALLS.get(name, {}))


@pytest.mark.parametrize("layer", ["GCN", "SG", "TAG", "APPNP", "LG", "Cheb"])
def test_learnable_weights_keep_the_structure(layer, edge_index):
    conv, weight = LAYERS[layer](), torch.rand(30).requires_grad_()
    for _ in range(2):
        compare(conv, features(N, C).requires_grad_(), edge_index, weight, steps=3)
    before = misses()
    for _ in range(3):
        with torch.no_grad():
            weight += 0.1  # an optimiser's step
        conv(features(N, C), edge_index, weight).sum().backward()
    assert misses() == before
    assert all(not t.requires_grad for e in CACHE._entries.values() for t in tensors(e.value))


def tensors(value):
    return getattr(value, "tensors", [])


@pytest.mark.parametrize("layer", ["GCN", "TAG"])
def test_changing_weights_keep_nothing_for_long(layer, edge_index):
    """Weights of another network, new at every step, with and without a gradient."""
    conv, x = LAYERS[layer](), features(N, C)
    for requires_grad in (True, False):
        for i in range(6):
            weight = features(30, seed=i).abs()
            compare(conv, x, edge_index, weight.requires_grad_(requires_grad), steps=1)
        del weight
        assert CACHE.info().entries <= 4


@pytest.mark.parametrize("layer", ["GCN", "TAG", "Cheb"])
def test_forward_derivatives_of_weights(layer, edge_index):
    """A tensor that carries one is the same memory, at the same version, as one that does not."""
    conv, x, weight = LAYERS[layer](), features(N, C), torch.rand(30)

    def derivative(scale):
        with forward_ad.dual_level():
            moved = forward_ad.make_dual(weight, weight * scale)
            return forward_ad.unpack_dual(conv(x, edge_index, moved)).tangent

    with pyg_ioaware.disabled():
        expected = [derivative(scale) for scale in (1, 2)]
    primal = conv(x, edge_index, weight)
    torch.testing.assert_close([derivative(scale) for scale in (1, 2)], expected)
    torch.testing.assert_close(conv(x, edge_index, weight), primal)


@pytest.mark.parametrize("layer", ["GCN", "TAG"])
def test_weights_that_show_the_negative_of_their_memory(layer, edge_index):
    numbers = torch.complex(torch.rand(30), torch.rand(30) / 100)
    for weight in (numbers.imag, numbers.conj().imag, numbers.imag):
        compare(LAYERS[layer](), features(N, C), edge_index, weight)


@pytest.mark.parametrize("kind", [torch.Tensor, EdgeIndex])
def test_mutated_outputs_are_not_handed_out_again(kind, edge_index):
    if kind is EdgeIndex:
        edge_index = EdgeIndex(edge_index, sparse_size=(N, N))
    expected = [t.clone() for t in gcn_norm(edge_index, None, N)]
    changes = [
        lambda index, weight: weight.mul_(2),
        lambda index, weight: index.fill_(0),
        lambda index, weight: index[0].fill_(0),
        lambda index, weight: weight.view(-1, 1).zero_(),
        lambda index, weight: weight.requires_grad_(),
    ]
    if kind is EdgeIndex:
        changes.append(lambda index, weight: index.as_tensor().fill_(0))
    for change in changes:
        found = gcn_norm(edge_index, None, N)
        change(*found)
        again = gcn_norm(edge_index, None, N)
        assert not again[1].requires_grad
        torch.testing.assert_close(list(again), expected)


class InPlace(GCNConv):
    """Works on the weights it was given, as stock lets it."""

    def message(self, x_j, edge_weight):
        edge_weight.mul_(0.5)
        return edge_weight.view(-1, 1) * x_j


def test_layer_that_changes_its_weights_in_place(edge_index):
    compare(InPlace(C, C), features(N, C).requires_grad_(), edge_index, steps=4)
    compare(GCNConv(C, C), features(N, C).requires_grad_(), edge_index)


@pytest.mark.parametrize("graph", ["loops", "duplicates", "no_edges", "one_node", "int32"])
@pytest.mark.parametrize("layer", LAYERS)
def test_special_graphs(layer, graph):
    given = SQUARE[graph]
    if graph in ("no_edges", "one_node") and layer.startswith("Cheb"):
        return  # stock takes the maximum of nothing
    # PyTorch's own gradient of a scatter by int32 indices is wrong on CPU.
    x = features(given.num_src, C).requires_grad_(graph != "int32")
    conv = LAYERS[layer]().requires_grad_(graph != "int32")
    compare(conv, x, given.edge_index, **CALLS.get(layer, {}))


def test_layers_that_add_loops_to_features(edge_index):
    edge_attr = features(30, 3).requires_grad_()
    x = features(N, C).requires_grad_()
    for fill in ("mean", 1.0, "max"):
        compare(GATConv(C, C, edge_dim=3, fill_value=fill), x, edge_index, edge_attr)
    compare(PointNetConv(), x, features(N, 3), edge_index)
    compare(GCN2Conv(C, 0.5), x, features(N, C).requires_grad_(), edge_index)


def test_cached_layers_keep_their_own(edge_index):
    """Stock's 'cached=True' ignores later graphs, and shows what it keeps."""
    conv, x = GCNConv(C, C, cached=True), features(N, C)
    out = conv(x, edge_index)
    kept = conv._cached_edge_index
    torch.testing.assert_close(kept, gcn_conv.gcn_norm.__wrapped__(edge_index, None, N))
    torch.testing.assert_close(conv(x, random_edges(N, N, 30, seed=5)), out)
    del edge_index
    torch.testing.assert_close(conv(x, random_edges(N, N, 30, seed=6)), out)
    assert conv._cached_edge_index is kept
    conv.reset_parameters()
    assert conv._cached_edge_index is None
    compare(conv, x.requires_grad_(), random_edges(N, N, 30, seed=7), steps=3)
