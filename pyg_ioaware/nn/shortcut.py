"""Layers of sums, means and extrema: PyG's own forward, but for the way of its messages.

Where a layer passes messages as PyG wrote it, and nobody looks on, what it would propagate is
aggregated at once. Everything else goes the general way, that of lazy messages, with the same
result and the same records.
"""

from typing import Any

from torch import Tensor
from torch_geometric.nn import (
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
)

from pyg_ioaware import support
from pyg_ioaware.messages import aggregate_nodes
from pyg_ioaware.nn.biased import as_added, as_seen
from pyg_ioaware.nn.forward import Forward, Function
from pyg_ioaware.nn.sources import is_known

_PARTS = ("_check_input", "_set_size", "_index_select")  # what PyG's 'propagate' calls besides


class _View:
    r"""A layer as its own forward sees it while it runs: the layer, but for its propagation.

    They share their dictionary.

    Args:
        conv (MessagePassing): The layer.
        way (Shortcut): How it propagates.
    """

    __slots__ = ("__dict__", "_bias", "_conv", "_way")

    def __init__(self, conv: Any, way: "Shortcut") -> None:
        put = object.__setattr__
        put(self, "__dict__", conv.__dict__)
        put(self, "_conv", conv)
        put(self, "_way", way)
        put(self, "_bias", None)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._conv)

    def __getattr__(self, name: str) -> Any:
        if name == "bias" and self._bias is not None:
            return self._bias
        return as_seen(getattr(self._conv, name))  # parameters, modules and what the class has

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._conv, name, value)

    @property
    def propagate(self) -> Function:
        """What takes the place of the layer's own propagation, be it one that is bound to it."""
        return self._propagate

    def _propagate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the layer's own propagation returns."""
        out = self._way.aggregate(self._conv, *args, **kwargs)
        if out is None:
            return self._conv.propagate(*args, **kwargs)
        if self._way.adds_bias:
            object.__setattr__(self, "_bias", as_added(self._conv.bias, out))
        return out


class Shortcut(Forward):
    """How the forward of a layer runs whose message is known. See :class:`Forward`."""

    def __init__(self, layer: type) -> None:
        super().__init__(layer, ("propagate",))
        self._methods |= {name: (getattr(MessagePassing, name),) for name in _PARTS}
        self._message = layer.message  # type: ignore[attr-defined]
        is_weighted = "edge_weight" in self._message.__code__.co_varnames
        self._operands = {"x", "edge_weight"} if is_weighted else {"x"}
        self._has_bias = layer is GCNConv

    @property
    def adds_bias(self) -> bool:
        """Whether the layer has a bias of its own, which its forward does nothing with but add."""
        return self._has_bias and is_known(self.stock)

    def __call__(self, conv: Any, stock: Function, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer's forward on a view of the layer."""
        return stock(_View(conv, self), *args, **kwargs)

    def aggregate(self, conv: Any, *edges: Any, size: Any = None, **operands: Any) -> Tensor | None:
        r"""Returns what a layer's propagation returns.

        Args:
            conv (MessagePassing): The layer.
            *edges: The edges.
            size (tuple, optional): The numbers of nodes of both sides. (default: :obj:`None`)
            **operands: What else the layer's forward passes.

        Returns:
            torch.Tensor, optional: :obj:`None` if the layer has to propagate by itself.
        """
        if operands.keys() != self._operands or len(edges) != 1 or not is_known(self._message):
            return None
        if support.passing_reasons(conv, self._methods, self._generated, support.REDUCTIONS):
            return None
        reduce, weight = support.REDUCTIONS[type(conv.aggr_module)], operands.get("edge_weight")
        return aggregate_nodes(conv, reduce, edges[0], operands["x"], weight, size)


SHORTCUTS = {layer: Shortcut(layer) for layer in (GCNConv, SAGEConv, GraphConv, GINConv)}
