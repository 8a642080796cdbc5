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
from pyg_ioaware.ops.library import (
    CSR_ARGS,
    allocate,
    as_made,
    cast,
    compute_dtype,
    gathers,
    is_batched,
    keeps_scores,
    launch,
    nothing,
    partials,
    primitive,
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
    signs = positions, sign_bytes(x_r, heads)
    return (
        torch.empty_like(x_r, memory_format=torch.contiguous_format),
        x_r.new_empty(x_r.size(0), 2 * heads, dtype=sums),
        x_r.new_empty(positions, heads, dtype=sums) if with_scores else nothing(x_l),
        x_r.new_empty(*signs, dtype=torch.uint8) if with_signs else nothing(x_l),
    )


def sign_bytes(x: Tensor, heads: int) -> int:
    """Returns the bytes that hold one bit for each channel of an edge, each head padded."""
    return heads * ((row_width(x) // max(heads, 1) + 7) // 8)


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
    edges = _edge_operands(attr, loop_attr, lin)
    options = (heads, num_loops, slope, dropout, seed)
    launch("gatv2", csr, out, stats, scores, signs, *parts, *operands, *edges, *options)
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
    loops, width = max(num_loops, 0), row_width(x_r)
    positions, dim = idx.size(0) + loops, 0 if lin is None else lin.size(1)
    formed = positions, sign_bytes(x_r, heads)
    return (
        torch.empty_like(x_r, memory_format=torch.contiguous_format),
        x_r.new_empty(1, width, dtype=torch.float64),
        nothing(grad) if lin is None else x_r.new_empty(width, dim),
        x_r.new_empty(idx.size(0), dim) if needs_attr else nothing(grad),
        x_r.new_empty(loops, dim) if needs_attr else nothing(grad),
        x_r.new_empty(positions, 2, heads, dtype=sum_dtype(x_r.dtype)),
        x_r.new_empty(*formed, dtype=torch.uint8) if signs is None else nothing(grad),
    )


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
) -> tuple[Tensor | None, ...]:
    num_rows, width, sums = x_r.size(0), row_width(x_r), sum_dtype(x_r.dtype)
    loops, dim = max(num_loops, 0), 0 if lin is None else lin.size(1)
    positions = idx.size(0) + loops
    grad_x_r = allocate(x_r, *x_r.shape)
    parts = [partials(x_r, tiles, w, sums) for w in (width, heads)]
    terms = allocate(x_r, positions, 2, heads, dtype=sums)
    formed = None
    if signs is None:
        formed = allocate(x_r, positions, sign_bytes(x_r, heads), dtype=torch.uint8)
    grad_attr = grad_loop = grad_lin = lin_parts = scaled = None
    if needs_attr:  # edges that are skipped have none
        grad_attr, grad_loop = allocate(x_r, idx.size(0), dim).zero_(), allocate(x_r, loops, dim)
    count, att = slots(x_r, idx.size(0) + num_rows, dim), att.contiguous()
    att_parts = _parameter_sums(x_r, count, width)
    if lin is not None:
        lin_parts = _parameter_sums(x_r, count, dim, width)
        scaled = (lin * att.view(-1, 1)).contiguous()
    csr = CSR(rowptr, idx, perm, tiles, split)
    launch(
        "gatv2_target",
        csr,
        *(grad_x_r, terms, formed if signs is None else signs),
        *(att_parts, lin_parts, grad_attr, grad_loop, *parts, scores),
        *(grad.contiguous(), None if grad_weights is None else grad_weights.contiguous()),
        *(x_l.contiguous(), x_r.contiguous(), att, stats),
        *(*_edge_operands(attr, loop_attr, lin), scaled),
        *(heads, num_loops, slope, dropout, seed),
    )
    grad_att = _total(att_parts)
    if lin is not None and lin_parts is not None:
        # The kernel leaves the attention vector out, so that it may be zero.
        raw = _total(lin_parts)[0].t()
        grad_att = grad_att + (lin * raw).sum(1)
        grad_lin = (raw * att.view(-1, 1)).to(att.dtype).contiguous()
    return grad_x_r, grad_att, grad_lin, grad_attr, grad_loop, terms, formed


def _parameter_sums(x: Tensor, count: int, *shape: int) -> Tensor:
    """Returns memory for partial sums, set to zero where the engine adds to them."""
    make = torch.empty if gathers(x.device) else torch.zeros
    return make(count, *shape, dtype=torch.float64, device=x.device)


def _total(sums: Tensor) -> Tensor:
    """Returns one row, the sum of all."""
    return sums if sums.size(0) == 1 else sums.sum(0, keepdim=True)


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
    count = 128 if work * row_width(x) > 2**17 else 8
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
    return grad_x_l, x_l.new_empty(1, row_width(x_l), dtype=torch.float64)


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
    num_rows, width, dtype = x_l.size(0), row_width(x_l), sum_dtype(x_l.dtype)
    grad_x_l = allocate(x_l, *x_l.shape)
    parts = partials(x_l, tiles, 2 * width, dtype)
    count = slots(x_l, idx.size(0) + num_rows)
    att_parts = _parameter_sums(x_l, count, width)
    sums = None if gathers(x_l.device) else allocate(x_l, count, width, dtype=dtype)
    csr = CSR(rowptr, idx, perm, tiles, split)
    operands = (grad.contiguous(), x_l.contiguous(), att.contiguous(), terms, signs)
    written = (grad_x_l, att_parts, sums, parts)
    launch("gatv2_source", csr, *written, *operands, heads, num_loops, slope)
    return grad_x_l, _total(att_parts)


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
        grad_x_r, grad_att, grad_lin, grad_attr, grad_loop, terms, formed = _gatv2_target(
            *(grad, grad_weights, x_l, x_r, vector, stats),
            *options.adj.by_target,
            *(attr, loop_attr, lin),
            *_options(options),
            *(needs[3] or needs[4], scores, signs),
        )
        grad_x_l = None
        if needs[0] or needs[2]:
            grad_x_l, more = _gatv2_source(
                *(grad, x_l, vector, terms, formed if signs is None else signs),
                *options.adj.by_source_in_place,
                *(options.heads, options.num_loops, options.factor),
            )
            grad_att = grad_att + more
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
        keeps=edges is not None and keeps_scores(x_l.device),
    )
    attr, loop_attr, lin = attention.edge_operands(edges, work)
    more = attention.lacking(x_r, work, adj)
    if more and lin is not None:
        lin = attention.filled(lin.unflatten(0, x_r.shape[1:]).mT, more).mT.flatten(0, 1)
    rows = (attention.filled(cast(x, work), more) for x in (x_l, x_r, att))
    out, weights = GATv2.apply(  # type: ignore[no-untyped-call]
        *rows, attr, loop_attr, lin, options
    )
    out = cast(attention.unfilled(out, more), dtype)
    if weights is not None:
        weights = weights.index_select(0, options.order()).to(score_dtype)
    return out, weights
