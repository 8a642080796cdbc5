"""The layers to measure, what each one takes, and what it is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    ClusterGCNConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)

WIDTH = 128
EDGE_DIM = 16
SHAPES = ((4, 32), (8, 8), (1, 128))
"""Heads, and channels of each, of the attention layers."""
WITH_EDGES = f"-edges{EDGE_DIM}"
"""Ends the name of a layer that takes edge features; what stands before it names its twin."""

Inputs = Callable[[Tensor, Tensor], tuple[Any, ...]]
Layers = dict[str, tuple[Any, Inputs]]


class WeightedMessage(MessagePassing):
    """A layer as users write it: a weight per edge, and a linear map."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j


def nothing(x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
    return (x, edge_index)


def weight(x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
    return (x, edge_index, torch.linspace(0.5, 1.5, edge_index.size(1)))


def initial(x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
    return (x, x.detach(), edge_index)


def edge_features(x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
    return (x, edge_index, torch.randn(edge_index.size(1), EDGE_DIM))


def make_layers() -> Layers:
    """Returns each layer, and what it takes besides x and edge_index."""
    f = WIDTH
    return {
        "GCNConv": (GCNConv(f, f), nothing),
        "SAGEConv-max": (SAGEConv(f, f, aggr="max"), nothing),
        "GraphConv": (GraphConv(f, f), nothing),
        "GINConv": (GINConv(torch.nn.Linear(f, f)), nothing),
        "TAGConv": (TAGConv(f, f), nothing),
        "SGConv": (SGConv(f, f, K=2), nothing),
        "APPNP": (APPNP(K=5, alpha=0.1), nothing),
        "LGConv": (LGConv(), nothing),
        "GCN2Conv": (GCN2Conv(f, alpha=0.1), initial),
        "ChebConv": (ChebConv(f, f, K=3), nothing),
        "ClusterGCNConv": (ClusterGCNConv(f, f), nothing),
        "WeightedMessage": (WeightedMessage(f), weight),
        "GATConv": (GATConv(f, f // 4, heads=4), nothing),
        **make_attention(),
    }


def make_attention() -> Layers:
    """Returns the attention layers: each shape, and the first one with edge features too."""
    found: Layers = {}
    for layer in (GATv2Conv, TransformerConv):
        for heads, channels in SHAPES:
            name = f"{layer.__name__}-{heads}x{channels}"
            found[name] = layer(WIDTH, channels, heads=heads), nothing
            if (heads, channels) == SHAPES[0]:
                taking = layer(WIDTH, channels, heads=heads, edge_dim=EDGE_DIM)
                found[name + WITH_EDGES] = taking, edge_features
    return found


def layer_names(wanted: list[str]) -> list[str]:
    """Returns the names that are meant: "all" and "attention" stand for several."""
    groups = {"all": make_layers, "attention": make_attention}
    return [name for w in wanted for name in (groups[w]() if w in groups else [w])]


def peers_of(name: str) -> tuple[str, ...]:
    """Returns the kinds of competitors, besides stock, that a layer is worth measuring with."""
    if name in ("GCNConv", "SAGEConv-max"):
        return ("SparseTensor", "torch.compile")
    return ("torch.compile",) if name in make_attention() else ()


class Linears(torch.nn.Module):
    """The dense part of a layer alone: each of its linear maps of nodes applied once."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        found = [
            module
            for name, module in layer.named_modules()
            if type(module).__name__ == "Linear" and name != "lin_edge"
        ]
        self.maps = torch.nn.ModuleList(found)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([m(x).sum() for m in self.maps]).sum()
