"""Attention whose scores are an MLP of both ends, without a tensor of the size of the edges."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.ops import attention, reference
from pyg_ioaware.ops.attention import Attention, EdgeFeatures
from pyg_ioaware.ops.library import (
    CSR_ARGS,
    allocate,
    compute_dtype,
    gathers,
    is_batched,
    keeps_scores,
    launch,
    primitive,
    rows,
    sum_dtype,
    through,
)

_EDGE_ARGS = "Tensor? attr, Tensor? loop_attr, Tensor? lin"
_OPTIONS = "int heads, int num_loops, float slope, float dropout, Tensor? seed"


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
    return (
        torch.empty_like(x_r, memory_format=torch.contiguous_format),
        x_r.new_empty(x_r.size(0), 2 * heads, dtype=sums),
        x_r.new_empty(positions if with_scores else 0, heads, dtype=sums),
        x_r.new_empty(positions if with_signs else 0, sign_bytes(x_r, heads), dtype=torch.uint8),
    )


@primitive(
    f"gatv2(Tensor x_l, Tensor x_r, Tensor att, {CSR_ARGS}, {_EDGE_ARGS}, {_OPTIONS},"
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, width = x_r.shape
    positions = idx.size(0) + max(num_loops, 0)
    out, sums = allocate(x_r, num_rows, width), sum_dtype(x_r.dtype)
    stats = allocate(x_r, num_rows, 2 * heads, dtype=sums)
    scores = allocate(x_r, positions if with_scores else 0, heads, dtype=sums)
    signs = allocate(x_r, positions if with_signs else 0, sign_bytes(x_r, heads), dtype=torch.uint8)
    parts = [allocate(x_r, tiles.size(0), w, dtype=sums) for w in (width, 2 * heads)]
    csr = CSR(rowptr, idx, perm, tiles, split)
    operands = (x_l.contiguous(), x_r.contiguous(), att.contiguous())
    edges = _edge_operands(attr, loop_attr, lin)
    kept = (scores if with_scores else None, signs if with_signs else None)
    options = (heads, num_loops, slope, dropout, seed)
    launch("gatv2", csr, out, stats, *kept, *parts, *operands, *edges, *options)
    return out, stats, scores, signs


def _edge_operands(
    attr: Tensor | None, loop_attr: Tensor | None, lin: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns features, those of loops, and the transposed map, as kernels read them."""
    if attr is None or lin is None:
        return None, None, None
    loop_attr = None if loop_attr is None else loop_attr.contiguous()
    return attr.contiguous(), loop_attr, lin.t().contiguous()


