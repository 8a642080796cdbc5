"""Compilation of kernel entries, and their disk cache.

An entry is a C function ``void entry(int64_t *block)`` that takes work items from a shared
counter until none is left, so it can be run by any number of threads at once:

    block[0]   next item (atomic)       block[1]   number of items       block[2]   phase
    block[8:]  the arguments: addresses of arrays, or integers

``Args`` carries the types of the arguments, so one Python function serves every combination of
dtypes and of arrays that are None; each combination is compiled on first use and kept on disk.
"""

# mypy: ignore-errors
import contextlib
import ctypes
import hashlib
import logging
import os
import pathlib
import threading

import torch
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.extending import intrinsic, models, register_model
from numba.core.typed_passes import NativeLowering

HEAD = 8
OPTIONS = {"error_model": "numpy", "boundscheck": False, "nogil": True}
NUMBA = {
    torch.float32: types.float32,
    torch.float64: types.float64,
    torch.int32: types.int32,
    torch.int64: types.int64,
    torch.uint8: types.uint8,
}


class _Library(JITCodeLibrary):
    """Code that is only linked into that of entries, and optimised there."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    """Lowers a function, but makes no machine code of it: that would take a third of the time."""

    _name = "pyg_ioaware_lowering"

    def run_pass(self, state):
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        state.flags.no_compile = True
        super().run_pass(state)
        key = [].append  # a built-in method like no other, as which the dispatcher knows it
        state["cr"] = state["cr"]._replace(cfunc=key)
        state.targetctx.insert_user_function(key, state["cr"].fndesc, [state.library])
        return True


class _DeviceCompiler(CompilerBase):
    def define_pipelines(self):
        """Return Numba's own pipeline, with another way of lowering."""
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [
            (_Lowering if kind is NativeLowering else kind, text) for kind, text in pipeline.passes
        ]
        pipeline.finalize()
        return [pipeline]


# What entries call is compiled, and cached, as part of them.
device = njit(
    **OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_DeviceCompiler
)


class Args(types.Type):
    """The block, and what each argument is: a dtype (of an array), none, INTEGER or Constant."""

    def __init__(self, fields):
        self.fields = fields
        super().__init__(name=f"Args({', '.join(map(str, fields))})")


@register_model(Args)
class _ArgsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.PointerType(ir.IntType(64)))


class Integer(types.Type):
    """Marks an integer among the fields of ``Args``."""


INTEGER = Integer(name="Integer")


class Constant(types.Type):
    """A number that is part of the code: there is one kernel for each value of it."""

    def __init__(self, value):
        self.value = value
        super().__init__(name=f"Constant({value})")


register_model(Constant)(models.OpaqueModel)


def _kind(field):
    """Returns the type in ``Args`` of a field."""
    if field is None:
        return types.none
    return Constant(field) if isinstance(field, int) else NUMBA.get(field, INTEGER)


def _field(field):
    """Returns the type that a kernel sees of a type in ``Args``."""
    if field == INTEGER:
        return types.intp
    return field if isinstance(field, (types.NoneType, Constant)) else types.CPointer(field)


def _word(builder, block, position):
    return builder.load(builder.gep(block, [ir.Constant(ir.IntType(64), position)]))


@intrinsic
def unpack(typingctx, args):
    """The arguments as a tuple of pointers, integers and None."""
    result = types.Tuple([_field(f) for f in args.fields])

    def codegen(context, builder, sig, values):
        items = []
        for position, kind in enumerate(result.types):
            if isinstance(kind, (types.NoneType, Constant)):
                items.append(context.get_dummy_value())
                continue
            word = _word(builder, values[0], HEAD + position)
            if isinstance(kind, types.CPointer):
                word = builder.inttoptr(word, context.get_value_type(kind))
            items.append(word)
        return context.make_tuple(builder, result, items)

    return result(args), codegen


@intrinsic
def take(typingctx, args):
    """The next work item, or -1 when there is none left."""

    def codegen(context, builder, sig, values):
        one, none = ir.Constant(ir.IntType(64), 1), ir.Constant(ir.IntType(64), -1)
        item = builder.atomic_rmw("add", values[0], one, "monotonic")
        left = builder.icmp_signed("<", item, _word(builder, values[0], 1))
        return builder.select(left, item, none)

    return types.intp(args), codegen


def _head(position):
    @intrinsic
    def read(typingctx, args):
        def codegen(context, builder, sig, values):
            return _word(builder, values[0], position)

        return types.intp(args), codegen

    return read


items_of, phase_of = _head(1), _head(2)


def _stamp():
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


_STAMP = _stamp()  # at import: the code that is compiled is that of now


class _Stamped:
    """Valid while no file of the engine has changed: entries inline helpers of other files."""

    def get_source_stamp(self):
        """Return the digest of the engine's sources."""
        return _STAMP


class _UserProvided(_Stamped, UserProvidedCacheLocator):
    pass


class _UserWide(_Stamped, UserWideCacheLocator):
    pass


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = (_UserProvided, _UserWide)


class _Cache(FunctionCache):
    _impl_class = _CacheImpl


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_lock = threading.Lock()
_announced = False


def _after_fork():
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _announce():
    global _announced
    if not _announced:
        _announced = True
        logging.getLogger("pyg_ioaware").warning(
            "compiling CPU kernels on their first use; later processes load them from a cache"
        )


def _announced_if_long(compile_uncached):
    """Returns the compilation, which says so while it takes long; loading does not."""

    def compile_and_announce():
        timer = threading.Timer(1.0, _announce)
        timer.daemon = True
        timer.start()
        try:
            return compile_uncached()
        finally:
            timer.cancel()

    return compile_and_announce


class Entry:
    """One kernel: ``entry(fields)`` is the C function for these argument types."""

    def __init__(self, function):
        self._function = function
        self._compiled = {}

    def __call__(self, fields):
        """Return the C function; ``fields`` holds a dtype, None, INTEGER or an int for each.

        An int is a Constant; its argument is not read.
        """
        found = self._compiled.get(fields)
        return found if found is not None else self._compile(fields)

    def _compile(self, fields):
        with _lock:
            if fields in self._compiled:
                return self._compiled[fields]
            args = Args(tuple(_kind(f) for f in fields))
            signature = types.void(args)
            callback = CFunc(
                self._function, (signature.args, signature.return_type), {}, dict(OPTIONS)
            )
            # Without a folder to write to, every process compiles.
            with contextlib.suppress(RuntimeError, OSError):
                callback._cache = _Cache(self._function)
            callback._compile_uncached = _announced_if_long(callback._compile_uncached)
            callback.compile()
            found = _Function(callback.address)
            found.keep = callback
            found.cached = callback.cache_hits > 0
            self._compiled[fields] = found
            return found
