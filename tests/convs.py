"""Every convolution of PyG: how to make it, what to call it with, and how it runs patched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from graphs import Graph, features
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric import nn

F, C = 12, 8  # features in and out

WHOLE, PART, STOCK = "whole", "in part", "stock"


@dataclass(frozen=True)
class Conv:
    """One row of the table.

    Attributes:
        make: Makes the layer.
        inputs: Makes the arguments for a graph: edge_index, x and the rest by name.
        fuses: WHOLE if every aggregation runs fused, PART if some do, STOCK if none does.
    """

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[Graph], dict[str, Any]]
    fuses: str


def x_only(graph: Graph) -> dict[str, Any]:
    return {"x": features(graph.num_src, F).requires_grad_(), "edge_index": graph.edge_index}


def weighted(graph: Graph) -> dict[str, Any]:
    return x_only(graph) | {"edge_weight": edge_weight(graph)}


def edge_weight(graph: Graph, requires_grad: bool = True) -> Tensor:
    weight = features(graph.num_edges, seed=1).abs() + 0.1
    return weight.requires_grad_(requires_grad)


def _plus(**more: Callable[[Graph], Any]) -> Callable[[Graph], dict[str, Any]]:
    return lambda graph: x_only(graph) | {name: make(graph) for name, make in more.items()}


def _edge_attr(width: int) -> Callable[[Graph], Tensor]:
    return lambda graph: features(graph.num_edges, width, seed=2).sigmoid().requires_grad_()


def _nodes(width: int, seed: int = 3) -> Callable[[Graph], Tensor]:
    return lambda graph: features(graph.num_src, width, seed=seed).requires_grad_()


def _edge_type(graph: Graph) -> Tensor:
    return torch.arange(graph.num_edges) % 3


def _node_type(graph: Graph) -> Tensor:
    return torch.arange(graph.num_src) % 2


def _hidden(graph: Graph) -> dict[str, Any]:
    return {"x": _nodes(C)(graph), "edge_index": graph.edge_index}


def _initial(graph: Graph) -> dict[str, Any]:
    return _hidden(graph) | {"x_0": _nodes(C, seed=4)(graph)}


def _signed(graph: Graph) -> dict[str, Any]:
    half = graph.num_edges // 2
    return {
        "x": _nodes(F)(graph),
        "pos_edge_index": graph.edge_index[:, :half],
        "neg_edge_index": graph.edge_index[:, half:],
    }


def _layers(graph: Graph) -> dict[str, Any]:
    x = features(graph.num_src, 3, C).requires_grad_()
    return {"x": x, "edge_index": graph.edge_index}


def _colours(graph: Graph) -> dict[str, Any]:
    return {"x": _node_type(graph), "edge_index": graph.edge_index}


def _hyper(graph: Graph) -> dict[str, Any]:
    return {"x": _nodes(F)(graph), "hyperedge_index": graph.edge_index}


def _mesh(graph: Graph) -> dict[str, Any]:
    # Each edge of a mesh has exactly four neighbours.
    n = max(graph.num_src, 5)
    target = torch.arange(n).repeat_interleave(4)
    source = (target + torch.arange(1, 5).repeat(n)) % n
    return {"x": features(n, F).requires_grad_(), "edge_index": torch.stack([target, source])}


def _hetero(graph: Graph) -> dict[str, Any]:
    return {
        "x_dict": {"a": _nodes(F)(graph), "b": _nodes(F, seed=5)(graph)},
        "edge_index_dict": {
            ("a", "to", "b"): graph.edge_index,
            ("b", "to", "a"): graph.edge_index.flip(0),
            ("a", "to", "a"): graph.edge_index[:, ::2],
        },
    }


_METADATA = (["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")])


def _mlp(width: int, out: int = C) -> Sequential:
    return Sequential(Linear(width, out), ReLU(), Linear(out, out))


def _degrees() -> Tensor:
    return torch.tensor([1, 2, 5, 3, 1])


CONVS: dict[str, Conv] = {
    # Messages are 'x_j' or a weight per edge (and head) times 'x_j', and nothing else.
    "SimpleConv": Conv(lambda: nn.SimpleConv("mean", "self_loop"), weighted, WHOLE),
    "GCNConv": Conv(lambda: nn.GCNConv(F, C), weighted, WHOLE),
    "ChebConv": Conv(lambda: nn.ChebConv(F, C, K=3), weighted, WHOLE),
    "SAGEConv": Conv(lambda: nn.SAGEConv(F, C), x_only, WHOLE),
    "GraphConv": Conv(lambda: nn.GraphConv(F, C), weighted, WHOLE),
    "GatedGraphConv": Conv(lambda: nn.GatedGraphConv(F, num_layers=2), weighted, WHOLE),
    "TAGConv": Conv(lambda: nn.TAGConv(F, C, K=2), weighted, WHOLE),
    "GINConv": Conv(lambda: nn.GINConv(_mlp(F), train_eps=True), x_only, WHOLE),
    "SGConv": Conv(lambda: nn.SGConv(F, C, K=2), weighted, WHOLE),
    "SSGConv": Conv(lambda: nn.SSGConv(F, C, alpha=0.1, K=2), weighted, WHOLE),
    "APPNP": Conv(lambda: nn.APPNP(K=3, alpha=0.1), weighted, WHOLE),
    "MFConv": Conv(lambda: nn.MFConv(F, C, max_degree=3), x_only, WHOLE),
    "SignedConv": Conv(lambda: nn.SignedConv(F, C, first_aggr=True), _signed, WHOLE),
    "ClusterGCNConv": Conv(lambda: nn.ClusterGCNConv(F, C, diag_lambda=0.5), x_only, WHOLE),
    "GCN2Conv": Conv(lambda: nn.GCN2Conv(C, alpha=0.1, theta=0.5, layer=2), _initial, WHOLE),
    "WLConvContinuous": Conv(nn.WLConvContinuous, weighted, WHOLE),
    "LGConv": Conv(nn.LGConv, weighted, WHOLE),
    "MixHopConv": Conv(lambda: nn.MixHopConv(F, C, powers=[0, 1, 2]), weighted, WHOLE),
    "AntiSymmetricConv": Conv(
        lambda: nn.AntiSymmetricConv(C, phi=nn.GCNConv(C, C), num_iters=2), _hidden, WHOLE
    ),
    "DirGNNConv": Conv(lambda: nn.DirGNNConv(nn.GraphConv(F, C)), x_only, WHOLE),
    "HeteroConv": Conv(
        lambda: nn.HeteroConv({edge: nn.SAGEConv((F, F), C) for edge in _METADATA[1]}),
        _hetero,
        WHOLE,
    ),
    "GPSConv": Conv(
        lambda: nn.GPSConv(C, nn.GCNConv(C, C), heads=2, attn_kwargs={"dropout": 0.0}),
        _hidden,
        WHOLE,
    ),
    "RGCNConv": Conv(lambda: nn.RGCNConv(F, C, 3, num_bases=2), _plus(edge_type=_edge_type), WHOLE),
    "PANConv": Conv(lambda: nn.PANConv(F, C, filter_size=2), x_only, WHOLE),
    "PDNConv": Conv(
        lambda: nn.PDNConv(F, C, edge_dim=2, hidden_channels=4),
        _plus(edge_attr=_edge_attr(2)),
        WHOLE,
    ),
    "GeneralConv": Conv(lambda: nn.GeneralConv(F, C, attention=True, heads=2), x_only, WHOLE),
    "HypergraphConv": Conv(lambda: nn.HypergraphConv(F, C), _hyper, WHOLE),
    "EGConv": Conv(
        lambda: nn.EGConv(F, C, ["sum", "max", "symnorm"], num_heads=2, num_bases=2), x_only, WHOLE
    ),
    # The scores are stock's; weighting and summing the values is one product.
    "AGNNConv": Conv(nn.AGNNConv, x_only, WHOLE),
    "GATConv": Conv(
        lambda: nn.GATConv(F, C, heads=2, edge_dim=3), _plus(edge_attr=_edge_attr(3)), WHOLE
    ),
    "GATv2Conv": Conv(lambda: nn.GATv2Conv(F, C, heads=2), x_only, WHOLE),
    "TransformerConv": Conv(lambda: nn.TransformerConv(F, C, heads=2), x_only, WHOLE),
    "SuperGATConv": Conv(lambda: nn.SuperGATConv(F, C, heads=2, dropout=0.5), x_only, WHOLE),
    "FAConv": Conv(lambda: nn.FAConv(C), _initial, WHOLE),
    # The values are looked at before they are weighted.
    "RGATConv": Conv(
        lambda: nn.RGATConv(F, C, num_relations=3, heads=2), _plus(edge_type=_edge_type), STOCK
    ),
    "HANConv": Conv(lambda: nn.HANConv(F, C, _METADATA, heads=2), _hetero, STOCK),
    "HGTConv": Conv(lambda: nn.HGTConv(F, C, _METADATA, heads=2), _hetero, STOCK),
    "HEATConv": Conv(
        lambda: nn.HEATConv(F, C, 2, 3, 4, 3, 5, heads=2),
        _plus(node_type=_node_type, edge_type=_edge_type, edge_attr=_edge_attr(3)),
        STOCK,
    ),
    # Messages that depend on more than one node or on edge features.
    "GINEConv": Conv(
        lambda: nn.GINEConv(_mlp(F), edge_dim=3), _plus(edge_attr=_edge_attr(3)), STOCK
    ),
    "ResGatedGraphConv": Conv(lambda: nn.ResGatedGraphConv(F, C), x_only, STOCK),
    "ARMAConv": Conv(lambda: nn.ARMAConv(F, C, num_stacks=2, num_layers=2), weighted, STOCK),
    "FastRGCNConv": Conv(
        lambda: nn.FastRGCNConv(F, C, 3, num_bases=2), _plus(edge_type=_edge_type), STOCK
    ),
    "DNAConv": Conv(lambda: nn.DNAConv(C, heads=2), _layers, STOCK),
    "PointNetConv": Conv(
        lambda: nn.PointNetConv(_mlp(F + 3), _mlp(C)), _plus(pos=_nodes(3)), STOCK
    ),
    "GMMConv": Conv(
        lambda: nn.GMMConv(F, C, dim=2, kernel_size=3), _plus(edge_attr=_edge_attr(2)), STOCK
    ),
    "NNConv": Conv(
        lambda: nn.NNConv(F, C, Linear(2, F * C)), _plus(edge_attr=_edge_attr(2)), STOCK
    ),
    "CGConv": Conv(lambda: nn.CGConv(F, dim=2), _plus(edge_attr=_edge_attr(2)), STOCK),
    "EdgeConv": Conv(lambda: nn.EdgeConv(_mlp(2 * F)), x_only, STOCK),
    "PPFConv": Conv(
        lambda: nn.PPFConv(_mlp(F + 4), _mlp(C)),
        _plus(pos=_nodes(3, seed=6), normal=_nodes(3, seed=7)),
        STOCK,
    ),
    "FeaStConv": Conv(lambda: nn.FeaStConv(F, C, heads=2), x_only, STOCK),
    "PointTransformerConv": Conv(
        lambda: nn.PointTransformerConv(F, C), _plus(pos=_nodes(3)), STOCK
    ),
    "LEConv": Conv(lambda: nn.LEConv(F, C), weighted, STOCK),
    "PNAConv": Conv(
        lambda: nn.PNAConv(F, C, ["mean", "max", "std"], ["identity", "amplification"], _degrees()),
        x_only,
        STOCK,
    ),
    "GENConv": Conv(lambda: nn.GENConv(F, C), x_only, STOCK),
    "WLConv": Conv(nn.WLConv, _colours, STOCK),
    "FiLMConv": Conv(lambda: nn.FiLMConv(F, C), x_only, STOCK),
    "PointGNNConv": Conv(
        lambda: nn.PointGNNConv(_mlp(F, 3), _mlp(F + 3), _mlp(C, F)), _plus(pos=_nodes(3)), STOCK
    ),
    "MeshCNNConv": Conv(lambda: nn.MeshCNNConv(F, C), _mesh, STOCK),
}

# They cannot be built without other packages or a GPU.
UNAVAILABLE = {
    "CuGraphSAGEConv": "cugraph",
    "CuGraphGATConv": "cugraph",
    "CuGraphRGCNConv": "cugraph",
    "FusedGATConv": "dgNN",
    "GravNetConv": "pyg-lib",
    "DynamicEdgeConv": "pyg-lib",
    "XConv": "pyg-lib",
    "SplineConv": "torch_spline_conv",
}

# Options of the layers that fuse whole. Those named in WEIGHTED take an 'edge_weight'.
OPTIONS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCN": lambda: nn.GCNConv(F, C),
    "GCN-improved": lambda: nn.GCNConv(F, C, improved=True, bias=False),
    "GCN-no-loops": lambda: nn.GCNConv(F, C, add_self_loops=False),
    "GCN-no-norm": lambda: nn.GCNConv(F, C, normalize=False),
    "GCN-cached": lambda: nn.GCNConv(F, C, cached=True),
    "GCN-max": lambda: nn.GCNConv(F, C, aggr="max"),
    "SAGE-mean": lambda: nn.SAGEConv(F, C),
    "SAGE-sum": lambda: nn.SAGEConv(F, C, aggr="sum"),
    "SAGE-max": lambda: nn.SAGEConv(F, C, aggr="max"),
    "SAGE-min": lambda: nn.SAGEConv(F, C, aggr="min", root_weight=False),
    "SAGE-list": lambda: nn.SAGEConv(F, C, aggr=["mean", "max", "min", "sum"]),
    "SAGE-normalize": lambda: nn.SAGEConv(F, C, normalize=True, bias=False),
    "SAGE-project": lambda: nn.SAGEConv(F, C, aggr="max", project=True),
    "GraphConv": lambda: nn.GraphConv(F, C),
    "GraphConv-mean": lambda: nn.GraphConv(F, C, aggr="mean"),
    "GraphConv-max": lambda: nn.GraphConv(F, C, aggr="max"),
    "GIN": lambda: nn.GINConv(_mlp(F), eps=0.5, train_eps=True),
    "TAG": lambda: nn.TAGConv(F, C, K=2),
    "TAG-no-norm": lambda: nn.TAGConv(F, C, K=2, normalize=False),
    "SG": lambda: nn.SGConv(F, C, K=2),
    "SG-cached": lambda: nn.SGConv(F, C, K=2, cached=True),
    "SSG": lambda: nn.SSGConv(F, C, alpha=0.2, K=2),
    "SSG-cached": lambda: nn.SSGConv(F, C, alpha=0.2, K=2, cached=True),
    "APPNP": lambda: nn.APPNP(K=2, alpha=0.2),
    "APPNP-cached": lambda: nn.APPNP(K=2, alpha=0.2, cached=True),
    "APPNP-dropout": lambda: nn.APPNP(K=2, alpha=0.2, dropout=0.5),
    "LG": nn.LGConv,
    "LG-no-norm": lambda: nn.LGConv(normalize=False),
    "Cheb": lambda: nn.ChebConv(F, C, K=3),
    "Cheb-rw": lambda: nn.ChebConv(F, C, K=2, normalization="rw"),
    "GCN2": lambda: nn.GCN2Conv(C, alpha=0.1, theta=0.5, layer=3),
    "GCN2-two-weights": lambda: nn.GCN2Conv(C, alpha=0.1, shared_weights=False, cached=True),
    "ClusterGCN": lambda: nn.ClusterGCNConv(F, C, diag_lambda=0.3),
    "MF": lambda: nn.MFConv(F, C, max_degree=3),
    "GatedGraph": lambda: nn.GatedGraphConv(F, num_layers=2),
    "Simple-cat": lambda: nn.SimpleConv("sum", combine_root="cat"),
    "Simple-list": lambda: nn.SimpleConv(["max", "mean"]),
    "MixHop": lambda: nn.MixHopConv(F, C, powers=[1, 2], add_self_loops=False),
    "AntiSymmetric": lambda: nn.AntiSymmetricConv(C),
    "DirGNN": lambda: nn.DirGNNConv(nn.SAGEConv(F, C, aggr="max")),
    "WLContinuous": nn.WLConvContinuous,
    "GAT": lambda: nn.GATConv(F, C, heads=2),
    "GAT-mean": lambda: nn.GATConv(F, C, heads=3, concat=False, add_self_loops=False),
    "GAT-one-head": lambda: nn.GATConv(F, C, dropout=0.5),
    "GATv2": lambda: nn.GATv2Conv(F, C, heads=2),
    "Transformer": lambda: nn.TransformerConv(F, C, heads=2),
}
WEIGHTED = ("GCN", "GraphConv", "TAG", "SG", "SSG", "APPNP", "LG", "Cheb", "GCN2", "GatedGraph")
WEIGHTED += ("Simple", "MixHop", "WLContinuous")
_CHANNELS = ("GCN2", "AntiSymmetric")


def takes_weight(option: str) -> bool:
    return option.split("-")[0] in WEIGHTED


def node_inputs(option: str, num_nodes: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Makes the node features that an option takes."""
    width = C if option.split("-")[0] in _CHANNELS else F
    found = {"x": features(num_nodes, width, dtype=dtype).requires_grad_()}
    if option.startswith("GCN2"):
        found["x_0"] = features(num_nodes, width, seed=4, dtype=dtype).requires_grad_()
    return found
