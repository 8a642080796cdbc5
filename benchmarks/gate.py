"""What a provider has to pass before it is timed: stock PyG's results, outputs and gradients."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import pyg_ioaware
from benchmarks.registry import Problem

Call = Callable[[], Tensor]
FLOORS = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
"""Errors, relative to the largest value, that always pass."""


def cotangent(out: Tensor) -> Tensor | None:
    """Returns the gradient of an output, the same at each call; none for a scalar."""
    if out.dim() == 0:
        return None
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out)


def gradients(problem: Problem, out: Tensor, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """Runs the backward pass to every leaf."""
    return torch.autograd.grad(out, problem.leaves, grad, allow_unused=True)


def results(problem: Problem, call: Call) -> dict[str, Tensor]:
    """Returns the output and every gradient of one step."""
    out = call()
    found = {"output": out.detach()}
    for i, grad in enumerate(gradients(problem, out, cotangent(out))):
        if grad is not None:
            found[f"gradient {i}"] = grad
    return found


def exactly(problem: Problem) -> dict[str, Tensor]:
    """Returns what stock PyG gives in float64."""
    tensors = (t.detach().double().requires_grad_(t.requires_grad) for t in problem.tensors)
    module = None if problem.module is None else copy.deepcopy(problem.module).double()
    twin = replace(problem, tensors=tuple(tensors), module=module)
    with pyg_ioaware.disabled():
        return results(twin, twin.run)


def size(values: Tensor) -> float:
    """Returns the largest magnitude."""
    return float(values.abs().max()) if values.numel() else 0.0


def error(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """Returns the largest error relative to the largest value, or to what is given at the least."""
    return size(got.double() - want.double()) / max(size(want), least, 1e-30)


class Gate:
    r"""Judges providers of one problem.

    A result passes if it is close to stock's, or, where it is not, if it is at most twice as far
    from a float64 computation as stock's own. A small result is measured by a thousandth of the
    largest one, and a gradient that is nothing but for rounding by the largest one itself.

    Args:
        problem (Problem): The problem.
        gradients (bool, optional): If not set, only the output is compared.
            (default: :obj:`True`)
    """

    def __init__(self, problem: Problem, gradients: bool = True) -> None:
        self.problem, self.gradients = problem, gradients
        self.stock = results(problem, problem.run)
        self.largest = max(map(size, self.stock.values()))
        self.least = 1e-3 * self.largest
        self._exact: dict[str, Tensor] | None = None

    def verdict(self, call: Call) -> str:
        """Returns what is wrong with a provider; nothing if it passes."""
        got = results(self.problem, call)
        floor = FLOORS[self.problem.tensors[0].dtype]
        if got.keys() != self.stock.keys():
            return f"gives {', '.join(got)}, stock {', '.join(self.stock)}"
        for name, want in self.stock.items():
            if name != "output" and not self.gradients:
                continue
            if got[name].shape != want.shape:
                return f"{name}: shape {list(got[name].shape)}, stock {list(want.shape)}"
            # Written so that NaN fails.
            if error(got[name], want, self.least) < floor:
                continue
            if self._exact is None:
                self._exact = exactly(self.problem)
            best = self._exact[name]
            least = self.largest if size(best) < 1e-9 * self.largest else self.least
            ours, theirs = (error(t, best, least) for t in (got[name], want))
            if not ours < max(2 * theirs, floor):
                return f"{name}: error {ours:.1e}, of stock PyG {theirs:.1e}"
        return ""
