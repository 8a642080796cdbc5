"""prepare compiles the kernels that layers launch on that graph; none of them is run."""

import pytest
import torch
from runtime import Recorder, installed
from torch import Tensor
from torch_geometric.nn import GATv2Conv, SAGEConv, TransformerConv

import pyg_ioaware
from pyg_ioaware.engines.cuda import CUDAEngine


def _edges(num_nodes: int, num_edges: int, hub: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edges[1, :hub], edges[0, num_edges - hub :] = 0, 0
    return edges


GRAPHS = {
    "few": (3, _edges(3, 4)),
    "short": (400, _edges(400, 800)),
    "usual": (200, _edges(200, 3000)),
    "long": (60, _edges(60, 3000)),
    "short_and_hubs": (2000, _edges(2000, 4000, 300)),
    "long_and_hubs": (60, _edges(60, 6000, 300)),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_all_is_compiled(graph: str) -> None:
    num_nodes, edges = GRAPHS[graph]
    recorder = Recorder()
    layers = [
        *(SAGEConv(16, 16, aggr=aggr) for aggr in ("mean", "max")),
        *(GATv2Conv(16, 8, heads=2, add_self_loops=loops) for loops in (False, True)),
        TransformerConv(16, 8, heads=2),
    ]
    x = torch.randn(num_nodes, 16, requires_grad=True)
    with installed(CUDAEngine(recorder)), pyg_ioaware.patched(strict=True):
        pyg_ioaware.prepare(edges, num_nodes, width=16, attention=(2, 8))
        compiled = set(recorder.kernels)
        for layer in layers:
            layer(x, edges).sum().backward()
            with torch.no_grad():
                layer(x, edges)
    assert len(compiled) > 10
    assert set(recorder.kernels) == compiled
