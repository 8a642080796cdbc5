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
    mask_of,
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
def _own_slope(zero, e, f, h, g, channels, slopes, factor, signs, signs_at, group):
    """Returns the slopes of edge e of a batch at the channels [f, ...) of a head of a group."""
    stride = (channels + 7) // 8
    at, place = signs_at[e] + (h + g) * stride, e * value_of(group) + g
    return _slope(zero, slopes, place, factor, signs, at, f, stride, None)


@device
def add_outer(
    parts, at, h, g, attr, starts, masked, channels, width, dim, slopes, factor, signs, of, n, group
):
    """Adds to parts[at + d * width + c] the sum over a batch of attr[d] times the slope at c."""
    edges = (h, g, channels, slopes, factor, signs, of, group)
    zero = zeros(parts, 32)
    for f in range(0, channels, lanes(zero)):
        m = mask_of(zero, channels - f, masked)
        for e in range(0, n, 4):
            g0 = _own_slope(zero, e, f, *edges)
            g1 = _own_slope(zero, e + 1, f, *edges)
            g2 = _own_slope(zero, e + 2, f, *edges)
            g3 = _own_slope(zero, e + 3, f, *edges)
            a0, a1, a2, a3 = starts[e], starts[e + 1], starts[e + 2], starts[e + 3]
            for d in range(dim):
                to = at + d * width + f
                w = load(parts, to, zero, m)
                w = fma(splat(w, attr[a0 + d]), g0, w)
                w = fma(splat(w, attr[a1 + d]), g1, w)
                w = fma(splat(w, attr[a2 + d]), g2, w)
                w = fma(splat(w, attr[a3 + d]), g3, w)
                store(parts, to, w, m)


@device
def map_back(out, starts, h, g, scaled, parts, channels, dim, slopes, factor, signs, of, n, group):
    """Adds one head's part, scaled times slope, to the gradient of each edge's features."""
    edges = (h, g, channels, slopes, factor, signs, of, group)
    zero = zeros(out, 32)
    size = lanes(zero)
    for e in range(0, n, 4):
        i0, i1, i2, i3 = starts[e], starts[e + 1], starts[e + 2], starts[e + 3]
        for d in range(0, dim, size):
            m = tail(zero, dim - d)
            s0, s1, s2, s3 = zero, zero, zero, zero
            if h + g > 0:
                s0, s1 = load(out, i0 + d, zero, m), load(out, i1 + d, zero, m)
                s2, s3 = load(out, i2 + d, zero, m), load(out, i3 + d, zero, m)
            for f in range(0, channels, size):
                for q in range(4):
                    store(parts, q * size, _own_slope(zero, e + q, f, *edges), None)
                for c in range(min(size, channels - f)):
                    w = load(scaled, ((h + g) * channels + f + c) * dim + d, zero, m)
                    s0 = fma(splat(w, parts[c]), w, s0)
                    s1 = fma(splat(w, parts[size + c]), w, s1)
                    s2 = fma(splat(w, parts[2 * size + c]), w, s2)
                    s3 = fma(splat(w, parts[3 * size + c]), w, s3)
            # The last edge may be repeated, with a gradient of zero: it is written last.
            store(out, i3 + d, s3, m)
            store(out, i2 + d, s2, m)
            store(out, i1 + d, s1, m)
            store(out, i0 + d, s0, m)


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
