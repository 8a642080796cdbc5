"""GATv2Conv, fused."""

import sys
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch_geometric.nn import GATv2Conv, MessagePassing
from torch_geometric.typing import SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr

from pyg_ioaware import messages, ops, support
from pyg_ioaware.graph.identity import unwrap
from pyg_ioaware.nn.attention import (
    Fusion,
    Unfit,
    View,
    adjacency,
    as_mapped,
    dropout_rate,
    edge_features,
    require,
)
from pyg_ioaware.nn.biased import as_added
from pyg_ioaware.nn.fused import FusedMessages, bind_memo
from pyg_ioaware.ops import EdgeFeatures
from pyg_ioaware.record import RECORD


class _View(View):
    """Adds self-loops inside of the operation, unless the caller gets to see the edges."""

    def __init__(self, conv: Any, with_weights: bool) -> None:
        super().__init__(conv, with_weights)
        self._out: Tensor | None = None
        self._given: tuple[Any, Any] | None = None  # the edges to which the operation adds loops
        self._edge_index: Any = None  # those of stock PyG, loops added
        self._fill_value: Any = None
        self._num_loops = -1

    def _remove_loops(self, edge_index: Tensor, edge_attr: Any = None) -> Any:
        # That of a sparse matrix merges duplicates, too: only PyG itself knows the result.
        if not support.is_sparse(edge_index):
            self._given = edge_index, edge_attr
            if not self._with_weights:
                return edge_index, edge_attr
        return self._as_stock(remove_self_loops, edge_index, edge_attr)

    def _add_loops(self, edge_index: Any, edge_attr: Any, fill_value: Any, num_nodes: int) -> Any:
        if self._given is not None:
            self._fill_value, self._num_loops = fill_value, num_nodes
            if not self._with_weights:
                return edge_index, edge_attr
        options = {"fill_value": fill_value, "num_nodes": num_nodes}
        return self._as_stock(add_self_loops, edge_index, edge_attr, **options)

    def _set_diagonal(self, adj_t: SparseTensor) -> SparseTensor:
        if self._with_weights:
            return torch_sparse.set_diag(adj_t)
        self._num_loops = min(adj_t.sizes())
        return adj_t

    def edge_updater(self, edge_index: Any, x: Any, edge_attr: Any) -> Any:
        """Computes output and weights; returns the weights if they are wanted."""
        found = self._attempt(edge_index, *x, edge_attr)
        if found is not None:
            self._out, weights = found
            return weights
        self._edge_index, edge_attr = self._loops_added(edge_index, edge_attr)
        return self._conv.edge_updater(self._edge_index, x=x, edge_attr=edge_attr)

    def propagate(self, edge_index: Any, x: Any, alpha: Any) -> Tensor:
        """Returns the output."""
        if self._out is not None:
            self.bias = as_added(self._conv.bias, self._out)
            return self._out
        out: Tensor = self._conv.propagate(self._edge_index, x=x, alpha=alpha)
        return out

    def _attend(self, *operands: Any) -> tuple[Tensor, Tensor | None]:
        edge_index, x_l, x_r, edge_attr = operands
        conv, att, slope = self._conv, self._conv.att, self._conv.negative_slope
        require(support.operand_reasons(x_l, x_r))
        require(support.parameter_reasons("att", att, (1, *x_r.shape[1:]), x_r))
        if not isinstance(slope, float | int):
            raise Unfit("a slope that is no number")
        if conv.flow != "source_to_target" and x_l.size(0) != x_r.size(0):
            raise Unfit("flow 'target_to_source' between two sets of nodes")
        dropout = dropout_rate(conv)
        if self._given is not None:
            edge_index, edge_attr = self._given
        adj = adjacency(conv, edge_index, x_l, x_r)
        edges = None
        if edge_attr is not None:
            edges = self._edges(edge_index, edge_attr, adj.num_edges)
        require(support.saving_reasons(x_l, x_r, att, *(edges or ())))
        RECORD.fused(type(conv).__name__)
        return ops.gatv2(
            *(x_l, x_r, att, adj, slope, dropout),
            *(self._num_loops, edges, self._with_weights),
        )

    def _edges(self, edge_index: Any, edge_attr: Tensor, num_edges: int) -> EdgeFeatures:
        edges = edge_features(self._conv, _columns(edge_attr), num_edges)
        if self._num_loops < 0:
            return edges
        args = (edge_index, edge_attr, self._num_loops, self._fill_value)
        loop_attr = messages.memoise("loop_features", _loop_features, args, {})
        require(support.forward_ad_reasons(loop_attr))
        return edges._replace(loop_attr=as_mapped(_columns(loop_attr)))

    def _loops_added(self, edge_index: Any, edge_attr: Any) -> tuple[Any, Any]:
        """Adds the loops that were left to the operation."""
        if self._num_loops < 0 or self._with_weights:
            return edge_index, edge_attr
        if isinstance(edge_index, SparseTensor):
            return torch_sparse.set_diag(edge_index), edge_attr
        edges: tuple[Any, Any] = self._as_stock(remove_self_loops, edge_index, edge_attr)
        options = {"fill_value": self._fill_value, "num_nodes": self._num_loops}
        edges = self._as_stock(add_self_loops, *edges, **options)
        return edges

    def _as_stock(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self._with_weights:  # the caller gets the result, and may change it
            return function(*args, **kwargs)
        return messages.memoise(function.__name__, function, args, kwargs)


def _columns(edge_attr: Any) -> Any:
    is_vector = isinstance(edge_attr, Tensor) and edge_attr.dim() == 1
    return edge_attr.view(-1, 1) if is_vector else edge_attr


def _loop_features(
    edge_index: Tensor, edge_attr: Tensor, num_loops: int, fill_value: Any
) -> Tensor:
    """Returns the features that PyG gives to the self-loops that it adds."""
    # PyTorch has wrong gradients for a scatter by int32.
    kept, kept_attr = remove_self_loops(unwrap(edge_index).long(), edge_attr)
    out: Tensor = compute_loop_attr(kept, kept_attr, num_loops, False, fill_value)
    return out


# PyG's functions by which the layer adds self-loops; they find the view in the layer's frame.


def _remove_self_loops(*args: Any, **kwargs: Any) -> Any:
    return sys._getframe(1).f_locals["self"]._remove_loops(*args, **kwargs)


def _add_self_loops(*args: Any, **kwargs: Any) -> Any:
    return sys._getframe(1).f_locals["self"]._add_loops(*args, **kwargs)


def _set_diag(adj_t: Any) -> Any:
    return sys._getframe(1).f_locals["self"]._set_diagonal(adj_t)


fuse_gatv2 = Fusion(
    GATv2Conv,
    _View,
    ("edge_updater", "propagate"),
    remove_self_loops=_remove_self_loops,
    add_self_loops=_add_self_loops,
    torch_sparse=SimpleNamespace(set_diag=_set_diag),
)


class IOAwareGATv2Conv(FusedMessages, GATv2Conv):
    r"""The GATv2 operator of :class:`~torch_geometric.nn.GATv2Conv` from the `"How Attentive are
    Graph Attention Networks?" <https://arxiv.org/abs/2105.14491>`_ paper, its scores, softmax and
    aggregation computed in one pass as in the `"On Efficient Scaling of GNNs via IO-Aware Layers
    Implementations" <https://arxiv.org/abs/2605.31500>`_ paper.

    Arguments, shapes, parameters and results are those of
    :class:`~torch_geometric.nn.GATv2Conv`; checkpoints fit both ways.

    **Differences:** attention dropout is drawn inside the operation, from a seed that PyTorch's
    generator gives: it has the distribution of the stock layer's, but drops other weights.
    Self-loops are added without a copy of the edges.

    **Falls back** to the stock layer's code where :meth:`pyg_ioaware.explain` says so.

    **Memory:** beyond inputs, output and the linear layers, two numbers per node and head, and in
    the backward pass a few numbers per edge and head. A training step on a GPU, and with edge
    features on the CPU, keeps a number per edge and head, and a bit per edge and channel, for its
    backward pass. Attention weights exist only if they are to be returned.
    """

    # PyG ignores 'explain' in subclasses of a class that was used before, unless these are reset.
    propagate = MessagePassing.propagate
    edge_updater = MessagePassing.edge_updater

    forward = fuse_gatv2.bind(
        remove_self_loops=bind_memo(remove_self_loops), add_self_loops=bind_memo(add_self_loops)
    )
