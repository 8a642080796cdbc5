"""Vecs made of blocks: 32 bytes of each of several heads, or of several edges and heads.

Attention takes heads in groups, whose number of heads is a ``Constant``. A *unit* holds a block of
each head of a group for as many edges as make up to eight blocks, edge by edge; what is summed over
its blocks comes out with a lane per edge and head, in the order of memory.
"""

# mypy: ignore-errors
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from pyg_ioaware.engines.cpu.vec import Vec, load_vector, mask_given, store_vector

BLOCK = 32  # bytes
WIDE = 128
UNIT = 8  # blocks


def _count(kind):
    """The value of a Constant, or 1 for None."""
    return 1 if isinstance(kind, types.NoneType) else kind.value


def _edges(group):
    return min(4, UNIT // group.value)


def _size(dtype):
    return dtype.bitwidth // 8


def _number(value):
    return ir.Constant(ir.IntType(64), value)


def _pick(builder, x, y, order):
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order))
    return builder.shuffle_vector(x, y, lanes)


def _part(builder, value, first, lanes):
    """``lanes`` lanes of a vector."""
    if value.type.count == lanes:
        return value
    undefined = ir.Constant(value.type, ir.Undefined)
    return _pick(builder, value, undefined, range(first, first + lanes))


def _parts(builder, value, lanes):
    return [_part(builder, value, first, lanes) for first in range(0, value.type.count, lanes)]


