"""Installs the seams into PyG, and takes them out again."""

import contextlib
import functools
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch_geometric.nn
import torch_geometric.utils
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric import EdgeIndex
from torch_geometric.index import ptr2index
from torch_geometric.nn import ChebConv, GATv2Conv, GraphConv, MessagePassing, TransformerConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_ioaware import messages
from pyg_ioaware.forks import hold_over_fork
from pyg_ioaware.nn.gatv2_conv import fuse_gatv2
from pyg_ioaware.nn.shortcut import SHORTCUTS
from pyg_ioaware.nn.transformer_conv import fuse_transformer
from pyg_ioaware.rebind import rebind, share_overloads
from pyg_ioaware.switch import FLAG, SWITCH, Flag, enabled, forced

logger = logging.getLogger("pyg_ioaware")

Function = Callable[..., Any]
Module = TypeVar("Module", bound=torch.nn.Module)

_LAYERS = ("torch_geometric.nn.conv", "torch_geometric.nn.models")
_COLLECTORS = ("torch_geometric.index", "torch_geometric.nn.conv")
_AGGREGATIONS = ("torch_geometric.nn.aggr",)


@dataclass(frozen=True)
class Replacement:
    r"""One row of the :obj:`REGISTRY`: a function of PyG, and what stands in for it.

    Attributes:
        target (callable): PyG's function.
        places (type or tuple): Its class, if it is a method; else the packages in each of whose
            modules it is replaced.
        make (callable): Makes the wrapper from the original.
        purpose (str): What the replacement does, for the documentation.
    """

    target: Function
    places: type | tuple[str, ...]
    make: Callable[[Function], Function]
    purpose: str

    @property
    def name(self) -> str:
        """The function's name as users know it."""
        return self.target.__qualname__


def _exchange(new: dict[Function, tuple[Function, tuple[str, ...]]]) -> None:
    """Replaces functions in every module of the packages named with each, in one pass."""
    searched = tuple({package for _, packages in new.values() for package in packages})
    wanted = {id(function) for function in new}
    for module in [m for m in sys.modules.values() if isinstance(m, types.ModuleType)]:
        place = str(getattr(module, "__name__", ""))
        if not place.startswith(searched):
            continue
        # By identity: some objects answer to being compared by importing or warning.
        if wanted.isdisjoint(map(id, list(vars(module).values()))):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in wanted:
                function, packages = new[value]
                if place.startswith(packages):
                    setattr(module, name, function)


# Wrappers keep all that they refer to in closure cells, inner annotations included: their globals
# are the original's.


def _make_gather(original: Function) -> Function:
    is_enabled, gather = enabled, messages.gather

    def _index_select_safe(self: MessagePassing, src: Tensor, index: Tensor) -> Tensor:
        if is_enabled(self):
            return gather(self, src, index, original)
        out: Tensor = original(self, src, index)
        return out

    return _index_select_safe


def _make_memo(original: Function) -> Function:
    is_enabled, is_compiling, frame = enabled, torch.compiler.is_compiling, sys._getframe
    memoise, is_handed_out, name = messages.memoise, messages.is_handed_out, original.__name__

    def memoised(*args: Any, **kwargs: Any) -> Any:
        # A function such as 'gcn_norm' is not told which layer calls it; the layer's frame is.
        if is_compiling() or not (is_enabled() or is_enabled(frame(1).f_locals.get("self"))):
            return original(*args, **kwargs)
        if is_handed_out(frame(1)):
            return original(*args, **kwargs)
        return memoise(name, original, args, kwargs)

    return memoised


