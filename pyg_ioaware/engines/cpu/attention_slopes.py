"""What the gradients of attention scores add up to, batch by batch; see ``attention_target``.

The slope of a score at a channel is the score's gradient, times the negative slope where the
hidden value was not positive. ``signs`` tells where; ``signs_at`` where an edge's bytes start.
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.attention import read_signs
from pyg_ioaware.engines.cpu.jit import device
from pyg_ioaware.engines.cpu.vec import (
    add,
    fma,
    lanes,
    load,
    mask_of,
    mul,
    select,
    splat,
    store,
    tail,
    zeros,
)


@device
def settle(h, n, heads, places, terms, delta, kept, slopes, drop, keep):
    """Replaces weight and t of a batch by the weight after dropout and the score's gradient."""
    for q in range(n):
        at = places[q] * 2 * heads + h
        a = terms[at]
        dropped = a < 0
        s = (-a if dropped else a) * (terms[at + heads] - delta)
        if drop:
            a = 0 if dropped else a * keep
        terms[at], terms[at + heads] = a, s
        kept[q], slopes[q] = a, s
    for q in range(n, (n + 3) // 4 * 4):
        kept[q] = slopes[q] = 0


@device
def _slope(zero, slopes, q, factor, signs, at, f):
    """Returns the slopes of an edge at the channels [f, ...)."""
    steep = splat(zero, slopes[q])
    return select(read_signs(signs, at, f, zero), steep, mul(steep, splat(zero, factor)))


@device
def _span(zero, m, out, at, f, stop, first, slopes, factor, signs, signs_at, n):
    while f + lanes(zero) <= stop:
        total = zero
        if not first:
            total = load(out, at + f, zero, m)
        for q in range(n):
            total = add(total, _slope(zero, slopes, q, factor, signs, signs_at[q], f))
        store(out, at + f, total, m)
        f += lanes(zero)
    return f


@device
def add_slopes(out, at, first, size, *edges):
    """Writes, or adds after the first batch, the sum of slopes over a batch to out[at:]."""
    f = _span(zeros(out, 128), None, out, at, 0, size, first, *edges)
    zero = zeros(out, 32)
    f = _span(zero, None, out, at, f, size, first, *edges)
    if f < size:
        _span(zero, tail(zero, size - f), out, at, f, f + lanes(zero), first, *edges)


@device
def add_outer(
    parts, at, attr, starts, masked, channels, width, dim, slopes, factor, signs, signs_at, n
):
    """Adds to parts[at + d * width + c] the sum over a batch of attr[d] times the slope at c."""
    zero = zeros(parts, 32)
    for f in range(0, channels, lanes(zero)):
        m = mask_of(zero, channels - f, masked)
        for e in range(0, n, 4):
            g0 = _slope(zero, slopes, e, factor, signs, signs_at[e], f)
            g1 = _slope(zero, slopes, e + 1, factor, signs, signs_at[e + 1], f)
            g2 = _slope(zero, slopes, e + 2, factor, signs, signs_at[e + 2], f)
            g3 = _slope(zero, slopes, e + 3, factor, signs, signs_at[e + 3], f)
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
def map_back(out, starts, h, scaled, blocks, channels, dim, slopes, factor, signs, signs_at, n):
    """Adds one head's part, scaled times slope, to the gradient of each edge's features."""
    zero = zeros(out, 32)
    size = lanes(zero)
    for e in range(0, n, 4):
        i0, i1, i2, i3 = starts[e], starts[e + 1], starts[e + 2], starts[e + 3]
        for d in range(0, dim, size):
            m = tail(zero, dim - d)
            s0, s1, s2, s3 = zero, zero, zero, zero
            if h > 0:
                s0, s1 = load(out, i0 + d, zero, m), load(out, i1 + d, zero, m)
                s2, s3 = load(out, i2 + d, zero, m), load(out, i3 + d, zero, m)
            for f in range(0, channels, size):
                for q in range(4):
                    g = _slope(zero, slopes, e + q, factor, signs, signs_at[e + q], f)
                    store(blocks, q * size, g, None)
                for c in range(min(size, channels - f)):
                    w = load(scaled, (h * channels + f + c) * dim + d, zero, m)
                    s0 = fma(splat(w, blocks[c]), w, s0)
                    s1 = fma(splat(w, blocks[size + c]), w, s1)
                    s2 = fma(splat(w, blocks[2 * size + c]), w, s2)
                    s3 = fma(splat(w, blocks[3 * size + c]), w, s3)
            # The last edge may be repeated, with a gradient of zero: it is written last.
            store(out, i3 + d, s3, m)
            store(out, i2 + d, s2, m)
            store(out, i1 + d, s1, m)
            store(out, i0 + d, s0, m)


@device
def add_rows(out, starts, first, slopes, left, kept, right, at, n, dim):
    """Adds slopes[q] * left[at:] + kept[q] * right[at:] to out[starts[q]:]."""
    zero = zeros(out, 32)
    for d in range(0, dim, lanes(zero)):
        m = tail(zero, dim - d)
        a, b = load(left, at + d, zero, m), load(right, at + d, zero, m)
        for q in range(n):
            total = zero
            if not first:
                total = load(out, starts[q] + d, zero, m)
            total = fma(splat(zero, slopes[q]), a, fma(splat(zero, kept[q]), b, total))
            store(out, starts[q] + d, total, m)
