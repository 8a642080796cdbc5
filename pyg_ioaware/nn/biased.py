"""Biases of PyG's layers: added as PyG adds them, their gradients summed by a kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.dense.linear import Linear

from pyg_ioaware import support
from pyg_ioaware.nn.sources import is_known
from pyg_ioaware.ops.bias import biased, sums_columns


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
        if not _is_worth_it(x, bias) or not _is_stock(module, (bias.numel(), x.size(1))):
            return module(x)
        return biased(F.linear(x, module.weight, bias.detach()), bias)


class Bias:
    r"""The bias of a layer as a forward sees it that does nothing but add it to its result.

    Args:
        bias (torch.nn.Parameter): The layer's own.
    """

    __slots__ = ("_bias",)

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def __radd__(self, out: Any) -> Any:
        """Returns the sum of a result and the bias."""
        bias = self._bias
        if not _is_worth_it(out, bias) or out.size(1) != bias.numel():
            return out + bias
        return biased(out + bias.detach(), bias)


def as_seen(value: Any) -> Any:
    """Returns an attribute of a layer as the layer's forward sees it."""
    return Mapped(value) if type(value) is Linear else value


def as_added(bias: Any, out: Any) -> Any:
    r"""Returns the bias of a layer as a forward sees it that does nothing but add it.

    Args:
        bias (torch.nn.Parameter, optional): The bias.
        out (torch.Tensor): What the layer's messages were aggregated to.
    """
    is_large = type(out) is Tensor and type(bias) in support.PLAIN
    return Bias(bias) if is_large and sums_columns(out, out.numel()) else bias


def _is_worth_it(x: Any, bias: Any) -> bool:
    """Tells whether the gradient of a bias is a sum over so many rows that it takes long."""
    return (
        type(x) in support.PLAIN
        and type(bias) in support.PLAIN
        and (x.dim(), bias.dim()) == (2, 1)
        and sums_columns(x, x.size(0) * bias.numel())
        and bias.requires_grad
        and (bias.dtype, bias.device) == (x.dtype, x.device)
        and torch.is_grad_enabled()
        and not support.mode_reasons(x, bias)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_stock(module: Linear, shape: tuple[int, int]) -> bool:
    """Tells whether calling a linear map does what PyG wrote, and nobody looks on."""
    weight = module.weight
    return (
        is_known(Linear.forward)
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not support.has_hooks(module)
        and not _has_any_global_hook()
        and type(weight) in support.PLAIN
        and weight.shape == shape
        and not support.mode_reasons(weight)
    )
