"""Symptoms that users of such software have reported, each as a test for its whole kind."""

import numpy
import pytest
import torch
from graphs import FORMS, Graph, by_source, by_target, features, random_edges
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    GCNConv,
    GraphConv,
    MaxAggregation,
    MessagePassing,
    SAGEConv,
    SimpleConv,
    TAGConv,
)

import pyg_ioaware
from pyg_ioaware.nn import IOAwareGCNConv, IOAwareMaxAggregation, IOAwareSAGEConv
from pyg_ioaware.testing import compare

C = 16


class Heads(MessagePassing):
    """A weight per edge and head times [E, H, C], as in attention without the scores."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr, node_dim=0)

    def forward(self, x, edge_index, alpha):
        return self.propagate(edge_index, x=x, alpha=alpha)

    def message(self, x_j, alpha):
        return alpha.unsqueeze(-1) * x_j


LAYERS = {
    "GCN": lambda c=C: GCNConv(c, c),
    "SAGE_mean": lambda c=C: SAGEConv(c, c),
    "SAGE_max": lambda c=C: SAGEConv(c, c, aggr="max"),
    "SAGE_min": lambda c=C: SAGEConv(c, c, aggr="min"),
    "Graph": lambda c=C: GraphConv(c, c),
}
OWN = {
    "IOAwareGCN": (lambda c=C: GCNConv(c, c), lambda c=C: IOAwareGCNConv(c, c)),
    "IOAwareSAGE": (
        lambda c=C: SAGEConv(c, c, aggr="max"),
        lambda c=C: IOAwareSAGEConv(c, c, aggr="max"),
    ),
}
ALL = [*LAYERS, *OWN]


def compare_layer(name, *args, c=C, **kwargs):
    """Compares the layer patched, or the IOAware layer unpatched, with stock."""
    if name in LAYERS:
        return compare(LAYERS[name](c), *args, **kwargs)
    stock, ours = (make(c) for make in OWN[name])
    ours.load_state_dict(stock.state_dict())
    return compare(stock, *args, ours=ours, **kwargs)


def x(n, *shape, **kwargs):
    return features(n, *(shape or (C,)), **kwargs).requires_grad_()


# Maxima: ties and empty groups.


@pytest.mark.parametrize("degree", [3, 40, 600, 2100])
@pytest.mark.parametrize("channels", [1, 16])
def test_tied_maxima_share_the_gradient(degree, channels):
    """pytorch_scatter#399: the documented rule, the same on every run and for every degree."""
    n = degree + 1
    edge_index = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)])
    edge_index[1, -1] = 1
    for value, exact in ((1.0, False), (1.0, True), (0.0, True)):
        given = torch.full((n, channels), value)
        given[-1] = 2
        given.requires_grad_()
        expected = torch.full((n, channels), 1 / degree)
        expected[-1] = 1
        if exact:
            out = IOAwareMaxAggregation(ties="exact")(given, edge_index[1], dim_size=n)
        else:
            with pyg_ioaware.patched():
                out = SimpleConv(aggr="max")(given, edge_index)
        for _ in range(3):
            (found,) = torch.autograd.grad(out.sum(), given, retain_graph=True)
            torch.testing.assert_close(found, expected)
    compare(SimpleConv(aggr="max"), torch.ones(n, channels, requires_grad=True), edge_index)
    compare(SimpleConv(aggr="max"), torch.zeros(n, channels, requires_grad=True), edge_index)


@pytest.mark.parametrize("rows", [(0, 5), (3, 4), (1, 7), (0, 1), ()])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.usefixtures("poison")
def test_empty_groups_write_nothing(reduce, rows):
    """pytorch_scatter#373: the argument of an empty group points nowhere."""
    edges = random_edges(9, 8, 12 if rows else 0)
    if rows:
        edges[1] = torch.tensor(rows).repeat(6)
    given = x(9)
    pyg_ioaware.patch()
    out = SimpleConv(aggr=reduce)((given, features(8, C)), edges)
    empty = [r for r in range(8) if r not in rows]
    assert out[empty].eq(0).all()
    (grad,) = torch.autograd.grad(out.sum(), given)
    unused = [r for r in range(9) if r not in edges[0]]
    assert grad[unused].eq(0).all()
    compare(SimpleConv(aggr=reduce), (given, features(8, C)), edges)


