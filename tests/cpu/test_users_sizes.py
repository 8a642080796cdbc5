"""More of what users have reported: dtypes, sizes, widths, alignment, determinism."""

from functools import partial

import numpy
import pytest
import torch
from graphs import DEVICE, ON_CPU, by_source, by_target, features, random_edges
from layers import ALL, LAYERS, OWN, C, Heads, compare_layer, x
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv, MaxAggregation, SimpleConv

import pyg_ioaware
from pyg_ioaware.nn import IOAwareMaxAggregation
from pyg_ioaware.testing import compare

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("half_input", [False, True])
@pytest.mark.parametrize("layer", ["GCN", "Graph", "SAGE_max", "SAGE_mean"])
def test_mixed_precision(layer, half_input, dtype):
    """pyg-lib#271: autocast, weights left in float32, features in half already."""
    given = x(9, dtype=dtype if half_input else torch.float32)
    args = [torch.rand(40, requires_grad=True)] if layer in ("GCN", "Graph") else []
    autocast = partial(torch.autocast, DEVICE.type, dtype)
    compare_layer(layer, given, random_edges(9, 9, 40), *args, context=autocast)


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
    """pytorch_sparse#223: offsets beyond 2^31. On a CPU memory that is never written costs none."""
    n = 8_500_000
    given = torch.from_numpy(numpy.zeros((n, 256), dtype=numpy.float32)).to(DEVICE)
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
    # On a GPU the degrees by weights are PyTorch's own sums, in another order each time.
    weighted = ("GCN", "Graph") if ON_CPU else ("Graph",)
    args = [torch.rand(6000, requires_grad=True)] if layer in weighted else []
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
