"""Functions that commute with a gather: :obj:`f(x[index]) == f(x)[index]`.

Applied to lazy messages, they are applied to the nodes instead, which are fewer, and the messages
stay lazy.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_ioaware import support
from pyg_ioaware.graph.cache import CACHE

# Elementwise functions of numbers, and of messages of the same edges.
_ELEMENTWISE = {
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, F.softplus, F.logsigmoid, F.selu, F.hardtanh),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.log, torch.abs, torch.neg),
    *(torch.sqrt, torch.square, torch.add, torch.sub, torch.mul, torch.div, torch.pow),
    *(torch.sin, torch.cos, torch.clamp),
    *(Tensor.relu, Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.log, Tensor.abs, Tensor.neg),
    *(Tensor.sqrt, Tensor.square, Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.pow),
    *(Tensor.sin, Tensor.cos, Tensor.clamp),
    *(Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__, Tensor.__mul__),
    *(Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__, Tensor.__pow__),
}
_NUMBERS = (int, float, bool)
SHAPING = {Tensor.view, Tensor.reshape}


def on_nodes(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    r"""Applies a function of messages to the nodes that they are gathered from.

    Args:
        func (callable): The function as PyTorch dispatches it.
        args (tuple): Its arguments, the first of them lazy messages without a weight.
        kwargs (dict): Its keyword arguments.

    Returns:
        torch.Tensor, optional: The function of the nodes; :obj:`None` if it does not commute, or
        if there are more nodes than messages.
    """
    messages, rest = args[0], args[1:]
    if messages.src.size(0) > messages.size(0):
        return None
    if func not in SHAPING and func not in _ELEMENTWISE and func is not F.linear:
        return None
    if support.mode_reasons(*rest) or support.saving_reasons(messages.src, *rest):
        return None
    if func in SHAPING:  # moves values and gradients as they are
        sizes = None if kwargs else _trailing_sizes(messages, rest)
        if sizes is None or len(sizes) > 2:
            return None
        shaped: Tensor = messages.src.reshape(messages.src.size(0), *sizes)
        return shaped
    unused = CACHE.unused(messages.ends, messages.src.size(0))
    if unused is None:
        return None
    src = _without(unused, messages.src)
    out: Any = None
    if func in _ELEMENTWISE and not kwargs.get("inplace"):
        others = [_node_operand(v, messages, unused) for v in rest]
        if all(v is not None for v in others) and all(type(v) in _NUMBERS for v in kwargs.values()):
            out = func(src, *others, **kwargs)
    elif func is F.linear and not kwargs and all(_is_parameter(v) for v in rest):
        out = func(src, *rest)
    usable = isinstance(out, Tensor) and out.dim() in (2, 3) and out.is_floating_point()
    return out if usable else None


def _is_parameter(value: Any) -> bool:
    return value is None or type(value) in (Tensor, torch.nn.Parameter)


def _node_operand(value: Any, messages: Any, unused: Tensor) -> Any:
    """Returns a number, or what other messages of the same edges gather from; else None."""
    if type(value) in _NUMBERS:
        return value
    if type(value) is not type(messages) or value.ends is not messages.ends:
        return None
    if value.weight is not None or not value.is_intact:
        return None
    same_nodes = value.src.size(0) == messages.src.size(0) and value.dim() == messages.dim()
    return _without(unused, value.src) if same_nodes else None


def _without(unused: Tensor, src: Tensor) -> Tensor:
    """Returns the features with ones for nodes without messages.

    Stock never applies the function to those: no gradient may come from there, be it NaN.
    """
    if unused.numel() == 0:
        return src
    return src.index_fill(0, unused, 1.0)


def _trailing_sizes(messages: Tensor, rest: tuple[Any, ...]) -> list[int] | None:
    """Returns what a view makes of each message, if it leaves the messages apart."""
    sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
    if len(sizes) < 2 or not all(type(s) is int for s in sizes):
        return None
    first, width = sizes[0], math.prod(messages.shape[1:])
    trailing = list(sizes[1:])
    if first == messages.size(0) and trailing.count(-1) == 1:
        known = -math.prod(trailing)
        if known <= 0 or width % known:
            return None
        trailing[trailing.index(-1)] = width // known
    elif first not in (-1, messages.size(0)):
        return None
    return trailing if math.prod(trailing) == width and min(trailing) >= 0 else None