# Isolated, single, unused.


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.usefixtures("poison")
def test_one_isolated_node(layer):
    """pyg#1129: uninitialised memory, NaN after a few batches."""
    compare_layer(layer, x(1), torch.empty(2, 0, dtype=torch.long), steps=100)


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.usefixtures("poison")
def test_edgeless_graph(layer):
    """dgl#1598."""
    compare_layer(layer, x(4), torch.empty(2, 0, dtype=torch.long))
    loopless = GCNConv(C, C, add_self_loops=False)
    with torch.no_grad():
        loopless.bias.fill_(3)
    pyg_ioaware.patch()
    out = loopless(x(4), torch.empty(2, 0, dtype=torch.long))
    assert out.eq(3).all()


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.usefixtures("poison")
def test_unused_sources_get_a_gradient_of_zero(aggr, weighted):
    """flash-attention#2324: gradient buffers made by 'empty' keep what memory held."""
    edges = random_edges(10, 12, 40)
    edges[0] *= 10
    given, weight = x(100), torch.rand(40, requires_grad=True) if weighted else None
    conv = SimpleConv(aggr=aggr)
    pyg_ioaware.patch()
    out = conv((given, features(12, C)), edges, weight)
    out.square().sum().backward()
    unused = torch.ones(100, dtype=torch.bool)
    unused[edges[0]] = False
    assert unused.sum() >= 90
    assert given.grad[unused].eq(0).all()
    assert given.grad.isfinite().all()
    assert weight is None or weight.grad.isfinite().all()
    compare(conv, (given, features(12, C)), edges, weight)


# Direction, weights, order.


def test_directed_path_in_every_form():
    """pyg#7960: an adjacency object gave the result of the reverse direction."""
    edges, given = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[1.0], [2.0], [4.0]])
    convs = [SimpleConv(aggr="sum"), GCNConv(1, 1), SAGEConv(1, 1), SAGEConv(1, 1, aggr="max")]
    for conv in convs:
        expected = conv(given, edges)
        forms = [edges, edges.int(), FORMS["torch_csr"](Graph(edges, 3, 3), None)[0]]
        for order in ("row", "col"):
            forms.append(EdgeIndex(edges, sparse_size=(3, 3), sort_order=order))
            forms.append(EdgeIndex(edges, sparse_size=(3, 3)).sort_by(order)[0])
        if "SparseTensor" in FORMS:
            forms.append(FORMS["SparseTensor"](Graph(edges, 3, 3), None)[0])
        with pyg_ioaware.patched():
            for form in forms:
                torch.testing.assert_close(conv(given, form), expected)
        assert not torch.allclose(conv(given, edges.flip(0)), expected)


def test_negative_weights():
    """pyg#795: NaN exactly where stock has it, and a finite result for the next graph."""
    edges, weight = torch.tensor([[0, 1], [1, 2]]), torch.tensor([-3.0, 1.0])
    conv = GCNConv(4, 4)
    for requires_grad in (False, True):
        compare(conv, x(3, 4), edges, weight.clone().requires_grad_(requires_grad))
    pyg_ioaware.patch()
    out = conv(x(3, 4), edges, weight)
    assert out.isnan().any()
    assert out.isfinite().any()
    assert conv(x(3, 4), edges, weight.abs()).isfinite().all()
    assert conv(x(3, 4), edges.flip(0)).isfinite().all()


@pytest.mark.parametrize("layer", ALL)
def test_smaller_last_batch_and_equal_sizes(layer):
    """pyg#7173: with our own cache on, no batch gets another's structure."""
    graphs = [Data(x=features(6, C, seed=s), edge_index=random_edges(6, 6, 14, seed=s))
              for s in range(5)]  # fmt: skip
    batches = [Batch.from_data_list(graphs[i:j]) for i, j in ((0, 2), (2, 4), (4, 5))]
    for batch in batches * 2:
        compare_layer(layer, batch.x.requires_grad_(), batch.edge_index, steps=1)
    for seed in range(6):  # as many nodes and edges, other edges
        compare_layer(layer, x(12), random_edges(12, 12, 28, seed=seed), steps=1)


@pytest.mark.parametrize("layer", ["GCN", "Graph", "TAG"])
def test_any_order_of_the_edges(layer):
    """GSAT#3: weights and their gradients keep the caller's order."""
    conv = {"TAG": lambda: TAGConv(C, C)}.get(layer, LAYERS.get(layer))().double()
    given, edges = x(9, dtype=torch.float64), random_edges(9, 9, 40)
    weight = torch.linspace(0.1, 2, 40, dtype=torch.float64)
    pyg_ioaware.patch()

    def run(order):
        w = weight[order].requires_grad_()
        out = conv(given, edges[:, order], w)
        return out.detach(), torch.autograd.grad(out.square().sum(), w)[0]

    out, grad = run(torch.arange(40))
    orders = [torch.randperm(40, generator=torch.Generator().manual_seed(s)) for s in range(5)]
    orders += [edges[0].argsort(stable=True), edges[1].argsort(stable=True)]
    for order in orders:
        found, found_grad = run(order)
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(found_grad, grad[order])


# Autograd.


