"""Random search for inputs on which the CUDA kernels, run on the CPU, differ from plain PyTorch.

python tests/host_cuda/fuzz.py --seconds 3600 --seed 1

Draws graphs, shapes, dtypes, options, layouts of tensors, ways to split rows and orders of threads.
What fails is made smaller, and printed with its seed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import test_host_attention
import test_host_ops
from runtime import HostRuntime, installed
from test_host_ops import CASES, DTYPES, with_int64

from pyg_ioaware.engines.cuda import CUDAEngine, reduce_backward
from pyg_ioaware.graph.csr import Adjacency

ROUND = 10  # examples between two looks at the clock
SCANNED = reduce_backward.SCANNED
HUB = 110  # edges to one target beside the others, at the most


class Poisoned(CUDAEngine):
    """An engine whose results hold NaN before kernels write them."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns memory in which what nobody writes shows."""
        out = super().empty(shape, dtype, device)
        return out.fill_(float("nan") if out.is_floating_point() else 1)


RUNTIME = HostRuntime()
ENGINE = Poisoned(RUNTIME)
# Half of all are shapes of which few kernels have to be compiled.
USUAL = [(1, 1), (2, 3), (2, 8), (4, 4), (1, 130)]
SHAPES = st.one_of(st.sampled_from(USUAL), st.tuples(st.integers(1, 9), st.integers(1, 80)))


@dataclass(frozen=True)
class Problem:
    """What a case is run on, and how."""

    edges: list[tuple[int, int]]
    hub: int
    num_src: int
    num_dst: int
    dtype: torch.dtype
    offset: int
    strided: bool
    wide_index: bool
    split: int
    order: int

    def adjacency(self) -> Adjacency:
        """Builds the structure, the hub being the first target."""
        edges = [*self.edges, *((i % self.num_src, 0) for i in range(self.hub))]
        src, dst = torch.tensor(edges, dtype=torch.long).view(-1, 2).unbind(1)
        adj = Adjacency.from_pair(src, dst, self.num_src, self.num_dst)
        assert adj is not None
        return with_int64(adj) if self.wide_index else adj

    def check(self, case: Any, *shape: int) -> None:
        """Compares a case with plain PyTorch."""
        RUNTIME.seed = self.order
        with installed(ENGINE, split=self.split):
            case.check(self.adjacency(), *shape, self.dtype, self.offset)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draws what a case is run on."""
    num_src, num_dst = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    pair = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    return Problem(
        edges=draw(st.lists(pair, max_size=60)),
        hub=draw(st.integers(0, HUB)),
        num_src=num_src,
        num_dst=num_dst,
        dtype=draw(st.sampled_from(DTYPES)),
        offset=draw(st.sampled_from([0, 0, 0, 1, 2])),
        strided=draw(st.booleans()),
        wide_index=draw(st.sampled_from([False, False, False, True])),
        split=draw(st.sampled_from([128, 20, 3, 1])),
        order=draw(st.integers(0, 3)),
    )


def laid_out(tensors: list[Tensor | None], strided: bool) -> list[Tensor | None]:
    """Returns the tensors, or the same in memory of which they are every other column."""
    if not strided:
        return tensors
    return [None if t is None else torch.stack([t, t], -1)[..., 0] for t in tensors]


@dataclass(frozen=True)
class Sums(test_host_ops.Case):
    """A case of sums, dot products or maxima."""

    strided: bool = False

    def make(self, *args: Any) -> list[Tensor | None]:
        """Draws operands."""
        return laid_out(super().make(*args), self.strided)


@dataclass(frozen=True)
class Attention(test_host_attention.Case):
    """A case of attention."""

    strided: bool = False

    def make(self, *args: Any) -> list[Tensor | None]:
        """Draws operands."""
        return laid_out(super().make(*args), self.strided)


def sums(name: str, shape: tuple[int, int], problem: Problem) -> None:
    """Compares sums, dot products and maxima."""
    heads, channels = shape
    if "heads" not in name and "sddmm" not in name:
        heads, channels = 1, heads * channels
    reduce_backward.SCANNED = 0 if "scanned" in name else SCANNED
    fields = {key: getattr(CASES[name], key) for key in test_host_ops.Case.__dataclass_fields__}
    problem.check(Sums(**fields, strided=problem.strided), heads, channels)


def attention(
    op: str,
    shape: tuple[int, int],
    dim: int,
    loops: bool,
    dropout: float,
    weights: bool,
    problem: Problem,
) -> None:
    """Compares attention."""
    loops = loops and op == "gatv2"
    case = Attention(op, *shape, dim, loops, dropout, weights, problem.strided)
    problem.check(case)


# What is compared, and what it is given.
SEARCHED: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (
        sums,
        {"name": st.sampled_from(sorted(CASES)), "shape": SHAPES, "problem": problems()},
    ),
    (
        attention,
        {
            "op": st.sampled_from(test_host_attention.OPS),
            "shape": SHAPES,
            "dim": st.sampled_from([0, 3, 1, 8, 21]),
            "loops": st.booleans(),
            "dropout": st.sampled_from([0.0, 0.4]),
            "weights": st.booleans(),
            "problem": problems(),
        },
    ),
]


def search(seconds: float, start: int) -> None:
    r"""Searches, and raises at the first failure, which is as small as could be found.

    Args:
        seconds (float): How long, not counting the search for a smaller one.
        start (int): The first seed.
    """
    torch.set_num_threads(1)
    end, number = time.monotonic() + seconds, start
    while time.monotonic() < end:
        for check, drawn in SEARCHED:
            options = settings(
                max_examples=ROUND,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            )
            try:
                seed(number)(options(given(**drawn)(check)))()
            except BaseException:
                print(f"failed: --seed {number}", flush=True)
                raise
        number += 1
    print(
        f"{2 * ROUND * (number - start)} examples from seed {start} to {number - 1}: no difference"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    search(arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
