"""The layers of the users' cases, patched and as IOAware classes."""

from graphs import features
from torch_geometric.nn import (
    GATv2Conv,
    GCNConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)

from pyg_ioaware.nn import (
    IOAwareGATv2Conv,
    IOAwareGCNConv,
    IOAwareSAGEConv,
    IOAwareTransformerConv,
)
from pyg_ioaware.testing import compare

C = 16


class Heads(MessagePassing):
    """A weight per edge and head times [E, H, C], as in attention without the scores."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr, node_dim=0)

    def forward(self, x, edge_index, alpha):
        return self.propagate(edge_index, x=x, alpha=alpha)

    def message(self, x_j, alpha):
        return alpha.unsqueeze(-1) * x_j


LAYERS = {
    "GCN": lambda c=C: GCNConv(c, c),
    "SAGE_mean": lambda c=C: SAGEConv(c, c),
    "SAGE_max": lambda c=C: SAGEConv(c, c, aggr="max"),
    "SAGE_min": lambda c=C: SAGEConv(c, c, aggr="min"),
    "Graph": lambda c=C: GraphConv(c, c),
    "GATv2": lambda c=C: GATv2Conv(c, c),
    "Transformer": lambda c=C: TransformerConv(c, c),
}
OWN = {
    "IOAwareGCN": (lambda c=C: GCNConv(c, c), lambda c=C: IOAwareGCNConv(c, c)),
    "IOAwareSAGE": (
        lambda c=C: SAGEConv(c, c, aggr="max"),
        lambda c=C: IOAwareSAGEConv(c, c, aggr="max"),
    ),
    "IOAwareGATv2": (
        lambda c=C: GATv2Conv(c, c, add_self_loops=False),
        lambda c=C: IOAwareGATv2Conv(c, c, add_self_loops=False),
    ),
    "IOAwareTransformer": (
        lambda c=C: TransformerConv(c, c),
        lambda c=C: IOAwareTransformerConv(c, c),
    ),
}
ALL = [*LAYERS, *OWN]


def compare_layer(name, *args, c=C, **kwargs):
    """Compares the layer patched, or the IOAware layer unpatched, with stock."""
    if name in LAYERS:
        return compare(LAYERS[name](c), *args, **kwargs)
    stock, ours = (make(c) for make in OWN[name])
    ours.load_state_dict(stock.state_dict())
    return compare(stock, *args, ours=ours, **kwargs)


def x(n, *shape, **kwargs):
    return features(n, *(shape or (C,)), **kwargs).requires_grad_()
