"""The fused operations, differentiable any number of times; they know structures, not layers."""

from pyg_ioaware.ops.attention import EdgeFeatures
from pyg_ioaware.ops.gatv2 import gatv2
from pyg_ioaware.ops.reduce import TIES, reduce
from pyg_ioaware.ops.sddmm import sddmm
from pyg_ioaware.ops.spmm import spmm
from pyg_ioaware.ops.transformer import transformer

__all__ = ["TIES", "EdgeFeatures", "gatv2", "reduce", "sddmm", "spmm", "transformer"]
