"""Sparse adjacencies: the product that PyG's layers take in :meth:`message_and_aggregate`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

from pyg_ioaware import ops, support
from pyg_ioaware.graph.cache import CACHE
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.record import RECORD

Stock = Callable[..., Tensor]


def spmm(stock: Stock, owner: str, adj_t: Any, x: Tensor, reduce: str = "sum") -> Tensor:
    r"""Multiplies a sparse adjacency with node features.

    Args:
        stock (callable): PyG's own product.
        owner (str): The name of the layer.
        adj_t (SparseTensor or torch.Tensor): The transposed adjacency (row = target).
        x (torch.Tensor): Node features of shape :obj:`[num_src, F]`.
        reduce (str, optional): How a target's rows are combined. (default: :obj:`"sum"`)
    """
    reduce = "sum" if reduce == "add" else reduce
    why = _reasons(adj_t, x, reduce)
    if why:
        RECORD.stock(owner, why)
        return stock(adj_t, x, reduce)
    adj, value = structure(adj_t)
    if adj is None or adj.num_edges == 0:
        return stock(adj_t, x, reduce)
    RECORD.fused(owner)
    if value is not None:
        value = value.to(x.dtype)
    if reduce in ("sum", "mean"):
        return ops.spmm(x, adj, value, mean=reduce == "mean")
    return ops.reduce(x, adj, value, reduce=reduce, ties="first")


def matmul(
    stock: Stock, owner: str, edge_index: EdgeIndex, x: Tensor, weight: Tensor | None, reduce: str
) -> Tensor:
    r"""Multiplies the transpose of an EdgeIndex with node features, as GraphConv does.

    Args:
        stock (callable): PyG's own product.
        owner (str): The name of the layer.
        edge_index (EdgeIndex): The edges.
        x (torch.Tensor): Node features of shape :obj:`[num_src, F]`.
        weight (torch.Tensor, optional): Edge weights of shape :obj:`[E]`.
        reduce (str): How a target's rows are combined.
    """
    why = support.mode_reasons(x) + support.tensor_reasons(x)
    why += support.index_reasons(edge_index[0], x)
    if reduce not in ("sum", "add", "mean"):
        why.append(f"reduction '{reduce}' of an EdgeIndex")
    if weight is not None and (weight.dim() != 1 or weight.dtype != x.dtype):
        why.append("edge weights that are not one number per edge in the features' dtype")
    num_src, num_dst = edge_index.get_sparse_size()
    adj = None
    if not why and num_src == x.size(0):
        adj = CACHE.adjacency(edge_index[0], edge_index[1], num_src, num_dst)
    if adj is None:
        RECORD.stock(owner, why or ["indices or sizes that do not fit"])
        return stock()
    RECORD.fused(owner)
    return ops.spmm(x, adj, weight, mean=reduce == "mean")


def structure(adj_t: Any) -> tuple[Adjacency | None, Tensor | None]:
    """Returns the structure of a sparse adjacency (None if it is not sound), and its values."""
    if isinstance(adj_t, SparseTensor):
        # Row pointers may be new in every matrix of this structure; what was given is shared.
        storage, col, value = adj_t.storage, adj_t.storage.col(), adj_t.storage.value()
        if storage._row is None:
            return CACHE.adjacency_rows(storage.rowptr(), col, adj_t.size(1)), value
        return CACHE.adjacency(col, storage._row, adj_t.size(1), adj_t.size(0)), value
    if adj_t.layout == torch.sparse_csr:
        crow, col = adj_t.crow_indices(), adj_t.col_indices()
        return CACHE.adjacency_rows(crow, col, adj_t.size(1)), adj_t.values()
    row, col = adj_t.indices()
    return CACHE.adjacency(col, row, adj_t.size(1), adj_t.size(0)), adj_t.values()


def _reasons(adj_t: Any, x: Tensor, reduce: str) -> list[str]:
    found = support.mode_reasons(x) + support.tensor_reasons(x)
    if reduce not in ("sum", "mean", "min", "max"):
        return [*found, f"reduction '{reduce}'"]
    if isinstance(adj_t, Tensor) and x.is_cuda and reduce in ("min", "max"):
        return [*found, f"reduction '{reduce}' of a sparse tensor on a GPU, which stock rejects"]
    if x.dim() != 2:
        found.append(f"features of {x.dim()} dimensions with a sparse adjacency")
    if x.device.type == "cpu" and x.dtype not in (torch.float32, torch.float64):
        found.append(f"a sparse adjacency with features of dtype '{x.dtype}'")
    parts = matrix_parts(adj_t)
    if parts is None:
        return [*found, f"adjacency of type or layout '{getattr(adj_t, 'layout', type(adj_t))}'"]
    sizes, device, value = parts
    if isinstance(adj_t, Tensor) and adj_t.requires_grad:
        found.append("a sparse tensor that requires a gradient")
    if sizes[1] != x.size(0) or device != x.device:
        found.append("adjacency and features that do not fit")
    if value is not None and (value.dim() != 1 or value.dtype not in support.DTYPES):
        found.append("edge values that are not one floating-point number per edge")
    if value is not None and value.dtype != x.dtype and isinstance(adj_t, Tensor):
        found.append("edge values of another dtype than the features")
    return found


def matrix_parts(adj_t: Any) -> tuple[tuple[int, int], torch.device, Tensor | None] | None:
    """Returns sizes, device and values of a sparse adjacency; None if it is none we can read."""
    if isinstance(adj_t, SparseTensor):
        return (adj_t.size(0), adj_t.size(1)), adj_t.device(), adj_t.storage.value()
    if not isinstance(adj_t, Tensor) or adj_t.dim() != 2:
        return None
    is_readable = adj_t.layout == torch.sparse_csr
    if adj_t.layout == torch.sparse_coo:
        is_readable = adj_t.is_coalesced()
    if not is_readable:
        return None
    return (adj_t.size(0), adj_t.size(1)), adj_t.device, adj_t.values()
