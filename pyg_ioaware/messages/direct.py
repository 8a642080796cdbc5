"""Aggregation straight from nodes, for layers whose message is known beforehand.

It gives what lazy messages would give, without making any.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_ioaware import ops, support
from pyg_ioaware.graph.cache import CACHE
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.record import RECORD


def combine(
    owner: str,
    src: Tensor,
    weight: Tensor | None,
    adj: Adjacency,
    reduce: str,
    ties: str | None = None,
) -> Tensor:
    r"""Combines the rows of each target's sources by a fused operation, and notes that.

    Args:
        owner (str): The name of the layer.
        src (torch.Tensor): Node features.
        weight (torch.Tensor, optional): Weights of shape :obj:`[E]` or :obj:`[E, H]`.
        adj (Adjacency): The structure.
        reduce (str): :obj:`"sum"`, :obj:`"mean"`, :obj:`"max"` or :obj:`"min"`.
        ties (str, optional): The rule for ties; stock PyG's if :obj:`None`.
    """
    RECORD.fused(owner)
    if reduce in ("sum", "mean"):
        return ops.spmm(src, adj, weight, mean=reduce == "mean")
    if ties is None:
        differs = src.requires_grad or (weight is not None and weight.requires_grad)
        ties = support.scatter_ties(src, differs and torch.is_grad_enabled())
    return ops.reduce(src, adj, weight, reduce=reduce, ties=ties)


def aggregate_nodes(
    conv: Any, reduce: str, edge_index: Any, x: Any, weight: Any, size: Any
) -> Tensor | None:
    r"""Aggregates :obj:`x_j`, or :obj:`edge_weight.view(-1, 1) * x_j`, as a layer propagates it.

    Args:
        conv (MessagePassing): The layer.
        reduce (str): The reduction.
        edge_index (torch.Tensor): The edges.
        x (torch.Tensor or tuple): Node features, or those of both sides.
        weight (torch.Tensor, optional): Edge weights.
        size (tuple, optional): The numbers of nodes of both sides.

    Returns:
        torch.Tensor, optional: :obj:`None` if the layer has to propagate its messages itself.
    """
    is_pair = isinstance(x, (tuple, list))
    src = x[0] if is_pair and len(x) == 2 else x
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        return None
    if type(src) not in support.PLAIN or src.dim() != 2 or conv.node_dim not in (0, -2):
        return None
    if support.tensor_reasons(src) or support.index_reasons(edge_index, src, 2):
        return None
    num_edges = edge_index.size(1)
    if edge_index.size(0) != 2 or not _is_weight(weight, src, num_edges):
        return None
    if support.saving_reasons(src, weight) or support.forward_ad_reasons(src, weight):
        return None
    forwards = conv.flow == "source_to_target"
    num_targets: int | None = src.size(0)
    if size is not None or (is_pair and x[1] is not src):
        # What PyG generates gathers from the first of a pair, whatever the flow.
        given = x if is_pair else (src, None) if forwards else (None, src)
        num_targets = _num_targets(given, size, forwards)
    if num_targets is None:
        return None
    adj = CACHE.edges(edge_index, forwards, src.size(0), num_targets)
    return None if adj is None else combine(type(conv).__name__, src, weight, adj, reduce)


def _is_weight(weight: Any, src: Tensor, num_edges: int) -> bool:
    if weight is None:
        return True
    return (
        type(weight) in support.PLAIN
        and weight.layout == torch.strided
        and weight.dtype in support.DTYPES
        and weight.device == src.device
        and weight.dim() == 1
        and weight.size(0) == num_edges
    )


def _num_targets(given: Any, size: Any, forwards: bool) -> int | None:
    """Returns the number of targets; None where PyG has something to say about the sizes."""
    if size is not None and (not isinstance(size, (tuple, list)) or len(size) != 2):
        return None
    sizes = [None, None] if size is None else list(size)
    for dim, x in enumerate(given):
        if x is None:
            continue
        if type(x) not in support.PLAIN or x.dim() != 2 or sizes[dim] not in (None, x.size(0)):
            return None
        sizes[dim] = x.size(0)
    to, other = (sizes[1], sizes[0]) if forwards else sizes
    found = other if to is None else to
    return found if type(found) is int else None
