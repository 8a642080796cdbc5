"""Which path a call takes, found by taking it on a copy of the layer."""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from pyg_ioaware import engines
from pyg_ioaware.patch import fused_here
from pyg_ioaware.record import RECORD, LayerCalls
from pyg_ioaware.switch import is_disabled


@dataclass(frozen=True)
class Explanation:
    r"""What :meth:`explain` found.

    Attributes:
        layers (dict): Per kind of layer, how many aggregations run fused, and how many on stock
            PyG and why.
        error (str, optional): Why the call was not taken to its end, if it was not.
        chosen (Counter): What an engine chose between, and why, such as the library that sums.
    """

    layers: dict[str, LayerCalls]
    error: str | None = None
    chosen: "Counter[str]" = field(default_factory=Counter)

    @property
    def fused(self) -> bool:
        """Whether every aggregation of the call runs fused."""
        calls = self.layers.values()
        return bool(calls) and all(c.fused and not c.stock for c in calls) and not self.error

    @property
    def reasons(self) -> list[str]:
        """Every reason for running on stock PyG."""
        found = [f"{name}: {why}" for name, c in self.layers.items() for why in c.stock]
        if self.error:
            found.append(self.error)
        if not self.layers and not self.error:
            found.append("no message passing that gathers from nodes")
        return found

    def __str__(self) -> str:
        lines = []
        for name, calls in self.layers.items():
            if calls.fused:
                lines.append(f"{name}: fused ({calls.fused}x)")
            lines += [f"{name}: in part on stock PyG, {what}" for what in calls.formed]
        lines += [f"{what} ({n}x)" for what, n in self.chosen.items()]
        lines += [self.error] if self.error else [f"stock PyG, {why}" for why in self.reasons]
        return "\n".join(lines)


def explain(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    r"""Tells which path a call of a layer or model takes, and every reason if it is the stock one.

    The call is made on a copy, without gradients and with the random state put back, so nothing
    changes. The answer is that of a patched PyG, whether it is patched now or not.

    Args:
        module (torch.nn.Module): The layer or model.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        Explanation: Has :obj:`fused`, :obj:`reasons`, :obj:`layers` and a readable :obj:`str`.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"'explain' expects a 'torch.nn.Module' (got '{type(module)}')")
    if is_disabled():
        return Explanation({}, "everything is disabled in this context, and runs on stock PyG")
    error = None
    # Random numbers are drawn even by a copy: the linear layer of PyG 2.6 initialises itself first.
    with (
        torch.random.fork_rng(),
        torch.no_grad(),
        fused_here(),
        RECORD.watch() as seen,
        engines.watch() as chosen,
    ):
        twin = copy.deepcopy(module)
        try:
            twin(*args, **kwargs)
        except Exception as e:
            said = str(e).splitlines()[0] if str(e) else "no message"
            error = f"the call fails: {type(e).__name__}: {said}"
    return Explanation(dict(seen), error, chosen)
