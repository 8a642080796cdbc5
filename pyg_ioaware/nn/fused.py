"""What the IOAware layers share: the seams, bound to their classes instead of to PyG."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, MultiAggregation
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.typing import OptTensor
from torch_geometric.utils import scatter, segment, spmm

from pyg_ioaware import messages
from pyg_ioaware.messages import LazyMessage
from pyg_ioaware.rebind import with_globals
from pyg_ioaware.support import REDUCTIONS, has_hooks
from pyg_ioaware.switch import is_disabled

# PyG reads the annotations of 'aggregate', and fails on 'int | None'.
OptInt = Optional[int]  # noqa: UP045

_stock_gather = inspect.unwrap(MessagePassing._index_select_safe)


def bind_scatter(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a stock aggregation's function that reduces lazy messages fused."""

    def fused_scatter(*args: Any, **kwargs: Any) -> Tensor:
        return messages.scatter(scatter, *args, **kwargs)

    def fused_segment(*args: Any, **kwargs: Any) -> Tensor:
        return messages.segment(segment, *args, **kwargs)

    return with_globals(stock, scatter=fused_scatter, segment=fused_segment)


def bind_spmm(stock: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """Returns a stock layer's function that multiplies sparse adjacencies fused."""

    def fused_spmm(*args: Any, **kwargs: Any) -> Tensor:
        stock: Callable[..., Tensor] = spmm
        if is_disabled():
            return stock(*args, **kwargs)
        return messages.spmm(stock, owner, *args, **kwargs)

    return with_globals(stock, spmm=fused_spmm)


def bind_memo(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the graph structure that returns the same tensors again."""
    original = inspect.unwrap(stock)

    def memoised(*args: Any, **kwargs: Any) -> Any:
        if is_disabled() or messages.is_handed_out(sys._getframe(1)):
            return original(*args, **kwargs)
        return messages.memoise(original.__name__, original, args, kwargs)

    return memoised


class FusedMessages(MessagePassing):
    """A message passing layer whose messages are lazy, whether PyG is patched or not."""

    def _index_select_safe(self, src: Tensor, index: Tensor) -> Tensor:
        if is_disabled():
            out: Tensor = _stock_gather(self, src, index)
            return out
        return messages.gather(self, src, index, _stock_gather)

    def aggregate(
        self,
        inputs: Tensor,
        index: Tensor,
        ptr: OptTensor = None,
        dim_size: OptInt = None,
    ) -> Tensor:
        """Aggregates as the stock layer does; see PyG's MessagePassing.aggregate."""
        # Of the two branches, TorchScript compiles the first alone.
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            out: Tensor = self.aggr_module(inputs, index, ptr, dim_size, self.node_dim)
        else:
            out = _aggregate(self.aggr_module, inputs, index, ptr, dim_size, self.node_dim)
        return out


_reduce = bind_scatter(Aggregation.reduce)
_fused_forward = bind_scatter(FusedAggregation.forward)


def _aggregate(
    module: Aggregation,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None,
    dim_size: int | None,
    dim: int,
) -> Tensor:
    out: Tensor
    if type(x) is LazyMessage and type(module) in REDUCTIONS and not has_hooks(module):
        out = _reduce(module, x, index, ptr, dim_size, dim, REDUCTIONS[type(module)])
    elif type(x) is LazyMessage and type(module) is MultiAggregation and not has_hooks(module):
        out = module.combine(_aggregate_list(module, x, index, ptr, dim_size, dim))
    else:
        out = module(x, index, ptr=ptr, dim_size=dim_size, dim=dim)
    return out


def _aggregate_list(
    module: MultiAggregation,
    x: LazyMessage,
    index: Tensor,
    ptr: Tensor | None,
    dim_size: int | None,
    dim: int,
) -> list[Tensor]:
    outs: dict[int, Tensor] = {}
    if x.dim() == 2 and module.fused_aggr is not None:
        fused = _fused_forward(module.fused_aggr, x, index, ptr, dim_size, dim)
        outs = dict(zip(module.fused_out_index, fused, strict=True))
    for i, aggr in enumerate(module.aggrs):
        if i not in outs:
            outs[i] = _aggregate(aggr, x, index, ptr, dim_size, dim)
    return [outs[i] for i in range(len(module.aggrs))]
