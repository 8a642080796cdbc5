"""SIMD values for the kernels: a fixed number of lanes held in registers, as Numba intrinsics.

Numba's own loops leave it to LLVM whether a row's accumulators stay in registers; these do. A
``Vec`` of more lanes than a register has is split by LLVM into several, so the same kernels serve
SSE, AVX2, AVX-512 and NEON. ``mask`` is None (all lanes) or a mask made by ``tail``.
"""

# mypy: ignore-errors
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic, models, register_model


class Vec(types.Type):
    """``lanes`` numbers of ``dtype`` (a mask when ``dtype`` is boolean)."""

    def __init__(self, dtype, lanes):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vec({dtype}, {lanes})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        dtype = fe_type.dtype
        item = ir.IntType(1) if dtype == types.boolean else dmm.lookup(dtype).get_data_type()
        super().__init__(dmm, fe_type, ir.VectorType(item, fe_type.lanes))


def _vector(context, vec):
    return context.get_value_type(vec)


def _size(dtype):
    return dtype.bitwidth // 8


def _address(builder, pointer, index, to=None):
    at = builder.gep(pointer, [index])
    return at if to is None else builder.bitcast(at, ir.PointerType(to))


def _splat(builder, value, vector):
    first = ir.Constant(ir.IntType(32), 0)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, first)
    order = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), order)


def _suffix(vector):
    item = vector.element
    kind = {ir.FloatType: "f32", ir.DoubleType: "f64"}.get(type(item)) or f"i{item.width}"
    return f"v{vector.count}{kind}"


