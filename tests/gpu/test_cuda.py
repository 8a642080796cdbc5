"""What only a GPU shows: streams, devices, graphs, sizes, memory. Parity: TEST_DEVICE=cuda."""

import copy
import gc
import subprocess
import sys
import threading

import pytest
import torch
import torch_geometric.typing
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    SAGEConv,
    SimpleConv,
    TransformerConv,
)
from torch_geometric.utils import softmax

import pyg_ioaware
from pyg_ioaware import engines, ops
from pyg_ioaware.engines.cuda import CUDAEngine, CUDARuntime, reduce_backward
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.ops import EdgeFeatures
from pyg_ioaware.testing import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYERS = {
    "GCN": lambda: GCNConv(16, 16),
    "SAGE-mean": lambda: SAGEConv(16, 16),
    "SAGE-max": lambda: SAGEConv(16, 16, aggr="max"),
    "GIN": lambda: GINConv(torch.nn.Linear(16, 16)),
    "GAT": lambda: GATConv(16, 4, heads=4),
    "GATv2": lambda: GATv2Conv(16, 4, heads=4),
    "GATv2-edges": lambda: GATv2Conv(16, 4, heads=4, edge_dim=3),
    "Transformer": lambda: TransformerConv(16, 4, heads=4),
    "Transformer-edges": lambda: TransformerConv(16, 4, heads=4, edge_dim=3),
}
ATTENTION = ("gatv2", "transformer")


def graph(num_nodes=60, num_edges=600, device="cuda", seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=g, device=device)


def inputs(name, edge_index, dtype=torch.float32):
    """Returns what a layer takes besides the nodes: edges, and their features if it has any."""
    if not name.endswith("edges"):
        return (edge_index,)
    device = edge_index.device
    g = torch.Generator(device=device).manual_seed(1)
    return edge_index, torch.randn(edge_index.size(1), 3, generator=g, device=device, dtype=dtype)


def step(layer, x, *args):
    out = layer(x, *args)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        # Sums that cancel keep the rounding of their terms, which are of the size of the largest.
        atol = 1e-4 * max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_fused(name):
    layer, x = LAYERS[name]().cuda(), torch.randn(60, 16, device="cuda", requires_grad=True)
    args = inputs(name, graph())
    layers = compare(layer, x, *args, steps=2, draws=10)
    assert layers
    assert all(c.fused and not c.stock for c in layers.values())
    assert name == "GAT" or not any(c.formed for c in layers.values())  # GAT forms its scores
    assert pyg_ioaware.explain(layer, x, *args).fused


def test_import_and_patch_leave_cuda_alone():
    code = "import torch, pyg_ioaware; pyg_ioaware.patch(); assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


