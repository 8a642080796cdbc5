"""What the attention kernels share: batches of edges, scores, and sums weighted by them.

A row's edges are taken in batches of up to BATCH, all heads of a batch before the next batch, so
that what was gathered for the scores is still in the first-level cache for the sums. Heads are
taken in groups of up to eight, as many as divide their number; what there is one number of per
edge and head lies in scratch memory edge by edge, the heads of the group side by side.

Positions number the edges in the rows by target, and after them the self-loops, one per row.
"""

# mypy: ignore-errors
import ctypes
import math

from pyg_ioaware.engines.cpu.blocks import (
    BLOCK,
    WIDE,
    blocks,
    edges_of,
    gather_blocks,
    gather_numbers,
    leaky,
    load_blocks,
    numbers_of,
    positive_bits,
    repeat,
    spread,
    store_blocks,
    sum_blocks,
    unit,
    value_of,
    within,
)
from pyg_ioaware.engines.cpu.jit import INTEGER, device
from pyg_ioaware.engines.cpu.philox import words
from pyg_ioaware.engines.cpu.rows import address
from pyg_ioaware.engines.cpu.vec import (
    add,
    fma,
    lanes,
    load,
    mask_of,
    mul,
    prefetch,
    splat,
    store,
    tail,
    zeros,
    zeros_of,
)

BATCH = 64  # edges; their rows of 128 numbers just fit the first-level cache
GROUP = 8  # heads at most
LANES = 16  # scores taken at once
NO_LOOP = -1
PART = 8  # blocks of a dot product that are summed in one go; longer sums would round more


