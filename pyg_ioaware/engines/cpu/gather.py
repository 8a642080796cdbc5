"""Messages of one edge: weight[perm[k], h] * x[idx[k]], at one feature or at a block of them.

``edges`` is the tuple (x, idx, weight, perm, last, width, heads), ``last`` the last position.
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.jit import device
from pyg_ioaware.engines.cpu.vec import load, mul, prefetch, splat

AHEAD = 8  # edges between the prefetch of a row and its use


@device
def edge_of(k, perm):
    """Returns the input edge at position k."""
    if perm is not None:
        return perm[k]
    return k


@device
def _coefficient(k, h, x, idx, weight, perm, last, width, heads):
    return weight[edge_of(k, perm) * heads + h]


@device
def _value(k, f, h, x, idx, weight, perm, last, width, heads):
    v = x[idx[k] * width + f]
    if weight is not None:
        v *= _coefficient(k, h, x, idx, weight, perm, last, width, heads)
    return v


@device
def _values(like, mask, k, f, h, x, idx, weight, perm, last, width, heads):
    v = load(x, idx[k] * width + f, like, mask)
    if weight is not None:
        v = mul(v, splat(v, _coefficient(k, h, x, idx, weight, perm, last, width, heads)))
    return v


@device
def _weighted(v, k, h, x, idx, weight, perm, last, width, heads):
    if weight is not None:
        v *= _coefficient(k, h, x, idx, weight, perm, last, width, heads)
    return v


@device
def _weighted_values(v, k, h, x, idx, weight, perm, last, width, heads):
    if weight is not None:
        v = mul(v, splat(v, _coefficient(k, h, x, idx, weight, perm, last, width, heads)))
    return v


@device
def _ahead(like, k, f, x, idx, weight, perm, last, width, heads):
    prefetch(x, idx[min(k + AHEAD, last)] * width + f, like)


@device
def value(k, f, h, edges):
    """Returns the message of edge k at feature f of head h."""
    return _value(k, f, h, *edges)


@device
def values(like, mask, k, f, h, edges):
    """Returns the message of edge k at the block of features that starts at f."""
    return _values(like, mask, k, f, h, *edges)


@device
def weighted(v, k, h, edges):
    """Returns the number v times the weight of edge k."""
    return _weighted(v, k, h, *edges)


@device
def weighted_values(v, k, h, edges):
    """Returns the Vec v times the weight of edge k."""
    return _weighted_values(v, k, h, *edges)


@device
def ahead(like, k, f, edges):
    """Prefetches the block that edge k + AHEAD will need."""
    _ahead(like, k, f, *edges)
