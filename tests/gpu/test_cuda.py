"""What only a GPU shows: streams, devices, graphs, sizes, memory. Parity: TEST_DEVICE=cuda."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TransformerConv

import pyg_ioaware
from pyg_ioaware import ops
from pyg_ioaware.graph.csr import Adjacency
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
}
ATTENTION = {
    "GATv2": lambda: GATv2Conv(16, 4, heads=4),
    "Transformer": lambda: TransformerConv(16, 4, heads=4),
}


def graph(num_nodes=60, num_edges=600, device="cuda", seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=g, device=device)


def step(layer, x, edge_index):
    out = layer(x, edge_index)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_fused(name):
    layer, x = LAYERS[name]().cuda(), torch.randn(60, 16, device="cuda", requires_grad=True)
    layers = compare(layer, x, graph(), steps=2)
    assert all(c.fused and not c.stock for c in layers.values())
    assert pyg_ioaware.explain(layer, x, graph()).fused


@pytest.mark.parametrize("name", ATTENTION)
def test_scores_of_attention_run_on_stock(name):
    layer, x = ATTENTION[name]().cuda(), torch.randn(60, 16, device="cuda", requires_grad=True)
    layers = compare(layer, x, graph(), steps=2)
    assert all(c.fused and not c.stock for c in layers.values())
    assert "whose scores this version leaves to stock" in str(
        pyg_ioaware.explain(layer, x, graph())
    )


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


# Streams, devices and graphs ###############################################################


@pytest.mark.parametrize("name", LAYERS)
def test_a_side_stream(name):
    layer, edges = LAYERS[name]().cuda(), graph()
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    want = step(layer, x, edges)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with pyg_ioaware.patched(), torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would run before this
        found = step(layer, x.mul(1).detach().requires_grad_(), edges)
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
    x, edges = torch.randn(60, 16), graph(device="cpu")
    want = step(layer, x.clone().requires_grad_(), edges)
    with pyg_ioaware.patched():
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            there = x.to(device).requires_grad_()
            found = step(layer.to(device), there, edges.to(device))
            assert torch.cuda.current_device() == 0
            assert all(t.device == torch.device(device) for t in found)
            assert_close([t.cpu() for t in found], want)


@pytest.mark.parametrize("prepared", ["prepare", "warm"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_graph(name, prepared):
    layer, edges = LAYERS[name]().cuda(), graph()
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    with pyg_ioaware.patched(strict=True):
        if prepared == "prepare" and name not in ("GCN", "GAT"):  # these make edges of their own
            pyg_ioaware.prepare(edges, 60, width=16)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(layer, x, edges)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = step(layer, x, edges)
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
                assert_close(got, step(layer, x, edges))
    pyg_ioaware.cache_limits(max_entries=512)


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
            layer = LAYERS[name]().cuda()
            for _ in range(2):
                step(layer, x, edges)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step(layer, x, edges)
            finally:
                torch.cuda.set_sync_debug_mode("default")


# Sizes and memory ##########################################################################


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


@pytest.mark.parametrize("name", LAYERS)
def test_more_rows_than_a_grid_dimension_has(name):
    num_nodes = 300_000
    x = torch.randn(num_nodes, 16, device="cuda", requires_grad=True)
    compare(LAYERS[name]().cuda(), x, graph(num_nodes, 900_000))


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


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_views_that_are_not_aligned(dtype, offset):
    edges = graph()
    buffer = torch.randn(60 * 16 + offset, device="cuda", dtype=dtype)
    x = buffer[offset:].view(60, 16).requires_grad_()
    for make in LAYERS.values():
        compare(make().to("cuda", dtype), x.detach().requires_grad_(), edges)


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
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    edges = graph(1000, 2000)
    adj = Adjacency.from_pair(*edges, 1000, 1000)
    block = torch.empty(free - 2**27 - 2**26, dtype=torch.uint8, device="cuda")
    x = torch.ones(1000, 2**15, device="cuda")  # as large as what is left, and half of it
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ops.spmm(x, adj)
    del block
    assert ops.spmm(torch.ones(1000, 4, device="cuda"), adj).isfinite().all()
