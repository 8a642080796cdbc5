"""SAGEConv, fused."""

from torch_geometric.nn import MessagePassing, SAGEConv

from pyg_ioaware.nn.fused import FusedMessages, bind_spmm
from pyg_ioaware.nn.shortcut import SHORTCUTS


class IOAwareSAGEConv(FusedMessages, SAGEConv):
    r"""The GraphSAGE operator of :class:`~torch_geometric.nn.SAGEConv` from the `"Inductive
    Representation Learning on Large Graphs" <https://arxiv.org/abs/1706.02216>`_ paper, run
    without messages as in the `"On Efficient Scaling of GNNs via IO-Aware Layers Implementations"
    <https://arxiv.org/abs/2605.31500>`_ paper.

    Arguments, shapes, parameters and results are those of
    :class:`~torch_geometric.nn.SAGEConv`; checkpoints fit both ways. The aggregations
    :obj:`"sum"`, :obj:`"mean"`, :obj:`"max"` and :obj:`"min"` and lists of them are fused.

    **Falls back** to the stock layer's code where :meth:`pyg_ioaware.explain` says so, and for any
    other aggregation.

    **Memory:** beyond inputs, output and the linear layers, one array of the size of the
    aggregated features, and for :obj:`"max"` and :obj:`"min"` one more of int32.
    """

    # PyG ignores 'explain' in subclasses of a class that was used before, unless these are reset.
    propagate = MessagePassing.propagate
    edge_updater = MessagePassing.edge_updater

    forward = SHORTCUTS[SAGEConv].bind()
    message_and_aggregate = bind_spmm(SAGEConv.message_and_aggregate, "IOAwareSAGEConv")
