"""Attention whose scores are an MLP of both ends, without a tensor of the size of the edges."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_ioaware.engines import row_width
from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.ops import attention, reference
from pyg_ioaware.ops.attention import Attention, EdgeFeatures
from pyg_ioaware.ops.gatv2_backward import (
    EDGE_ARGS,
    OPTIONS,
    edge_operands,
    gatv2_backward,
    sign_bytes,
)
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


def _fake(
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    attr: Tensor | None,
    loop_attr: Tensor | None,
    lin: Tensor | None,
    heads: int,
    num_loops: int,
    slope: float,
    dropout: float,
    seed: Tensor | None,
    with_scores: bool,
    with_signs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    positions, sums = idx.size(0) + max(num_loops, 0), sum_dtype(x_r.dtype)
    signs = positions, sign_bytes(x_r, heads)
    return (
        torch.empty_like(x_r, memory_format=torch.contiguous_format),
        x_r.new_empty(x_r.size(0), 2 * heads, dtype=sums),
        x_r.new_empty(positions, heads, dtype=sums) if with_scores else nothing(x_l),
        x_r.new_empty(*signs, dtype=torch.uint8) if with_signs else nothing(x_l),
    )


@primitive(
    f"gatv2(Tensor x_l, Tensor x_r, Tensor att, {CSR_ARGS}, {EDGE_ARGS}, {OPTIONS},"
    " bool with_scores, bool with_signs) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def _gatv2(
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    attr: Tensor | None,
    loop_attr: Tensor | None,
    lin: Tensor | None,
    heads: int,
    num_loops: int,
    slope: float,
    dropout: float,
    seed: Tensor | None,
    with_scores: bool,
    with_signs: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    num_rows, width, sums = x_r.size(0), row_width(x_r), sum_dtype(x_r.dtype)
    positions = idx.size(0) + max(num_loops, 0)
    out = allocate(x_r, *x_r.shape)
    stats = allocate(x_r, num_rows, 2 * heads, dtype=sums)
    scores = allocate(x_r, positions, heads, dtype=sums) if with_scores else None
    signs = None
    if with_signs:
        signs = allocate(x_r, positions, sign_bytes(x_r, heads), dtype=torch.uint8)
    parts = [partials(x_r, tiles, w, sums) for w in (width, 2 * heads)]
    csr = CSR(rowptr, idx, perm, tiles, split)
    operands = (x_l.contiguous(), x_r.contiguous(), att.contiguous())
    edges = edge_operands(attr, loop_attr, lin)
    options = (heads, num_loops, slope, dropout, seed)
    launch("gatv2", csr, out, stats, scores, signs, *parts, *operands, *edges, *options)
    return out, stats, scores, signs


class GATv2(Function):
    """The operation; neither output is saved, so they may be changed."""

    @staticmethod
    def forward(
        ctx: Any,
        x_l: Tensor,
        x_r: Tensor,
        att: Tensor,
        attr: Tensor | None,
        loop_attr: Tensor | None,
        lin: Tensor | None,
        options: Attention,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.options = options
        ctx.set_materialize_grads(False)
        keeps = options.keeps and any(ctx.needs_input_grad)
        out, stats, scores, signs = _gatv2(
            *(x_l, x_r, _vector(att)),
            *options.adj.by_target,
            *(attr, loop_attr, lin),
            *_options(options),
            *(options.with_weights or keeps, keeps),
        )
        kept = (scores, signs) if keeps else (None, None)
        ctx.save_for_backward(x_l, x_r, att, attr, loop_attr, lin, stats, *kept)
        if not options.with_weights:
            return out, None
        weights = options.normalise(scores, stats)
        mask = options.mask(weights.dtype)
        return out, weights if mask is None else weights * mask

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, stats, scores, signs = ctx.saved_tensors
        options, needs = ctx.options, ctx.needs_input_grad
        if grad is None and grad_weights is None:
            return (None,) * 7
        if torch.is_grad_enabled() or is_batched(grad, grad_weights):
            formed = partial(reference.gatv2, options)
            found = through(formed, inputs, needs[:6], (grad, grad_weights))
            return *found, None
        x_l, x_r, att, attr, loop_attr, lin = inputs
        stats, scores, signs = as_made(stats), as_made(scores), as_made(signs)
        grad, vector = torch.zeros_like(x_r) if grad is None else grad, _vector(att)
        needs_source = needs[0] or needs[2]
        grad_x_l, grad_x_r, grad_att, grad_attr, grad_loop, grad_lin = gatv2_backward(
            *(grad, grad_weights, x_l, x_r, vector, stats),
            *options.adj.by_target,
            *options.sources(needs_source),
            *(attr, loop_attr, lin),
            *_options(options),
            *(needs[3] or needs[4], needs_source, scores, signs),
        )
        grad_att = grad_att.to(att.dtype).view(att.shape)
        found = [grad_x_l, grad_x_r, grad_att, grad_attr, grad_loop, grad_lin]
        return *(g if need else None for g, need in zip(found, needs, strict=False)), None


def _vector(att: Tensor) -> Tensor:
    return att.contiguous().view(-1)


def _options(options: Attention) -> tuple[int, int, float, float, Tensor | None]:
    o = options
    return o.heads, o.num_loops, o.factor, o.dropout, o.seed


def gatv2(
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    adj: Adjacency,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    num_loops: int = -1,
    edges: EdgeFeatures | None = None,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""Attends to the sources of each target by the scores of the `"How Attentive are Graph
    Attention Networks?" <https://arxiv.org/abs/2105.14491>`_ paper.

    .. math::
        \alpha_{e,h} = \mathrm{softmax}_i \left( \mathbf{a}_h^{\top} \, \mathrm{LeakyReLU} \left(
        \mathbf{x}^l_{j,h} + \mathbf{x}^r_{i,h} + \mathbf{W}_h \mathbf{e}_e \right) \right), \quad
        \mathbf{y}_{i,h} = \sum_{e = (j, i)} \alpha_{e,h} \, \mathbf{x}^l_{j,h}

    Sums are taken in float32 (float64 for float64), whatever the storage type. A target without
    edges gets zeros.

    Args:
        x_l (torch.Tensor): Source rows of shape :obj:`[num_src, H, C]`.
        x_r (torch.Tensor): Target rows of shape :obj:`[num_dst, H, C]`.
        att (torch.Tensor): The attention vectors, of shape :obj:`[H, C]`, or :obj:`[1, H, C]` as
            PyG holds them.
        adj (Adjacency): The structure.
        negative_slope (float, optional): The slope of the LeakyReLU below zero.
            (default: :obj:`0.2`)
        dropout (float, optional): The probability with which a weight is dropped; those that are
            not grow accordingly. (default: :obj:`0.0`)
        num_loops (int, optional): If not negative, edges from a node to itself are skipped, and
            the first so many nodes get one self-loop each. (default: :obj:`-1`)
        edges (EdgeFeatures, optional): Features of the edges. (default: :obj:`None`)
        return_weights (bool, optional): If set, also returns the weights. (default: :obj:`False`)

    Returns:
        (torch.Tensor, torch.Tensor or None): Target rows of shape :obj:`[num_dst, H, C]`, and
        the weights after dropout, of shape :obj:`[E', H]`: of the edges that are not skipped in
        the order in which they were given, then of the self-loops.

    Raises:
        ValueError: If the operands do not fit the structure.
    """
    attention.check("gatv2", adj, [x_l], x_r, edges, num_loops, dropout)
    if att.shape[att.dim() == 3 and att.size(0) == 1 :] != x_r.shape[1:]:
        raise ValueError(
            f"'gatv2' expects attention vectors of shape {list(x_r.shape[1:])} "
            f"(got shape {list(att.shape)})"
        )
    score_dtype = torch.promote_types(torch.promote_types(x_l.dtype, x_r.dtype), att.dtype)
    if edges is not None:
        score_dtype = torch.promote_types(score_dtype, edges.weight.dtype)
    dtype = torch.promote_types(x_l.dtype, score_dtype)
    work = compute_dtype(dtype, x_l.device)
    seed = attention.seed_for(dropout, x_l.device)
    heads = x_r.size(1)
    options = Attention(
        *(adj, heads, num_loops, negative_slope, dropout, seed, return_weights),
        keeps=keeps_scores(x_l.device, edges is not None),
    )
    attr, loop_attr, lin = attention.edge_operands(edges, work)
    # An infinite feature of an edge times a channel of zeros would be NaN.
    more = attention.lacking(x_r, work, adj) if lin is None else 0
    rows = (attention.filled(cast(x, work), more) for x in (x_l, x_r, att))
    out, weights = GATv2.apply(  # type: ignore[no-untyped-call]
        *rows, attr, loop_attr, lin, options
    )
    out = cast(attention.unfilled(out, more), dtype)
    if weights is not None:
        weights = weights.index_select(0, options.order()).to(score_dtype)
    return out, weights
