"""Symptoms that users of such software have reported, each as a test for its whole kind."""

import pytest
import torch
from graphs import FORMS, NONDET_TOL, ON_CPU, Graph, features, random_edges, shuffled
from layers import ALL, LAYERS, OWN, C, compare_layer, x
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, SAGEConv, SimpleConv, TAGConv

import pyg_ioaware
from pyg_ioaware.nn import IOAwareMaxAggregation
from pyg_ioaware.testing import compare

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
        forms = [edges, edges.int()]
        if ON_CPU or conv is not convs[-1]:  # stock has no maximum of a sparse tensor on a GPU
            forms.append(FORMS["torch_csr"](Graph(edges, 3, 3), None)[0])
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
        compare_layer(layer, batch.x.requires_grad_(), batch.edge_index, steps=1, draws=8)
    for seed in range(6):  # as many nodes and edges, other edges
        compare_layer(layer, x(12), random_edges(12, 12, 28, seed=seed), steps=1, draws=8)


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
    orders = [shuffled(40, s) for s in range(5)]
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
    assert gradcheck(call, inputs, nondet_tol=NONDET_TOL)
    assert gradgradcheck(call, inputs, nondet_tol=NONDET_TOL)
    assert pyg_ioaware.stats()["layers"][type(conv).__name__]["stock"] == {}