@pytest.mark.parametrize("layer", ALL)
def test_gradients_of_any_layout(layer):
    """flash-attention#355: a backward pass that takes the output's gradient for contiguous."""
    edges, given = random_edges(9, 9, 40), x(9)
    stock, ours = OWN[layer] if layer in OWN else (LAYERS[layer], LAYERS[layer])
    stock, ours = stock(), ours()
    ours.load_state_dict(stock.state_dict())

    def run(conv):
        found = []
        for use in (
            lambda out: out.t()[1:4].contiguous(),
            lambda out: out[:, ::2],
            lambda out: out.flip(0)[::3],
            lambda out: out.sum(),
            lambda out: out.mean(0).expand(5, -1),
        ):
            out = use(conv(given, edges))
            grad = torch.ones(()).expand(out.shape)
            found += torch.autograd.grad(out, [given, *conv.parameters()], grad)
        return found

    expected = run(stock)
    if layer in LAYERS:
        pyg_ioaware.patch()
    torch.testing.assert_close(run(ours), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_second_derivatives(layer):
    """pytorch_scatter#299, pyg#7401: of features, parameters and learnable weights."""
    conv, edges = LAYERS[layer](3).double(), random_edges(4, 4, 7)
    given = x(4, 3, dtype=torch.float64)
    inputs = [given, *conv.parameters()]
    weighted = layer in ("GCN", "Graph")
    if weighted:
        inputs.append(torch.linspace(0.5, 2, 7, dtype=torch.float64).requires_grad_())

    def call(given, *rest):
        params = dict(zip(dict(conv.named_parameters()), rest, strict=False))
        args = (given, edges, rest[-1]) if weighted else (given, edges)
        return torch.func.functional_call(conv, params, args)

    pyg_ioaware.patch()
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)
    assert pyg_ioaware.stats()["layers"][type(conv).__name__]["stock"] == {}


# Dtypes.

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("half_input", [False, True])
@pytest.mark.parametrize("layer", ["GCN", "Graph", "SAGE_max", "SAGE_mean"])
def test_mixed_precision(layer, half_input, dtype):
    """pyg-lib#271: autocast, weights left in float32, features in half already."""
    given = x(9, dtype=dtype if half_input else torch.float32)
    args = [torch.rand(40, requires_grad=True)] if layer in ("GCN", "Graph") else []
    compare_layer(
        layer, given, random_edges(9, 9, 40), *args, context=lambda: torch.autocast("cpu", dtype)
    )


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_with_learnable_weights(dtype):
    """pytorch#187681: the gradient of the weights, which cuSPARSE cannot do in bfloat16."""
    weight = (torch.rand(40) + 0.5).to(dtype).requires_grad_()
    compare(GCNConv(C, C).to(dtype), x(9, dtype=dtype), random_edges(9, 9, 40), weight)


@pytest.mark.parametrize("order", [None, by_source, by_target])
@pytest.mark.parametrize("layer", ALL)
def test_int32_edges(layer, order):
    """pyg#5087. The oracle has int64 edges: PyTorch's own gradient is wrong for int32 on CPU."""
    edges = random_edges(9, 9, 40) if order is None else order(random_edges(9, 9, 40))
    stock, ours = OWN[layer] if layer in OWN else (LAYERS[layer], LAYERS[layer])
    stock, ours = stock(), ours()
    ours.load_state_dict(stock.state_dict())

    def run(conv, edges):
        given = x(9)
        out = conv(given, edges)
        return [out, *torch.autograd.grad(out.square().sum(), [given, *conv.parameters()])]

    expected = run(stock, edges)
    if layer in LAYERS:
        pyg_ioaware.patch()
    for form in (edges.int(), EdgeIndex(edges.int(), sparse_size=(9, 9))):
        torch.testing.assert_close(run(ours, form), expected, rtol=1e-4, atol=1e-5)


# Sizes, widths, alignment.


def test_more_than_two_billion_numbers():
    """pytorch_sparse#223: offsets beyond 2^31. The memory is never written, so it costs none."""
    n = 8_500_000
    given = torch.from_numpy(numpy.zeros((n, 256), dtype=numpy.float32))
    last = torch.arange(n - 4, n)
    given[last] = features(4, 256)
    edges = torch.stack([last.repeat(2), torch.tensor([0, 1, 2, 0, 2, 2, 1, 0])])
    edges = torch.cat([edges, torch.tensor([[0], [1]])], dim=1)
    small = torch.cat([given[last], torch.zeros(1, 256)])
    places = torch.cat([torch.arange(4).repeat(2), torch.tensor([4])])
    for aggr in ("sum", "mean", "max"):
        conv = SimpleConv(aggr=aggr)
        expected = conv((small, features(3, 256)), torch.stack([places, edges[1]]))
        with pyg_ioaware.patched(), torch.no_grad():
            out = conv((given, features(3, 256)), edges)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("n", [70_000, 200_000])
