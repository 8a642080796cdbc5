"""Attention by dot products of both ends, without a tensor of the size of the edges."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_ioaware.engines import row_width
from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.ops import attention, reference
from pyg_ioaware.ops.attention import Attention, EdgeFeatures
from pyg_ioaware.ops.library import (
    CSR_ARGS,
    allocate,
    as_made,
    cast,
    compute_dtype,
    is_batched,
    keeps_scores,
    launch,
    nothing,
    partials,
    primitive,
    sum_dtype,
    through,
)
from pyg_ioaware.ops.transformer_backward import (
    EDGE_ARGS,
    OPTIONS,
    edge_operands,
    transformer_backward,
)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, sums = query.size(0), sum_dtype(query.dtype)
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        nothing(query) if edge_query is None else query.new_empty(num_rows, edge_query.size(1)),
        query.new_empty(num_rows, 2 * heads, dtype=sums),
        query.new_empty(idx.size(0), heads, dtype=sums) if with_scores else nothing(query),
    )


@primitive(
    f"transformer(Tensor query, Tensor key, Tensor value, {CSR_ARGS}, {EDGE_ARGS}, {OPTIONS},"
    " bool with_scores) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def _transformer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    with_scores: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    num_rows, width, sums = query.size(0), row_width(query), sum_dtype(query.dtype)
    out, edge_out, edge_width = allocate(query, *query.shape), None, 0
    if edge_query is not None:
        edge_width = edge_query.size(1)
        edge_out = allocate(query, num_rows, edge_width)
    stats = allocate(query, num_rows, 2 * heads, dtype=sums)
    scores = allocate(query, idx.size(0), heads, dtype=sums) if with_scores else None
    parts = [partials(query, tiles, w, sums) for w in (width, edge_width, 2 * heads)]
    csr = CSR(rowptr, idx, perm, tiles, split)
    launch(
        "transformer",
        csr,
        *(out, edge_out, stats, scores),
        *parts,
        *(query.contiguous(), key.contiguous(), value.contiguous()),
        *edge_operands(attr, edge_query),
        *(heads, scale, dropout, seed),
    )
    return out, edge_out, stats, scores


class Transformer(Function):
    r"""The operation; no output is saved, so they may be changed.

    Features of edges enter by two products of the size of the nodes, outside of this function:
    :obj:`edge_query` holds what each target asks of them, and the second output is their weighted
    sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attr: Tensor | None,
        edge_query: Tensor | None,
        options: Attention,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.options = options
        ctx.set_materialize_grads(False)
        keeps = options.keeps and any(ctx.needs_input_grad)
        out, edge_out, stats, scores = _transformer(
            *(query, key, value),
            *options.adj.by_target,
            *(attr, edge_query),
            *_options(options),
            options.with_weights or keeps,
        )
        kept = scores if keeps else None
        ctx.save_for_backward(query, key, value, attr, edge_query, stats, kept)
        weights = options.normalise(scores, stats) if options.with_weights else None
        needs = ctx.needs_input_grad
        if weights is not None and not any((*needs[:2], *needs[3:5])):
            ctx.mark_non_differentiable(weights)
        return out, None if edge_query is None else edge_out, weights

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_edge: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, stats, scores = ctx.saved_tensors
        options, needs = ctx.options, ctx.needs_input_grad
        grads = (grad, grad_edge, grad_weights)
        if all(g is None for g in grads):
            return (None,) * 6
        if torch.is_grad_enabled() or is_batched(*grads):
            formed = partial(reference.transformer, options)
            return *through(formed, inputs, needs[:5], grads), None
        query, key, value, attr, edge_query = inputs
        grad = torch.zeros_like(query) if grad is None else grad
        if edge_query is not None and grad_edge is None:
            grad_edge = torch.zeros_like(edge_query)
        needs_source = needs[1] or needs[2]
        grad_query, grad_key, grad_value, grad_attr, grad_edge_query = transformer_backward(
            *(grad, grad_edge, grad_weights, query, key, value, as_made(stats)),
            *options.adj.by_target,
            *options.sources(needs_source),
            *(attr, edge_query),
            *_options(options),
            *(needs[3], needs_source, as_made(scores)),
        )
        if grads[0] is None:
            grad_value = None
        found = [grad_query, grad_key, grad_value, grad_attr, grad_edge_query]
        return *(g if need else None for g, need in zip(found, needs, strict=False)), None


def _options(options: Attention) -> tuple[int, float, float, Tensor | None]:
    return options.heads, options.factor, options.dropout, options.seed


