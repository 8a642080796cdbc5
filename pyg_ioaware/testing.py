r"""Comparison with stock PyG, for tests and benchmarks.

The measure is stock PyG itself: results may be as far from a float64 computation as twice stock's
own, plus a small floor, and nothing else is a tolerance.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_ioaware.patch import patched
from pyg_ioaware.record import RECORD, LayerCalls
from pyg_ioaware.switch import disabled


@dataclass(frozen=True)
class Floor:
    r"""An error that is always allowed, relative to the largest magnitude in the reference.

    Attributes:
        value (float): The error.
        reason (str): Why a correct result may have it where stock has none.
    """

    value: float
    reason: str


FLOORS: dict[torch.dtype, Floor] = {
    torch.float64: Floor(
        2.0**-44,
        "the reference is itself a float64 computation: 256 units in the last place for sums of "
        "some thousand terms in another order",
    ),
    torch.float32: Floor(
        2.0**-21,
        "stock is exact at times, by luck: 4 units in the last place for another order of the "
        "same few roundings",
    ),
    torch.float16: Floor(
        2.0**-10,
        "one rounding to float16 at the end: one unit in the last place, where stock's own "
        "roundings cancel by luck",
    ),
    torch.bfloat16: Floor(
        2.0**-7,
        "one rounding to bfloat16 at the end: one unit in the last place, where stock's own "
        "roundings cancel by luck",
    ),
}

_FACTOR = 2.0


def assert_no_worse_than_stock(
    ours: Tensor,
    stock: Tensor,
    reference64: Tensor,
    name: str = "result",
    scale: float = 0.0,
) -> None:
    r"""Asserts that a result is as good as that of stock PyG.

    Shape, dtype and layout are stock's, infinities and NaN are where stock has them, and the
    largest error is at most twice stock's own plus the floor of the dtype. Integers are equal.

    Args:
        ours (torch.Tensor): The result.
        stock (torch.Tensor): The result of stock PyG for the same input.
        reference64 (torch.Tensor): The result of stock PyG in float64.
        name (str, optional): What to call it in the message. (default: :obj:`"result"`)
        scale (float, optional): The size of the terms, for a result that is nothing because its
            terms cancel: they leave their rounding, unless they are luckily the same.
            (default: :obj:`0.0`)

    Raises:
        AssertionError: If it is not.
    """
    for what in ("dtype", "shape", "layout"):
        got, expected = getattr(ours, what), getattr(stock, what)
        assert got == expected, f"{name}: {what} {got}, stock has {expected}"
    dtype = stock.dtype
    ours, stock, reference64 = (_dense(t) for t in (ours, stock, reference64))
    if dtype not in FLOORS:
        assert torch.equal(ours, stock), f"{name}: values of dtype {dtype} differ from stock"
        return
    for value in ("nan", "posinf", "neginf"):
        wrong = getattr(torch, f"is{value}")(ours) != getattr(torch, f"is{value}")(stock)
        assert not wrong.any(), f"{name}: {value} differs from stock at {_places(wrong)}"
    finite = stock.isfinite() & reference64.isfinite()
    if not finite.any():
        return
    reference64 = reference64.double().masked_fill(~finite, 0)
    error = (ours.double() - reference64).masked_fill(~finite, 0).abs()
    stock_error = float((stock.double() - reference64).masked_fill(~finite, 0).abs().max())
    size = float(reference64.abs().max())
    floor = FLOORS[dtype].value * (scale if size < 1e-12 * scale else size)
    wrong = error > _FACTOR * stock_error + floor
    assert not wrong.any(), (
        f"{name}: error {float(error.max()):.3g} against float64, stock has {stock_error:.3g} "
        f"(floor {floor:.3g}); too large at {_places(wrong)}"
    )


def compare(
    stock: Callable[..., Any],
    *args: Any,
    ours: Callable[..., Any] | None = None,
    steps: int = 1,
    draws: int = 3,
    seed: int = 0,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **kwargs: Any,
) -> dict[str, LayerCalls]:
    r"""Asserts that a layer or function gives what it gives on stock PyG.

    It is run on stock PyG, patched, and on stock PyG in float64, on copies of its own, and
    :meth:`assert_no_worse_than_stock` has to hold for each output and, for random output
    gradients, for the gradient of each parameter and of each input that requires one. Where stock
    raises, the same error has to be raised. Stock gets int32 indices as int64, since its gradients
    are wrong otherwise: PyTorch reads past the end of an int32 index in the backward of a scatter.

    Args:
        stock (callable): The module or function.
        *args: Its arguments: tensors, adjacencies of any form, and containers of them.
        ours (callable, optional): What to compare with it instead of the same thing patched, such
            as an IOAware layer; it is run without a patch. (default: :obj:`None`)
        steps (int, optional): How often each of them is run: from the second time on, what was
            kept from the calls before is compared too. (default: :obj:`1`)
        draws (int, optional): For how many output gradients the gradients are compared together.
            The largest error of one draw is that of one number, and at a hub of thousands of
            edges stock's is small at times by luck. (default: :obj:`3`)
        seed (int, optional): The seed of all that is random. (default: :obj:`0`)
        context (callable, optional): Makes the context in which a layer is called, such as
            autocast; not for float64. (default: no context)
        **kwargs: Its keyword arguments.

    Returns:
        dict: Per kind of layer, how many aggregations ran fused and on stock PyG.

    Raises:
        AssertionError: If anything differs.
    """
    given = (args, kwargs)
    run = partial(_run, steps=steps, draws=draws, seed=seed)
    with disabled():
        expected = run(_Twin(stock, given, long=True), context)
    scope = patched(strict=False) if ours is None else nullcontext()
    with scope, RECORD.watch() as layers:
        found = run(_Twin(stock if ours is None else ours, given), context)
    if isinstance(expected, Exception) or isinstance(found, Exception):
        with disabled():
            _assert_same_error(found, run(_Twin(stock, given), context))
        return layers
    with disabled(), _default_dtype(torch.float64):
        exact = run(_Twin(stock, given, torch.float64, long=True), nullcontext)
    if isinstance(exact, Exception):
        raise exact
    for mine, theirs, best in zip(found, expected, exact, strict=True):
        assert mine.keys() == theirs.keys(), f"{sorted(mine)} exist, on stock {sorted(theirs)}"
        scale = max((_size(value) for value in best.values()), default=0.0)
        for name, value in theirs.items():
            assert_no_worse_than_stock(mine[name], value, best[name], name, scale)
    return layers


def _size(value: Tensor) -> float:
    """Returns the largest finite magnitude in a tensor."""
    dense = _dense(value)
    if not dense.is_floating_point() or dense.numel() == 0:
        return 0.0
    return float(dense.abs().nan_to_num(0.0, 0.0, 0.0).max())


_Results = list[dict[str, Tensor]]


class _Twin:
    """A copy of a callable and its arguments whose gradients are its own."""

    def __init__(
        self,
        fn: Callable[..., Any],
        given: Any,
        dtype: torch.dtype | None = None,
        long: bool = False,
    ) -> None:
        self.fn, self.dtype, self.long = fn, dtype, long
        self.leaves: dict[str, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        if isinstance(fn, torch.nn.Module):
            module = copy.deepcopy(fn)
            device = next((t.device for t in tree_leaves(given) if isinstance(t, Tensor)), None)
            if device is not None:  # not all of PyG's layers heed the default device
                module = module.to(device)
            self.fn = module if dtype is None else module.to(dtype)
            self.leaves |= {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.args, self.kwargs = self._copy(given, "input")

    def _copy(self, value: Any, name: str) -> Any:
        if isinstance(value, SparseTensor):
            values = value.storage.value()
            return value if values is None else value.set_value(self._copy(values, name), "coo")
        if isinstance(value, Tensor):
            return self._copy_tensor(value, name)
        if isinstance(value, dict):
            return {k: self._copy(v, f"{name}.{k}") for k, v in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._copy(v, f"{name}.{i}") for i, v in enumerate(value))
        return value

    def _copy_tensor(self, value: Tensor, name: str) -> Tensor:
        # One tensor that is given twice stays one; strides and offsets stay as they are.
        if self.long and value.dtype == torch.int32:
            return value.long()
        if not value.is_floating_point():
            return value
        if value.is_inference():
            return value if self.dtype is None else value.to(self.dtype)
        if id(value) not in self._copies:
            out = value.detach() if self.dtype is None else value.detach().to(self.dtype)
            self._copies[id(value)] = out
            if value.requires_grad:
                self.leaves[f"{name} (gradient)"] = out.requires_grad_()
        return self._copies[id(value)]


def _run(
    twin: _Twin,
    context: Callable[[], AbstractContextManager[Any]],
    steps: int,
    draws: int,
    seed: int,
) -> "_Results | Exception":
    results = []
    for step in range(steps):
        with torch.random.fork_rng():
            torch.manual_seed(seed + step)
            try:
                with context():
                    outputs = dict(_named(twin.fn(*twin.args, **twin.kwargs), "output"))
                gradients = _gradients(outputs, twin.leaves, draws, seed)
            except Exception as error:
                return error
        results.append({name: value.detach() for name, value in (outputs | gradients).items()})
    return results


def _gradients(
    outputs: dict[str, Tensor], leaves: dict[str, Tensor], draws: int, seed: int
) -> dict[str, Tensor]:
    roots = [t for t in outputs.values() if t.requires_grad]
    if not roots or not leaves:
        return {}
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {}
    for draw in range(draws):
        # Such that every dtype gets the same numbers: three bits are exact in all of them.
        directions = [_direction(t, generator) for t in roots]
        gradients = torch.autograd.grad(
            roots, list(leaves.values()), directions, draw < draws - 1, allow_unused=True
        )
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                found.setdefault(name, []).append(_dense(gradient))
    return {name: torch.stack(gradients) for name, gradients in found.items()}


def _direction(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(-4, 5, like.shape, generator=generator, device="cpu").to(like)


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, SparseTensor):
        yield name, value.to_dense()
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, v in value.items():
            yield from _named(v, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for i, v in enumerate(value):
            yield from _named(v, f"{name}.{i}")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _assert_same_error(ours: "_Results | Exception", stock: "_Results | Exception") -> None:
    if not isinstance(stock, Exception):
        assert isinstance(ours, Exception)
        raise AssertionError(f"stock runs, but the call raised {ours!r}") from ours
    assert type(ours) is type(stock), f"stock raises {stock!r} (got {type(ours).__name__}: {ours})"
    assert str(ours) == str(stock), f"stock's message is '{stock}' (got '{ours}')"


def _dense(value: Tensor) -> Tensor:
    return value.to_dense() if is_torch_sparse_tensor(value) else value


def _places(wrong: Tensor) -> str:
    places = wrong.nonzero().tolist()
    return f"{places[:3]}{' and others' if len(places) > 3 else ''}"
