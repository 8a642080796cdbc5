"""Messages used in ways that few layers do: patched and stock PyG must still agree."""

import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from graphs import DEVICE
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, MessagePassing
from torch_geometric.nn.conv import gcn_conv

import pyg_ioaware

EDGES = torch.tensor([[0, 1, 2, 0, 3, 1], [1, 2, 0, 2, 1, 1]])  # node 4 is isolated
TRIANGLE = torch.tensor([[0, 1, 0], [1, 0, 1]])  # node 2 is isolated


class Layer(MessagePassing):
    """Sends what a function makes of x_j and a weight."""

    def __init__(self, make, aggr="sum"):
        super().__init__(aggr=aggr)
        self.make = make

    def forward(self, x, edge_index, weight=None):
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j, weight):
        return self.make(self, x_j, weight)


class Cut(MessagePassing):
    """Aggregates with an index of another length than its messages."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        index = index.repeat(2)[: self.length]
        return self.aggr_module(inputs, index, ptr=ptr, dim_size=dim_size, dim=self.node_dim)


class Ranks(MessagePassing):
    """Adds messages of two and three dimensions."""

    def __init__(self):
        super().__init__(node_dim=0)

    def forward(self, x, z, edge_index):
        return self.propagate(edge_index, x=x, z=z)

    def message(self, x_j, z_j):
        return x_j + z_j


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


def _gradient(make, last_row, edge_index=TRIANGLE):
    x = torch.tensor([[4.0], [1.0], [last_row]]).repeat(1, 2).requires_grad_()
    Layer(lambda layer, x_j, weight: make(x_j))(x, edge_index).sum().backward()
    return x.grad


def fused_optimizer():
    weight, conv, x = Parameter(torch.rand(6)), GCNConv(8, 4), torch.randn(5, 8)
    optimizer = torch.optim.Adam([weight], 0.3, fused=True)
    outs = []
    for _ in range(2):
        optimizer.zero_grad()
        conv(x, EDGES, weight).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            outs.append(conv(x, EDGES, weight))
    return torch.stack(outs)


def parameter_gradient_beside_an_infinite_isolated_node():
    x = torch.tensor([[4.0], [1.0], [float("inf")]]).repeat(1, 2)
    lin = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(lin.weight)
    Layer(lambda layer, x_j, weight: lin(x_j))(x, TRIANGLE).sum().backward()
    return lin.weight.grad


def product_without_gradients():
    def make(layer, x_j, weight):
        with torch.no_grad():
            return x_j * weight

    x = torch.ones(3, 2, requires_grad=True)
    return torch.tensor(Layer(make)(x, TRIANGLE, torch.ones(3, 1)).requires_grad)


def function_in_place():
    x = torch.ones(3, 2, requires_grad=True)
    Layer(lambda layer, x_j, weight: DoubledInPlace.apply(x_j))(x, TRIANGLE).sum().backward()
    return x.grad


def returned_edges_written():
    x, conv = torch.randn(20, 8), GATConv(8, 4)
    with torch.no_grad():
        _, (edges, _) = conv(x, EDGES, return_attention_weights=True)
        written = edges.numpy()
        written += 1
        written %= 20
        return conv(x, EDGES)


def cached_edges_written():
    x, convs = torch.randn(5, 8), [GCNConv(8, 4, cached=True) for _ in range(2)]
    with torch.no_grad():
        for conv in convs:
            conv(x, EDGES)
        convs[0]._cached_edge_index[1].mul_(0.5)
        return convs[1](x, EDGES)


def autocast_inside():
    lin = torch.nn.Linear(8, 8)

    def make(layer, x_j, weight):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = lin(x_j)
        return y.cumsum(0)

    return Layer(make)(torch.randn(5, 8), EDGES)


def messages_kept_over_a_step():
    weight = Parameter(torch.ones(8, 8))

    def make(layer, x_j, _):
        layer.kept = F.linear(x_j, weight)
        return layer.kept

    layer = Layer(make)
    layer(torch.randn(5, 8), EDGES).sum().backward()
    torch.optim.SGD([weight], 0.1).step()
    return layer.kept + 0


def data_replaced():
    def make(layer, x_j, weight):
        x_j.data = torch.zeros(6, 8)
        return x_j

    return Layer(make)(torch.randn(5, 8), EDGES)


def requires_grad_set():
    def make(layer, x_j, weight):
        x_j.requires_grad = True
        return x_j * 2

    return torch.tensor(Layer(make)(torch.randn(5, 8), EDGES).requires_grad)


def norm_by_keywords():
    weight, other = torch.rand(6, requires_grad=True), EDGES.flip(0).contiguous()
    outs = [
        gcn_conv.gcn_norm(edge_weight=weight, edge_index=edges, num_nodes=5)[0]
        for edges in (EDGES, other)
    ]
    return torch.stack(outs)


def forward_mode_through_a_parameter():
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(torch.ones(8, 8), torch.ones(8, 8))
        layer = Layer(lambda layer, x_j, _: F.linear(x_j, weight))
        return forward_ad.unpack_dual(layer(torch.ones(5, 8), EDGES)).tangent + 0


def _checkpointed(body):
    x = torch.randn(5, 8, requires_grad=True)
    layer = Layer(lambda layer, x_j, _: checkpoint(body, x_j, use_reentrant=True))
    layer(x, EDGES).sum().backward()
    return x.grad


CASES = {
    "fused optimizer": fused_optimizer,
    "sqrt": lambda: _gradient(torch.sqrt, 0.0),
    "log": lambda: _gradient(torch.log, 0.0),
    "sqrt of square": lambda: _gradient(lambda x: (x * x).sqrt(), 0.0),
    "infinite": lambda: _gradient(lambda x: x * x, float("inf")),
    "parameter": parameter_gradient_beside_an_infinite_isolated_node,
    "no_grad": product_without_gradients,
    "function in place": function_in_place,
    "returned edges": returned_edges_written,
    "cached edges": cached_edges_written,
    "autocast": autocast_inside,
    "kept messages": messages_kept_over_a_step,
    "data": data_replaced,
    "requires_grad": requires_grad_set,
    "longer index": lambda: Cut(12)(torch.ones(5, 3), EDGES),
    "shorter index": lambda: Cut(4)(torch.ones(5, 3), EDGES),
    "index of one": lambda: Cut(1)(torch.ones(5, 3), EDGES),
    "empty index": lambda: Cut(0)(torch.ones(5, 3), EDGES),
    "ranks": lambda: Ranks()(torch.randn(5, 8), torch.randn(5, 1, 8), EDGES),
    "keywords": norm_by_keywords,
    "forward mode": forward_mode_through_a_parameter,
    "checkpoint": lambda: _checkpointed(lambda x: torch.relu(x * 2)),
    "checkpoint of a view": lambda: _checkpointed(lambda x: x.view(6, 2, 4).repeat(1, 1, 2).sum(1)),
}


def outcome(case):
    torch.manual_seed(0)
    try:
        return case()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_stock(name):
    stock = outcome(CASES[name])
    with pyg_ioaware.patched():
        ours = outcome(CASES[name])
    if isinstance(stock, Tensor):
        assert ours.dtype == stock.dtype
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        assert ours == stock


def test_scopes_of_overlapping_threads():
    """A scope that ends does not end another's, and nothing stays when all have ended."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    def second():
        with pyg_ioaware.patched():
            inside.set()
            leave.wait(10)
            seen.append(pyg_ioaware.is_patched())

    with pyg_ioaware.patched():
        thread = threading.Thread(target=second)
        thread.start()
        assert inside.wait(10)
    leave.set()
    thread.join(10)
    assert seen == [True]
    assert not pyg_ioaware.is_patched()
