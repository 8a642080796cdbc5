"""On a GPU there is no engine yet: everything runs on stock PyG, and says so."""

import subprocess
import sys

import pytest
import torch
from torch_geometric.nn import (
    ChebConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    MaxAggregation,
    SAGEConv,
    TransformerConv,
)

import pyg_ioaware

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYERS = {
    "GCN": lambda: GCNConv(16, 8),
    "SAGE-mean": lambda: SAGEConv(16, 8),
    "SAGE-max": lambda: SAGEConv(16, 8, aggr="max"),
    "SAGE-list": lambda: SAGEConv(16, 8, aggr=["max", "mean", "std"]),
    "GIN": lambda: GINConv(torch.nn.Linear(16, 8)),
    "GAT": lambda: GATConv(16, 4, heads=2),
    "GATv2": lambda: GATv2Conv(16, 4, heads=2),
    "Transformer": lambda: TransformerConv(16, 4, heads=2),
    "Cheb": lambda: ChebConv(16, 8, K=2),
}


def run(layer, x, edge_index):
    layer.zero_grad()
    x.grad = None
    out = layer(x, edge_index)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_stock(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().cuda()
    x = torch.randn(50, 16, device="cuda", requires_grad=True)
    edge_index = torch.randint(0, 50, (2, 300), device="cuda")
    with torch.random.fork_rng(devices=[0]):
        stock = run(layer, x, edge_index)
    with pyg_ioaware.patched():
        ours = run(layer, x, edge_index)
        assert not pyg_ioaware.explain(layer, x, edge_index).fused
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    calls = pyg_ioaware.stats()["layers"][type(layer).__name__]
    assert calls["fused"] == 0
    assert any("no engine for device 'cuda:0'" in why for why in calls["stock"])


def test_memoised_structure_stays_on_its_device():
    layer = GCNConv(16, 8).cuda()
    edge_index = torch.randint(0, 50, (2, 300), device="cuda")
    x = torch.randn(50, 16, device="cuda")
    want = layer(x, edge_index)
    with pyg_ioaware.patched():
        first = layer(x, edge_index)
        hits = pyg_ioaware.stats()["cache"]["hits"]
        second = layer(x, edge_index)
        assert pyg_ioaware.stats()["cache"]["hits"] > hits
    torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, want, rtol=1e-5, atol=1e-6)


def test_aggregation_of_formed_messages():
    x = torch.randn(300, 16, device="cuda", requires_grad=True)
    index = torch.randint(0, 50, (300,), device="cuda")
    want = MaxAggregation()(x, index, dim_size=50)
    with pyg_ioaware.patched():
        assert torch.equal(MaxAggregation()(x, index, dim_size=50), want)


def test_import_and_patch_leave_cuda_alone():
    code = "import torch, pyg_ioaware; pyg_ioaware.patch(); assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