FORK = """
import os, sys, torch, pyg_ioaware
from torch_geometric.nn import GCNConv
if sys.argv[1] == "patched":
    pyg_ioaware.patch(strict=True)
conv, edges = GCNConv(4, 4), torch.randint(0, 9, (2, 30))
conv(torch.randn(9, 4), edges)
pid = os.fork()
out = conv.cuda()(torch.randn(9, 4).cuda(), edges.cuda())
torch.cuda.synchronize()
assert out.isfinite().all()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_cuda_in_a_child_and_its_parent():
    def run(how):
        command = [sys.executable, "-c", FORK, how]
        return subprocess.run(command, timeout=200, capture_output=True, text=True)

    if run("stock").returncode:
        pytest.skip("PyTorch and PyG themselves cannot use CUDA after a fork here")
    done = run("patched")
    assert done.returncode == 0, done.stderr


# Maxima by torch_scatter ###################################################################


@pytest.fixture
def torch_scatter(monkeypatch):
    """Lets stock PyG reduce by torch_scatter, which the other tests do without."""
    pytest.importorskip("torch_scatter")
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", True)


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.usefixtures("torch_scatter")
def test_maxima_without_ties_are_those_of_torch_scatter(aggr):
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    for layer in (SimpleConv(aggr), SAGEConv(16, 16, aggr=aggr).cuda()):
        layers = compare(layer, x, graph(), steps=2)
        assert all(c.fused and not c.stock for c in layers.values())


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.usefixtures("torch_scatter")
def test_the_first_of_tied_maxima_gets_the_gradient_with_torch_scatter(aggr):
    """torch_scatter gives it to any one of them."""
    edges = graph()
    x = torch.randn(60, 5, device="cuda").round().add(0.0).requires_grad_()  # no -0.0
    with pyg_ioaware.patched(strict=True):
        out = SimpleConv(aggr)(x, edges)
    weight = torch.arange(1.0, 301, device="cuda").view(60, 5)
    (found,) = torch.autograd.grad(out, x, weight)
    best, values, expected = out.tolist(), x.tolist(), torch.zeros(60, 5)
    given = set()
    for source, target in edges.t().tolist():
        for c in range(5):
            if values[source][c] == best[target][c] and (target, c) not in given:
                given.add((target, c))
                expected[source, c] += float(weight[target, c])
    torch.testing.assert_close(found.cpu(), expected)


# Streams, devices and graphs ###############################################################


@pytest.mark.parametrize("name", LAYERS)
def test_a_side_stream(name):
    layer, args = LAYERS[name]().cuda(), inputs(name, graph())
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    want = step(layer, x, *args)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with pyg_ioaware.patched(), torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would run before this
        found = step(layer, x.mul(1).detach().requires_grad_(), *args)
    torch.cuda.current_stream().wait_stream(side)
    assert_close(found, want)


def test_a_structure_is_waited_for_on_other_streams():
    edges = graph(50_000, 2_000_000)
    x = torch.randn(50_000, 16, device="cuda")
    conv = SAGEConv(16, 16).cuda()
    want = conv(x, edges)
    sides = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    with pyg_ioaware.patched():
        outs = []
        for i, side in enumerate(sides):
            with torch.cuda.stream(side):
                if i == 0:
                    torch.cuda._sleep(50_000_000)  # what is built here is late
                outs.append(conv(x, edges))
        del edges
        pyg_ioaware.clear_cache()
        junk = [torch.full((2_000_000,), 2**30, dtype=torch.int32, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del junk
    for out in outs:
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_threads_on_streams_of_their_own():
    layer, edges = GCNConv(16, 16).cuda(), graph()
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    want, errors = step(layer, x, edges), []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    found = step(layer, x.detach().clone().requires_grad_(), edges)
                torch.cuda.current_stream().synchronize()
            assert_close(found, want)
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    with pyg_ioaware.patched():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", LAYERS)
def test_the_device_of_the_tensors_not_the_current_one(name):
    layer = LAYERS[name]()
    x, args = torch.randn(60, 16), inputs(name, graph(device="cpu"))
    want = step(layer, x.clone().requires_grad_(), *args)
    with pyg_ioaware.patched():
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            there = x.to(device).requires_grad_()
            found = step(layer.to(device), there, *(t.to(device) for t in args))
            assert torch.cuda.current_device() == 0
            assert all(t.device == torch.device(device) for t in found)
            assert_close([t.cpu() for t in found], want)


@pytest.mark.parametrize("prepared", ["prepare", "warm"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_graph(name, prepared):
    layer, args = LAYERS[name]().cuda(), inputs(name, graph())
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    with pyg_ioaware.patched(strict=True):
        if prepared == "prepare" and name not in ("GCN", "GAT"):  # these make edges of their own
            attends = name.startswith(("GATv2", "Transformer"))
            more = {"attention": (4, 4), "edge_attr": len(args) > 1} if attends else {}
            pyg_ioaware.prepare(args[0], 60, width=16, **more)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(layer, x, *args)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = step(layer, x, *args)
        for seed in range(3):
            with torch.no_grad():
                x.copy_(torch.randn(60, 16, generator=torch.Generator().manual_seed(seed)))
            if seed == 1:  # what the graph uses must outlive the cache's entry
                pyg_ioaware.cache_limits(max_entries=1)
                SAGEConv(4, 4).cuda()(torch.randn(60, 4, device="cuda"), graph(seed=5))
                gc.collect()
                torch.cuda.empty_cache()
            captured.replay()
            got = [t.clone() for t in found]
            with pyg_ioaware.disabled():
                assert_close(got, step(layer, x, *args))
    pyg_ioaware.cache_limits(max_entries=512)


class Fixed(torch.nn.Module):
    """A layer on edges that do not change: what a CUDA graph may capture."""

    def __init__(self, layer, *args):
        super().__init__()
        self.layer, self.args = layer, args

    def forward(self, x):
        return self.layer(x, *self.args)


@pytest.mark.parametrize("name", LAYERS)
def test_a_graphed_callable(name):
    layer, args = LAYERS[name]().cuda(), inputs(name, graph())
    twin, x = copy.deepcopy(layer), torch.randn(60, 16, device="cuda", requires_grad=True)
    gc.collect()  # a graph that goes while another is captured ends the capture
    with pyg_ioaware.patched(strict=True):
        graphed = torch.cuda.make_graphed_callables(Fixed(layer, *args), (x,))
    for seed in range(3):
        x = torch.randn(60, 16, generator=torch.Generator().manual_seed(seed)).cuda()
        found, expected = [], []
        for run, of, into in ((graphed, layer, found), (Fixed(twin, *args), twin, expected)):
            leaf = x.clone().requires_grad_()
            out = run(leaf)
            out.square().sum().backward()
            into += [out.detach().clone(), leaf.grad]
            into += [p.grad.clone() for p in of.parameters() if p.grad is not None]
            of.zero_grad()
        assert_close(found, expected)


def test_a_captured_graph_without_preparation_runs_on_stock():
    layer, edges = SAGEConv(16, 16).cuda(), graph()
    x = torch.randn(60, 16, device="cuda")
    want = layer(x, edges)
    with pyg_ioaware.patched():
        layer(x, graph(seed=3))  # compiled, but of another graph
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = layer(x, edges)
        captured.replay()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_no_synchronisation_on_a_warm_path():
    edges = graph()
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    with pyg_ioaware.patched(strict=True):
        for name in LAYERS:
            layer, args = LAYERS[name]().cuda(), inputs(name, edges)
            for _ in range(2):
                step(layer, x, *args)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step(layer, x, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")


# Sizes and memory ##########################################################################


@pytest.fixture
def much_memory():
    """Gives back what a test took, for those that run beside it."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def hub(num_nodes, num_edges):
    """One target and one source with a million edges each, among others."""
    edges = graph(num_nodes, 2 * num_edges)
    edges[1, :num_edges] = 3
    edges[0, num_edges:] = 5
    return edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hub_of_a_million_edges(dtype):
    edges = hub(200_000, 1_000_000)
    adj = Adjacency.from_pair(*edges, 200_000, 200_000)
    x = torch.randn(200_000, 8, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.rand(2_000_000, device="cuda", dtype=dtype, requires_grad=True)
    for op in (ops.spmm, ops.reduce):
        found = []
        for _ in range(3):
            out = op(x, adj, weight)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (x, weight))])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    exact = torch.zeros(200_000, 8, device="cuda", dtype=torch.float64)
    exact.index_add_(0, edges[1], x.detach().double()[edges[0]] * weight.detach().double()[:, None])
    error = (ops.spmm(x, adj, weight).double() - exact).abs().max() / exact.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def rows(op, num_nodes, heads, channels, dtype=torch.float32):
    """Returns random operands of attention: those that have a row for each node, and vectors."""
    shapes = [(num_nodes, heads, channels)] * 3
    if op == "gatv2":
        shapes[2] = (heads, channels)
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def attention(op, edge_index, a, b, c):
    """The operation by tensors of the size of the edges."""
    source, target = edge_index
    if op == "gatv2":
        value, scores = a, torch.nn.functional.leaky_relu(a[source] + b[target], 0.2) * c
    else:
        value, scores = c, a[target] * b[source] / a.size(-1) ** 0.5
    weights = softmax(scores.sum(-1), target, num_nodes=value.size(0))
    return torch.zeros_like(value).index_add_(0, target, weights.unsqueeze(-1) * value[source])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.usefixtures("much_memory")