@device
def repeat_last(numbers, n):
    """Repeats the last of n numbers, if there is one, up to a multiple of four."""
    for q in range(n, (n + 3) // 4 * 4):
        numbers[q] = numbers[n - 1]


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
    repeat_last(sources, n)
    repeat_last(places, n)
    return n, k


@device
def scale(to, numbers, n, factor):
    """Writes where the rows, or features, of each edge of a batch start."""
    for q in range((n + 3) // 4 * 4):
        to[q] = numbers[q] * factor


@device
def look_ahead(ahead, n, k, last, width, idx):
    """Writes where the rows of the edges after a batch of n start, of which k is the first."""
    for q in range((n + 3) // 4 * 4):
        ahead[q] = idx[min(k + q, last)] * width if last >= 0 else 0


@device
def locate(starts, places, n, edges, permuted, perm, loop_offset, dim, attr):
    """Writes where the features of each edge of a batch start; asks for those in ``attr``."""
    for q in range((n + 3) // 4 * 4):
        if places[q] >= edges:
            starts[q] = loop_offset + (places[q] - edges) * dim
        else:
            starts[q] = (perm[places[q]] if permuted else places[q]) * dim
        if attr is not None:
            zero = zeros(attr, BLOCK)
            for f in range(0, dim, 2 * lanes(zero)):
                prefetch(attr, starts[q] + f, zero)


@device
def draw(drops, places, n, h, seed, threshold, keep, group):
    """Writes the factors, zero or keep, of each edge of a batch for the heads from h."""
    across = max(4, value_of(group))
    for block in range(across // 4):
        for q in range(n):
            at = q * across + 4 * block
            a, b, c, d = words(places[q], h // 4 + block, seed)
            drops[at] = keep if a >= threshold else 0.0
            drops[at + 1] = keep if b >= threshold else 0.0
            drops[at + 2] = keep if c >= threshold else 0.0
            drops[at + 3] = keep if d >= threshold else 0.0


@device
def drop_of(drops, q, h, group):
    """Returns the factors of an edge for the heads of a group, as ``draw`` wrote them."""
    return load(drops, q * max(4, value_of(group)) + h % 4, numbers_of(drops, group), None)


@device
def multiply_rows(s, drops, n, h, group):
    """Multiplies what a batch has for each edge and head of a group by its factors."""
    for q in range(n):
        at = q * value_of(group)
        v = load(s, at, numbers_of(s, group), None)
        store(s, at, mul(v, drop_of(drops, q, h, group)), None)


@device
def multiply(s, count, factor):
    """Multiplies numbers by a factor; those up to the next sixteen may change."""
    zero = zeros_of(s, LANES)
    for q in range(0, count, LANES):
        store(s, q, mul(load(s, q, zero, None), splat(zero, factor)), None)


@device
def add_rows(s, n, table, places, width, offset, group):
    """Adds rows of a table to what a batch has for each edge and head of a group."""
    for q in range(n):
        at, none = q * value_of(group), numbers_of(s, group)
        v = load(table, places[q] * width + offset, none, None)
        store(s, at, add(load(s, at, none, None), v), None)


@device
def write_rows(table, places, width, offset, s, n, group):
    """Writes what a batch has for each edge and head of a group to rows of a table."""
    for q in range(n):
        v = load(s, q * value_of(group), numbers_of(s, group), None)
        store(table, places[q] * width + offset, v, None)


@device
def read_rows(s, n, table, places, width, offset, group):
    """The inverse of ``write_rows``."""
    for q in range(n):
        v = load(table, places[q] * width + offset, numbers_of(s, group), None)
        store(s, q * value_of(group), v, None)


@device
def _prefetch_rows(table, starts, e, base, size, group):
    """Asks for ``size`` numbers of the rows of the edges of a unit."""
    zero = zeros(table, BLOCK)
    for q in range(e, e + edges_of(group)):
        for f in range(base, base + size, 2 * lanes(zero)):
            prefetch(table, starts[q] + f, zero)


@device
def read_signs(signs, at, f, stride, count, like):
    """Returns the bits that mlp_scores noted for the channels [f, ...) of ``count`` heads."""
    size, bits = lanes(like) // value_of(count), 0
    for g in range(value_of(count)):
        few = 0
        for byte in range((size + 7) // 8):
            few |= int(signs[at + g * stride + f // 8 + byte]) << (8 * byte)
        if size < 8:
            few = (few >> (f % 8)) & ((1 << size) - 1)
        bits |= few << (g * size)
    return bits


@device
def _write_signs(signs, at, e, offset, stride, f, bits, block, group):
    """Notes for the channels [f, ...) of a unit whether they are positive."""
    size = lanes(block)
    for q in range(e, e + edges_of(group)):
        for g in range(value_of(group)):
            place = at[q] + offset + g * stride + f // 8
            few = bits & ((1 << size) - 1)
            if size == 8 or f % 8 == 0:
                signs[place] = few
            else:
                signs[place] |= few << size
            bits >>= size


@device
def mlp_scores(scores, signs, h, n, row, batch, att, x_l, x_r, attr, lin, shape):
    """Writes att . leaky_relu(x_l + x_r + lin attr) for each edge of a batch and head of a group.

    With ``signs``, also which hidden values are positive.
    """
    rows_at, signs_at, starts, ahead = batch
    group, masked, slope, channels, width, dim = shape
    zero, block, few = unit(x_l, group), zeros(x_l, BLOCK), blocks(x_l, group)
    steep = splat(zero, slope)
    base, stride = h * channels, (channels + 7) // 8
    own = row * width + base
    for part in range(0, channels, PART * lanes(block)):
        stop = min(channels, part + PART * lanes(block))
        for e in range(0, n, edges_of(group)):
            if part == 0:
                _prefetch_rows(x_l, ahead, e, base, value_of(group) * channels, group)
            total = zero
            for f in range(part, stop, lanes(block)):
                m = mask_of(block, channels - f, masked)
                r = load_blocks(x_r, own + f, channels, group, few, m)
                v = gather_blocks(x_l, rows_at, e, base + f, channels, group, zero, m)
                z = add(v, repeat(r, zero))
                if lin is not None:
                    for d in range(dim):
                        w = load_blocks(lin, d * width + base + f, channels, group, few, m)
                        a = gather_numbers(attr, starts, e, d, group, zero)
                        z = fma(a, repeat(w, zero), z)
                    z = within(z, m)  # an infinite feature times no channel is NaN
                if signs is not None:
                    bits = positive_bits(z)
                    _write_signs(signs, signs_at, e, h * stride, stride, f, bits, block, group)
                a = load_blocks(att, base + f, channels, group, few, m)
                total = fma(repeat(a, zero), leaky(z, steep), total)
            _add_unit(scores, e, part > 0, total, group)


@device
def _add_unit(s, e, add_to, total, group):
    """Writes to, or adds to, what a batch has from edge e on the sums over the blocks of a unit."""
    at, sums = e * value_of(group), sum_blocks(total, group)
    if add_to:
        sums = add(load(s, at, sums, None), sums)
    store(s, at, sums, None)


@device
def _dots(
    s, add_to, left, at, apart, right, starts, base, stride, ahead, also, n, size, masked, group
):
    """Writes to, or adds to, s the dot products of left[at:] with right[starts[e] + base:].

    The rows of a group of heads lie ``apart`` numbers apart on the left, and ``stride`` on the
    right. Asks for the rows of ``right`` at ``ahead``, and those of ``also``; both may be None.
    """
    zero, block, few = unit(left, group), zeros(left, BLOCK), blocks(left, group)
    for part in range(0, size, PART * lanes(block)):
        stop = min(size, part + PART * lanes(block))
        for e in range(0, n, edges_of(group)):
            if ahead is not None and part == 0:
                _prefetch_rows(right, ahead, e, base, value_of(group) * size, group)
            if also is not None and part == 0:
                _prefetch_rows(also, starts, e, base, value_of(group) * size, group)
            total = zero
            for f in range(part, stop, lanes(block)):
                m = mask_of(block, size - f, masked)
                q = load_blocks(left, at + f, apart, group, few, m)
                v = gather_blocks(right, starts, e, base + f, stride, group, zero, m)
                total = fma(repeat(q, zero), v, total)
            _add_unit(s, e, add_to or part > 0, total, group)


@device
def dot_products(s, h, n, row, batch, left, right, also, edge_left, attr, shape):
    """Writes left . right for each edge of a batch and head of a group, edge features included.

    Asks for the rows of ``right`` after the batch, and of ``also`` in the batch.
    """
    rows_at, starts, ahead = batch
    group, masked, channels, width, dim, heads = shape
    base = h * channels
    own, form = (row * width + base, channels), (base, channels, ahead, also, n, channels)
    _dots(s, False, left, *own, right, rows_at, *form, masked, group)
    if edge_left is not None:
        own, form = ((row * heads + h) * dim, dim), (0, 0, None, None, n, dim)
        _dots(s, True, edge_left, *own, attr, starts, *form, 0, group)


@device
def _sum_span(zero, m, out, at, f, stop, first, factors, weights, table, starts, n, g, shape):
    base, stride, size, group, together = shape
    while f + lanes(zero) // value_of(together) <= stop:
        total = zero
        if not first:
            total = load_blocks(out, at + f, size, together, zero, m)
            if factors is not None:
                total = mul(total, spread(factors, g, together, zero))
        for q in range(n):
            v = load_blocks(table, starts[q] + base + f, stride, together, zero, m)
            total = fma(spread(weights, q * value_of(group) + g, together, zero), v, total)
        store_blocks(out, at + f, size, together, total, m)
        f += lanes(zero) // value_of(together)
    return f


@device
def add_weighted(out, at, first, factors, weights, table, starts, n, shape):
    """Writes factor * out[at:] + sum_q weight[q] * table[starts[q] + base:] for a group of heads.

    The rows of ``size`` numbers of the heads lie side by side in out, and ``stride`` numbers apart
    in the table. ``factors`` has a number for each head, or is None; out is not read at first.
    ``together`` is None, or how many heads to take at once.
    """
    base, stride, size, group, together = shape
    for g in range(0, value_of(group), value_of(together)):
        to, form = at + g * size, (base + g * stride, stride, size, group, together)
        rest, f = (first, factors, weights, table, starts, n, g, form), 0
        if together is None:
            f = _sum_span(zeros(table, WIDE), None, out, to, f, size, *rest)
        zero = blocks(table, together)
        f = _sum_span(zero, None, out, to, f, size, *rest)
        if f < size:
            m = tail(zeros(table, BLOCK), size - f)
            stop = f + lanes(zero) // value_of(together)
            _sum_span(zero, m, out, to, f, stop, *rest)


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


def size_fields(channels, dtype, more):
    """The fields of what every entry takes of sizes and shape, and of so many more integers.

    A head's channels are part of the code where they are one block: the compiler knows then that
    the blocks of a group of heads lie side by side.
    """
    own = channels if channels * dtype.itemsize == BLOCK else INTEGER
    return (*(INTEGER,) * 4, own, *(INTEGER,) * more)


def shape_fields(heads, channels, dtype):
    """What of a shape is part of the code: masked, group, together, and that of edge features.

    ``masked`` is None where a head's channels fill whole blocks, else a number. Heads are summed
    all at once where the channels of each are one block, and one by one where they fill many.
    """
    group, size = math.gcd(max(heads, 1), GROUP), channels * dtype.itemsize
    several = None if group == 1 else min(group, 4)
    together = several if size <= 2 * BLOCK else None
    if size == BLOCK and group > 1:
        together = group
    return None if size % BLOCK == 0 else INTEGER, group, together, several
