"""The gradients of attention whose scores are an MLP of both ends."""

import torch
from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.graph.csr import CSR
from pyg_ioaware.ops.library import (
    CSR_ARGS,
    SOURCE_ARGS,
    allocate,
    gathers,
    launch,
    nothing,
    partials,
    primitive,
    sum_dtype,
)

EDGE_ARGS = "Tensor? attr, Tensor? loop_attr, Tensor? lin"
OPTIONS = "int heads, int num_loops, float slope, float dropout, Tensor? seed"


def sign_bytes(x: Tensor, heads: int) -> int:
    """Returns the bytes that hold one bit for each channel of an edge, each head padded."""
    return heads * ((row_width(x) // max(heads, 1) + 7) // 8)


def edge_operands(
    attr: Tensor | None, loop_attr: Tensor | None, lin: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns features, those of loops, and the transposed map, as kernels read them."""
    if attr is None or lin is None:
        return None, None, None
    loop_attr = None if loop_attr is None else loop_attr.contiguous()
    return attr.contiguous(), loop_attr, lin.t().contiguous()


def _fake(
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
    source_rowptr: Tensor,
    source_idx: Tensor,
    source_perm: Tensor | None,
    source_tiles: Tensor,
    source_split: int,
    attr: Tensor | None,
    loop_attr: Tensor | None,
    lin: Tensor | None,
    heads: int,
    num_loops: int,
    slope: float,
    dropout: float,
    seed: Tensor | None,
    needs_attr: bool,
    needs_source: bool,
    scores: Tensor | None,
    signs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    dim = 0 if lin is None else lin.size(1)
    return (
        like(x_l) if needs_source else nothing(grad),
        like(x_r),
        x_r.new_empty(1, row_width(x_r), dtype=torch.float64),
        x_r.new_empty(idx.size(0), dim) if needs_attr else nothing(grad),
        x_r.new_empty(max(num_loops, 0), dim) if needs_attr else nothing(grad),
        nothing(grad) if lin is None else x_r.new_empty(row_width(x_r), dim),
    )


@primitive(
    "gatv2_backward(Tensor grad, Tensor? grad_weights, Tensor x_l, Tensor x_r, Tensor att,"
    f" Tensor stats, {CSR_ARGS}, {SOURCE_ARGS}, {EDGE_ARGS}, {OPTIONS}, bool needs_attr,"
    " bool needs_source, Tensor? scores, Tensor? signs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def gatv2_backward(
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
    source_rowptr: Tensor,
    source_idx: Tensor,
    source_perm: Tensor | None,
    source_tiles: Tensor,
    source_split: int,
    attr: Tensor | None,
    loop_attr: Tensor | None,
    lin: Tensor | None,
    heads: int,
    num_loops: int,
    slope: float,
    dropout: float,
    seed: Tensor | None,
    needs_attr: bool,
    needs_source: bool,
    scores: Tensor | None,
    signs: Tensor | None,
) -> tuple[Tensor | None, ...]:
    r"""Returns the gradients of both rows, of the attention vectors (in float64), of the features
    of edges and of self-loops, and of their map.

    An engine that gathers needs :obj:`scores` and :obj:`signs`; others form what is not given.
    """
    num_rows, width, sums = x_r.size(0), row_width(x_r), sum_dtype(x_r.dtype)
    loops, dim = max(num_loops, 0), 0 if lin is None else lin.size(1)
    positions = idx.size(0) + loops
    by_target = CSR(rowptr, idx, perm, tiles, split)
    by_source = CSR(source_rowptr, source_idx, source_perm, source_tiles, source_split)
    x_l, x_r, att, grad = (t.contiguous() for t in (x_l, x_r, att, grad))
    grad_weights = None if grad_weights is None else grad_weights.contiguous()
    edges = edge_operands(attr, loop_attr, lin)
    grad_attr = grad_loop = grad_lin = lin_parts = grad_x_l = None
    if needs_attr:  # edges that are skipped have none
        grad_attr, grad_loop = allocate(x_r, idx.size(0), dim).zero_(), allocate(x_r, loops, dim)
    count = slots(x_r, idx.size(0) + num_rows, dim)
    att_parts = _parameter_sums(x_r, count, width)
    if lin is not None:
        lin_parts = _parameter_sums(x_r, count, dim, width)
    written = (att_parts, lin_parts, grad_attr, grad_loop)
    source_count = slots(x_l, idx.size(0) + x_l.size(0)) if needs_source else 0
    source_parts = _parameter_sums(x_l, source_count, width)
    parts = [partials(x_r, tiles, w, sums) for w in (width, heads)]
    grad_x_r = allocate(x_r, *x_r.shape)
    if gathers(x_r.device):
        assert scores is not None, "scores were not kept"
        terms, grad_x_l = allocate(x_r, positions, heads, dtype=sums), allocate(x_l, *x_l.shape)
        values = grad_x_l if sums is x_l.dtype else allocate(x_l, *x_l.shape, dtype=sums)
        value_parts = partials(x_l, source_tiles, width, sums)
        launch(
            "attention_values",
            by_source,
            *(values, terms, value_parts, grad, x_l, scores, stats),
            *(heads, num_loops, dropout, seed, True),
        )
        launch(
            "gatv2_target",
            by_target,
            *(grad_x_r, terms, *written, *parts, scores, signs, grad_weights, x_r, att, stats),
            *(*edges, heads, num_loops, slope, dropout, seed),
        )
        if needs_source:
            launch(
                "gatv2_source",
                by_source,
                *(grad_x_l, source_parts, values, value_parts, x_l, att, terms, signs),
                *(heads, num_loops, slope),
            )
    else:
        terms = allocate(x_r, positions, 2, heads, dtype=sums)
        if signs is None:
            signs = allocate(x_r, positions, sign_bytes(x_r, heads), dtype=torch.uint8)
        scaled = None if lin is None else (lin * att.view(-1, 1)).contiguous()
        launch(
            "gatv2_target",
            by_target,
            *(grad_x_r, terms, signs, *written, *parts, scores),
            *(grad, grad_weights, x_l, x_r, att, stats, *edges, scaled),
            *(heads, num_loops, slope, dropout, seed),
        )
        if needs_source:
            grad_x_l = allocate(x_l, *x_l.shape)
            row_sums = allocate(x_l, source_count, width, dtype=sums)
            launch(
                "gatv2_source",
                by_source,
                *(grad_x_l, source_parts, row_sums, partials(x_l, source_tiles, 2 * width, sums)),
                *(grad, x_l, att, terms, signs, heads, num_loops, slope),
            )
    grad_att = _total(att_parts)
    if needs_source:
        grad_att = grad_att + _total(source_parts)
    if lin is not None and lin_parts is not None:
        # The kernel leaves the attention vector out, so that it may be zero.
        raw = _total(lin_parts)[0].t()
        grad_att = grad_att + (lin * raw).sum(1)
        grad_lin = (raw * att.view(-1, 1)).to(att.dtype).contiguous()
    return grad_x_l if needs_source else None, grad_x_r, grad_att, grad_attr, grad_loop, grad_lin


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
