"""What the attention kernels share: batches of edges, scores, and sums weighted by them.

A row's edges are taken in batches of up to BATCH, all heads of a batch before the next batch, so
that what was gathered for the scores is still in the first-level cache for the sums. Channels are
taken in blocks of 32 bytes, four edges at a time, which just fits the registers of AVX2.

Positions number the edges in the rows by target, and after them the self-loops, one per row.
"""

# mypy: ignore-errors
import ctypes

from pyg_ioaware.engines.cpu.jit import INTEGER, device
from pyg_ioaware.engines.cpu.philox import words
from pyg_ioaware.engines.cpu.rows import address
from pyg_ioaware.engines.cpu.vec import (
    add,
    better,
    bits_of,
    fma,
    from_bits,
    hsum4,
    lanes,
    load,
    mask_of,
    mul,
    prefetch,
    select,
    splat,
    store,
    tail,
    zeros,
)

BATCH = 64  # edges; their rows of 128 numbers just fit the first-level cache
LANES = 16  # scores taken at once
NO_LOOP = -1
PART = 8  # blocks of a dot product that are summed in one go; longer sums would round more


@device
def fill(sources, places, k, end, row, skip, loop, idx):
    """Takes the next batch of a row's edges, without those to itself if skip is set.

    ``loop`` is the position of the row's self-loop, or NO_LOOP. Returns the number of edges, and
    where the next batch begins: ``end``, plus one after the loop, if there is none. The last edge
    is repeated up to a multiple of four.
    """
    n = 0
    while k < end and n < BATCH:
        j = idx[k]
        if skip == 0 or j != row:
            sources[n] = j
            places[n] = k
            n += 1
        k += 1
    if k == end and loop != NO_LOOP and n < BATCH:
        sources[n] = row
        places[n] = loop
        n += 1
        k += 1
    if n > 0:
        for q in range(n, (n + 3) // 4 * 4):
            sources[q] = sources[n - 1]
            places[q] = places[n - 1]
    return n, k


@device
def look_ahead(ahead, n, k, last, width, idx):
    """Writes where the rows of the edges after a batch of n start, of which k is the first."""
    for q in range((n + 3) // 4 * 4):
        ahead[q] = idx[min(k + q, last)] * width if last >= 0 else 0


@device
def locate(starts, places, n, row, edges, permuted, perm, loop_offset, dim):
    """Writes where the features of each edge of a batch start."""
    for q in range((n + 3) // 4 * 4):
        if places[q] >= edges:
            starts[q] = loop_offset + row * dim
        else:
            starts[q] = (perm[places[q]] if permuted else places[q]) * dim


@device
def draw(drops, places, n, block, seed, threshold, keep):
    """Writes the factors of four heads of each edge of a batch: zero, or keep."""
    for q in range(n):
        a, b, c, d = words(places[q], block, seed)
        drops[q] = keep if a >= threshold else 0.0
        drops[BATCH + q] = keep if b >= threshold else 0.0
        drops[2 * BATCH + q] = keep if c >= threshold else 0.0
        drops[3 * BATCH + q] = keep if d >= threshold else 0.0


@device
def write_signs(signs, at, f, positive):
    """Notes for the channels [f, ...) of a head whether they are positive."""
    bits = bits_of(positive)
    if lanes(positive) == 8 or f % 8 == 0:
        signs[at + f // 8] = bits
    else:
        signs[at + f // 8] |= bits << 4


@device
def read_signs(signs, at, f, like):
    """Returns as a mask what write_signs noted for the channels [f, ...) of a head."""
    bits = 0
    for byte in range((lanes(like) + 7) // 8):
        bits |= int(signs[at + f // 8 + byte]) << (8 * byte)
    if lanes(like) < 8:
        bits >>= f % 8
    return from_bits(like, bits)


@device
def _prefetch_four(table, ahead, e, base, f, zero):
    """Asks for what four rows ahead hold where this block does, once for each cache line."""
    if f % (2 * lanes(zero)) == 0:
        for q in range(e, e + 4):
            prefetch(table, ahead[q] + base + f, zero)


@device
def _add_four(to, e, add_to, a, b, c, d):
    """Writes to to[e : e + 4], or adds, the sums over the lanes of four Vecs."""
    total = hsum4(a, b, c, d)
    if add_to:
        total = add(load(to, e, total, None), total)
    store(to, e, total, None)


@device
def mlp_scores(scores, dots, signs, h, n, row, batch, att, x_l, x_r, grad, attr, lin, shape):
    """Writes att . leaky_relu(x_l + x_r + lin attr) for each edge of a batch and one head.

    With ``grad``, also the dot products of its row with those of x_l, and the signs.
    """
    sources, places, starts, ahead = batch
    masked, slope, channels, width, dim, sign_bytes = shape
    zero = zeros(x_l, 32)
    steep = splat(zero, slope)
    base = h * channels
    own = row * width + base
    at_sign = h * ((channels + 7) // 8)
    for e in range(0, n, 4):
        i0, i1 = sources[e] * width + base, sources[e + 1] * width + base
        i2, i3 = sources[e + 2] * width + base, sources[e + 3] * width + base
        for part in range(0, channels, PART * lanes(zero)):
            s0, s1, s2, s3 = zero, zero, zero, zero
            t0, t1, t2, t3 = zero, zero, zero, zero
            for f in range(part, min(channels, part + PART * lanes(zero)), lanes(zero)):
                m = mask_of(zero, channels - f, masked)
                _prefetch_four(x_l, ahead, e, base, f, zero)
                r, a = load(x_r, own + f, zero, m), load(att, base + f, zero, m)
                v0, v1 = load(x_l, i0 + f, zero, m), load(x_l, i1 + f, zero, m)
                v2, v3 = load(x_l, i2 + f, zero, m), load(x_l, i3 + f, zero, m)
                z0, z1, z2, z3 = add(v0, r), add(v1, r), add(v2, r), add(v3, r)
                if lin is not None:
                    a0, a1, a2, a3 = starts[e], starts[e + 1], starts[e + 2], starts[e + 3]
                    for d in range(dim):
                        w = load(lin, d * width + base + f, zero, m)
                        z0 = fma(splat(w, attr[a0 + d]), w, z0)
                        z1 = fma(splat(w, attr[a1 + d]), w, z1)
                        z2 = fma(splat(w, attr[a2 + d]), w, z2)
                        z3 = fma(splat(w, attr[a3 + d]), w, z3)
                p0, p1 = better(z0, zero, None), better(z1, zero, None)
                p2, p3 = better(z2, zero, None), better(z3, zero, None)
                z0, z1 = select(p0, z0, mul(z0, steep)), select(p1, z1, mul(z1, steep))
                z2, z3 = select(p2, z2, mul(z2, steep)), select(p3, z3, mul(z3, steep))
                s0, s1, s2, s3 = fma(a, z0, s0), fma(a, z1, s1), fma(a, z2, s2), fma(a, z3, s3)
                if grad is not None:
                    g = load(grad, own + f, zero, m)
                    t0, t1, t2, t3 = fma(g, v0, t0), fma(g, v1, t1), fma(g, v2, t2), fma(g, v3, t3)
                    write_signs(signs, places[e] * sign_bytes + at_sign, f, p0)
                    write_signs(signs, places[e + 1] * sign_bytes + at_sign, f, p1)
                    write_signs(signs, places[e + 2] * sign_bytes + at_sign, f, p2)
                    write_signs(signs, places[e + 3] * sign_bytes + at_sign, f, p3)
            _add_four(scores, e, part > 0, s0, s1, s2, s3)
            if grad is not None:
                _add_four(dots, e, part > 0, t0, t1, t2, t3)


@device
def _dots(s, add_to, at, left, right, starts, ahead, base, n, size, masked):
    """Writes to s[e], or adds, the dot products of left[at:] with right[starts[e]:]."""
    zero = zeros(left, 32)
    for e in range(0, n, 4):
        i0, i1, i2, i3 = starts[e], starts[e + 1], starts[e + 2], starts[e + 3]
        for part in range(0, size, PART * lanes(zero)):
            s0, s1, s2, s3 = zero, zero, zero, zero
            for f in range(part, min(size, part + PART * lanes(zero)), lanes(zero)):
                m = mask_of(zero, size - f, masked)
                if ahead is not None:
                    _prefetch_four(right, ahead, e, base, f, zero)
                q = load(left, at + f, zero, m)
                s0 = fma(q, load(right, i0 + f, zero, m), s0)
                s1 = fma(q, load(right, i1 + f, zero, m), s1)
                s2 = fma(q, load(right, i2 + f, zero, m), s2)
                s3 = fma(q, load(right, i3 + f, zero, m), s3)
            _add_four(s, e, add_to or part > 0, s0, s1, s2, s3)


@device
def dot_products(s, h, n, row, batch, left, right, edge_left, attr, shape):
    """Writes left . right for each edge of a batch and one head, edge features included."""
    sources, starts, rows_at, ahead = batch
    masked, channels, width, dim, heads = shape
    base = h * channels
    for q in range((n + 3) // 4 * 4):
        rows_at[q] = sources[q] * width + base
    own = row * width + base
    _dots(s, False, own, left, right, rows_at, ahead, base, n, channels, masked)
    if edge_left is not None:
        own = (row * heads + h) * dim
        _dots(s, True, own, edge_left, attr, starts, None, 0, n, dim, 0)


@device
def _sum_span(zero, m, out, at, f, stop, first, factor, weights, values, starts, n):
    while f + lanes(zero) <= stop:
        total = zero
        if not first:
            total = mul(load(out, at + f, zero, m), splat(zero, factor))
        for q in range(n):
            v = load(values, starts[q] + f, zero, m)
            total = fma(splat(zero, weights[q]), v, total)
        store(out, at + f, total, m)
        f += lanes(zero)
    return f


@device
def add_weighted(out, at, first, factor, weights, values, starts, n, size):
    """Writes factor * out[at:] + sum_q weights[q] * values[starts[q]:]; out is not read at first.

    ``size`` numbers are written.
    """
    f = _sum_span(
        zeros(values, 128), None, out, at, 0, size, first, factor, weights, values, starts, n
    )
    zero = zeros(values, 32)
    f = _sum_span(zero, None, out, at, f, size, first, factor, weights, values, starts, n)
    if f < size:
        m = tail(zero, size - f)
        _sum_span(zero, m, out, at, f, f + lanes(zero), first, factor, weights, values, starts, n)


@device
def clear(out, at, size):
    """Writes zeros to out[at : at + size]."""
    for f in range(at, at + size):
        out[f] = 0


def present(tensor, stand_in):
    """An optional tensor, or what stands in for it, and whether it is there.

    One compiled kernel serves both; the stand-in is of the same dtype and never read.
    """
    return (stand_in, 0) if tensor is None else (tensor, 1)


def numbers(*values):
    """Floating-point arguments of a kernel, as an array of float64."""
    return (ctypes.c_double * len(values))(*values)


def loop_offset(attr, loop_attr):
    """Where the features of loops start, counted from those of edges."""
    if loop_attr is None:
        return 0
    return (address(loop_attr) - address(attr)) // attr.element_size()


def masked_field(channels, dtype):
    """None where a head's channels fill whole blocks, else a number."""
    return None if channels * dtype.itemsize % 32 == 0 else INTEGER