def _call(builder, name, result, args):
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@intrinsic(prefer_literal=True)
def zeros(typingctx, pointer, nbytes):
    """A zero Vec of the pointer's dtype, ``nbytes`` (a constant) wide."""
    vec = Vec(pointer.dtype, nbytes.literal_value // _size(pointer.dtype))

    def codegen(context, builder, sig, args):
        return ir.Constant(_vector(context, vec), None)

    return vec(pointer, nbytes), codegen


def _constant(of):
    @intrinsic
    def value(typingctx, vec):
        def codegen(context, builder, sig, args):
            return context.get_constant(types.intp, of(vec))

        return types.intp(vec), codegen

    return value


lanes = _constant(lambda vec: vec.lanes)
nbytes = _constant(lambda vec: vec.lanes * _size(vec.dtype))


def _splatted(dtype_of):
    @intrinsic
    def splat(typingctx, like, value):
        vec = Vec(dtype_of(like), like.lanes)

        def codegen(context, builder, sig, args):
            cast = context.cast(builder, args[1], value, vec.dtype)
            return _splat(builder, cast, _vector(context, vec))

        return vec(like, value), codegen

    return splat


splat = _splatted(lambda like: like.dtype)  # `value` in every lane, in the dtype of `like`
splat_int = _splatted(lambda like: types.int32)  # the same as int32


def _first_lanes(context, builder, vec, count, kind):
    wide = ir.VectorType(ir.IntType(32), vec.lanes)
    count32 = builder.trunc(context.cast(builder, count, kind, types.int64), ir.IntType(32))
    order = ir.Constant(wide, list(range(vec.lanes)))
    return builder.icmp_signed("<", order, _splat(builder, count32, wide))


@intrinsic
def tail(typingctx, like, count):
    """The mask of the first ``count`` lanes."""
    vec = Vec(types.boolean, like.lanes)

    def codegen(context, builder, sig, args):
        return _first_lanes(context, builder, vec, args[1], count)

    return vec(like, count), codegen


@intrinsic
def mask_of(typingctx, like, count, masked):
    """``tail``, or None where ``masked`` is None: then all blocks are whole."""
    if isinstance(masked, types.NoneType):
        return types.none(like, count, masked), lambda context, *_: context.get_dummy_value()
    vec = Vec(types.boolean, like.lanes)

    def codegen(context, builder, sig, args):
        return _first_lanes(context, builder, vec, args[1], count)

    return vec(like, count, masked), codegen


def load_vector(builder, pointer, index, vector, size, mask):
    """Loads a vector of items of ``size`` bytes; ``mask`` None: all of its lanes."""
    at = _address(builder, pointer, index, vector)
    if mask is None:
        return builder.load(at, align=size)
    align, zero = ir.Constant(ir.IntType(32), size), ir.Constant(vector, None)
    name = f"llvm.masked.load.{_suffix(vector)}.p0"
    return _call(builder, name, vector, [at, align, mask, zero])


def store_vector(builder, pointer, index, value, size, mask):
    """The inverse of ``load_vector``."""
    at = _address(builder, pointer, index, value.type)
    if mask is None:
        builder.store(value, at, align=size)
    else:
        align = ir.Constant(ir.IntType(32), size)
        name = f"llvm.masked.store.{_suffix(value.type)}.p0"
        _call(builder, name, ir.VoidType(), [value, at, align, mask])


def mask_given(mask, value):
    """Returns the value of a mask of this type, None if it stands for all lanes."""
    return None if isinstance(mask, types.NoneType) else value


@intrinsic
def load(typingctx, pointer, index, like, mask):
    """``pointer[index : index + lanes]``; lanes off the mask are 0 and not read."""
    vec = Vec(pointer.dtype, like.lanes)

    def codegen(context, builder, sig, args):
        vector = _vector(context, vec)
        given = mask_given(mask, args[3])
        return load_vector(builder, args[0], args[1], vector, _size(vec.dtype), given)

    return vec(pointer, types.intp, like, mask), codegen


@intrinsic
def store(typingctx, pointer, index, vec, mask):
    """Write the lanes on the mask to ``pointer[index:]``."""

    def codegen(context, builder, sig, args):
        given = mask_given(mask, args[3])
        store_vector(builder, args[0], args[1], args[2], _size(vec.dtype), given)
        return context.get_dummy_value()

    return types.none(pointer, types.intp, vec, mask), codegen


@intrinsic
def prefetch(typingctx, pointer, index, like):
    """Ask for the cache lines of ``pointer[index : index + lanes]``."""

    def codegen(context, builder, sig, args):
        i32 = ir.IntType(32)
        hints = [ir.Constant(i32, h) for h in (0, 3, 1)]  # read, keep in all levels, data cache
        step = max(1, 64 // _size(pointer.dtype))
        for first in range(0, like.lanes, step):
            index = builder.add(args[1], ir.Constant(args[1].type, first))
            at = _address(builder, args[0], index, ir.IntType(8))
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [at, *hints])
        return context.get_dummy_value()

    return types.none(pointer, types.intp, like), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c``, contracted where the machine can."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.fmuladd.{_suffix(args[0].type)}", args[0].type, list(args))

    return a(a, b, c), codegen


def _arithmetic(method):
    @intrinsic
    def op(typingctx, a, b):
        def codegen(context, builder, sig, args):
            return getattr(builder, method)(*args)

        return a(a, b), codegen

    return op


add, sub = _arithmetic("fadd"), _arithmetic("fsub")
mul, div = _arithmetic("fmul"), _arithmetic("fdiv")
both, either = _arithmetic("and_"), _arithmetic("or_")


@intrinsic
def complement(typingctx, vec):
    """``~vec`` of integers."""

    def codegen(context, builder, sig, args):
        return builder.not_(args[0])

    return vec(vec), codegen


def _comparison(method, symbol):
    @intrinsic
    def op(typingctx, a, b):
        def codegen(context, builder, sig, args):
            return getattr(builder, method)(symbol, *args)

        return Vec(types.boolean, a.lanes)(a, b), codegen

    return op


# Ordered comparisons: false where either side is NaN. `unordered`: true there, and only there.
eq, unordered = _comparison("fcmp_ordered", "=="), _comparison("fcmp_unordered", "uno")
int_ne, int_eq = _comparison("icmp_signed", "!="), _comparison("icmp_signed", "==")
int_lt = _comparison("icmp_signed", "<")


