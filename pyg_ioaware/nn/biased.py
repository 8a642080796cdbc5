"""Biases of PyG's layers: added as PyG adds them, their gradients summed by a kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.dense.linear import Linear

from pyg_ioaware import support
from pyg_ioaware.engines import row_width
from pyg_ioaware.ops.bias import biased, sums_columns

_STOCK = Linear.forward


class Mapped:
    r"""A linear map as a layer's forward sees it.

    Args:
        module (Linear): The layer's own.
    """

    __slots__ = ("_module",)

    def __init__(self, module: Linear) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any) -> Any:
        """Returns what the linear map returns."""
        module = self._module
        bias = module.bias
        if not _is_worth_it(x, bias, module.out_channels) or not _is_stock(module):
            return module(x)
        return biased(F.linear(x, module.weight, bias.detach()), bias)


def as_seen(value: Any) -> Any:
    """Returns an attribute of a layer as the layer's forward sees it."""
    return Mapped(value) if type(value) is Linear else value


def add_bias(out: Any, bias: Any) -> Tensor | None:
    r"""Adds the bias of a layer to what its messages were aggregated to.

    Args:
        out (torch.Tensor): That, of shape :obj:`[N, *]`.
        bias (torch.nn.Parameter, optional): The bias, of as many numbers as a row has.

    Returns:
        torch.Tensor, optional: :obj:`None` if it is left to PyG.
    """
    if not isinstance(out, Tensor) or not _is_worth_it(out, bias, row_width(out)):
        return None
    return biased(out + bias.detach().view(out.shape[1:]), bias)


def _is_worth_it(x: Any, bias: Any, width: int) -> bool:
    """Tells whether the gradient of a bias is a sum over so many rows that it takes long."""
    return (
        isinstance(bias, Tensor)
        and type(x) in support.PLAIN
        and x.dim() > 1
        and sums_columns(x, x.size(0) * width)
        and bias.requires_grad
        and bias.numel() == width
        and (bias.dtype, bias.device) == (x.dtype, x.device)
        and torch.is_grad_enabled()
        and not support.mode_reasons(x, bias)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_stock(module: Linear) -> bool:
    """Tells whether calling a linear map does what PyG wrote, and nobody looks on."""
    return (
        Linear.forward is _STOCK
        and "forward" not in module.__dict__
        and not support.has_hooks(module)
        and not _has_any_global_hook()
        and not support.mode_reasons(module.weight)
    )
