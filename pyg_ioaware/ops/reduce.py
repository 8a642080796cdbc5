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
    as_made,
    check,
    compute_dtype,
    gathers,
    is_batched,
    is_recorded,
    launch,
    like,
    nothing,
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
    longest: int,
    weight: Tensor | None,
    is_max: bool,
    ties: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = rowptr.size(0) - 1, x.size(1)
    out = x.new_empty(num_rows, width)
    if ties is None:
        return out, nothing(x), nothing(x)
    arg = x.new_empty(num_rows, width, dtype=_arg_dtype(x.device, longest))
    tied = nothing(x) if gathers(x.device) else x.new_empty(num_rows, dtype=torch.uint8)
    return out, arg, tied


@primitive(
    f"reduce(Tensor x, {CSR_ARGS}, int longest, Tensor? weight, bool is_max, int? ties)"
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
    longest: int,
    weight: Tensor | None,
    is_max: bool,
    ties: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    csr = CSR(rowptr, idx, perm, tiles, split)
    num_rows, width = rowptr.size(0) - 1, x.size(1)
    out, arg, tied = allocate(x, num_rows, width), None, None
    if ties is not None:
        arg = allocate(x, num_rows, width, dtype=_arg_dtype(x.device, longest))
        tied = None if gathers(x.device) else allocate(x, num_rows, dtype=torch.uint8)
    weight = None if weight is None else weight.contiguous()
    tiled = partials(x, tiles, width), partials(x, tiles, width, torch.int32)
    launch("reduce", csr, out, arg, tied, x.contiguous(), weight, *tiled, is_max, ties or 0)
    return out, arg, tied


def _arg_dtype(device: torch.device, longest: int) -> torch.dtype:
    """Returns the dtype of what is kept for each result, which counts up to a row's edges."""
    if not gathers(device) or longest > 2**15 - 2:
        return torch.int32
    return torch.int16 if longest > 2**7 - 2 else torch.int8


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
    mark: Tensor,
    best: Tensor | None,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    place: Tensor | None,
    weight: Tensor | None,
    ties: int,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@primitive(
    f"reduce_gather(Tensor grad, Tensor mark, Tensor? best, Tensor x, {CSR_ARGS}, Tensor? place,"
    " Tensor? weight, int ties) -> Tensor",
    _fake_gather,
    ["CUDA"],
)
def _reduce_gather(
    grad: Tensor,
    mark: Tensor,
    best: Tensor | None,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    place: Tensor | None,
    weight: Tensor | None,
    ties: int,
) -> Tensor:
    by_source = CSR(rowptr, idx, perm, tiles, split)
    grad_x = allocate(x, *x.shape)
    partial = partials(x, tiles, x.size(1))
    weight = None if weight is None else weight.contiguous()
    read = (partial, grad.contiguous(), mark, best, x.contiguous(), weight, ties)
    launch("reduce_gather", by_source, place, grad_x, *read)
    return grad_x


def _fake_weight(
    grad: Tensor,
    mark: Tensor,
    best: Tensor | None,
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor,
    ties: int,
) -> Tensor:
    return weight.new_empty(weight.shape, dtype=sum_dtype(x.dtype))


@primitive(
    f"reduce_weight(Tensor grad, Tensor mark, Tensor? best, Tensor x, {CSR_ARGS}, Tensor weight,"
    " int ties) -> Tensor",
    _fake_weight,
    ["CUDA"],
)
def _reduce_weight(
    grad: Tensor,
    mark: Tensor,
    best: Tensor | None,
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
    grad_weight = allocate(x, *weight.shape, dtype=sum_dtype(x.dtype))
    read = (grad.contiguous(), mark, best, x.contiguous(), weight.contiguous(), ties)
    launch("reduce_weight", csr, grad_weight, *read)
    return grad_weight


class Reduce(Function):
    """The extremum over each target's edges."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, adj: Adjacency, is_max: bool, ties: str
    ) -> Tensor:
        ctx.adj, ctx.is_max, ctx.ties = adj, is_max, ties
        rule = TIES.index(ties) if any(ctx.needs_input_grad) else None
        out, arg, tied = _extremum(x, weight, adj, is_max, ties, rule)
        # Of edges that tie, marks are only the number: the result tells which they are.
        best = out if gathers(x.device) and ties != "first" else None
        ctx.save_for_backward(x, weight, arg, tied, best)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, arg, tied, best = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if arg is not None and not torch.is_grad_enabled() and not is_batched(grad):
            rule = TIES.index(ctx.ties)
            with contextlib.suppress(KernelError):  # a step that has begun is finished
                by_marks = gathers(x.device)
                take, more = (_from_marks, best) if by_marks else (_from_places, tied)
                kept = as_made(arg), as_made(more)
                return *take(ctx.adj, grad, *kept, x, weight, rule, needs), *_NO

        def formed(x: Tensor, weight: Tensor | None) -> tuple[Tensor]:
            return (reference.reduce(x, weight, ctx.adj, ctx.is_max, ctx.ties),)

        found_x, found_weight = through(formed, (x, weight), needs, (grad,))
        return found_x, found_weight, *_NO


def _extremum(
    x: Tensor, weight: Tensor | None, adj: Adjacency, is_max: bool, ties: str, rule: int | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    found: tuple[Tensor, Tensor | None, Tensor | None]
    try:
        found = _reduce(x, *adj.by_target, adj.longest, weight, is_max, rule)
    except KernelError:  # a step that has begun is finished
        found = reference.reduce(x, weight, adj, is_max, ties), None, None
    return found


def _from_places(
    adj: Adjacency,
    grad: Tensor,
    arg: Tensor,
    tied: Tensor,
    x: Tensor,
    weight: Tensor | None,
    ties: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients where each target tells its sources."""
    given = (grad, arg, tied, x, *adj.by_target, weight, ties)
    grad_x = _reduce_backward(*given) if needs[0] else None
    return grad_x, _reduce_backward_weight(*given) if needs[1] else None


def _from_marks(
    adj: Adjacency,
    grad: Tensor,
    mark: Tensor,
    best: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    ties: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients where each source asks its targets."""
    grad_x = grad_weight = None
    if needs[0]:
        # Marks of 16 bit numbers are how many edges share, unless the first one gets everything.
        place = adj.places if best is None or x.element_size() > 2 else None
        grad_x = _reduce_gather(grad, mark, best, x, *adj.by_source, place, weight, ties)
    if needs[1]:
        grad_weight = _reduce_weight(grad, mark, best, x, *adj.by_target, weight, ties).to(x.dtype)
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
        out, _, _ = _extremum(values, weights, adj, reduce == "max", ties, None)
    return like(out, x, dtype)
