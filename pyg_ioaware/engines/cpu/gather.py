"""The weight that one edge puts on its message, and what tells edges apart."""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.jit import device
from pyg_ioaware.engines.cpu.vec import mul, splat

AHEAD = 8  # edges between the prefetch of a row and its use


@device
def edge_of(k, perm):
    """Returns the input edge at position k."""
    if perm is not None:
        return perm[k]
    return k


@device
def weighted(v, k, h, weight, perm, heads):
    """Returns the number v times the weight of the edge at position k for head h."""
    if weight is not None:
        v *= weight[edge_of(k, perm) * heads + h]
    return v


@device
def weighted_block(v, k, h, weight, perm, heads):
    """Returns the Vec v times the weight of the edge at position k for head h."""
    if weight is not None:
        v = mul(v, splat(v, weight[edge_of(k, perm) * heads + h]))
    return v
