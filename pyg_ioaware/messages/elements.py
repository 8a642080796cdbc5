"""Maxima and minima of tensors that are formed already, such as the messages of EdgeConv."""

import math

import torch
from torch import Tensor

from pyg_ioaware import ops, support
from pyg_ioaware.graph.cache import CACHE

# Below this width, building the structure costs as much as stock's reduction.
_MIN_WIDTH = 8


def reduce_elements(
    x: Tensor, index: Tensor, dim: int, dim_size: int | None, reduce: str, ties: str | None = None
) -> Tensor | None:
    r"""Reduces the rows of each set by one fused operation.

    Args:
        x (torch.Tensor): Elements of shape :obj:`[E, *]`.
        index (torch.Tensor): The set of each element, of shape :obj:`[E]`.
        dim (int): The dimension of the elements.
        dim_size (int, optional): The number of sets.
        reduce (str): :obj:`"max"` or :obj:`"min"`.
        ties (str, optional): The rule for ties; stock PyG's if :obj:`None`.

    Returns:
        torch.Tensor, optional: :obj:`None` if stock PyG has to do it.
    """
    if dim_size is None or type(x) not in support.PLAIN or dim not in (0, -x.dim()):
        return None
    if support.tensor_reasons(x) or support.index_reasons(index, x) or support.mode_reasons(x):
        return None
    if x.size(0) != index.size(0) or (ties is None and math.prod(x.shape[1:]) < _MIN_WIDTH):
        return None
    adj = CACHE.elements(index, dim_size)
    if adj is None:
        return None
    rule = support.scatter_ties(x, x.requires_grad and torch.is_grad_enabled())
    return ops.reduce(x, adj, reduce=reduce, ties=ties or rule)
