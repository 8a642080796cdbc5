r"""Plain PyTorch versions of the primitives: what they compute, edge by edge.

They form the tensors that the engines avoid, and are used by tests, by readers, and where a
gradient is itself differentiated or batched. Operands are as for the autograd functions: rows
:obj:`[N, H * C]`, weights :obj:`[E, H]` in the order of the input edges.
"""

import torch
from torch import Tensor

from pyg_ioaware.graph.csr import Adjacency


def edges(adj: Adjacency, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the two ends of each input edge: where it reads, and where it adds."""
    src, dst = adj.edges()
    if adj.by_target.perm is not None:
        place = _positions(adj)
        src, dst = src[place], dst[place]
    return (dst, src) if transposed else (src, dst)


def spmm(
    x: Tensor, weight: Tensor | None, adj: Adjacency, mean: bool, transposed: bool = False
) -> Tensor:
    """Sums weighted rows; see pyg_ioaware.ops.spmm.SpMM."""
    src, dst = edges(adj, transposed)
    if mean and transposed:
        x = x * adj.inv_degree(x.dtype).view(-1, 1)
    out = x.new_zeros(adj.num_src if transposed else adj.num_dst, x.size(1))
    out = out.index_add(0, dst, _messages(x, weight, src))
    if mean and not transposed:
        out = out * adj.inv_degree(x.dtype).view(-1, 1)
    return out


def sddmm(a: Tensor, b: Tensor, adj: Adjacency, heads: int, mean: bool) -> Tensor:
    """Takes one dot product per edge and head; see pyg_ioaware.ops.sddmm.SDDMM."""
    src, dst = edges(adj)
    if mean:
        a = a * adj.inv_degree(a.dtype).view(-1, 1)
    product = a.index_select(0, dst) * b.index_select(0, src)
    return product.view(adj.num_edges, heads, a.size(1) // heads).sum(-1)


def reduce(x: Tensor, weight: Tensor | None, adj: Adjacency, is_max: bool, ties: str) -> Tensor:
    """Takes the maximum or minimum of weighted rows; see pyg_ioaware.ops.reduce.Reduce."""
    src, dst = edges(adj)
    index = dst.view(-1, 1).expand(adj.num_edges, x.size(1))
    values = _messages(x, weight, src)
    zeros = x.new_zeros(adj.num_dst, x.size(1))
    name = "amax" if is_max else "amin"
    out = zeros.scatter_reduce(0, index, values, name, include_self=False)
    if ties == "even":
        return out
    # The other rules choose by constant coefficients: the value is the same, the gradient theirs.
    hit = values.detach() == out.detach().index_select(0, dst)
    if ties == "first":
        order = _positions(adj).view(-1, 1).expand_as(index)
        none = torch.full_like(zeros, adj.num_edges, dtype=torch.long)
        first = none.scatter_reduce(0, index, order.where(hit, none[:1, :1]), "amin")
        share = (order == first.index_select(0, dst)).to(x.dtype)
    else:
        count = zeros.scatter_add(0, index, hit.to(x.dtype))
        share = hit.to(x.dtype) / count.index_select(0, dst)
    return zeros.scatter_add(0, index, values * share)


def _messages(x: Tensor, weight: Tensor | None, src: Tensor) -> Tensor:
    values = x.index_select(0, src)
    if weight is None:
        return values
    heads = weight.size(1)
    shaped = values.view(values.size(0), heads, x.size(1) // heads)
    return (weight.unsqueeze(-1) * shaped).reshape(values.shape)


def _positions(adj: Adjacency) -> Tensor:
    """Returns the place of each input edge in the rows by target."""
    perm, place = adj.by_target.perm, torch.arange(adj.num_edges, device=adj.by_target.idx.device)
    if perm is None:
        return place
    return torch.empty_like(place).scatter_(0, perm.long(), place)
