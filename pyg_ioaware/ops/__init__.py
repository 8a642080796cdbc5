"""The fused operations, differentiable any number of times; they know structures, not layers."""

from pyg_ioaware.ops.reduce import TIES, reduce
from pyg_ioaware.ops.sddmm import sddmm
from pyg_ioaware.ops.spmm import spmm

__all__ = ["TIES", "reduce", "sddmm", "spmm"]
