"""What the attention operations share: options, checks, and the order of weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_ioaware import philox
from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.ops.library import cast, gathers

_MANY, _LONG = 16, 6  # channels, and edges of a row on average, from which zeros are added


class EdgeFeatures(NamedTuple):
    r"""Features of edges, and how they enter attention.

    Attributes:
        attr (torch.Tensor): Features in the order of the input edges, of shape :obj:`[E, D]`.
        loop_attr (torch.Tensor, optional): Features of the self-loops that are added, of shape
            :obj:`[num_loops, D]`; :obj:`None` if none are.
        weight (torch.Tensor): The linear map, of shape :obj:`[H * C, D]`.
    """

    attr: Tensor
    loop_attr: Tensor | None
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Attention:
    r"""What an attention operation computes, besides its operands.

    Positions number the edges in the rows by target, and after them the self-loops.

    Attributes:
        adj (Adjacency): The structure.
        heads (int): The number of heads.
        num_loops (int): If not negative, edges from a node to itself are skipped, and the first
            so many nodes get one self-loop each.
        factor (float): The negative slope of GATv2, or the scale of the scores of Transformer.
        dropout (float): The probability with which a weight is dropped.
        seed (torch.Tensor, optional): The seed of the dropout; :obj:`None` without dropout.
        with_weights (bool): Whether weights are handed out.
        keeps (bool): Whether scores are kept for the backward pass, if there will be one.
    """

    adj: Adjacency
    heads: int
    num_loops: int
    factor: float
    dropout: float
    seed: Tensor | None
    with_weights: bool
    keeps: bool = False

    @property
    def num_positions(self) -> int:
        """The number of positions."""
        return self.adj.num_edges + max(self.num_loops, 0)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Returns source and target at each position, as int64."""
        src, dst = self.adj.edges()
        if self.num_loops <= 0:
            return src, dst
        loops = torch.arange(self.num_loops, device=src.device)
        return torch.cat([src, loops]), torch.cat([dst, loops])

    def sources(self, needed: bool) -> CSR:
        """Returns the rows by source, or others where they are not needed to be built."""
        adj = self.adj
        needed = needed or gathers(adj.by_target.rowptr.device)
        return adj.by_source_in_place if needed else adj.by_target

    def used(self) -> Tensor:
        """Returns the positions that are not skipped, in order."""
        src, dst = self.adj.edges()
        if self.num_loops < 0:
            return torch.arange(self.adj.num_edges, device=src.device)
        loops = torch.arange(self.adj.num_edges, self.num_positions, device=src.device)
        return torch.cat([(src != dst).nonzero().view(-1), loops])

    def order(self) -> Tensor:
        """Returns the position of each edge as PyG lists them: as given, then self-loops."""
        used, perm = self.used(), self.adj.by_target.perm
        if perm is None:
            return used
        inner = used[: used.numel() - max(self.num_loops, 0)]
        rank = torch.full((self.adj.num_edges,), -1, device=perm.device)
        rank[perm[inner].long()] = inner
        return torch.cat([rank[rank >= 0], used[inner.numel() :]])

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the factor of the weight at each position, or None without dropout."""
        if self.seed is None:
            return None
        return philox.mask(self.num_positions, self.heads, self.dropout, self.seed, dtype)

    def normalise(self, scores: Tensor, stats: Tensor) -> Tensor:
        r"""Returns the softmax of scores.

        Args:
            scores (torch.Tensor): Scores of shape :obj:`[num_positions, H]`.
            stats (torch.Tensor): The largest score of each target and head, then one over the sum
                of exponentials, of shape :obj:`[num_dst, 2 * H]`.
        """
        _, dst = self.ends()
        largest, inverse = stats.index_select(0, dst).chunk(2, dim=1)
        return (scores - largest).exp() * inverse


def seed_for(p: float, device: torch.device) -> Tensor | None:
    """Draws a seed if anything is dropped."""
    return philox.draw_seed(device) if p > 0 else None


def check(
    name: str,
    adj: Adjacency,
    sources: Sequence[Tensor],
    target: Tensor,
    edges: EdgeFeatures | None,
    num_loops: int,
    dropout: float,
) -> None:
    """Raises if the operands do not fit the structure: nothing is launched on them then."""
    for operand, num_rows in (*((s, adj.num_src) for s in sources), (target, adj.num_dst)):
        if operand.dim() != 3 or operand.size(0) != num_rows:
            raise ValueError(
                f"'{name}' expects operands of shape [{num_rows}, H, C] "
                f"(got shape {list(operand.shape)})"
            )
        if operand.shape[1:] != target.shape[1:] or operand.device != target.device:
            raise ValueError(
                f"'{name}' expects operands of the same heads, channels and device "
                f"(got {list(operand.shape[1:])} on '{operand.device}' and "
                f"{list(target.shape[1:])} on '{target.device}')"
            )
    if not 0 <= dropout <= 1:
        raise ValueError(f"'dropout' must be in [0, 1] (got {dropout})")
    if num_loops > min(adj.num_src, adj.num_dst):
        raise ValueError(
            f"'num_loops' must be at most the number of nodes on either side (got {num_loops} for "
            f"{adj.num_src} sources and {adj.num_dst} targets)"
        )
    if edges is None:
        return
    width = target.size(1) * target.size(2)
    if edges.weight.dim() != 2 or edges.weight.size(0) != width:
        raise ValueError(
            f"'{name}' expects a map of edge features of shape [{width}, D] "
            f"(got shape {list(edges.weight.shape)})"
        )
    found = [(edges.attr, adj.num_edges)]
    if edges.loop_attr is not None:
        found.append((edges.loop_attr, max(num_loops, 0)))
    elif num_loops > 0:
        raise ValueError(f"'{name}' expects features of the {num_loops} self-loops (got none)")
    for attr, count in found:
        if attr.shape != (count, edges.weight.size(1)):
            raise ValueError(
                f"'{name}' expects edge features of shape [{count}, {edges.weight.size(1)}] "
                f"(got shape {list(attr.shape)})"
            )


def lacking(x: Tensor, dtype: torch.dtype, adj: Adjacency) -> int:
    r"""Returns how many channels of zeros a GPU lacks to read rows four numbers at a time.

    They change no score, and are left out of the result; where rows are long, what they cost is
    far less than what they save.

    Args:
        x (torch.Tensor): Target rows of shape :obj:`[num_dst, H, C]`.
        dtype (torch.dtype): The dtype in which rows are read.
        adj (Adjacency): The structure.
    """
    channels = x.size(2)
    if channels < _MANY or not gathers(x.device) or adj.num_edges < _LONG * adj.num_dst:
        return 0
    return -channels % (2 if dtype is torch.float64 else 4)


def filled(x: Tensor, channels: int) -> Tensor:
    """Returns x with so many more channels of zeros, differentiably."""
    return torch.nn.functional.pad(x, (0, channels)) if channels else x


def unfilled(x: Tensor, channels: int) -> Tensor:
    """Returns x without its last channels, differentiably."""
    return x[..., :-channels].contiguous() if channels else x


def edge_operands(
    edges: EdgeFeatures | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the parts of edge features in a dtype, differentiably."""
    if edges is None:
        return None, None, None
    loop_attr = None if edges.loop_attr is None else cast(edges.loop_attr, dtype)
    return cast(edges.attr, dtype), loop_attr, cast(edges.weight, dtype)
