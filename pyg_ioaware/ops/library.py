"""The dispatcher's view of the primitives, and what all of them share."""

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from pyg_ioaware import engines
from pyg_ioaware.engines import row_width
from pyg_ioaware.graph.csr import CSR

LIBRARY = torch.library.Library("pyg_ioaware", "DEF")

_ALIGNED = 16  # bytes of the widest access
_PLAIN = frozenset({type(None), bool, int, float})

# The five fields of a CSR, as every primitive takes them.
CSR_ARGS = "Tensor rowptr, Tensor idx, Tensor? perm, Tensor tiles, int split"
SOURCE_ARGS = (
    "Tensor source_rowptr, Tensor source_idx, Tensor? source_perm, Tensor source_tiles,"
    " int source_split"
)


def primitive(
    schema: str, fake: Callable[..., Any], devices: Sequence[str] = ("CPU", "CUDA")
) -> Callable[[Callable[..., Any]], Any]:
    r"""Registers a function as the kernel of a primitive.

    An output that is not asked for is :obj:`None`; the dispatcher, which cannot pass that on, has
    :meth:`nothing` in its place.

    Args:
        schema (str): The primitive's schema; it may only write tensors that it returns.
        fake (callable): The same function on tensors without data.
        devices (sequence, optional): The devices whose engines have its kernels.
            (default: all of them)
    """
    name = schema.split("(", 1)[0]

    def register(fn: Callable[..., Any]) -> Any:
        def filled(*args: Any) -> Any:
            out = fn(*args)
            if not isinstance(out, tuple):
                return out
            return tuple(nothing(args[0]) if t is None else t for t in out)

        LIBRARY.define(schema)
        for device in devices:
            LIBRARY.impl(name, filled, device)
        torch.library.register_fake(f"pyg_ioaware::{name}", fake, lib=LIBRARY)
        op = getattr(torch.ops.pyg_ioaware, name).default
        chosen = _operands(op._schema.arguments)
        # Of one place `itemgetter` returns the operand, not a tuple of it.
        operands = (
            itemgetter(*chosen) if len(chosen) > 1 else itemgetter(slice(chosen[0], chosen[0] + 1))
        )

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            # The dispatcher costs some 20 us, and is needed where something else listens.
            return fn(*args) if _nobody_listens() and is_plain(*operands(args)) else op(*args)

        return call

    return register


def _operands(arguments: Sequence[Any]) -> list[int]:
    """Returns the places of the tensors that are none of a structure's: its are always plain."""
    tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    return [i for i in tensors if arguments[i].name.removeprefix("source_") not in CSR._fields]


def _nobody_listens() -> bool:
    """Tells whether no mode of PyTorch wants to see operations."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    )


def is_recorded(*operands: Tensor | None) -> bool:
    """Tells whether autograd has to see an operation: it differentiates, or something listens."""
    if torch.is_grad_enabled():
        for operand in operands:
            if operand is not None and operand.requires_grad:
                return True
    return torch.autograd.forward_ad._current_level >= 0 or not _nobody_listens()


def is_plain(*values: Any) -> bool:
    """Tells whether arguments are no tensors, or have memory on a device with an engine."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    for value in values:
        kind = type(value)
        if kind is Tensor:
            if not (value.is_cpu or value.is_cuda) or is_wrapped(value) or is_batched(value):
                return False
        elif kind not in _PLAIN:
            return False
    return True


def launch(kernel: str, csr: CSR, *args: Any) -> None:
    """Runs a kernel on the engine of the structure's device."""
    launch_on(csr.rowptr.device, kernel, csr, *args)


def launch_on(device: torch.device, kernel: str, csr: CSR | None, *args: Any) -> None:
    """Runs a kernel on the engine of a device; one that takes no edges gets no structure."""
    engine = engines.of(device)
    if engine is None:
        raise NotImplementedError(f"no engine for device '{device}'")
    engine.run(kernel, csr, *args)


def allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns new memory on the device of a tensor and, unless told otherwise, of its dtype."""
    engine = engines.of(like.device)
    dtype = like.dtype if dtype is None else dtype
    if engine is None:
        return like.new_empty(shape, dtype=dtype)
    return engine.empty(shape, dtype, like.device)


def nothing(like: Tensor) -> Tensor:
    """Returns an empty tensor, for an output that was not asked for."""
    return like.new_empty(0)


def partials(like: Tensor, tiles: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns memory for what is found in each tile of split rows; sums, if not told otherwise."""
    dtype = sum_dtype(like.dtype) if dtype is None else dtype
    if tiles.size(0) == 0:
        return _nothing(width, dtype, like.device)
    return allocate(like, tiles.size(0), width, dtype=dtype)


