"""Dot products of the two ends of each edge: the gradient of a weight."""

from typing import Any

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
    is_batched,
    launch,
    primitive,
    rows,
)
from pyg_ioaware.ops.spmm import multiply


def _fake(
    a: Tensor,
    b: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    heads: int,
    mean: bool,
) -> Tensor:
    return a.new_empty(idx.size(0), heads)


@primitive(f"sddmm(Tensor a, Tensor b, {CSR_ARGS}, int heads, bool mean) -> Tensor", _fake)
def _sddmm(
    a: Tensor,
    b: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    heads: int,
    mean: bool,
) -> Tensor:
    out = allocate(a, idx.size(0), heads)
    csr = CSR(rowptr, idx, perm, tiles, split)
    launch("sddmm", csr, out, a.contiguous(), b.contiguous(), mean)
    return out


class SDDMM(Function):
    """One dot product per edge and head, closed under differentiation together with SpMM."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, adj: Adjacency, heads: int, mean: bool) -> Tensor:
        ctx.adj, ctx.mean = adj, mean
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        out: Tensor
        try:
            out = _sddmm(a, b, *adj.by_target, heads, mean)
        except KernelError:  # a step that has begun is finished
            out = reference.sddmm(a, b, adj, heads, mean)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        a, b = ctx.saved_tensors
        product = reference.spmm if is_batched(grad) else multiply
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = product(b, grad, ctx.adj, ctx.mean, False)
        if ctx.needs_input_grad[1]:
            grad_b = product(a, grad, ctx.adj, ctx.mean, True)
        return grad_a, grad_b, None, None, None


def sddmm(a: Tensor, b: Tensor, adj: Adjacency, heads: int = 1, mean: bool = False) -> Tensor:
    r"""Takes the dot product of the target's and the source's row of every edge.

    .. math::
        s_{e,h} = \mathbf{a}_{i,h}^{\top} \mathbf{b}_{j,h}, \quad e = (j, i)

    Args:
        a (torch.Tensor): Target rows of shape :obj:`[num_dst, H * C]` or :obj:`[num_dst, H, C]`.
        b (torch.Tensor): Source rows of shape :obj:`[num_src, H * C]` or :obj:`[num_src, H, C]`.
        adj (Adjacency): The structure.
        heads (int, optional): The number :obj:`H` of heads. (default: :obj:`1`)
        mean (bool, optional): If set, divides by the in-degree of the target.
            (default: :obj:`False`)

    Returns:
        torch.Tensor: Products in the order of the input edges, of shape :obj:`[E, H]`.

    Raises:
        ValueError: If the operands do not fit the structure.
    """
    check(a, adj.num_dst, None, adj.num_edges, "sddmm")
    check(b, adj.num_src, None, adj.num_edges, "sddmm")
    if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
        raise ValueError(
            f"'sddmm' expects two operands of one width and dtype (got {list(a.shape[1:])} "
            f"'{a.dtype}' and {list(b.shape[1:])} '{b.dtype}')"
        )
    work = compute_dtype(a.dtype, a.device)
    a_rows, b_rows = rows(a, work), rows(b, work)
    if heads < 1 or a_rows.size(1) % heads:
        raise ValueError(
            f"'sddmm' expects a width that 'heads' divides (got {a_rows.size(1)} and {heads})"
        )
    out: Tensor = SDDMM.apply(  # type: ignore[no-untyped-call]
        a_rows, b_rows, adj, heads, mean
    )
    return out.to(a.dtype)
