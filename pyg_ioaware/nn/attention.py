"""What the fused attention layers share: PyG's own forward, run on a view of the layer.

All that surrounds the message passing of an attention layer, such as linear maps, heads, skip
connections and what is returned, stays the code of the installed PyG. Only what that code calls
to pass messages is ours.
"""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_ioaware import support
from pyg_ioaware.graph.cache import CACHE
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.messages import matrix_parts, structure
from pyg_ioaware.nn.biased import as_seen
from pyg_ioaware.nn.forward import Forward, Function
from pyg_ioaware.nn.sources import is_known
from pyg_ioaware.ops import EdgeFeatures
from pyg_ioaware.rebind import with_globals
from pyg_ioaware.record import RECORD


class Unfit(Exception):
    """Raised where the operands of a call keep it on stock PyG; holds every reason."""


def require(reasons: list[str]) -> None:
    r"""Does nothing if there is no reason for stock PyG.

    Raises:
        Unfit: If there is.
    """
    if reasons:
        raise Unfit(*reasons)


class View:
    r"""A layer as its own forward sees it while it runs: the layer, but for its message passing.

    What the forward sets stays here.

    Args:
        conv (MessagePassing): The layer.
        with_weights (bool): Whether the caller may want the attention weights.
    """

    def __init__(self, conv: Any, with_weights: bool) -> None:
        own = self.__dict__ = conv.__dict__.copy()
        own.pop("propagate", None)  # PyG binds them to a layer that was explained once
        own.pop("edge_updater", None)
        self._conv, self._with_weights = conv, with_weights

    def __getattr__(self, name: str) -> Any:
        return as_seen(getattr(self._conv, name))  # parameters, modules and what the class has

    def _attempt(self, *operands: Any) -> Any:
        """Returns output and weights; None if stock PyG has to pass the messages instead."""
        try:
            return self._attend(*operands)
        except Unfit as unfit:
            for reason in unfit.args:
                RECORD.pend(type(self._conv).__name__, reason)
        return None

    def _attend(self, *operands: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class Fusion(Forward):
    r"""How one of PyG's attention layers runs fused.

    Args:
        layer (type): PyG's layer.
        view (type): Passes the messages.
        generated (tuple): The methods that PyG generates for the class and its subclasses.
        **names: Functions that the layer's forward calls by these global names.
    """

    def __init__(
        self, layer: type, view: type[View], generated: tuple[str, ...], **names: Any
    ) -> None:
        super().__init__(layer, generated)
        self._forward, self._view = with_globals(self.stock, **names), view
        own = [name for name in ("message", "edge_update") if name in layer.__dict__]
        self._methods |= {name: (getattr(layer, name),) for name in own}
        self._methods["message_and_aggregate"] = (MessagePassing.message_and_aggregate,)
        self._sources = (self.stock, *(getattr(layer, name) for name in own))

    def __call__(self, conv: Any, stock: Function, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer's forward fused, or as it is."""
        why = support.attention_reasons(conv, self._methods, self._generated)
        if not is_known(*self._sources):
            why.append("an unknown version of the layer")
        if why:
            for reason in why:
                RECORD.pend(type(conv).__name__, reason)
            return stock(conv, *args, **kwargs)
        weights = args[3] if len(args) > 3 else kwargs.get("return_attention_weights")
        return self._forward(self._view(conv, weights is not None), *args, **kwargs)


def dropout_rate(conv: Any) -> float:
    """Returns the probability with which a weight is dropped in this call."""
    p = conv.dropout
    if not isinstance(p, float | int) or not 0 <= p <= 1:
        raise Unfit("a dropout that is no probability")
    return float(p) if conv.training else 0.0


def adjacency(conv: Any, edge_index: Any, sources: Tensor, targets: Tensor) -> Adjacency:
    r"""Returns the structure of the edges.

    Args:
        conv (MessagePassing): The layer.
        edge_index (torch.Tensor or SparseTensor): The edges, in any form that PyG takes.
        sources (torch.Tensor): What messages are made from.
        targets (torch.Tensor): What they are aggregated for.

    Raises:
        Unfit: If the edges are not what the operations take, or do not fit the features.
    """
    is_matrix = not isinstance(edge_index, Tensor) or support.is_sparse(edge_index)
    find = _from_matrix if is_matrix else _from_edges
    adj = find(conv.flow == "source_to_target", edge_index, sources, targets)
    if adj is None:
        raise Unfit("indices out of range")
    return adj


def _from_edges(
    forwards: bool, edge_index: Tensor, sources: Tensor, targets: Tensor
) -> Adjacency | None:
    num_src, num_dst = sources.size(0), targets.size(0)
    require(
        support.edges_reasons(edge_index, (num_src, num_dst) if forwards else (num_dst, num_src))
    )
    if type(edge_index) is Tensor:
        require(support.index_reasons(edge_index, sources, 2))
        return CACHE.edges(edge_index, forwards, num_src, num_dst)
    i, j = (1, 0) if forwards else (0, 1)
    src, dst = edge_index[j], edge_index[i]
    require(support.index_reasons(src, sources))
    return CACHE.adjacency(src, dst, num_src, num_dst)


def _from_matrix(forwards: bool, adj_t: Any, sources: Tensor, targets: Tensor) -> Adjacency | None:
    if not forwards:
        raise Unfit("a sparse adjacency whose flow is 'target_to_source'")
    parts = matrix_parts(adj_t)
    if parts is None:
        layout = getattr(adj_t, "layout", type(adj_t).__name__)
        raise Unfit(f"adjacency of type or layout '{layout}'")
    sizes, device, value = parts
    if sizes != (targets.size(0), sources.size(0)) or device != sources.device:
        raise Unfit("adjacency and features that do not fit")
    if value is not None and value.dim() != 1:
        raise Unfit("edge values that are more than one number per edge")
    return structure(adj_t)[0]


def edge_features(conv: Any, attr: Tensor, num_edges: int) -> EdgeFeatures:
    r"""Returns edge features and their linear map, in the dtypes in which it would take them.

    Args:
        conv (MessagePassing): The layer.
        attr (torch.Tensor): The features, one row per edge.
        num_edges (int): The number of edges.

    Raises:
        Unfit: If the map cannot be factored out, or features and map do not fit.
    """
    if conv.lin_edge is None:
        raise Unfit("edge features without 'edge_dim'")
    require(support.linear_reasons(conv.lin_edge, conv.heads * conv.out_channels))
    attr, weight = as_mapped(attr), as_mapped(conv.lin_edge.weight)
    require(support.edge_attr_reasons(attr, num_edges, weight))
    return EdgeFeatures(attr, None, weight)


def as_mapped(x: Any) -> Any:
    """Returns a tensor as a linear map takes it, which under autocast is another dtype."""
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