def _joined(builder, parts):
    """One vector of all lanes of vectors of the same type, a power of two of them."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_pick(builder, x, y, range(2 * x.type.count)) for x, y in pairs]
    return parts[0]


def _splat(builder, value, lanes):
    vector = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return _pick(builder, one, undefined, [0] * lanes)


@intrinsic
def edges_of(typingctx, group):
    """The edges of a unit."""

    def codegen(context, builder, sig, args):
        return _number(_edges(group))

    return types.intp(group), codegen


@intrinsic
def value_of(typingctx, constant):
    """The value of a Constant, or 1 for None."""

    def codegen(context, builder, sig, args):
        return _number(_count(constant))

    return types.intp(constant), codegen


@intrinsic
def number_of(typingctx, number):
    """The number itself, which the compiler knows where it is a Constant."""

    def codegen(context, builder, sig, args):
        return args[0] if isinstance(number, types.Integer) else _number(number.value)

    return types.intp(number), codegen


def _zeros(lanes_of):
    @intrinsic
    def zeros(typingctx, pointer, constant):
        vec = Vec(pointer.dtype, lanes_of(constant, BLOCK // _size(pointer.dtype)))

        def codegen(context, builder, sig, args):
            return ir.Constant(context.get_value_type(vec), None)

        return vec(pointer, constant), codegen

    return zeros


blocks = _zeros(lambda count, block: _count(count) * block)  # a block of each of some heads
unit = _zeros(lambda group, block: _edges(group) * group.value * block)
numbers_of = _zeros(lambda group, block: group.value)  # a number of each head of a group


@intrinsic
def load_blocks(typingctx, pointer, index, stride, count, like, mask):
    """A block of each of ``count`` heads, which lie ``stride`` numbers apart.

    A block is what is left of ``like`` for each of them, and ``mask`` that of one block.
    """
    heads = _count(count)
    vec = Vec(pointer.dtype, like.lanes)

    def codegen(context, builder, sig, args):
        vector = ir.VectorType(args[0].type.pointee, vec.lanes // heads)
        given, found, at = mask_given(mask, args[5]), [], args[1]
        for _ in range(heads):
            found.append(load_vector(builder, args[0], at, vector, _size(vec.dtype), given))
            at = builder.add(at, args[2])
        return _joined(builder, found)

    return vec(pointer, types.intp, types.intp, count, like, mask), codegen


@intrinsic
def store_blocks(typingctx, pointer, index, stride, count, vec, mask):
    """The inverse of ``load_blocks``."""
    heads = _count(count)

    def codegen(context, builder, sig, args):
        at = args[1]
        for part in _parts(builder, args[4], vec.lanes // heads):
            given = mask_given(mask, args[5])
            store_vector(builder, args[0], at, part, _size(vec.dtype), given)
            at = builder.add(at, args[2])
        return context.get_dummy_value()

    return types.none(pointer, types.intp, types.intp, count, vec, mask), codegen


@intrinsic
def gather_blocks(typingctx, pointer, starts, e, offset, stride, group, like, mask):
    """The unit of ``pointer[starts[e + i] + offset + g * stride :]``, edges i and heads g."""
    edges, heads = _edges(group), group.value
    vec = Vec(pointer.dtype, like.lanes)

    def codegen(context, builder, sig, args):
        vector = ir.VectorType(args[0].type.pointee, vec.lanes // (edges * heads))
        given, found = mask_given(mask, args[7]), []
        for i in range(edges):
            start = builder.load(builder.gep(args[1], [builder.add(args[2], _number(i))]))
            start = context.cast(builder, start, starts.dtype, types.intp)
            at = builder.add(start, args[3])
            for _ in range(heads):
                found.append(load_vector(builder, args[0], at, vector, _size(vec.dtype), given))
                at = builder.add(at, args[4])
        return _joined(builder, found)

    kinds = (pointer, starts, types.intp, types.intp, types.intp, group, like, mask)
    return vec(*kinds), codegen


@intrinsic
def gather_numbers(typingctx, pointer, starts, e, offset, group, like):
    """The unit of ``pointer[starts[e + i] + offset]``, each in all blocks of its edge."""
    edges = _edges(group)
    vec = Vec(pointer.dtype, like.lanes)

    def codegen(context, builder, sig, args):
        found = []
        for i in range(edges):
            start = builder.load(builder.gep(args[1], [builder.add(args[2], _number(i))]))
            start = context.cast(builder, start, starts.dtype, types.intp)
            value = builder.load(builder.gep(args[0], [builder.add(start, args[3])]))
            found.append(_splat(builder, value, vec.lanes // edges))
        return _joined(builder, found)

    return vec(pointer, starts, types.intp, types.intp, group, like), codegen


@intrinsic
def spread(typingctx, pointer, index, count, like):
    """``pointer[index : index + count]``, each in all lanes of its head."""
    heads = _count(count)
    vec = Vec(pointer.dtype, like.lanes)

    def codegen(context, builder, sig, args):
        found = []
        for i in range(heads):
            at = builder.gep(args[0], [builder.add(args[1], _number(i))])
            found.append(_splat(builder, builder.load(at), vec.lanes // heads))
        return _joined(builder, found)

    return vec(pointer, types.intp, count, like), codegen


def _lanes(vector):
    """The lanes of a block; compared block by block, since masks of many lanes are slow."""
    return BLOCK // (8 if isinstance(vector.element, ir.DoubleType) else 4)


@intrinsic
def leaky(typingctx, z, slope):
    """``z`` where it is positive, else ``z`` times the Vec ``slope``."""

    def codegen(context, builder, sig, args):
        zero = ir.Constant(args[0].type, None)
        found, lanes = [], _lanes(args[0].type)
        for a, b, none in zip(*(_parts(builder, v, lanes) for v in (*args, zero)), strict=True):
            positive = builder.fcmp_ordered(">", a, none)
            found.append(builder.select(positive, a, builder.fmul(a, b)))
        return _joined(builder, found)

    return z(z, slope), codegen


@intrinsic
def within(typingctx, unit, mask):
    """The lanes of a unit; zero in those that are off the mask of their block."""

    def codegen(context, builder, sig, args):
        if isinstance(mask, types.NoneType):
            return args[0]
        parts = _parts(builder, args[0], mask.lanes)
        zero = ir.Constant(parts[0].type, None)
        return _joined(builder, [builder.select(args[1], part, zero) for part in parts])

    return unit(unit, mask), codegen


@intrinsic
def positive_bits(typingctx, z):
    """A bit for each lane, lane 0 lowest: whether it is positive."""

    def codegen(context, builder, sig, args):
        bits, lanes = _number(0), _lanes(args[0].type)
        for i, part in enumerate(_parts(builder, args[0], lanes)):
            positive = builder.fcmp_ordered(">", part, ir.Constant(part.type, None))
            few = builder.zext(builder.bitcast(positive, ir.IntType(lanes)), ir.IntType(64))
            bits = builder.or_(bits, builder.shl(few, _number(i * lanes)))
        return bits

    return types.int64(z), codegen


@intrinsic
def select_by_bits(typingctx, bits, a, b):
    """``a`` in the lanes whose bit is set, lane 0 lowest, ``b`` in the others."""

    def codegen(context, builder, sig, args):
        lanes = _lanes(args[1].type)
        integer = ir.IntType(8 * BLOCK // lanes)
        found = []
        for i, pair in enumerate(zip(*(_parts(builder, v, lanes) for v in args[1:]), strict=True)):
            first = i * lanes // integer.width * integer.width  # of the bits that a lane holds
            some = builder.trunc(builder.lshr(args[0], _number(first)), integer)
            spread_out = _splat(builder, some, lanes)
            wanted = [1 << (i * lanes - first + lane) for lane in range(lanes)]
            bit = builder.and_(spread_out, ir.Constant(spread_out.type, wanted))
            none = ir.Constant(spread_out.type, None)
            found.append(builder.select(builder.icmp_signed("!=", bit, none), *pair))
        return _joined(builder, found)

    return a(types.int64, a, b), codegen


@intrinsic
def repeat(typingctx, vec, like):
    """The lanes of a Vec again and again, as many as ``like`` has."""
    result = Vec(vec.dtype, like.lanes)

    def codegen(context, builder, sig, args):
        undefined = ir.Constant(args[0].type, ir.Undefined)
        order = [lane % vec.lanes for lane in range(like.lanes)]
        return _pick(builder, args[0], undefined, order)

    return result(vec, like), codegen


def _folding(combine):
    @intrinsic
    def fold(typingctx, vec, group):
        result = Vec(vec.dtype, group.value)

        def codegen(context, builder, sig, args):
            value = args[0]
            while value.type.count > group.value:
                value = combine(builder, *_parts(builder, value, value.type.count // 2))
            return value

        return result(vec, group), codegen

    return fold


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


# Over the lanes of each head of a group, where lanes hold the heads of one edge after the other.
fold_sum = _folding(lambda builder, a, b: builder.fadd(a, b))  # as a fixed tree
fold_max = _folding(_larger)  # any, if one is NaN


@intrinsic
def sum_blocks(typingctx, vec, group):
    """The sum over each block of a unit, as a fixed tree."""
    count = _edges(group) * group.value
    result = Vec(vec.dtype, count)

    def codegen(context, builder, sig, args):
        parts = _parts(builder, args[0], vec.lanes // count)
        if count == 8 and parts[0].type.count == 8:
            parts = [
                _halves_added(builder, *pair) for pair in zip(parts[:4], parts[4:], strict=True)
            ]
            return _quarters_added(builder, parts)
        found = []
        for first in range(0, count, 4):
            fours = []
            for value in parts[first : first + 4]:
                while value.type.count > 4:
                    value = builder.fadd(*_parts(builder, value, value.type.count // 2))
                fours.append(value)
            found.append(_quarters_added(builder, fours))
        return _joined(builder, found)

    return result(vec, group), codegen


def _halves_added(builder, a, b):
    """The halves of a added, then those of b."""
    half = a.type.count // 2
    low = [*range(half), *range(2 * half, 3 * half)]
    return builder.fadd(_pick(builder, a, b, low), _pick(builder, a, b, [k + half for k in low]))


def _quarters_added(builder, parts):
    """The sums over every four lanes of four vectors; those of the first four lanes come first."""
    lanes = parts[0].type.count

    def added(x, y, left, right):
        orders = []
        for lane in (left, right):
            from_x = [[q + k for k in lane] for q in range(0, lanes, 4)]
            orders.append([k for few in from_x for k in (*few, *(f + lanes for f in few))])
        return builder.fadd(*(_pick(builder, x, y, order) for order in orders))

    a, b, c, d = parts
    ab, cd = added(a, b, (0, 1), (2, 3)), added(c, d, (0, 1), (2, 3))
    return added(ab, cd, (0, 2), (1, 3))