def test_attention_at_a_hub_of_a_million_edges(op, dtype):
    num_nodes = 200_000
    edges = hub(num_nodes, 1_000_000)
    adj = Adjacency.from_pair(*edges, num_nodes, num_nodes)
    given = rows(op, num_nodes, 4, 8, dtype)
    shapes = [(2_000_000, 3), (num_nodes, 3) if op == "gatv2" else None, (32, 3)]
    features = EdgeFeatures(
        *(s and torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes)
    )
    loops = {"num_loops": num_nodes} if op == "gatv2" else {}
    for more in ({}, {"edges": features, **loops}):
        leaves = [*given, *(t for t in more.get("edges", ()) if t is not None)]
        found = []
        for _ in range(3):
            out, _ = getattr(ops, op)(*given, adj, **more)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    exact = attention(op, edges, *(t.detach().double() for t in given))
    out, _ = getattr(ops, op)(*given, adj)
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", LAYERS)
def test_more_rows_than_a_grid_dimension_has(name):
    num_nodes = 300_000
    x = torch.randn(num_nodes, 16, device="cuda", requires_grad=True)
    compare(LAYERS[name]().cuda(), x, *inputs(name, graph(num_nodes, 900_000)))


@pytest.mark.usefixtures("much_memory")
def test_more_than_two_to_the_31_elements():
    num_nodes, width = 17_000_000, 130
    edges = graph(num_nodes, 3_000_000)
    edges[:, 0] = num_nodes - 1
    adj = Adjacency.from_pair(*edges, num_nodes, num_nodes)
    x = torch.ones(num_nodes, width, device="cuda", dtype=torch.bfloat16)
    x[:, 129] = 2
    x.requires_grad_()
    degree = torch.zeros(num_nodes, device="cuda").index_add_(
        0, edges[1], torch.ones(3_000_000, device="cuda")
    )
    out = ops.spmm(x, adj)
    assert torch.equal(out[:, 0].float(), degree)
    assert torch.equal(out[:, 129].float(), 2 * degree)
    del out
    best = ops.reduce(x, adj)
    assert torch.equal(best[:, 129].float(), 2 * (degree > 0).float())
    (grad,) = torch.autograd.grad(best[:, 128:].sum(), x)
    assert float(grad[:, 128:].float().sum(dtype=torch.float64)) == pytest.approx(
        2 * int((degree > 0).sum()), rel=2e-2
    )
    assert not grad[:, :128].any()


