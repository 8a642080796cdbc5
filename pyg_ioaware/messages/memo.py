"""Seam B: functions of the graph structure that give the same tensors for the same input.

Layers such as GCNConv derive a new :obj:`edge_index` at every forward, so that nothing keyed on
it could be found again. A memoised function returns the very tensors it returned for the same
input, version and options; where an edge attribute requires a gradient, only the structure is
taken from the memo.
"""

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_ioaware import support
from pyg_ioaware.graph.cache import CACHE
from pyg_ioaware.graph.identity import identity, same_memory

Stock = Callable[..., Any]

_GRAPHS = (Tensor, SparseTensor)
_OPTIONS = frozenset({type(None), bool, int, float, str, torch.dtype})

_inside: ContextVar[bool] = ContextVar("pyg_ioaware_inside_memo", default=False)


class _Argument(NamedTuple):
    """Stands for an output that is one of the arguments itself."""

    place: int


class _Held:
    """Outputs of a function, and the versions that they had when they were made."""

    def __init__(self, outputs: Any, arguments: list[Any]) -> None:
        def hold(output: Any) -> Any:
            same = (i for i, a in enumerate(arguments) if a is output and output is not None)
            place = next(same, None)
            return output if place is None else _Argument(place)

        is_tuple = isinstance(outputs, tuple)
        held = [hold(o) for o in outputs] if is_tuple else [hold(outputs)]
        self.outputs = tuple(held) if is_tuple else held[0]
        self._takes_arguments = any(isinstance(h, _Argument) for h in held)
        self.tensors = _tensors(self.outputs)
        self.versions = [_version(t) for t in self.tensors]

    def give(self, arguments: list[Any]) -> Any:
        """Returns the outputs for these arguments."""
        if not self._takes_arguments:
            return self.outputs

        def give(held: Any) -> Any:
            return arguments[held.place] if isinstance(held, _Argument) else held

        if isinstance(self.outputs, tuple) and not isinstance(self.outputs, _Argument):
            return tuple(give(o) for o in self.outputs)
        return give(self.outputs)

    @property
    def is_intact(self) -> bool:
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor.requires_grad or _version(tensor) != version:
                return False
        return True

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def memoise(name: str, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    r"""Calls a function of the graph structure, or returns what it returned before.

    Args:
        name (str): The function's name.
        stock (callable): The function; it returns tensors derived from its arguments, and the
            first of them, a new :obj:`edge_index`, depends on no edge attribute.
        args (tuple): Positional arguments.
        kwargs (dict): Keyword arguments.
    """
    values = [*args, *kwargs.values()]
    anchors: list[Tensor] = []
    tokens: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _OPTIONS:
            tokens += [kind, value]
        elif kind is Tensor and value.layout is torch.strided:
            anchors.append(value)
            tokens.append(value.requires_grad)
        elif isinstance(value, _GRAPHS):
            anchors += _tensors(value)
            tokens.append(_token(value))
        else:
            try:
                hash(value)
            except TypeError:  # an option that has no value of its own, such as a list
                return stock(*args, **kwargs)
            tokens.append((kind, value))
    # Inside another memoised function there is nothing to keep: that one's results are kept.
    if (
        _inside.get()
        or not anchors
        or not all(map(_is_plain, anchors))
        or support.mode_reasons(*anchors)
    ):
        return stock(*args, **kwargs)
    what: Hashable = (name, len(args), *kwargs, *tokens)

    # Weights that are learned change by ways that no version counts, such as fused optimizers.
    if any(t.requires_grad for t in anchors):
        edge_index = args[0] if args else kwargs.get("edge_index")
        return _with_structure_of_memo(what, edge_index, _call(stock, args, kwargs))

    def build() -> _Held | None:
        outputs = _call(stock, args, kwargs)
        held = _Held(outputs, values)
        # Outputs that show an input's memory would keep that input alive.
        aliased = any(same_memory(a, b) for a in held.tensors for b in anchors)
        return None if aliased or not all(map(_is_plain, held.tensors)) else held

    held = CACHE.get(what, anchors, build, _nbytes, _usable)
    return stock(*args, **kwargs) if held is None else held.give(values)


def is_handed_out(frame: FrameType) -> bool:
    r"""Tells whether the layer that calls hands the result on to its user, who may change it.

    Args:
        frame (FrameType): The frame of the layer's method.
    """
    names = frame.f_locals
    return bool(
        getattr(names.get("self"), "cached", False) or names.get("return_attention_weights")
    )


def _call(stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = _inside.set(True)
    try:
        return stock(*args, **kwargs)
    finally:
        _inside.reset(token)


def _with_structure_of_memo(what: Hashable, edge_index: Any, outputs: Any) -> Any:
    fresh = outputs[0] if isinstance(outputs, tuple) else None
    if not isinstance(fresh, Tensor) or not _is_plain(fresh) or fresh.requires_grad:
        return outputs
    if not isinstance(edge_index, Tensor) or same_memory(fresh, edge_index):
        return outputs
    held = CACHE.get(
        ("structure", what), (edge_index,), lambda: _Held(fresh.clone(), []), _nbytes, _usable
    )
    return (held.outputs, *outputs[1:])


def _nbytes(held: _Held | None) -> int:
    return 0 if held is None else held.nbytes


def _usable(held: _Held | None) -> bool:
    return held is None or held.is_intact


def _version(tensor: Tensor) -> Hashable:
    if type(tensor) is Tensor:
        return None if tensor.is_inference() else tensor._version
    found = identity(tensor)
    return found and found.version


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_inference()


def _tensors(value: Any) -> list[Tensor]:
    """Returns the strided tensors that a value consists of."""
    if type(value) is Tensor and value.layout is torch.strided:
        return [value]
    if isinstance(value, SparseTensor):
        storage = value.storage
        parts = (storage._row, storage._rowptr, storage._col, storage._value)
        return [t for t in parts if t is not None]
    if isinstance(value, Tensor):
        if not is_torch_sparse_tensor(value):
            return [value]
        if value.layout == torch.sparse_csr:
            return [value.crow_indices(), value.col_indices(), value.values()]
        if value.layout == torch.sparse_coo:
            return [value._indices(), value._values()]
        return [value]
    if isinstance(value, tuple | list):
        return [t for v in value for t in _tensors(v)]
    return []


def _token(value: Any) -> Hashable:
    """Returns what tells a graph from others with the same tensors."""
    if isinstance(value, SparseTensor):
        return ("SparseTensor", tuple(value.sizes()))
    if isinstance(value, EdgeIndex):
        # What it says about its data is no part of the data, and may decide the result.
        return ("EdgeIndex", value._sparse_size, value._sort_order, value._is_undirected)
    return (value.layout, value.shape, value.requires_grad)