def transformer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    adj: Adjacency,
    dropout: float = 0.0,
    edges: EdgeFeatures | None = None,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""Attends to the sources of each target by scaled dot products, as in the `"Masked Label
    Prediction: Unified Message Passing Model for Semi-Supervised Classification"
    <https://arxiv.org/abs/2009.03509>`_ paper.

    .. math::
        \alpha_{e,h} = \mathrm{softmax}_i \left( \frac{\mathbf{q}_{i,h}^{\top} \left(
        \mathbf{k}_{j,h} + \mathbf{W}_h \mathbf{e}_e \right)}{\sqrt{C}} \right), \quad
        \mathbf{y}_{i,h} = \sum_{e = (j, i)} \alpha_{e,h} \left( \mathbf{v}_{j,h} + \mathbf{W}_h
        \mathbf{e}_e \right)

    Sums are taken in float32 (float64 for float64), whatever the storage type. A target without
    edges gets zeros. Features of edges are never mapped one by one: the query is mapped to
    them, and their weighted sum to the values.

    Args:
        query (torch.Tensor): Target rows of shape :obj:`[num_dst, H, C]`.
        key (torch.Tensor): Source rows of shape :obj:`[num_src, H, C]`.
        value (torch.Tensor): Source rows of shape :obj:`[num_src, H, C]`.
        adj (Adjacency): The structure.
        dropout (float, optional): The probability with which a weight is dropped; those that are
            not grow accordingly. (default: :obj:`0.0`)
        edges (EdgeFeatures, optional): Features of the edges. (default: :obj:`None`)
        return_weights (bool, optional): If set, also returns the weights. (default: :obj:`False`)

    Returns:
        (torch.Tensor, torch.Tensor or None): Target rows of shape :obj:`[num_dst, H, C]`, and
        the weights before dropout in the order of the input edges, of shape :obj:`[E, H]`.

    Raises:
        ValueError: If the operands do not fit the structure.
    """
    attention.check("transformer", adj, [key, value], query, edges, -1, dropout)
    score_dtype = torch.promote_types(query.dtype, key.dtype)
    dtype = value.dtype
    if edges is not None:
        score_dtype = torch.promote_types(score_dtype, edges.weight.dtype)
        dtype = torch.promote_types(dtype, edges.weight.dtype)
    score_dtype = _exponential(score_dtype, query.device)
    dtype = torch.promote_types(dtype, score_dtype)
    work = compute_dtype(dtype, query.device)
    seed = attention.seed_for(dropout, query.device)
    heads, channels = query.size(1), query.size(2)
    scale = 1 / math.sqrt(channels) if channels else 1.0
    keeps = keeps_scores(query.device)
    options = Attention(adj, heads, -1, scale, dropout, seed, return_weights, keeps)
    attr, _, lin = attention.edge_operands(edges, work)
    asked = None
    if lin is not None:
        lin = lin.view(heads, channels, lin.size(1))
        asked = _Mapped.apply(cast(query, work), lin).flatten(1)  # type: ignore[no-untyped-call]
    more = attention.lacking(query, work, adj)
    rows = (attention.filled(cast(x, work), more) for x in (query, key, value))
    out, summed, weights = Transformer.apply(  # type: ignore[no-untyped-call]
        *rows, attr, asked, options
    )
    out = attention.unfilled(out, more)
    if lin is not None:
        summed = summed.view(-1, heads, lin.size(2))
        out = out + _Mapped.apply(summed, lin.mT)  # type: ignore[no-untyped-call]
    if weights is not None:
        weights = weights.index_select(0, options.order()).to(score_dtype)
    return cast(out, dtype), weights


def _exponential(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of sums and exponentials, which autocast widens on some devices."""
    if not torch.is_autocast_enabled(device.type):
        return dtype
    return torch.empty(0, 1, dtype=dtype, device=device).sum(-1).exp().dtype


class _Mapped(Function):
    """Rows of shape [N, H, P] times a matrix [P, Q] for each head, in their dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Tensor) -> Tensor:
        ctx.save_for_backward(x, maps)
        with torch.autocast(x.device.type, enabled=False):
            return torch.bmm(x.transpose(0, 1), maps).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, maps = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            rows, nodes = grad.transpose(0, 1), _NODES if x.is_cuda else x.size(0)
            grad_x = torch.bmm(rows, maps.mT).transpose(0, 1) if needs[0] else None
            return grad_x, _sum_products(x, grad, nodes) if needs[1] else None


# cuBLAS sums products of narrow matrices in one chain, in which thousands of rows lose digits.
_NODES = 256


def _sum_products(x: Tensor, y: Tensor, nodes: int) -> Tensor:
    """Returns the sums over nodes of x[n, h, p] * y[n, h, q], of so many at a time."""
    whole = x.size(0) - x.size(0) % max(nodes, 1)
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    if whole <= nodes:
        return torch.bmm(x.mT, y)
    heads = []
    for left, right in zip(x[:, :whole], y[:, :whole], strict=True):
        parts = left.unflatten(0, (-1, nodes)).mT @ right.unflatten(0, (-1, nodes))
        heads.append(parts.sum(0))
    return torch.stack(heads) + torch.bmm(x[:, whole:].mT, y[:, whole:])