@pytest.mark.parametrize("failures", [1, 2])
def test_no_memory_for_the_code_of_a_kernel(failures, monkeypatch):
    """The memory that PyTorch keeps is given back first; the dtype is not given up."""
    import cupy
    from cupy_backends.cuda.api import driver

    real, calls = cupy.RawModule, []

    def module(*args, **kwargs):
        calls.append(args)
        if len(calls) <= failures:
            raise driver.CUDADriverError(2)
        return real(*args, **kwargs)

    device, engine = torch.device("cuda", 0), CUDAEngine(CUDARuntime())
    adj, x = Adjacency.from_pair(*graph(), 60, 60), torch.ones(60, 8, device=device)
    monkeypatch.setitem(engines._engines, device, engine)
    monkeypatch.setattr(cupy, "RawModule", module)
    if failures == 1:
        ops.spmm(x, adj)
    else:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="no memory on device 0"):
            ops.spmm(x, adj)
    assert len(calls) == 2
    assert not engine.broken


@pytest.mark.parametrize("ties", ["even", "exact"])
@pytest.mark.parametrize("width", [8, 7])  # in pairs, and one by one
@pytest.mark.parametrize("bits", [0x0040, 0x0000, 0x3F80])
def test_all_shares_of_a_tiny_maximum_in_bfloat16(bits, width, ties):
    """Passes agree on which numbers are equal, where comparisons of floats flush some to zero."""
    x = torch.zeros(100, width, dtype=torch.int16)
    x[3] = bits
    x = x.view(torch.bfloat16).cuda().requires_grad_()
    source = torch.arange(100, device="cuda")
    adj = Adjacency.from_pair(source, torch.zeros_like(source), 100, 1)
    (grad,) = torch.autograd.grad(ops.reduce(x, adj, ties=ties).sum(), x)
    # Of a result of zero, the buffer that scatter_reduce starts from shares, too.
    assert grad.float().sum(0).tolist() == pytest.approx([1.0] * width, abs=0.02)