def _make_norm(original: Function) -> Function:
    is_enabled, is_compiling = enabled, torch.compiler.is_compiling
    memoise, name, partial = messages.memoise, original.__qualname__, functools.partial

    def __norm__(self: ChebConv, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not is_enabled(self):
            return original(self, *args, **kwargs)
        return memoise(name, partial(original, self), args, kwargs)

    return __norm__


def _make_spmm(original: Function) -> Function:
    is_enabled, is_compiling, frame = enabled, torch.compiler.is_compiling, sys._getframe
    product = messages.spmm

    def spmm(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        layer = frame(1).f_locals.get("self")
        if not is_enabled(layer):
            return original(*args, **kwargs)
        return product(original, type(layer).__name__, *args, **kwargs)

    return spmm


def _make_product(original: Function) -> Function:
    is_enabled, is_compiling, partial = enabled, torch.compiler.is_compiling, functools.partial
    matmul, edge_index_type = messages.matmul, EdgeIndex

    def message_and_aggregate(self, edge_index, x, edge_weight):  # type: ignore[no-untyped-def]
        if is_compiling() or type(edge_index) is not edge_index_type or not is_enabled(self):
            return original(self, edge_index, x, edge_weight)
        stock = partial(original, self, edge_index, x, edge_weight)
        return matmul(stock, type(self).__name__, edge_index, x[0], edge_weight, self.aggr)

    return message_and_aggregate


def _make_scatter(original: Function) -> Function:
    is_compiling, scatter = torch.compiler.is_compiling, messages.scatter

    def reduce(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        return scatter(original, *args, **kwargs)

    return reduce


def _make_segment(original: Function) -> Function:
    is_compiling, segment = torch.compiler.is_compiling, messages.segment

    def reduce(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        return segment(original, *args, **kwargs)

    return reduce


_utils = torch_geometric.utils
_ATTENDS = "attends in one pass: scores, softmax and weighted sum"
_AGGREGATES = "aggregates without making messages"

REGISTRY: tuple[Replacement, ...] = (
    Replacement(GATv2Conv.forward, GATv2Conv, fuse_gatv2.wrap, _ATTENDS),
    Replacement(TransformerConv.forward, TransformerConv, fuse_transformer.wrap, _ATTENDS),
    *(Replacement(s.stock, layer, s.wrap, _AGGREGATES) for layer, s in SHORTCUTS.items()),
    Replacement(
        MessagePassing._index_select_safe,
        MessagePassing,
        _make_gather,
        "gathers messages lazily",
    ),
    Replacement(
        _utils.scatter, _AGGREGATIONS + _LAYERS, _make_scatter, "reduces lazy messages fused"
    ),
    Replacement(_utils.segment, _AGGREGATIONS, _make_segment, "forms lazy messages"),
    Replacement(gcn_norm, _LAYERS, _make_memo, "returns the same tensors again"),
    Replacement(
        _utils.add_remaining_self_loops, _LAYERS, _make_memo, "returns the same tensors again"
    ),
    Replacement(_utils.add_self_loops, _LAYERS, _make_memo, "returns the same tensors again"),
    Replacement(_utils.remove_self_loops, _LAYERS, _make_memo, "returns the same tensors again"),
    Replacement(_utils.get_laplacian, _LAYERS, _make_memo, "returns the same tensors again"),
    Replacement(ptr2index, _COLLECTORS, _make_memo, "returns the same tensors again"),
    Replacement(ChebConv.__norm__, ChebConv, _make_norm, "returns the same tensors again"),
    Replacement(
        GraphConv.message_and_aggregate,
        GraphConv,
        _make_product,
        "multiplies a sorted EdgeIndex fused",
    ),
    Replacement(_utils.spmm, _LAYERS, _make_spmm, "multiplies sparse adjacencies fused"),
)

_Scripted = torch.jit.ScriptFunction
_call_scripted = _Scripted.__call__


def _call_formed(self: Any, *args: Any, **kwargs: Any) -> Any:
    # TorchScript asks no '__torch_function__' here, and its fusers read the memory of arguments.
    if any(type(value) is messages.LazyMessage for value in tree_leaves((args, kwargs))):
        return messages.LazyMessage.__torch_function__(self, (), args, kwargs)
    return _call_scripted(self, *args, **kwargs)


# A user's 'message' may call a compiled function: it gets formed messages, not the code that makes
# them lazy.
for _name in ("lazy", "commute"):
    torch._dynamo.trace_rules.add(f"{messages.__name__}.{_name}")

_lock = threading.RLock()
hold_over_fork(_lock)
_scopes: dict[object, tuple[bool, bool]] = {}  # in the order of entry: the state before each
_installed: list[tuple[Replacement, Function]] = []
_accelerated: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
_visitors = 0


def patch(strict: bool | None = None) -> None:
    r"""Runs PyG's message passing fused from now on, in models built before or after.

    Calling it again changes nothing but :obj:`strict`. Nothing of CUDA is touched. The environment
    variable :obj:`PYG_IOAWARE_DISABLE=1` makes it do nothing.

    Args:
        strict (bool, optional): If set, a layer that would run on stock PyG raises
            :class:`FallbackError` with every reason. (default: :obj:`True` if the environment
            has :obj:`PYG_IOAWARE_STRICT=1`, else :obj:`False`)
    """
    if _is_switched_off():
        return
    with _lock:
        _install()
        SWITCH.patched = True
        SWITCH.strict = _environment("PYG_IOAWARE_STRICT") if strict is None else strict


def unpatch() -> None:
    r"""Puts PyG's own functions back.

    While models are accelerated one by one, the functions stay replaced for them; no other model
    notices. What the cache holds stays until :meth:`~pyg_ioaware.clear_cache`.
    """
    with _lock:
        SWITCH.patched = SWITCH.strict = False
        _uninstall_if_unused()


def is_patched() -> bool:
    """Tells whether :meth:`patch` is in force."""
    return SWITCH.patched


@contextlib.contextmanager
def patched(strict: bool | None = None) -> Iterator[None]:
    r"""Patches PyG inside a :obj:`with` block, and leaves things as they were before it.

    Args:
        strict (bool, optional): See :meth:`patch`. (default: :obj:`None`)
    """
    scope = object()
    with _lock:
        _scopes[scope] = (SWITCH.patched, SWITCH.strict)
        patch(strict)
    try:
        yield
    finally:
        with _lock:
            _leave(scope)


def _leave(scope: object) -> None:
    """Ends a scope; where threads overlap, the state before it passes to the one that follows."""
    later = list(_scopes)[list(_scopes).index(scope) + 1 :]
    before = _scopes.pop(scope)
    if later:
        _scopes[later[0]] = before
        return
    SWITCH.patched, SWITCH.strict = before
    if SWITCH.patched:  # 'unpatch' may have been called inside
        _install()
    _uninstall_if_unused()


@contextlib.contextmanager
def fused_here() -> Iterator[None]:
    """Runs this thread and context fused, never strictly, and tells no other of it."""
    global _visitors
    with _lock:
        _install()
        _visitors += 1
    try:
        with forced():
            yield
    finally:
        with _lock:
            _visitors -= 1
            _uninstall_if_unused()


def accelerate(model: Module) -> Module:
    r"""Runs one model fused and leaves all others alone.

    A private flag on the model's modules says so; it travels with copies and pickles, and changes
    neither parameters nor names. A process that loads such a pickle runs it on stock PyG until
    something is patched or accelerated there. With :obj:`PYG_IOAWARE_DISABLE=1` nothing happens.

    Args:
        model (torch.nn.Module): The model.

    Returns:
        torch.nn.Module: The same model.

    Raises:
        TypeError: If :obj:`model` is not a module.
    """
    _check_module(model, "accelerate")
    if _is_switched_off():
        return model
    with _lock:
        _install()
        for module in model.modules():
            module.__dict__[FLAG] = Flag()
        _accelerated.add(model)
    return model


def decelerate(model: Module) -> Module:
    r"""Undoes :meth:`accelerate`.

    Args:
        model (torch.nn.Module): The model.

    Returns:
        torch.nn.Module: The same model.

    Raises:
        TypeError: If :obj:`model` is not a module.
    """
    _check_module(model, "decelerate")
    with _lock:
        for module in model.modules():
            module.__dict__.pop(FLAG, None)
        _accelerated.discard(model)
        _uninstall_if_unused()
    return model


def _install() -> None:
    if _installed:
        return
    made = [(row, rebind(row.make(row.target), row.target)) for row in REGISTRY]
    _installed.extend(made)
    try:
        for row, wrapper in made:
            share_overloads(row.target, wrapper)
            if isinstance(row.places, type):
                setattr(row.places, row.target.__name__, wrapper)
        _Scripted.__call__ = _call_formed  # type: ignore[method-assign]
        in_modules = [(row, w, row.places) for row, w in made if isinstance(row.places, tuple)]
        _exchange({row.target: (wrapper, places) for row, wrapper, places in in_modules})
    except BaseException:
        _uninstall()
        raise


def _uninstall() -> None:
    if not _installed:
        return
    # What somebody else has put in our place since is left alone. A module that was imported
    # while the patch was on may have taken a wrapper from another: all are searched.
    for row, wrapper in _installed:
        name = row.target.__name__
        share_overloads(wrapper, row.target)
        if isinstance(row.places, type) and row.places.__dict__.get(name) is wrapper:
            setattr(row.places, name, row.target)
    if _Scripted.__call__ is _call_formed:
        _Scripted.__call__ = _call_scripted  # type: ignore[method-assign]
    _exchange({wrapper: (row.target, ("",)) for row, wrapper in _installed})
    _installed.clear()


def _uninstall_if_unused() -> None:
    if not SWITCH.patched and _visitors == 0 and len(Flag.alive) == 0:
        _uninstall()


def _is_switched_off() -> bool:
    if _environment("PYG_IOAWARE_DISABLE"):
        logger.warning("PYG_IOAWARE_DISABLE is set: PyG stays as it is")
        return True
    return False


def _environment(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no")


def _check_module(model: Any, name: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"'{name}' expects a 'torch.nn.Module' (got '{type(model)}')")