def test_many_targets_and_long_rows(n, aggr):
    """xformers#845: more than 65535 of anything."""
    edges = random_edges(n, n, 80_000)
    compare(SimpleConv(aggr=aggr), x(n, 2), edges, steps=1)
    edges[1] = 17  # one row with 80,000 edges
    compare(SimpleConv(aggr=aggr), x(n, 2), edges, steps=1)
    compare(SimpleConv(aggr=aggr), x(n, 2), edges.flip(0), steps=1)


def test_wide_rows():
    """xformers#845 again: heads times channels beyond 65535."""
    edges = random_edges(3, 3, 8)
    compare(Heads(), x(3, 8200, 9), edges, torch.rand(8, 8200, requires_grad=True), steps=1)
    compare(SimpleConv(aggr="max"), x(3, 70_001), edges, steps=1)


WIDTHS = [1, 3, 7, 17, 31, 33, 65, 100, 129, 255, 257, 513]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
@pytest.mark.parametrize("width", WIDTHS)
def test_any_width(width, dtype):
    """dgSPARSE-Lib#14: wrong results where the width is no power of two."""
    edges, given = random_edges(7, 7, 30), x(7, width, dtype=dtype)
    weight = torch.rand(30).to(dtype).requires_grad_()
    for aggr in ("sum", "mean", "max", "min"):
        compare(SimpleConv(aggr=aggr), given, edges, steps=1)
        compare(SimpleConv(aggr=aggr), given, edges, weight, steps=1)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("width", [1, 7, 33, 129])
def test_any_number_of_heads(width, heads):
    """dgSPARSE-Lib#14 with one weight per edge and head."""
    edges, weight = random_edges(7, 7, 30), torch.rand(30, heads).requires_grad_()
    for aggr in ("sum", "mean", "max"):
        compare(Heads(aggr), x(7, heads, width), edges, weight, steps=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
@pytest.mark.parametrize("layer", ["GCN", "Graph", "SAGE_max"])
def test_views_at_odd_offsets(layer, dtype):
    """pytorch#169419: pointers that are aligned to nothing but their own type."""
    buffer = features(1 + 9 * C, 1, dtype=dtype).view(-1)
    given = buffer[1:].view(9, C).requires_grad_()
    edges = random_edges(9, 9, 43)[:, 3:]
    args = [torch.rand(41).to(dtype)[1:].requires_grad_()] if layer in ("GCN", "Graph") else []
    conv = LAYERS[layer]().to(dtype)
    compare(conv, given, edges, *args)
    strided = features(18, 2 * C, dtype=dtype)[::2, 1::2].requires_grad_()
    compare(conv, strided, edges, *args)


# Determinism.


def run_twice_equal(conv, given, edges, args, runs):
    first = None
    for _ in range(runs):
        out = conv(given, edges, *args)
        leaves = [given, *conv.parameters(), *args]
        found = [out, *torch.autograd.grad(out.square().sum(), leaves)]
        assert first is None or all(map(torch.equal, found, first))
        first = first or found


@pytest.mark.parametrize("layer", LAYERS)
def test_bits_are_the_same_on_every_run(layer):
    """cupy#9323: also with rows that are split, and with a structure built anew."""
    edges, given = random_edges(50, 50, 6000), x(50)
    edges[1, :3000] = 7
    args = [torch.rand(6000, requires_grad=True)] if layer in ("GCN", "Graph") else []
    pyg_ioaware.patch()
    conv = LAYERS[layer]()
    run_twice_equal(conv, given, edges, args, runs=25)
    threads = torch.get_num_threads()
    out = conv(given, edges, *args)
    try:
        torch.set_num_threads(1)
        pyg_ioaware.clear_cache()
        assert torch.equal(conv(given, edges, *args), out)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_deterministic_algorithms(layer, warn_only):
    """pyg#3175: the flag is honoured, without an error."""
    edges, given = random_edges(9, 9, 40), x(9)
    args = [torch.rand(40, requires_grad=True)] if layer in ("GCN", "Graph") else []
    conv = LAYERS[layer]()
    with torch.no_grad():
        expected = conv(given, edges, *args)
    pyg_ioaware.patch()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        run_twice_equal(conv, given, edges, args, runs=3)
        torch.testing.assert_close(conv(given, edges, *args), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_global_pooling():
    """The same reductions without a message passing layer."""
    index = torch.tensor([0, 0, 3, 1, 3, 3])
    compare(lambda t: MaxAggregation()(t, index, dim_size=5), x(6))
    compare(MaxAggregation(), x(6), index, ours=IOAwareMaxAggregation())
