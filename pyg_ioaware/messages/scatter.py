"""The reduction inside PyG's aggregations, which meets the lazy messages."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyg_ioaware.messages.elements import reduce_elements
from pyg_ioaware.messages.lazy import REDUCE, LazyMessage, aggregate
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
        src = src.form(_why_formed(reduce))
    RECORD.settle(strict=True)
    if reduce in ("max", "min") and enabled():
        out = reduce_elements(src, index, dim, dim_size, reduce)
    return stock(src, index, dim, dim_size, reduce) if out is None else out


def segment(stock: Stock, src: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Reduces sorted messages by PyG's own segment reduction."""
    if type(src) is LazyMessage:
        src = src.form("aggregation by row pointers ('ptr'): by 'index' alone it runs fused")
    RECORD.settle(strict=True)
    return stock(src, *args, **kwargs)


def _why_formed(reduce: str) -> str:
    if reduce in REDUCE:
        return f"aggregation by '{reduce}' with an index, sizes or dimension unlike the messages'"
    return f"aggregation by '{reduce}': only sum, mean, max and min run fused"
