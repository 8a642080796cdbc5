"""What the gradients of attention scores add up to, batch by batch; see ``attention_target``.

The slope of a score at a channel is the score's gradient, times the negative slope where the
hidden value was not positive. ``signs`` tells where; ``signs_at`` where an edge's bytes start.
``slopes`` and ``weights`` hold what a batch has for each edge and head of a group; ``h`` is the
first head of the group, ``g`` counts within it.
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.attention import LANES, read_signs
from pyg_ioaware.engines.cpu.blocks import (
    BLOCK,
    WIDE,
    blocks,
    load_blocks,
    numbers_of,
    repeat,
    select_by_bits,
    spread,
    store_blocks,
    value_of,
)
from pyg_ioaware.engines.cpu.jit import device
from pyg_ioaware.engines.cpu.vec import (
    add,
    better,
    fma,
    lanes,
    load,
    mul,
    select,
    splat,
    store,
    sub,
    tail,
    zeros,
    zeros_of,
)


@device
def settle(weights, slopes, n, delta, at, drop, keep, group):
    """Replaces weight and t of a batch by the weight after dropout and the score's gradient."""
    zero, count = zeros_of(weights, LANES), n * value_of(group)
    shift = repeat(load(delta, at, numbers_of(delta, group), None), zero)
    for q in range(0, count, LANES):
        a, t = load(weights, q, zero, None), load(slopes, q, zero, None)
        if drop:
            dropped = better(zero, a, None)
            s = select(dropped, sub(zero, a), a)
            store(weights, q, select(dropped, zero, mul(a, splat(zero, keep))), None)
        else:
            s = a
        store(slopes, q, mul(s, sub(t, shift)), None)
    for q in range(count, (n + 3) // 4 * 4 * value_of(group)):
        weights[q] = slopes[q] = 0


@device
def _slope(zero, slopes, place, factor, signs, at, f, stride, together):
    """Returns the slopes of an edge at the channels [f, ...) of some heads."""
    steep = spread(slopes, place, together, zero)
    positive = read_signs(signs, at, f, stride, together, zero)
    return select_by_bits(positive, steep, mul(steep, splat(zero, factor)))


@device
def _span(zero, m, out, at, f, stop, h, g, first, size, together, *edges):
    slopes, factor, signs, signs_at, n, group = edges
    stride = (size + 7) // 8
    while f + lanes(zero) // value_of(together) <= stop:
        total = zero
        if not first:
            total = load_blocks(out, at + f, size, together, zero, m)
        for q in range(n):
            place, of = q * value_of(group) + g, signs_at[q] + (h + g) * stride
            more = _slope(zero, slopes, place, factor, signs, of, f, stride, together)
            total = add(total, more)
        store_blocks(out, at + f, size, together, total, m)
        f += lanes(zero) // value_of(together)
    return f


@device
def add_slopes(out, at, h, first, size, together, *edges):
    """Writes, or adds after the first batch, the sums of slopes over a batch to a row at out[at:].

    They are those of the group of heads from h, of ``size`` channels each.
    """
    for g in range(0, value_of(edges[5]), value_of(together)):
        to, f, rest = at + (h + g) * size, 0, (h, g, first, size, together, *edges)
        if together is None:
            f = _span(zeros(out, WIDE), None, out, to, f, size, *rest)
        zero = blocks(out, together)
        f = _span(zero, None, out, to, f, size, *rest)
        if f < size:
            m = tail(zeros(out, BLOCK), size - f)
            stop = f + lanes(zero) // value_of(together)
            _span(zero, m, out, to, f, stop, *rest)


@device
def add_products(out, starts, first, slopes, left, kept, right, at, n, dim, group):
    """Adds slopes * left[at:] + kept * right[at:], over a group of heads, to out[starts[q]:]."""
    zero = zeros(out, BLOCK)
    for d in range(0, dim, lanes(zero)):
        m = tail(zero, dim - d)
        for q in range(n):
            total = zero
            if not first:
                total = load(out, starts[q] + d, zero, m)
            for g in range(value_of(group)):
                place, own = q * value_of(group) + g, at + g * dim + d
                a, b = load(left, own, zero, m), load(right, own, zero, m)
                total = fma(splat(zero, kept[place]), b, total)
                total = fma(splat(zero, slopes[place]), a, total)
            store(out, starts[q] + d, total, m)
