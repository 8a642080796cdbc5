"""What functions do with messages, and why that needs them formed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def getters(*names: str) -> set[Any]:
    """Returns the functions by which attributes of tensors are read."""
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
# What lets the formed values change without their version moving, or watches their gradient.
EXPOSING = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
EXPOSING |= {Tensor.untyped_storage, Tensor.storage, Tensor.register_hook, Tensor.retain_grad}
EXPOSING |= getters("data", "grad", "grad_fn")
EXPOSING |= {getattr(Tensor, name).__set__ for name in ("data", "grad", "requires_grad")}


def may_change(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Tells whether a function may change its arguments in place, judging by its name."""
    if isinstance(func, torch.jit.ScriptFunction):
        return True
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name.startswith("__i") or name in ("__setitem__", "__set__")
    return in_place or "out" in kwargs or bool(kwargs.get("inplace"))


def why_formed(func: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """Tells a user why a function needs messages formed, and what to do about it."""
    name = _name(func)
    if func in EXPOSING:
        return f"'{name}' shows the memory or gradient of messages: leave it out of the layer"
    if may_change(func, kwargs):
        return f"'{name}' may change messages in place: use one of PyTorch that makes a new tensor"
    if func in PRODUCTS:
        return f"'{name}' by more than one weight per edge (and head): multiply weights first"
    return (
        f"'{name}' takes the messages of all edges: if it is a function of x_j alone, "
        f"apply it to the nodes before 'propagate'"
    )


def _name(func: Callable[..., Any]) -> str:
    if isinstance(func, torch.jit.ScriptFunction):
        return str(func.name)
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    return name