def _fake_target(
    grad: Tensor,
    grad_weights: Tensor | None,
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    stats: Tensor,
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
    needs_attr: bool,
    scores: Tensor | None,
    signs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    positions, loops = idx.size(0) + max(num_loops, 0), max(num_loops, 0)
    dim = 0 if lin is None else lin.size(1)
    kept = dim if needs_attr else 0
    return (
        torch.empty_like(x_r, memory_format=torch.contiguous_format),
        x_r.new_empty(x_r.size(1)),
        x_r.new_empty(x_r.size(1), dim),
        x_r.new_empty(idx.size(0), kept),
        x_r.new_empty(loops, kept),
        x_r.new_empty(positions, 2, heads, dtype=sum_dtype(x_r.dtype)),
        x_r.new_empty(positions if signs is None else 0, sign_bytes(x_r, heads), dtype=torch.uint8),
    )


def sign_bytes(x: Tensor, heads: int) -> int:
    """Returns the bytes that hold one bit for each channel of an edge, each head padded."""
    return heads * ((x.size(1) // max(heads, 1) + 7) // 8)


@primitive(
    "gatv2_target(Tensor grad, Tensor? grad_weights, Tensor x_l, Tensor x_r, Tensor att,"
    f" Tensor stats, {CSR_ARGS}, {_EDGE_ARGS}, {_OPTIONS}, bool needs_attr,"
    " Tensor? scores, Tensor? signs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_target,
)
def _gatv2_target(
    grad: Tensor,
    grad_weights: Tensor | None,
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    stats: Tensor,
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
    needs_attr: bool,
    scores: Tensor | None,
    signs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, width = x_r.shape
    loops = max(num_loops, 0)
    positions = idx.size(0) + loops
    dim = 0 if lin is None else lin.size(1)
    grad_x_r, sums = allocate(x_r, num_rows, width), sum_dtype(x_r.dtype)
    delta = allocate(x_r, num_rows, heads, dtype=sums)
    parts = [allocate(x_r, tiles.size(0), w, dtype=sums) for w in (width, heads)]
    terms = allocate(x_r, positions, 2, heads, dtype=sums)
    formed = allocate(
        x_r, positions if signs is None else 0, sign_bytes(x_r, heads), dtype=torch.uint8
    )
    kept = dim if needs_attr else 0
    grad_attr, grad_loop = allocate(x_r, idx.size(0), kept), allocate(x_r, loops, kept)
    count = slots(x_r, idx.size(0) + num_rows, dim)
    att_parts = torch.zeros(count, width, dtype=torch.float64, device=x_r.device)
    lin_parts = torch.zeros(count, dim, width, dtype=torch.float64, device=x_r.device)
    if needs_attr:  # edges that are skipped have none
        grad_attr.zero_()
    csr = CSR(rowptr, idx, perm, tiles, split)
    operands = (x_l.contiguous(), x_r.contiguous(), att.contiguous(), stats)
    edges = _edge_operands(attr, loop_attr, lin)
    scaled = None if lin is None else (lin * att.view(-1, 1)).contiguous()
    written = (grad_x_r, delta, terms, formed if signs is None else signs, att_parts, lin_parts)
    written_edges = (grad_attr, grad_loop) if needs_attr else (None, None)
    grad_weights = None if grad_weights is None else grad_weights.contiguous()
    launch(
        "gatv2_target",
        csr,
        *written,
        *written_edges,
        *parts,
        scores,
        grad.contiguous(),
        grad_weights,
        *operands,
        *edges,
        scaled,
        *(heads, num_loops, slope, dropout, seed),
    )
    # The kernel leaves the attention vector out, so that it may be zero.
    raw = lin_parts.sum(0).t().to(att.dtype)
    grad_att = att_parts.sum(0).to(att.dtype)
    if lin is not None:
        grad_att = grad_att + (lin * raw).sum(1)
    grad_lin = (raw * att.view(-1, 1)).contiguous()
    return grad_x_r, grad_att, grad_lin, grad_attr, grad_loop, terms, formed


def slots(x: Tensor, work: int, dim: int = 0) -> int:
    r"""Returns into how many partial sums a gradient of parameters is divided.

    With edge features, partial sums are as large as their map: all of them together hold at most
    as many numbers as one row of :obj:`x` per edge and node, or as two maps.

    Args:
        x (torch.Tensor): Rows of the width of the gradient.
        work (int): The number of edges and nodes.
        dim (int, optional): The number of edge features. (default: :obj:`0`)
    """
    if gathers(x.device):  # which has partial sums of its own
        return 1
    count = 128 if work * x.size(1) > 2**17 else 8
    return count if dim == 0 else max(2, min(count, work // (2 * dim) * 2))


def _fake_source(
    grad: Tensor,
    x_l: Tensor,
    att: Tensor,
    terms: Tensor,
    signs: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    heads: int,
    num_loops: int,
    slope: float,
) -> tuple[Tensor, Tensor]:
    grad_x_l = torch.empty_like(x_l, memory_format=torch.contiguous_format)
    return grad_x_l, x_l.new_empty(x_l.size(1))


@primitive(
    f"gatv2_source(Tensor grad, Tensor x_l, Tensor att, Tensor terms, Tensor signs, {CSR_ARGS},"
    " int heads, int num_loops, float slope) -> (Tensor, Tensor)",
    _fake_source,
)
def _gatv2_source(
    grad: Tensor,
    x_l: Tensor,
    att: Tensor,
    terms: Tensor,
    signs: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    heads: int,
    num_loops: int,
    slope: float,
) -> tuple[Tensor, Tensor]:
    num_rows, width = x_l.shape
    grad_x_l = allocate(x_l, num_rows, width)
    dtype = sum_dtype(x_l.dtype)
    parts = allocate(x_l, 2, tiles.size(0), width, dtype=dtype)
    count = slots(x_l, idx.size(0) + num_rows)
    att_parts = torch.zeros(count, width, dtype=torch.float64, device=x_l.device)
    sums = allocate(x_l, count, width, dtype=dtype)
    csr = CSR(rowptr, idx, perm, tiles, split)
    operands = (grad.contiguous(), x_l.contiguous(), att.contiguous(), terms, signs)
    written = (grad_x_l, att_parts, sums, parts)
    launch("gatv2_source", csr, *written, *operands, heads, num_loops, slope)
    return grad_x_l, att_parts.sum(0).to(att.dtype)


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
            *(x_l, x_r, att),
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
        grad = torch.zeros_like(x_r) if grad is None else grad
        grad_x_r, grad_att, grad_lin, grad_attr, grad_loop, terms, formed = _gatv2_target(
            *(grad, grad_weights, x_l, x_r, att, stats),
            *options.adj.by_target,
            *(attr, loop_attr, lin),
            *_options(options),
            *(needs[3] or needs[4], scores, signs),
        )
        grad_x_l = None
        if needs[0] or needs[2]:
            grad_x_l, more = _gatv2_source(
                *(grad, x_l, att, terms, formed if signs is None else signs),
                *options.adj.by_source_in_place,
                *(options.heads, options.num_loops, options.factor),
            )
            grad_att = grad_att + more
        found = [grad_x_l, grad_x_r, grad_att, grad_attr, grad_loop, grad_lin]
        return *(g if need else None for g, need in zip(found, needs, strict=False)), None


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
        att (torch.Tensor): The attention vectors, of shape :obj:`[H, C]`.
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
    if att.shape != x_r.shape[1:]:
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
        keeps=edges is not None and keeps_scores(x_l.device),
    )
    out, weights = GATv2.apply(  # type: ignore[no-untyped-call]
        rows(x_l, work),
        rows(x_r, work),
        att.to(work).reshape(-1),
        *attention.edge_operands(edges, work),
        options,
    )
    out = out.view(x_r.shape).to(dtype)
    if weights is not None:
        weights = weights.index_select(0, options.order()).to(score_dtype)
    return out, weights
