"""Maxima and minima of neighbour rows, with every rule for ties."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_ioaware.engines import KernelError
from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.ops import reference
from pyg_ioaware.ops.library import (
    CSR_ARGS,
    allocate,
    check,
    compute_dtype,
    gathers,
    is_batched,
    is_recorded,
    launch,
    like,
    partials,
    per_head,
    primitive,
    rows,
    sum_dtype,
    through,
)

TIES = ("even", "first", "exact")
_NO = (None, None, None)  # the gradients of options


def _fake(
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor | None,
    is_max: bool,
    with_arg: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = rowptr.size(0) - 1, x.size(1)
    out = x.new_empty(num_rows, width)
    kept = num_rows if with_arg else 0
    arg = x.new_empty(kept, width, dtype=_place_dtype(tiles, split))
    return out, arg, x.new_empty(kept, dtype=torch.uint8)


@primitive(
    f"reduce(Tensor x, {CSR_ARGS}, Tensor? weight, bool is_max, bool with_arg)"
    " -> (Tensor, Tensor, Tensor)",
    _fake,
)
def _reduce(
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor | None,
    is_max: bool,
    with_arg: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    csr = CSR(rowptr, idx, perm, tiles, split)
    num_rows, width = rowptr.size(0) - 1, x.size(1)
    kept = num_rows if with_arg else 0
    out = allocate(x, num_rows, width)
    partial = partials(x, tiles, width)
    arg = allocate(x, kept, width, dtype=_place_dtype(tiles, split))
    tied = allocate(x, kept, dtype=torch.uint8)
    partial_arg = partials(x, tiles, width, torch.int32)
    written = (arg, tied) if with_arg else (None, None)
    weight = None if weight is None else weight.contiguous()
    launch("reduce", csr, out, *written, x.contiguous(), weight, partial, partial_arg, is_max)
    return out, arg, tied


def _place_dtype(tiles: Tensor, split: int) -> torch.dtype:
    """Returns the dtype of places in rows, which are one byte where a GPU splits no row."""
    short = gathers(tiles.device) and split <= 128 and tiles.size(0) == 0
    return torch.int8 if short else torch.int32


def _fake_backward(
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor | None,
    ties: int,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@primitive(
    f"reduce_backward(Tensor grad, Tensor arg, Tensor tied, Tensor x, {CSR_ARGS},"
    " Tensor? weight, int ties) -> Tensor",
    _fake_backward,
    ["CPU"],
)
def _reduce_backward(
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor | None,
    ties: int,
) -> Tensor:
    csr = CSR(rowptr, idx, perm, tiles, split)
    x, weight = x.contiguous(), None if weight is None else weight.contiguous()
    grad_x = allocate(x, *x.shape).zero_()
    launch("reduce_backward", csr, grad_x, grad.contiguous(), arg, tied, x, weight, ties)
    return grad_x


def _fake_backward_weight(
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor,
    ties: int,
) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@primitive(
    f"reduce_backward_weight(Tensor grad, Tensor arg, Tensor tied, Tensor x, {CSR_ARGS},"
    " Tensor weight, int ties) -> Tensor",
    _fake_backward_weight,
    ["CPU"],
)
def _reduce_backward_weight(
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor,
    ties: int,
) -> Tensor:
    csr = CSR(rowptr, idx, perm, tiles, split)
    x, weight = x.contiguous(), weight.contiguous()
    grad_weight = torch.zeros_like(weight)
    args = (grad.contiguous(), arg, tied, x, weight, ties)
    launch("reduce_backward_weight", csr, grad_weight, *args)
    return grad_weight


def _fake_gather(
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    source_rowptr: Tensor | None,
    source_idx: Tensor | None,
    source_perm: Tensor | None,
    source_tiles: Tensor | None,
    source_split: int,
    weight: Tensor | None,
    ties: int,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    shape = (0 if source_rowptr is None else x.size(0), x.size(1))
    shape_weight = (0, 1) if weight is None or not needs_weight else weight.shape
    return x.new_empty(shape), x.new_empty(shape_weight, dtype=sum_dtype(x.dtype))


@primitive(
    f"reduce_gather(Tensor grad, Tensor arg, Tensor tied, Tensor x, {CSR_ARGS},"
    " Tensor? source_rowptr, Tensor? source_idx, Tensor? source_perm, Tensor? source_tiles,"
    " int source_split,"
    " Tensor? weight, int ties, bool needs_weight) -> (Tensor, Tensor)",
    _fake_gather,
    ["CUDA"],
)
def _reduce_gather(
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    source_rowptr: Tensor | None,
    source_idx: Tensor | None,
    source_perm: Tensor | None,
    source_tiles: Tensor | None,
    source_split: int,
    weight: Tensor | None,
    ties: int,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    csr, by_source = CSR(rowptr, idx, perm, tiles, split), None
    rows, width = (0 if source_rowptr is None else x.size(0)), x.size(1)
    if source_rowptr is not None and source_idx is not None and source_tiles is not None:
        by_source = CSR(source_rowptr, source_idx, source_perm, source_tiles, source_split)
    grad_x = allocate(x, rows, width)
    partial = partials(x, tiles if source_tiles is None else source_tiles, width)
    sums = sum_dtype(x.dtype)
    shape = (0, 1) if weight is None or not needs_weight else weight.shape
    make = torch.zeros if needs_weight else torch.empty
    grad_weight = make(shape, dtype=sums, device=x.device)
    weight = None if weight is None else weight.contiguous()
    written = (
        None if by_source is None else grad_x,
        grad_weight if needs_weight else None,
    )
    read = (partial, grad.contiguous(), arg, tied, x.contiguous(), weight, ties)
    launch("reduce_gather", csr, by_source, *written, *read)
    return grad_x, grad_weight


class Reduce(Function):
    """The extremum over each target's edges; the output is not saved, so it may be changed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, adj: Adjacency, is_max: bool, ties: str
    ) -> Tensor:
        ctx.adj, ctx.is_max, ctx.ties = adj, is_max, ties
        out, arg, tied = _extremum(x, weight, adj, is_max, ties, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, weight, arg, tied)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, arg, tied = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if arg is not None and not torch.is_grad_enabled() and not is_batched(grad):
            rule = TIES.index(ctx.ties)
            with contextlib.suppress(KernelError):  # a step that has begun is finished
                return *_gradients(ctx.adj, grad, arg, tied, x, weight, rule, needs), *_NO

        def formed(x: Tensor, weight: Tensor | None) -> tuple[Tensor]:
            return (reference.reduce(x, weight, ctx.adj, ctx.is_max, ctx.ties),)

        found_x, found_weight = through(formed, (x, weight), needs, (grad,))
        return found_x, found_weight, *_NO


