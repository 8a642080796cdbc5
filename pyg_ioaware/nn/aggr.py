"""MaxAggregation, fused."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import MaxAggregation

from pyg_ioaware.messages import LazyMessage, aggregate, reduce_elements
from pyg_ioaware.switch import is_disabled


class IOAwareMaxAggregation(MaxAggregation):
    r"""An aggregation operator that takes the feature-wise maximum across a set of elements, as
    :class:`~torch_geometric.nn.MaxAggregation` does.

    .. math::
        \mathrm{max}(\mathcal{X}) = \max_{\mathbf{x}_i \in \mathcal{X}} \mathbf{x}_i.

    Elements need not be sorted. A set without elements gets zeros, and NaN propagates.

    Args:
        ties (str, optional): Where the gradient of tied elements goes: :obj:`"stock"` as on this
            installation of PyG, or :obj:`"exact"` evenly, so that each output's gradient is
            passed on in full. (default: :obj:`"stock"`)

    Raises:
        ValueError: If :obj:`ties` is neither.
    """

    def __init__(self, ties: str = "stock") -> None:
        super().__init__()
        if ties not in ("stock", "exact"):
            raise ValueError(f"'ties' must be 'stock' or 'exact' (got '{ties}')")
        self.ties = ties

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Takes the maximum; see PyG's MaxAggregation."""
        by_segment = index is None or (ptr is not None and self._deterministic)
        if not is_disabled() and not by_segment and index is not None:
            ties = None if self.ties == "stock" else self.ties
            reduce: Any = aggregate if type(x) is LazyMessage else reduce_elements
            out: Tensor | None = reduce(x, index, dim, dim_size, "max", ties)
            if out is not None:
                return out
        stock: Tensor = super().forward(x, index, ptr, dim_size, dim)
        return stock
