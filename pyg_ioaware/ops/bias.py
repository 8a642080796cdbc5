"""Biases of large outputs, whose gradients are sums over very many rows."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_ioaware import engines
from pyg_ioaware.engines import KernelError
from pyg_ioaware.ops.library import allocate, is_plain, launch_on, primitive

MANY = 2**22
"""Numbers of an output from which on PyTorch's sum over rows takes long beside the rest."""


@primitive(
    "column_sums(Tensor x) -> Tensor",
    lambda x: x.new_empty(x.size(1), dtype=torch.double),
    ["CUDA"],
)
def _column_sums(x: Tensor) -> Tensor:
    out = allocate(x, x.size(1), dtype=torch.double)
    launch_on(x.device, "column_sums", None, out, x)
    return out


def sums_columns(x: Tensor, size: int) -> bool:
    r"""Tells whether sums over the rows of :obj:`size` such numbers are worth a kernel.

    Args:
        x (torch.Tensor): A tensor on the device, and of the dtype.
        size (int): How many numbers there are in all.
    """
    engine = engines.of(x.device) if size >= MANY else None
    if engine is None or not engine.sums_columns:
        return False
    return x.dtype in engine.native_dtypes and x.dtype not in engine.broken


class _Biased(Function):
    """An identity, for a sum that has its bias already."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(out)  # what is returned is no view, so it may be changed in place
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, _sums(grad) if ctx.needs_input_grad[1] else None


def _sums(grad: Tensor) -> Tensor:
    recorded = torch.is_grad_enabled() and grad.requires_grad
    is_dense = is_plain(grad) and grad.layout == torch.strided and grad.is_contiguous()
    if is_dense and not recorded:
        try:
            found: Tensor = _column_sums(grad)
            return found.to(grad.dtype)
        except KernelError:  # a step that has begun is finished
            pass
    return grad.sum(0)


def biased(out: Tensor, bias: Tensor) -> Tensor:
    r"""Returns a sum that a bias has been added to, and lets gradients reach that bias.

    Args:
        out (torch.Tensor): The sum of something and the detached bias, of shape
            :obj:`[N, C]`; a tensor that nobody else has.
        bias (torch.Tensor): The bias, of shape :obj:`[C]`, and of the same dtype.

    Returns:
        torch.Tensor: The same tensor. Its gradient reaches the bias as the sum over rows, taken
        in float64.
    """
    found: Tensor = _Biased.apply(out, bias)  # type: ignore[no-untyped-call]
    return found
