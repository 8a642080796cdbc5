"""Biases of layers on an engine that sums over rows no faster than PyTorch: all is as before."""

import pytest
import torch
from graphs import BY_NUMBA, SQUARE, features
from torch_geometric.nn import GATv2Conv, GCNConv, SAGEConv, TransformerConv

import pyg_ioaware
from pyg_ioaware.ops import bias

pytestmark = pytest.mark.skipif(not BY_NUMBA, reason="about the engine of the CPU")

LAYERS = {
    "GCN": lambda: GCNConv(8, 6),
    "SAGE": lambda: SAGEConv(8, 6, project=True),
    "GATv2": lambda: GATv2Conv(8, 3, heads=2),
    "Transformer": lambda: TransformerConv(8, 3, heads=2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_left_to_pytorch(dtype: torch.dtype) -> None:
    assert not bias.sums_columns(torch.empty(0, dtype=dtype), bias.MANY)
    assert not bias.sums_columns(torch.empty(0, dtype=dtype, device="meta"), bias.MANY)


@pytest.mark.parametrize("name", LAYERS)
def test_large_outputs_are_as_small_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def applied(*args: object) -> None:
        raise AssertionError("a bias was added by us")

    g, conv, found = SQUARE["unsorted"], LAYERS[name](), []
    monkeypatch.setattr(bias._Biased, "apply", applied)
    for bias_many in (bias.MANY, 1):
        monkeypatch.setattr(bias, "MANY", bias_many)
        x = features(g.num_src, 8).requires_grad_()
        with pyg_ioaware.patched(strict=True):
            out = conv(x, g.edge_index)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
