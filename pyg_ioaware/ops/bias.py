"""Biases of large outputs, whose gradients are sums over very many rows."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_ioaware import engines
from pyg_ioaware.engines import KernelError
from pyg_ioaware.ops.library import allocate, is_batched, primitive

MANY = 2**22
"""Numbers of an output from which on PyTorch's sum over rows takes long beside the rest."""


@primitive("column_sums(Tensor x) -> Tensor", lambda x: x.new_empty(x.size(1), dtype=torch.double))
def _column_sums(x: Tensor) -> Tensor:
    out = allocate(x, x.size(1), dtype=torch.double)
    engine = engines.of(x.device)
    if engine is None:
        raise NotImplementedError(f"no engine for device '{x.device}'")
    engine.run("column_sums", None, out, x)
    return out


def sums_columns(x: Tensor, size: int) -> bool:
    r"""Tells whether sums over the rows of :obj:`size` such numbers are worth a kernel.

    Args:
        x (torch.Tensor): A tensor on the device, and of the dtype.
        size (int): How many numbers there are in all.
    """
    engine = engines.of(x.device) if size >= MANY else None
    return engine is not None and engine.sums_columns and x.dtype in engine.native_dtypes


class _Biased(Function):
    """An identity, for a sum that has its bias already."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = bias.shape, bias.dtype
        ctx.mark_dirty(out)  # what is returned is no view, so it may be changed in place
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, _sums(grad, ctx.shape, ctx.dtype) if ctx.needs_input_grad[1] else None


def _sums(grad: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    flat = grad.reshape(-1, math.prod(shape))
    recorded = torch.is_grad_enabled() and grad.requires_grad
    if grad.is_contiguous() and not recorded and not is_batched(grad):
        try:
            found: Tensor = _column_sums(flat)
            return found.to(dtype).view(shape)
        except KernelError:  # a step that has begun is finished
            pass
    return flat.sum(0).to(dtype).view(shape)


def biased(out: Tensor, bias: Tensor) -> Tensor:
    r"""Returns a sum that a bias has been added to, and lets gradients reach that bias.

    Args:
        out (torch.Tensor): The sum of something and the detached bias, of shape
            :obj:`[N, *]`; a tensor that nobody else has.
        bias (torch.Tensor): The bias, of as many numbers as a row has.

    Returns:
        torch.Tensor: The same tensor. Its gradient reaches the bias as the sum over rows, taken
        in float64.
    """
    found: Tensor = _Biased.apply(out, bias)  # type: ignore[no-untyped-call]
    return found
