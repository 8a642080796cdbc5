r"""Plain PyTorch versions of the primitives: what they compute, edge by edge.

They form the tensors that the engines avoid, and are used by tests, by readers, and where a
gradient is itself differentiated or batched. Operands are as for the autograd functions: rows
:obj:`[N, H * C]`, weights :obj:`[E, H]` in the order of the input edges.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_ioaware.graph.csr import Adjacency

if TYPE_CHECKING:
    from pyg_ioaware.ops.attention import Attention


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
    return _per_head(product, heads).sum(-1)


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
    value, best = values.detach(), out.detach().index_select(0, dst)
    hit = (value == best) | (value.isnan() & best.isnan())
    if ties == "first":
        order = _positions(adj).view(-1, 1).expand_as(index)
        none = torch.full_like(zeros, adj.num_edges, dtype=torch.long)
        first = none.scatter_reduce(0, index, order.where(hit, none[:1, :1]), "amin")
        share = (order == first.index_select(0, dst)).to(x.dtype)
    else:
        count = zeros.scatter_add(0, index, hit.to(x.dtype))
        share = hit.to(x.dtype) / count.index_select(0, dst)
    # An infinite value of an edge without a share must not meet a zero.
    return zeros.scatter_add(0, index, values.where(share > 0, values.new_zeros(())) * share)


def gatv2(
    options: "Attention",
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    attr: Tensor | None,
    loop_attr: Tensor | None,
    lin: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attends by an MLP of both ends; see pyg_ioaware.ops.gatv2.GATv2."""
    shape = x_r.shape
    x_l, x_r, att = x_l.flatten(1), x_r.flatten(1), att.flatten()
    used = options.used()
    src, dst = (end[used] for end in options.ends())
    value = x_l.index_select(0, src)
    hidden = value + x_r.index_select(0, dst)
    if attr is not None and lin is not None:
        attr = _by_position(attr, options.adj)
        attr = attr if loop_attr is None else torch.cat([attr, loop_attr])
        hidden = hidden + attr[used] @ lin.t()
    hidden = torch.nn.functional.leaky_relu(hidden, options.factor)
    scores = _per_head(hidden * att, options.heads).sum(-1)
    weights = _softmax(scores, dst, x_r.size(0))
    mask = options.mask(weights.dtype)
    weights = weights if mask is None else weights * mask[used]
    out = _weighted_sum(value, weights, dst, x_r.size(0))
    placed = weights.new_zeros(options.num_positions, options.heads)
    return out.view(shape), placed.index_copy(0, used, weights)


def transformer(
    options: "Attention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attr: Tensor | None,
    edge_query: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attends by dot products of both ends; see pyg_ioaware.ops.transformer.Transformer."""
    shape, (src, dst) = query.shape, options.ends()
    query, key, value = query.flatten(1), key.flatten(1), value.flatten(1)
    heads, num_rows = options.heads, query.size(0)
    product = query.index_select(0, dst) * key.index_select(0, src)
    scores = _per_head(product, heads).sum(-1)
    if attr is not None and edge_query is not None:
        attr = _by_position(attr, options.adj).repeat(1, heads)
        product = edge_query.index_select(0, dst) * attr
        scores = scores + _per_head(product, heads).sum(-1)
    weights = _softmax(scores * options.factor, dst, num_rows)
    mask = options.mask(weights.dtype)
    kept = weights if mask is None else weights * mask
    out = _weighted_sum(value.index_select(0, src), kept, dst, num_rows)
    edge_out = None
    if attr is not None and edge_query is not None:
        edge_out = _weighted_sum(attr, kept, dst, num_rows)
    return out.view(shape), edge_out, weights


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.view(x.size(0), heads, x.size(1) // heads)


def _softmax(scores: Tensor, dst: Tensor, num_rows: int) -> Tensor:
    index = dst.view(-1, 1).expand_as(scores)
    zeros = scores.new_zeros(num_rows, scores.size(1))
    top = zeros.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    terms = (scores - top.index_select(0, dst)).exp()
    total = zeros.index_add(0, dst, terms) + 1e-16
    return terms / total.index_select(0, dst)


def _weighted_sum(values: Tensor, weights: Tensor, dst: Tensor, num_rows: int) -> Tensor:
    shaped = _per_head(values, weights.size(1)) * weights.unsqueeze(-1)
    zeros = values.new_zeros(num_rows, values.size(1))
    return zeros.index_add(0, dst, shaped.view(values.shape))


def _by_position(attr: Tensor, adj: Adjacency) -> Tensor:
    perm = adj.by_target.perm
    return attr if perm is None else attr.index_select(0, perm)


def _messages(x: Tensor, weight: Tensor | None, src: Tensor) -> Tensor:
    values = x.index_select(0, src)
    if weight is None:
        return values
    shaped = _per_head(values, weight.size(1))
    return (weight.unsqueeze(-1) * shaped).reshape(values.shape)


def _positions(adj: Adjacency) -> Tensor:
    """Returns the place of each input edge in the rows by target."""
    perm, place = adj.by_target.perm, torch.arange(adj.num_edges, device=adj.by_target.idx.device)
    if perm is None:
        return place
    return torch.empty_like(place).scatter_(0, perm.long(), place)
