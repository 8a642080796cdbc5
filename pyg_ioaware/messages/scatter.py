"""The reduction inside PyG's aggregations, which meets the lazy messages."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyg_ioaware.messages.elements import reduce_elements
from pyg_ioaware.messages.lazy import LazyMessage, aggregate
from pyg_ioaware.record import RECORD
from pyg_ioaware.switch import enabled

Stock = Callable[..., Tensor]


def scatter(
    stock: Stock,
    src: Tensor,
    index: Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Reduces lazy messages, and extrema of formed ones, fused; else calls PyG's own scatter."""
    out = None
    if type(src) is LazyMessage:
        out = aggregate(src, index, dim, dim_size, reduce)
        if out is not None:
            return out
        src = src.form(f"messages reduced by '{reduce}'")
    RECORD.settle(strict=True)
    if reduce in ("max", "min") and enabled():
        out = reduce_elements(src, index, dim, dim_size, reduce)
    return stock(src, index, dim, dim_size, reduce) if out is None else out


def segment(stock: Stock, src: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Reduces sorted messages by PyG's own segment reduction."""
    if type(src) is LazyMessage:
        src = src.form("messages reduced by 'segment'")
    RECORD.settle(strict=True)
    return stock(src, *args, **kwargs)
