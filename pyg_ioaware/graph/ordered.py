"""Edge weights in the order in which a kernel meets them, for as long as they stay the same."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_ioaware.graph.identity import Identity, identity
from pyg_ioaware.graph.streams import Made, is_capturing, made_now


class _Kept(NamedTuple):
    storage: "weakref.ref[Any]"
    view: Any
    version: Any
    ordered: Tensor | None = None  # None after the first time that the weights were seen
    made: Made | None = None

    def is_of(self, weight: Identity) -> bool:
        same = self.view == weight.view and self.version == weight.version
        return same and self.storage() is weight.storage


class OrderedWeights:
    """The last weights of one order of edges; they are put in order when seen again unchanged."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def get(self, weight: Tensor, perm: Tensor) -> Tensor | None:
        r"""Returns :obj:`weight[perm]` if it is worth having.

        Args:
            weight (torch.Tensor): Weights without a gradient, of shape :obj:`[E, H]`.
            perm (torch.Tensor): The input edge at each position, of shape :obj:`[E]`.

        Returns:
            torch.Tensor, optional: :obj:`None` for weights that were not seen before.
        """
        found, kept = identity(weight), self._kept
        if found is None:
            return None
        if kept is None or not kept.is_of(found):
            self._kept = _Kept(weakref.ref(found.storage), found.view, found.version)
            return None
        if kept.ordered is None:
            if is_capturing(weight.device):
                return None
            with torch.inference_mode(False), torch.no_grad():
                ordered = weight.index_select(0, perm)
            kept = self._kept = kept._replace(ordered=ordered, made=made_now(weight.device))
        if kept.made is not None and kept.ordered is not None:
            kept.made.wait(kept.ordered)
        return kept.ordered

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        kept = self._kept
        return [] if kept is None or kept.ordered is None else [kept.ordered]