@pytest.mark.parametrize("ties", ["even", "first", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [128, 600, 47])
@pytest.mark.parametrize("longest", [100, 5_000, 40_000])  # marks of 8, 16 and 32 bits
def test_marks_that_are_scanned(monkeypatch, longest, width, dtype, ties):
    """Gradients are those of marks that are not, but for the order of sums."""
    source, target = graph(500, 20_000)
    source = torch.cat([source, torch.arange(longest, device="cuda") % 500])
    target = torch.cat([target, target.new_full((longest,), 500)])
    adj = Adjacency.from_pair(source, target, 500, 501)
    x = torch.randn(500, width, device="cuda", dtype=dtype)
    x[:, ::5] = x[:, ::5].round()  # some tie
    out = ops.reduce(x.requires_grad_(), adj, ties=ties)
    grad = torch.randn_like(out)
    found = []
    for edges in (10**9, 0, 0):
        monkeypatch.setattr(reduce_backward, "SCANNED", edges)
        found += torch.autograd.grad(out, x, grad, retain_graph=True)
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.usefixtures("much_memory")
def test_attention_over_more_than_two_to_the_31_elements(op):
    num_nodes, num_edges, high = 17_000_000, 3_000_000, 16_600_000
    source, target = edges = graph(num_nodes, num_edges)
    edges[:, 0] = num_nodes - 1
    adj = Adjacency.from_pair(*edges, num_nodes, num_nodes)
    # Scores are zero, and so the result is the mean of values that only the last rows have.
    zeros = torch.zeros(num_nodes, 2, 65, device="cuda", dtype=torch.bfloat16)
    value = zeros.clone()
    value[high:] = 1
    value.requires_grad_()
    given = (value, zeros, zeros[0]) if op == "gatv2" else (zeros, zeros, value)
    out, _ = getattr(ops, op)(*given, adj)
    ones = torch.ones(num_edges, device="cuda")
    share = 1 / torch.zeros(num_nodes, device="cuda").index_add_(0, target, ones).clamp(min=1)
    mean = share.new_zeros(num_nodes).index_add_(0, target, (source >= high).float()) * share
    assert mean[high:].any()
    for head, channel in ((0, 0), (1, 64)):
        found = out[:, head, channel].float()
        torch.testing.assert_close(found, mean, rtol=1e-2, atol=1e-2)
    (grad,) = torch.autograd.grad(out[:, 1, 64].sum(), value)
    expected = torch.zeros_like(share).index_add_(0, source, share[target])
    torch.testing.assert_close(grad[:, 1, 64].float(), expected, rtol=1e-2, atol=1e-2)
    assert not grad[:, 0].any()
    assert not grad[:, 1, :64].any()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_views_that_are_not_aligned(dtype, offset):
    edges = graph()
    buffer = torch.randn(60 * 16 + offset, device="cuda", dtype=dtype)
    x = buffer[offset:].view(60, 16).requires_grad_()
    for name, make in LAYERS.items():
        args = inputs(name, edges, dtype)
        compare(make().to("cuda", dtype), x.detach().requires_grad_(), *args, draws=10)


def test_peak_memory_of_a_step():
    num_nodes, num_edges, width = 100_000, 2_000_000, 128
    edges, row = graph(num_nodes, num_edges), num_nodes * width * 4
    x = torch.randn(num_nodes, width, device="cuda", requires_grad=True)
    cotangent = torch.randn_like(x)
    adj = Adjacency.from_pair(*edges, num_nodes, num_nodes)
    adj.by_source_in_place  # noqa: B018
    for op, arrays in ((ops.spmm, 0.5), (ops.reduce, 3)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = op(x, adj)
        (grad,) = torch.autograd.grad(out, x, cotangent)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= (2 + arrays) * row, (op, peak / row)
        del out, grad


@pytest.mark.parametrize(("op", "results", "arrays"), [("gatv2", 3, 4), ("transformer", 4, 5)])
def test_peak_memory_of_a_step_of_attention(op, results, arrays):
    num_nodes, num_edges = 100_000, 2_000_000
    adj = Adjacency.from_pair(*graph(num_nodes, num_edges), num_nodes, num_nodes)
    adj.by_source_in_place  # noqa: B018
    given = rows(op, num_nodes, 4, 32)
    cotangent, row = torch.randn_like(given[0]), given[0].nbytes
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, _ = getattr(ops, op)(*given, adj)
        grads = torch.autograd.grad(out, given, cotangent)
        peak = torch.cuda.max_memory_allocated() - before
        del out, grads
    assert peak <= (results + arrays) * row, peak / row


def test_a_new_graph_at_every_step_frees_what_it_took():
    layer = SAGEConv(16, 16, aggr="max").cuda()
    x = torch.randn(5_000, 16, device="cuda", requires_grad=True)
    held = []
    with pyg_ioaware.patched(strict=True):
        for i in range(12):
            step(layer, x, graph(5_000, 100_000, seed=i))
            gc.collect()
            held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[3]


def test_out_of_memory_is_reported_as_such():
    edges = graph(1000, 2000)
    adj = Adjacency.from_pair(*edges, 1000, 1000)
    gc.collect()
    torch.cuda.empty_cache()  # or what is left of a larger block holds the result
    x = torch.ones(1000, 2**15, device="cuda")
    # A limit of this process only: others run on the same GPU. Half of the result fits.
    limit = torch.cuda.memory_reserved() + x.nbytes // 2
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            ops.spmm(x, adj)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ops.spmm(torch.ones(1000, 4, device="cuda"), adj).isfinite().all()
