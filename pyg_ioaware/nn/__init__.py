"""Layers that run fused without patching anything."""

from pyg_ioaware.nn.aggr import IOAwareMaxAggregation
from pyg_ioaware.nn.gcn_conv import IOAwareGCNConv
from pyg_ioaware.nn.sage_conv import IOAwareSAGEConv

__all__ = ["IOAwareGCNConv", "IOAwareMaxAggregation", "IOAwareSAGEConv"]
