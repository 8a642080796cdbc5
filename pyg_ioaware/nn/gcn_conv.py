"""GCNConv, fused."""

from torch_geometric.nn import GCNConv, MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_ioaware.nn.fused import FusedMessages, bind_memo, bind_spmm
from pyg_ioaware.nn.shortcut import SHORTCUTS


class IOAwareGCNConv(FusedMessages, GCNConv):
    r"""The graph convolutional operator of :class:`~torch_geometric.nn.GCNConv` from the
    `"Semi-supervised Classification with Graph Convolutional Networks"
    <https://arxiv.org/abs/1609.02907>`_ paper, run as one sparse product as in the `"On Efficient
    Scaling of GNNs via IO-Aware Layers Implementations" <https://arxiv.org/abs/2605.31500>`_
    paper.

    Arguments, shapes, parameters and results are those of
    :class:`~torch_geometric.nn.GCNConv`; checkpoints fit both ways.

    **Differences:** the normalised adjacency is kept while :obj:`edge_index` lives unchanged,
    with :obj:`cached=False` too, and no message is ever formed.

    **Falls back** to the stock layer's code where :meth:`pyg_ioaware.explain` says so.

    **Memory:** beyond input, output and the linear layer, one array of the output's size.
    """

    # PyG ignores 'explain' in subclasses of a class that was used before, unless these are reset.
    propagate = MessagePassing.propagate
    edge_updater = MessagePassing.edge_updater

    forward = SHORTCUTS[GCNConv].bind(gcn_norm=bind_memo(gcn_norm))
    message_and_aggregate = bind_spmm(GCNConv.message_and_aggregate, "IOAwareGCNConv")