def _extremum(
    x: Tensor, weight: Tensor | None, adj: Adjacency, is_max: bool, ties: str, with_arg: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    found: tuple[Tensor, Tensor | None, Tensor | None]
    try:
        found = _reduce(x, *adj.by_target, weight, is_max, with_arg)
    except KernelError:  # a step that has begun is finished
        found = reference.reduce(x, weight, adj, is_max, ties), None, None
    return found


def _gradients(
    adj: Adjacency,
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    weight: Tensor | None,
    ties: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    csr, grad_x, grad_weight = adj.by_target, None, None
    if gathers(x.device):
        by_source = adj.by_source_in_place if needs[0] else (None, None, None, None, 0)
        found = _reduce_gather(grad, arg, tied, x, *csr, *by_source, weight, ties, needs[1])
        grad_x = found[0] if needs[0] else None
        grad_weight = found[1].to(x.dtype) if needs[1] else None
        return grad_x, grad_weight
    if needs[0]:
        grad_x = _reduce_backward(grad, arg, tied, x, *csr, weight, ties)
    if needs[1]:
        grad_weight = _reduce_backward_weight(grad, arg, tied, x, *csr, weight, ties)
    return grad_x, grad_weight


def reduce(
    x: Tensor,
    adj: Adjacency,
    weight: Tensor | None = None,
    reduce: str = "max",
    ties: str = "even",
) -> Tensor:
    r"""Takes the maximum or minimum over the rows of each target's sources.

    A target without edges gets zeros, and NaN propagates.

    Args:
        x (torch.Tensor): Source rows of shape :obj:`[num_src, F]` or :obj:`[num_src, H, C]`.
        adj (Adjacency): The structure.
        weight (torch.Tensor, optional): Weights that multiply the rows first, in the order of the
            input edges, of shape :obj:`[E]` or :obj:`[E, H]`. (default: :obj:`None`)
        reduce (str, optional): :obj:`"max"` or :obj:`"min"`. (default: :obj:`"max"`)
        ties (str, optional): Where the gradient goes if several edges attain the result:
            :obj:`"even"` splits it evenly and, as :meth:`torch.Tensor.scatter_reduce_` does on a
            buffer of zeros, counts one edge more where the result is zero; :obj:`"first"` gives
            it to the first edge; :obj:`"exact"` splits it evenly. (default: :obj:`"even"`)

    Returns:
        torch.Tensor: Target rows of shape :obj:`[num_dst, ...]`, in the dtype that
        :obj:`weight * x` has.

    Raises:
        ValueError: If the operands do not fit the structure, or an option is not known.
    """
    check(x, adj.num_src, weight, adj.num_edges, "reduce")
    if reduce not in ("max", "min"):
        raise ValueError(f"'reduce' must be 'max' or 'min' (got '{reduce}')")
    if ties not in TIES:
        raise ValueError(f"'ties' must be one of {list(TIES)} (got '{ties}')")
    dtype = x.dtype if weight is None else torch.promote_types(weight.dtype, x.dtype)
    work = compute_dtype(dtype, x.device)
    values, weights = rows(x, work), per_head(weight, work)
    if is_recorded(values, weights):
        out = Reduce.apply(values, weights, adj, reduce == "max", ties)  # type: ignore[no-untyped-call]
    else:
        out, _, _ = _extremum(values, weights, adj, reduce == "max", ties, False)
    return like(out, x, dtype)
