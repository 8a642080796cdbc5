"""Layers that run fused without patching anything."""

from pyg_ioaware.nn.aggr import IOAwareMaxAggregation
from pyg_ioaware.nn.gatv2_conv import IOAwareGATv2Conv
from pyg_ioaware.nn.gcn_conv import IOAwareGCNConv
from pyg_ioaware.nn.sage_conv import IOAwareSAGEConv
from pyg_ioaware.nn.transformer_conv import IOAwareTransformerConv

__all__ = [
    "IOAwareGATv2Conv",
    "IOAwareGCNConv",
    "IOAwareMaxAggregation",
    "IOAwareSAGEConv",
    "IOAwareTransformerConv",
]
