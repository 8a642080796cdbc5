"""Sums and means of weighted neighbour rows, without a tensor of the size of the edges."""

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
    is_plain,
    is_recorded,
    launch,
    like,
    partials,
    per_head,
    primitive,
    rows,
)


def _fake(
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor | None,
    scale: Tensor | None,
    mean: bool,
) -> Tensor:
    return x.new_empty(rowptr.size(0) - 1, x.size(1))


@primitive(f"spmm(Tensor x, {CSR_ARGS}, Tensor? weight, Tensor? scale, bool mean) -> Tensor", _fake)
def _spmm(
    x: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    weight: Tensor | None,
    scale: Tensor | None,
    mean: bool,
) -> Tensor:
    out = allocate(x, rowptr.size(0) - 1, x.size(1))
    partial = partials(x, tiles, x.size(1))
    if weight is not None:
        weight = weight.contiguous()
    csr = CSR(rowptr, idx, perm, tiles, split)
    launch("spmm", csr, out, x.contiguous(), weight, scale, partial, mean)
    return out


class SpMM(Function):
    r"""The product with the adjacency (or its transpose), closed under differentiation.

    :obj:`mean` divides by the in-degree of the *target*: after the sum, or before it in the
    transpose, so that the gradient of either is the other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, adj: Adjacency, mean: bool, transposed: bool
    ) -> Tensor:
        ctx.adj, ctx.mean, ctx.transposed = adj, mean, transposed
        ctx.heads = 1 if weight is None else weight.size(1)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _multiply(x, weight, adj, mean, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        adj, mean, transposed = ctx.adj, ctx.mean, ctx.transposed
        batched = is_batched(grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            product = reference.spmm if batched else multiply
            grad_x = product(grad, weight, adj, mean, not transposed)
        if ctx.needs_input_grad[1]:
            # Imported late: each of the two operations is the gradient of the other.
            from pyg_ioaware.ops.sddmm import SDDMM

            dots = reference.sddmm if batched else SDDMM.apply
            target, source = (x, grad) if transposed else (grad, x)
            grad_weight = dots(target, source, adj, ctx.heads, mean)
        return grad_x, grad_weight, None, None, None


def _multiply(
    x: Tensor, weight: Tensor | None, adj: Adjacency, mean: bool, transposed: bool
) -> Tensor:
    scale = adj.inv_degree(x.dtype) if mean and transposed else None
    csr, ordered = adj.csr(transposed), weight
    if weight is not None and csr.perm is not None and _is_kept(weight):
        csr, ordered = adj.weighted(weight, transposed)
    out: Tensor
    try:
        out = _spmm(x, *csr, ordered, scale, mean and not transposed)
    except KernelError:  # a step that has begun is finished
        out = reference.spmm(x, weight, adj, mean, transposed)
    return out


def _is_kept(weight: Tensor) -> bool:
    """Tells whether weights are kept in the order in which a kernel meets them."""
    # Learned ones change by ways that no version counts.
    return not weight.requires_grad and gathers(weight.device) and is_plain(weight)


def multiply(
    x: Tensor, weight: Tensor | None, adj: Adjacency, mean: bool, transposed: bool
) -> Tensor:
    """Multiplies rows with the adjacency or its transpose; see :class:`SpMM`."""
    if not is_recorded(x, weight):
        return _multiply(x, weight, adj, mean, transposed)
    out: Tensor = SpMM.apply(x, weight, adj, mean, transposed)  # type: ignore[no-untyped-call]
    return out


def spmm(x: Tensor, adj: Adjacency, weight: Tensor | None = None, mean: bool = False) -> Tensor:
    r"""Sums the rows of each target's sources, optionally weighted.

    .. math::
        \mathbf{y}_i = \sum_{e = (j, i)} w_e \, \mathbf{x}_j

    Sums are taken in float32 (float64 for float64), whatever the storage type.

    Args:
        x (torch.Tensor): Source rows of shape :obj:`[num_src, F]` or :obj:`[num_src, H, C]`.
        adj (Adjacency): The structure.
        weight (torch.Tensor, optional): Weights in the order of the input edges, of shape
            :obj:`[E]`, or :obj:`[E, H]` for one per head. (default: :obj:`None`)
        mean (bool, optional): If set, divides each sum by the number of its edges, zero counting
            as one. (default: :obj:`False`)

    Returns:
        torch.Tensor: Target rows of shape :obj:`[num_dst, ...]`, in the dtype that
        :obj:`weight * x` has.

    Raises:
        ValueError: If the operands do not fit the structure.
    """
    check(x, adj.num_src, weight, adj.num_edges, "spmm")
    dtype = x.dtype if weight is None else torch.promote_types(weight.dtype, x.dtype)
    work = compute_dtype(dtype, x.device)
    out = multiply(rows(x, work), per_head(weight, work), adj, mean, False)
    return like(out, x, dtype)
