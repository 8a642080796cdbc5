"""The attention layers of the tests: how they are made, called, and expected to run."""

from typing import Any

import torch
from graphs import Graph, features
from torch import Tensor
from torch_geometric import nn

from pyg_ioaware.nn import IOAwareGATv2Conv, IOAwareTransformerConv
from pyg_ioaware.record import LayerCalls
from pyg_ioaware.testing import compare

F, C, D = 5, 4, 3  # features in, per head, and of an edge

LAYERS: dict[str, Any] = {"GATv2": nn.GATv2Conv, "Transformer": nn.TransformerConv}
OWN: dict[str, Any] = {"GATv2": IOAwareGATv2Conv, "Transformer": IOAwareTransformerConv}


def x(graph: Graph, width: int = F, dtype: torch.dtype = torch.float32) -> Tensor:
    return features(graph.num_src, width, dtype=dtype).requires_grad_()


def pair(graph: Graph) -> tuple[Tensor, Tensor]:
    return x(graph), features(graph.num_dst, F + 1, seed=1).requires_grad_()


def attr(graph: Graph, width: int = D, dtype: torch.dtype = torch.float32) -> Tensor:
    return features(graph.num_edges, width, seed=2, dtype=dtype).requires_grad_()


def is_fused(layers: dict[str, LayerCalls]) -> bool:
    """Tells whether all attention ran as one operation, and nothing was formed besides."""
    calls = layers.values()
    return bool(layers) and all(c.fused and not c.stock and not c.formed for c in calls)


def check(conv: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compares a layer with stock, and asserts that it ran fused."""
    # The root mean square of the errors is stock's own, but of few numbers stock's largest is small
    # at times by luck: more gradients are compared at once.
    layers = compare(conv, *args, **{"draws": 10, **kwargs})
    assert is_fused(layers), layers


def why_not(layers: dict[str, LayerCalls]) -> str:
    """Returns the reasons for which attention did not run as one operation."""
    return "; ".join(why for c in layers.values() for why in (*c.stock, *c.formed))
