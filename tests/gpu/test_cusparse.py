"""Sums by cuSPARSE where that is asked for: the same results, kept per structure, on any stream."""

import gc

import pytest
import torch
from torch_geometric.nn import GCNConv, SAGEConv, SimpleConv

import pyg_ioaware
from pyg_ioaware import ops
from pyg_ioaware.engines.cuda import cusparse
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.testing import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TIGHT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def forced():
    pyg_ioaware.preferred_spmm("cusparse")
    yield
    pyg_ioaware.preferred_spmm("auto")
    assert not cusparse._refused


def graph(num_nodes=60, num_edges=900, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    edges = torch.randint(0, num_nodes, (2, num_edges), generator=g, device="cuda")
    edges[1, : num_edges // 2] = 3  # split by the kernels, and many targets without edges
    adj = Adjacency.from_pair(*edges, num_nodes, num_nodes)
    assert adj is not None
    return edges, adj


def products():
    return sum(len(kept) for kept in cusparse._products.values())


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", list(TIGHT))
def test_results_and_gradients(dtype, weighted, mean):
    edges, adj = graph()
    before = products()
    made = [torch.randn(60, 24, device="cuda"), torch.rand(900, device="cuda")][: 1 + weighted]
    given = [t.to(dtype).requires_grad_() for t in made]
    out = ops.spmm(given[0], adj, *given[1:], mean=mean)
    exact = [t.detach().double().requires_grad_() for t in given]
    rows = exact[0][edges[0]] * (exact[1].view(-1, 1) if weighted else 1)
    wanted = torch.zeros(60, 24, device="cuda", dtype=torch.float64).index_add(0, edges[1], rows)
    if mean:
        wanted = wanted / torch.bincount(edges[1], minlength=60).clamp(min=1).view(-1, 1)
    factor = torch.randn_like(wanted).to(dtype)
    found = [out, *torch.autograd.grad(out, given, factor)]
    right = [wanted, *torch.autograd.grad(wanted, exact, factor.double())]
    for a, b in zip(found, right, strict=True):
        assert a.dtype is dtype
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a.double(), b, rtol=TIGHT[dtype], atol=TIGHT[dtype] * largest)
    assert products() > before


@pytest.mark.parametrize("conv", [GCNConv, SAGEConv, SimpleConv])
def test_layers(conv):
    layer = conv() if conv is SimpleConv else conv(16, 16)
    x = torch.randn(60, 16, device="cuda", requires_grad=True)
    before = products()
    assert all(c.fused for c in compare(layer.cuda(), x, graph()[0], steps=2, draws=10).values())
    assert products() > before


def test_explain_says_which_and_why():
    layer, x, edges = GCNConv(16, 16).cuda(), torch.randn(60, 16, device="cuda"), graph()[0]
    assert "sums by cuSPARSE: as was asked for" in str(pyg_ioaware.explain(layer, x, edges))
    pyg_ioaware.preferred_spmm("auto")
    assert "sums by own kernel: its bits repeat" in str(pyg_ioaware.explain(layer, x, edges))


@pytest.mark.parametrize("why", ["per head", "off 16 bytes"])
def test_what_it_has_no_form_for_runs_on_the_kernel(why):
    _, adj = graph()
    x, weight = torch.randn(61, 2, 6, device="cuda"), torch.rand(900, 2, device="cuda")
    before = products()
    if why == "per head":
        ops.spmm(x[:60], adj, weight)
    else:
        ops.spmm(x.flatten()[1 : 1 + 60 * 12].view(60, 12), adj)
    assert products() == before


def test_bits_repeat_under_the_deterministic_flag():
    _, adj = graph(2000, 200_000)
    x = torch.randn(2000, 64, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first = ops.spmm(x, adj)
        assert all(torch.equal(ops.spmm(x, adj), first) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)


def test_streams_have_their_own_workspace():
    _, adj = graph(2000, 200_000)
    x = torch.randn(2000, 64, device="cuda")
    wanted = ops.spmm(x.double(), adj).float()
    sides = [torch.cuda.Stream() for _ in range(4)]
    found = []
    torch.cuda.synchronize()
    for i in range(40):
        with torch.cuda.stream(sides[i % 4]):
            found.append(ops.spmm(x, adj))
    torch.cuda.synchronize()
    for out in found:
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-3)


def test_a_captured_graph():
    _, adj = graph()
    adj.by_source_in_place  # noqa: B018
    x = torch.randn(60, 16, device="cuda", requires_grad=True)

    def step():
        out = ops.spmm(x, adj, mean=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x])]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    for seed in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(60, 16, generator=torch.Generator().manual_seed(seed)))
        captured.replay()
        for a, b in zip(found, step(), strict=True):
            torch.testing.assert_close(a, b)


def test_what_was_kept_goes_with_the_structure():
    gc.collect()
    before, memory = products(), torch.cuda.memory_allocated()
    _, adj = graph(2000, 200_000)
    x = torch.randn(2000, 64, device="cuda", requires_grad=True)
    for _ in range(3):
        ops.spmm(x, adj).sum().backward()
    assert products() == before + 2  # one for each direction
    del adj, x
    gc.collect()
    assert products() == before
    assert torch.cuda.memory_allocated() <= memory + 2**20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors():
    edges, adj = graph()
    x = torch.randn(60, 16, device="cuda")
    wanted = ops.spmm(x, adj)
    there = Adjacency.from_pair(*edges.to("cuda:1"), 60, 60)
    torch.testing.assert_close(ops.spmm(x.to("cuda:1"), there).to("cuda:0"), wanted)
    assert torch.cuda.current_device() == 0
