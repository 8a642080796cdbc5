"""What all replaced forwards share: where they apply, and how they are bound to a class."""

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from pyg_ioaware.nn.fused import FusedMessages
from pyg_ioaware.rebind import rebind, with_globals
from pyg_ioaware.record import RECORD
from pyg_ioaware.switch import enabled, is_disabled

Function = Callable[..., Any]


class Forward:
    r"""How the forward of one of PyG's layers runs.

    Args:
        layer (type): PyG's layer.
        generated (tuple): The methods that PyG generates for the class and its subclasses.
    """

    def __init__(self, layer: Any, generated: tuple[str, ...]) -> None:
        self.stock: Function = layer.forward
        self._generated = generated
        self._methods: dict[str, tuple[Function, ...]] = {
            "message": (layer.message,),
            "aggregate": (MessagePassing.aggregate, FusedMessages.aggregate),
            "update": (MessagePassing.update,),
        }

    def __call__(self, conv: Any, stock: Function, *args: Any, **kwargs: Any) -> Any:
        r"""Runs a layer's forward fused, or as it is.

        Args:
            conv (MessagePassing): The layer.
            stock (callable): The forward to run on it where it is not fused.
            *args: The layer's arguments.
            **kwargs: Its keyword arguments.
        """
        raise NotImplementedError

    def _run(
        self, conv: Any, stock: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return self(conv, stock, *args, **kwargs)
        except Exception:
            RECORD.forget()  # or the reasons would be those of the next call
            raise

    def wrap(self, original: Function) -> Function:
        """Returns what stands in for the layer's forward while PyG is patched."""
        run, is_compiling, is_enabled = self, torch.compiler.is_compiling, enabled

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not is_enabled(self):
                return original(self, *args, **kwargs)
            return run._run(self, original, args, kwargs)

        return forward

    def bind(self, **names: Any) -> Function:
        r"""Returns the forward of an IOAware layer.

        Args:
            **names: Functions that the layer's forward calls by these global names where it is
                not fused.
        """
        run, plain, stock = self, self.stock, with_globals(self.stock, **names)
        is_compiling, is_off = torch.compiler.is_compiling, is_disabled

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or is_off():
                return plain(self, *args, **kwargs)
            return run._run(self, stock, args, kwargs)

        return rebind(forward, plain)