@functools.lru_cache(maxsize=64)
def _nothing(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((0, width), dtype=dtype, device=device)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype in which the engine computes on data of this dtype."""
    engine = engines.of(device)
    if engine is not None and dtype in engine.native_dtypes:
        return dtype
    return torch.float32


def gathers(device: torch.device) -> bool:
    """Tells whether the engine takes gradients of sources from the rows by source only."""
    engine = engines.of(device)
    return engine is not None and engine.gathers


def keeps_scores(device: torch.device, with_features: bool = False) -> bool:
    """Tells whether the engine forms scores, of edges with features or not, only once."""
    engine = engines.of(device)
    if engine is None or not torch.is_grad_enabled():
        return False
    return engine.gathers or (engine.keeps_scores and with_features)


@functools.cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which kernels sum numbers of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def as_made(tensor: Any) -> Any:
    """Returns what was saved as kernels laid it out, whatever a hook gave back in its place."""
    if tensor is None or (tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNED):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def check(x: Tensor, num_rows: int, weight: Tensor | None, num_edges: int, name: str) -> None:
    """Raises if the operands do not fit the structure: nothing is launched on them then."""
    if x.dim() < 2 or x.size(0) != num_rows:
        raise ValueError(
            f"'{name}' expects 'x' with {num_rows} rows and at least two dimensions "
            f"(got shape {list(x.shape)})"
        )
    if weight is None:
        return
    if weight.dim() not in (1, 2) or weight.size(0) != num_edges:
        raise ValueError(
            f"'{name}' expects one 'weight' per edge, of shape [{num_edges}] or [{num_edges}, H] "
            f"(got shape {list(weight.shape)})"
        )
    heads = 1 if weight.dim() == 1 else weight.size(1)
    if heads != 1 and (x.dim() != 3 or x.size(1) != heads):
        raise ValueError(
            f"'{name}' with {heads} weights per edge expects 'x' of shape [N, {heads}, C] "
            f"(got shape {list(x.shape)})"
        )
    if weight.device != x.device:
        raise ValueError(
            f"'{name}' expects 'x' and 'weight' on one device (got '{x.device}' and "
            f"'{weight.device}')"
        )


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x in the given dtype, differentiably."""
    return x if x.dtype is dtype else x.to(dtype)


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x as [N, F] in the given dtype, differentiably."""
    x = cast(x, dtype)
    return x if x.dim() == 2 else x.reshape(x.size(0), row_width(x))


def like(out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows in the shape that x has behind its first dimension, and in the given dtype."""
    if x.dim() != 2:
        out = out.view(out.size(0), *x.shape[1:])
    return cast(out, dtype)


def per_head(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns weights as [E, H] in the given dtype, differentiably."""
    if weight is None:
        return None
    weight = cast(weight, dtype)
    return weight.unsqueeze(1) if weight.dim() == 1 else weight


def is_batched(*tensors: Tensor | None) -> bool:
    """Tells whether a functorch transform (vmap of a gradient) wraps any of the tensors."""
    return any(
        t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors
    )


def through(
    reference: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    r"""Returns the gradients of a reference, recorded if gradients are being recorded.

    Args:
        reference (callable): Maps the inputs to a tuple of outputs.
        inputs (sequence): The inputs.
        needs (sequence): Which of them need a gradient.
        grads (sequence): The gradients of the outputs; :obj:`None` where there is none.
    """
    # Aliases, so that an input that is also an ancestor of another gets only its own gradient; in
    # the dtypes of the inputs, whatever the mode in which the gradient is taken.
    given, recorded = next(t for t in inputs if t is not None), torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(given.device.type, enabled=False):
        aliases = [None if t is None else t.view_as(t) for t in inputs]
        outputs = reference(*aliases)
        wanted = [t for t, need in zip(aliases, needs, strict=True) if need and t is not None]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=recorded,
                allow_unused=True,
            )
        )
    return [
        next(found) if need and t is not None else None
        for t, need in zip(inputs, needs, strict=True)
    ]
