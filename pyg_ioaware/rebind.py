"""Functions made from other functions, so that PyTorch and PyG still see the originals."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


def rebind(wrapper: Function, original: Function) -> Function:
    r"""Gives a wrapper the globals, name and signature of the function that it replaces.

    TorchScript, tracing and source inspection follow :obj:`__wrapped__` to the original's source,
    but resolve its names in the wrapper's globals. All that the wrapper itself refers to must be
    in closure cells.

    Args:
        wrapper (callable): The function to install.
        original (callable): The function that it replaces.
    """
    assert isinstance(wrapper, types.FunctionType)
    assert isinstance(original, types.FunctionType)
    rebound = types.FunctionType(
        wrapper.__code__,
        original.__globals__,
        original.__name__,
        original.__defaults__ if wrapper.__defaults__ else None,
        wrapper.__closure__,
    )
    return functools.update_wrapper(rebound, original)


def share_overloads(source: Function, target: Function) -> None:
    r"""Lets TorchScript find a function's compiled overloads in another function, too.

    It compiles the overloads of a name once in a process, and keeps them by function object.

    Args:
        source (callable): The function that may have been scripted.
        target (callable): The function that takes its place.
    """
    names = torch.jit._state._jit_function_overload_caching.get(source)
    if names is not None:
        torch.jit._state._jit_function_overload_caching[target] = names


def with_globals(function: Function, **names: Any) -> Function:
    r"""Returns the same function with some of its global names bound to other objects.

    It runs the stock code of a layer on our functions without changing the module that holds it.

    Args:
        function (callable): The function; it is not changed.
        **names: The names to bind anew; those that it does not use have no effect.
    """
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)
