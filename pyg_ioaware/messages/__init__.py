"""The seams at which stock PyG's own code reaches the fused operations."""

from pyg_ioaware.messages.direct import aggregate_nodes
from pyg_ioaware.messages.elements import reduce_elements
from pyg_ioaware.messages.lazy import LazyMessage, aggregate, gather
from pyg_ioaware.messages.memo import is_handed_out, memoise
from pyg_ioaware.messages.scatter import scatter, segment
from pyg_ioaware.messages.sparse import matmul, matrix_parts, spmm, structure

__all__ = [
    "LazyMessage",
    "aggregate",
    "aggregate_nodes",
    "gather",
    "is_handed_out",
    "matmul",
    "matrix_parts",
    "memoise",
    "reduce_elements",
    "scatter",
    "segment",
    "spmm",
    "structure",
]
