"""TransformerConv, fused."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing, TransformerConv

from pyg_ioaware import ops, support
from pyg_ioaware.nn.attention import (
    Fusion,
    Unfit,
    View,
    adjacency,
    dropout_rate,
    edge_features,
    require,
)
from pyg_ioaware.nn.fused import FusedMessages
from pyg_ioaware.record import RECORD


class _View(View):
    """Takes the place of the layer's propagate."""

    def propagate(
        self, edge_index: Any, query: Tensor, key: Tensor, value: Tensor, edge_attr: Any
    ) -> Tensor:
        """Returns the output, and leaves the weights where the layer's forward finds them."""
        out: Tensor
        found = self._attempt(edge_index, query, key, value, edge_attr)
        if found is not None:
            out, self._alpha = found
            return out
        conv = self._conv
        out = conv.propagate(edge_index, query=query, key=key, value=value, edge_attr=edge_attr)
        self._alpha, conv._alpha = conv._alpha, None
        return out

    def _attend(self, *operands: Any) -> tuple[Tensor, Tensor | None]:
        edge_index, query, key, value, edge_attr = operands
        conv = self._conv
        require(support.operand_reasons(query, key, value))
        if key.size(0) != value.size(0):
            raise Unfit("keys and values of different nodes")
        if conv.lin_edge is not None and edge_attr is None:
            raise Unfit("'edge_dim' without edge features")
        dropout = dropout_rate(conv)
        adj = adjacency(conv, edge_index, key, query)
        edges = None
        if edge_attr is not None:
            edges = edge_features(conv, edge_attr, adj.num_edges)
        require(support.saving_reasons(query, key, value, *(edges or ())))
        RECORD.fused(type(conv).__name__)
        return ops.transformer(query, key, value, adj, dropout, edges, self._with_weights)


fuse_transformer = Fusion(TransformerConv, _View, ("propagate",))


class IOAwareTransformerConv(FusedMessages, TransformerConv):
    r"""The graph transformer operator of :class:`~torch_geometric.nn.TransformerConv` from the
    `"Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification"
    <https://arxiv.org/abs/2009.03509>`_ paper, its scores, softmax and aggregation computed in one
    pass as in the `"On Efficient Scaling of GNNs via IO-Aware Layers Implementations"
    <https://arxiv.org/abs/2605.31500>`_ paper.

    Arguments, shapes, parameters and results are those of
    :class:`~torch_geometric.nn.TransformerConv`; checkpoints fit both ways.

    **Differences:** attention dropout is drawn inside the operation, from a seed that PyTorch's
    generator gives: it has the distribution of the stock layer's, but drops other weights. Edge
    features are mapped once per node instead of once per edge.

    **Falls back** to the stock layer's code where :meth:`pyg_ioaware.explain` says so.

    **Memory:** beyond inputs, output and the linear layers, two numbers per node and head, and in
    the backward pass two numbers per edge and head; with edge features, :obj:`edge_dim` numbers
    per node and head. A training step on a GPU keeps one of the former between the passes.
    Attention weights exist only if they are to be returned.
    """

    # PyG ignores 'explain' in subclasses of a class that was used before, unless these are reset.
    propagate = MessagePassing.propagate
    edge_updater = MessagePassing.edge_updater

    forward = fuse_transformer.bind()