def _ranking(for_max, for_min):
    @intrinsic
    def op(typingctx, v, best, minimum):
        symbol = for_max if isinstance(minimum, types.NoneType) else for_min

        def codegen(context, builder, sig, args):
            return builder.fcmp_ordered(symbol, args[0], args[1])

        result = Vec(types.boolean, v.lanes) if isinstance(v, Vec) else types.boolean
        return result(v, best, minimum), codegen

    return op


# Of Vecs or numbers; ``minimum`` None: a maximum is sought, else a minimum.
better, as_good = _ranking(">", "<"), _ranking(">=", "<=")


@intrinsic
def select(typingctx, mask, a, b):
    """``a`` in the lanes on the mask, ``b`` in the others."""

    def codegen(context, builder, sig, args):
        return builder.select(*args)

    return a(mask, a, b), codegen


@intrinsic
def any_lane(typingctx, hits, mask):
    """Whether any lane of the mask is hit."""

    def codegen(context, builder, sig, args):
        inside = args[0] if isinstance(mask, types.NoneType) else builder.and_(*args)
        bits = builder.bitcast(inside, ir.IntType(hits.lanes))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(hits, mask), codegen


@intrinsic
def bits_of(typingctx, mask):
    """The mask as the low bits of an integer, lane 0 lowest."""

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(args[0], ir.IntType(mask.lanes))
        return builder.zext(bits, ir.IntType(64))

    return types.int64(mask), codegen


def _halves(builder, value):
    """The two halves of a vector."""
    count, undefined = value.type.count, ir.Constant(value.type, ir.Undefined)
    wide = ir.VectorType(ir.IntType(32), count // 2)
    for first in (0, count // 2):
        order = ir.Constant(wide, list(range(first, first + count // 2)))
        yield builder.shuffle_vector(value, undefined, order)


def _tree(combine):
    @intrinsic
    def over_lanes(typingctx, vec):
        def codegen(context, builder, sig, args):
            value = args[0]
            while value.type.count > 1:
                value = combine(builder, *_halves(builder, value))
            return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

        return vec.dtype(vec), codegen

    return over_lanes


hsum = _tree(lambda builder, a, b: builder.fadd(a, b))  # the sum over lanes, as a fixed tree


@intrinsic(prefer_literal=True)
def scratch(typingctx, pointer, count):
    """Memory for ``count`` (a constant) numbers of the pointer's dtype, until the kernel ends."""
    length = count.literal_value

    def codegen(context, builder, sig, args):
        item = args[0].type.pointee
        # In the first block of the function, or a loop would take new memory each time.
        memory = cgutils.alloca_once(builder, ir.ArrayType(item, length))
        return builder.bitcast(memory, args[0].type)

    return pointer(pointer, count), codegen


@intrinsic(prefer_literal=True)
def zeros_of(typingctx, pointer, count):
    """A zero Vec of ``count`` (a constant) lanes of the pointer's dtype."""
    vec = Vec(pointer.dtype, count.literal_value)

    def codegen(context, builder, sig, args):
        return ir.Constant(_vector(context, vec), None)

    return vec(pointer, count), codegen


@intrinsic
def nearest(typingctx, vec):
    """Each lane rounded to an integer, still a float."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.nearbyint.{_suffix(args[0].type)}", args[0].type, args)

    return vec(vec), codegen


@intrinsic
def power_of_two(typingctx, vec):
    """2 to the power of each lane, which holds an integer within the range of exponents."""
    width, digits = (32, 23) if vec.dtype == types.float32 else (64, 52)
    bias = (1 << (width - digits - 2)) - 1

    def codegen(context, builder, sig, args):
        integers = ir.VectorType(ir.IntType(width), vec.lanes)
        exponent = builder.fptosi(args[0], integers)
        exponent = builder.add(exponent, ir.Constant(integers, [bias] * vec.lanes))
        bits = builder.shl(exponent, ir.Constant(integers, [digits] * vec.lanes))
        return builder.bitcast(bits, args[0].type)

    return vec(vec), codegen
