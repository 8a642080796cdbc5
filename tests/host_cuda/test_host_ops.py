"""The CUDA kernels on the CPU against plain PyTorch, on small hostile graphs."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import every_kernel
import pytest
import torch
from graphs import SQUARE, features
from runtime import COMPILER, HERE, SANITIZED, HostRuntime, installed, sanitizer_environment
from torch import Tensor

from pyg_ioaware import ops
from pyg_ioaware.engines.cuda import CUDAEngine, reduce_backward
from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.ops import reference
from pyg_ioaware.ops.reduce import Reduce
from pyg_ioaware.ops.sddmm import SDDMM
from pyg_ioaware.ops.spmm import SpMM

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("poison", "one_thread"),
]

# By the first, small rows are tiles already, and 97 edges more of them than one warp merges; by the
# second, rows and tiles have the full batches of edges that kernels take at once.
SPLITS = 3, 20
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WIDTHS = {
    torch.float32: [1, 6, 24, 67, 130],
    torch.float64: [3, 36],
    torch.float16: [2, 17, 64, 130],
    torch.bfloat16: [8, 66],
}


@pytest.fixture
def engine() -> Iterator[CUDAEngine]:
    """The CUDA engine on the CPU, as that of the CPU."""
    with installed(CUDAEngine(HostRuntime())) as found:
        yield found


def _random(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    src, dst = (torch.randint(n, (num_edges,), generator=generator) for n in (num_src, num_dst))
    return src, dst


def _hubs() -> tuple[Tensor, Tensor]:
    """Rows around the numbers of edges at which they are split, and merged by a block."""
    degrees = torch.tensor([0, 1, 3, 4, 96, 97, 7, 8, 9, 17, 20, 21, 230, 0])
    dst = torch.arange(degrees.numel()).repeat_interleave(degrees)
    src = torch.randint(9, dst.shape, generator=torch.Generator().manual_seed(1))
    src[::2] = 4  # a hub among the sources too
    order = torch.randperm(dst.numel(), generator=torch.Generator().manual_seed(2))
    return src[order], dst[order]


def _pairs(*pairs: tuple[int, int]) -> tuple[Tensor, Tensor]:
    src, dst = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    return src, dst


# Sources and targets of the edges, and how many nodes there are of each.
GRAPHS: dict[str, tuple[tuple[Tensor, Tensor], int, int]] = {
    "no_edges": (_pairs(), 4, 3),
    "no_nodes": (_pairs(), 0, 0),
    "one_edge": (_pairs((1, 0)), 2, 2),
    "isolated": (_pairs((5, 2), (2, 5), (5, 5), (7, 2)), 10, 10),
    "duplicates": (_pairs((0, 1), (0, 1), (2, 1), (0, 1), (3, 0), (3, 0), (1, 3), (1, 1)), 4, 4),
    "wide": (_random(17, 5, 40), 17, 5),
    "tall": (_random(4, 130, 90), 4, 130),
    "sorted": ((torch.arange(20) % 7, torch.arange(20) // 4), 7, 5),
    "hubs": (_hubs(), 11, 14),
}


def adjacencies(name: str, engine: CUDAEngine) -> Iterator[Adjacency]:
    """Builds a graph, its rows split in each of the ways."""
    (src, dst), num_src, num_dst = GRAPHS[name]
    for engine.split in SPLITS:
        adj = Adjacency.from_pair(src, dst, num_src, num_dst)
        assert adj is not None
        yield adj


def with_int64(adj: Adjacency) -> Adjacency:
    """The same structure with the index type of very large graphs."""
    rowptr, idx, perm, tiles, split = adj.by_target
    perm = None if perm is None else perm.long()
    return Adjacency(CSR(rowptr.long(), idx.long(), perm, tiles, split), adj.num_src, adj.longest)


# The number of numbers of each operand from the structure and the shape of a row.
Shape = Callable[[Adjacency, int, int], tuple[int, ...]]


def _source(adj: Adjacency, heads: int, channels: int) -> tuple[int, ...]:
    return adj.num_src, heads * channels


def _target(adj: Adjacency, heads: int, channels: int) -> tuple[int, ...]:
    return adj.num_dst, heads * channels


def _edge(adj: Adjacency, heads: int, channels: int) -> tuple[int, ...]:
    return adj.num_edges, heads


def _edge_all(adj: Adjacency, heads: int, channels: int) -> tuple[int, ...]:
    return adj.num_edges, 1


@dataclass(frozen=True)
class Case:
    r"""An operation, called as ``ours(*operands, adj, *options)``.

    Attributes:
        ours (callable): The operation.
        theirs (callable): Its reference, called in the same way.
        operands (tuple): The shape of each operand; None is passed as it is.
        options (tuple): What follows the structure.
        exact (bool): Whether operands are small integers, of which many are equal.
    """

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    operands: tuple[Shape | None, ...]
    options: Callable[[int], tuple[Any, ...]]
    exact: bool = False

    def make(
        self, adj: Adjacency, heads: int, channels: int, dtype: torch.dtype, offset: int = 0
    ) -> list[Tensor | None]:
        """Draws operands; an offset moves each off the alignment of its memory."""
        generator, made = torch.Generator().manual_seed(0), []
        for shape in self.operands:
            if shape is None:
                made.append(None)
                continue
            numbers = torch.randn(shape(adj, heads, channels), generator=generator)
            numbers = (numbers * 1.5).round() if self.exact else numbers
            memory = torch.empty(numbers.numel() + offset, dtype=dtype)
            made.append(memory[offset:].view(numbers.shape).copy_(numbers))
        return made

    def check(
        self, adj: Adjacency, heads: int, channels: int, dtype: torch.dtype, offset: int = 0
    ) -> None:
        """Compares values and gradients with the reference in float64."""
        operands = self.make(adj, heads, channels, dtype, offset)
        options, eps = self.options(heads), torch.finfo(dtype).eps
        longest = max(1, adj.num_edges * channels)
        sums = eps if dtype == torch.float64 else torch.finfo(torch.float32).eps
        factor = 1.5 * eps + longest**0.5 * sums
        ours = _results(self.ours, operands, adj, options, dtype)
        theirs = _results(self.theirs, operands, adj, options, torch.float64)
        if self.exact:
            sizes = [t.abs().amax() if t.numel() else t for t in theirs]
        else:  # of the terms, whose sum may be nothing
            absolute = [None if t is None else t.abs() for t in operands]
            sizes = _results(self.theirs, absolute, adj, options, torch.float64, torch.abs)
        for mine, right, size in zip(ours, theirs, sizes, strict=True):
            assert mine.dtype == dtype
            assert mine.shape == right.shape
            error, bound = (mine.double() - right).abs(), factor * size.abs() + 2.0**-24 * eps
            worse = ~(error <= bound)  # NaN is not
            assert not worse.any(), (
                f"{int(worse.sum())} of {worse.numel()} numbers differ, the first at "
                f"{worse.nonzero()[0].tolist()}: {mine[worse][0]} instead of {right[worse][0]}"
            )


def _results(
    op: Callable[..., Tensor],
    operands: list[Tensor | None],
    adj: Adjacency,
    options: tuple[Any, ...],
    dtype: torch.dtype,
    change: Callable[[Tensor], Tensor] = lambda t: t,
) -> list[Tensor]:
    """Returns the result and the gradient of each operand."""
    # In the dtype that they have already, operands stay where they are in memory.
    given = [None if t is None else t.detach().to(dtype).requires_grad_() for t in operands]
    out = op(*given, adj, *options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).mul(4).round()
    out.backward(change(grad.to(dtype)))
    return [out.detach(), *(t.grad for t in given if t is not None)]


def _spmm(weight: Shape | None, mean: bool, transposed: bool) -> Case:
    x = _target if transposed else _source
    return Case(SpMM.apply, reference.spmm, (x, weight), lambda heads: (mean, transposed))


def _sddmm(mean: bool) -> Case:
    return Case(SDDMM.apply, reference.sddmm, (_target, _source), lambda heads: (heads, mean))


def _reduce(weight: Shape | None, is_max: bool, ties: str) -> Case:
    operands = (_source, weight)
    return Case(Reduce.apply, reference.reduce, operands, lambda heads: (is_max, ties), True)


CASES: dict[str, Case] = {
    "sum": _spmm(None, False, False),
    "sum_transposed": _spmm(None, False, True),
    "mean": _spmm(None, True, False),
    "mean_transposed": _spmm(None, True, True),
    "weighted": _spmm(_edge_all, False, False),
    "weighted_transposed": _spmm(_edge_all, False, True),
    "weighted_mean": _spmm(_edge_all, True, False),
    "heads": _spmm(_edge, False, False),
    "heads_mean": _spmm(_edge, True, False),
    "heads_mean_transposed": _spmm(_edge, True, True),
    "sddmm": _sddmm(False),
    "sddmm_mean": _sddmm(True),
    "max_even": _reduce(None, True, "even"),
    "min_first": _reduce(None, False, "first"),
    "max_exact": _reduce(None, True, "exact"),
    "scanned_max_even": _reduce(None, True, "even"),
    "scanned_min_first": _reduce(None, False, "first"),
    "scanned_max_exact": _reduce(None, True, "exact"),
    "weighted_max_even": _reduce(_edge_all, True, "even"),
    "weighted_min_exact": _reduce(_edge_all, False, "exact"),
    "heads_max_first": _reduce(_edge, True, "first"),
    "heads_min_even": _reduce(_edge, False, "even"),
}
# One of each kind of kernel, where a test has many other parameters.
KINDS = ["sum", "heads_mean", "sddmm", "heads_min_even", "scanned_max_even"]


@pytest.fixture(autouse=True)
def scanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has marks of short rows scanned, too, by tests that say so."""
    if "scanned" in request.node.name:
        monkeypatch.setattr(reduce_backward, "SCANNED", 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs(engine: CUDAEngine, graph: str, name: str) -> None:
    for adj in adjacencies(graph, engine):
        for engine.runtime.seed in (1, 2):
            CASES[name].check(adj, 2, 3, torch.float32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("dtype", "width"), [(t, w) for t in DTYPES for w in WIDTHS[t]], ids=str)
def test_widths(engine: CUDAEngine, width: int, dtype: torch.dtype, name: str) -> None:
    heads = 2 if "heads" in name and width % 2 == 0 else 1
    for adj in adjacencies("hubs", engine):
        CASES[name].check(adj, heads, width // heads, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("place", "dtype"), list(enumerate(DTYPES)), ids=str)
def test_all_widths(engine: CUDAEngine, place: int, dtype: torch.dtype, name: str) -> None:
    """All of them in float32; a third of them, each another, in the other dtypes."""
    widths = [*range(1, 68), 128, 130]
    for adj in adjacencies("hubs", engine):
        for width in widths if dtype == torch.float32 else widths[place % 3 :: 3]:
            heads = 2 if "heads" in name and width % 2 == 0 else 1
            CASES[name].check(adj, heads, width // heads, dtype)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("dtype", "offset"), list(zip(DTYPES, (1, 1, 2, 1), strict=True)), ids=str)
def test_memory_that_is_not_aligned(
    engine: CUDAEngine, dtype: torch.dtype, offset: int, name: str
) -> None:
    for adj in adjacencies("hubs", engine):
        CASES[name].check(adj, 2, 8, dtype, offset)


@pytest.mark.parametrize("ties", ["even", "first", "exact"])
@pytest.mark.parametrize(
    ("most", "dtype"),
    [
        (126, torch.int8),
        (127, torch.int16),
        (128, torch.int16),
        (129, torch.int16),
        (2**15 - 2, torch.int16),
        (2**15 - 1, torch.int32),
    ],
)
@pytest.mark.parametrize("by", ["gathered", "scanned"])
def test_marks_of_few_bits(
    engine: CUDAEngine, by: str, most: int, dtype: torch.dtype, ties: str
) -> None:
    """The last edge of a row may be the only one that shares, or all may."""
    assert engine.split == 128
    degrees = torch.tensor([most, 125, 64, 1, 0])
    dst = torch.arange(5).repeat_interleave(degrees)
    src = torch.cat([torch.arange(n) for n in degrees.tolist()])
    x = torch.zeros(most, 4)  # of the first feature, all edges and the buffer tie
    x[:, 1] = torch.linspace(1, 2, most)  # the last of each row
    x[0, 2] = x[most - 3 :, 2] = 3  # the first and the last ones
    x[:, 3] = torch.linspace(2, 1, most)
    adj = Adjacency.from_pair(src, dst, most, 5)
    assert adj is not None
    found = []
    for run in (Reduce.apply, reference.reduce):
        leaf = x.clone().requires_grad_()
        out = run(leaf, None, adj, True, ties)
        cotangent = torch.arange(1.0, 21).view(5, 4)
        found.append((out.detach(), torch.autograd.grad(out, leaf, cotangent)[0]))
    mark = torch.ops.pyg_ioaware.reduce(x, *adj.by_target, adj.longest, None, True, 0)[1]
    assert mark.dtype == dtype
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("value", "feature"), [(float("inf"), 0.0), (float("nan"), 0.0), (1.0, float("nan"))]
)
@pytest.mark.parametrize("split", [20, 128])
@pytest.mark.parametrize("by", ["gathered", "scanned"])
def test_gradients_that_are_not_finite_reach_all_edges(
    engine: CUDAEngine, by: str, split: int, value: float, feature: float
) -> None:
    """Of long rows, too, in which nothing ties; those of a NaN are not."""
    engine.split = split
    degrees = torch.tensor([60, 3, 17])
    dst = torch.arange(3).repeat_interleave(degrees)
    src = torch.cat([torch.arange(n) for n in degrees.tolist()])
    adj = Adjacency.from_pair(src, dst, 61, 3)
    assert adj is not None
    x, cotangent = features(61, 40), features(3, 40, seed=1)
    cotangent[0, 3] = cotangent[2, 35] = value
    x[5, 7] += feature
    found = []
    for run in (Reduce.apply, reference.reduce):
        leaf = x.clone().requires_grad_()
        out = run(leaf, None, adj, True, "even")
        found.append(torch.autograd.grad(out, leaf, cotangent)[0])
    torch.testing.assert_close(*found, equal_nan=True)


def test_flags_are_zero_and_handed_out_once(engine: CUDAEngine) -> None:
    """Also where many are in use, and after one was set."""
    flags = [reduce_backward._flag(engine.runtime, torch.empty(1)) for _ in range(150)]
    for count, flag in enumerate(flags, 1):
        assert flag.item() == 0
        flag.fill_(count)
    assert [flag.item() for flag in flags] == list(range(1, 151))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_not_finite(engine: CUDAEngine, dtype: torch.dtype) -> None:
    for adj in adjacencies("hubs", engine):
        x = features(adj.num_src, 4, dtype=dtype)
        x[0, 0], x[1, 1], x[2, 2] = float("inf"), float("-inf"), float("nan")
        ours, plain = (
            run(x, None, adj, False, False).float() for run in (SpMM.apply, reference.spmm)
        )
        assert not plain.isfinite().all()
        torch.testing.assert_close(ours, plain, equal_nan=True, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", KINDS)
def test_indices_of_64_bits(engine: CUDAEngine, name: str) -> None:
    for adj in adjacencies("hubs", engine):
        CASES[name].check(with_int64(adj), 2, 3, torch.float32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("graph", ["hubs", "tall"])
def test_every_order_gives_the_same_bits(engine: CUDAEngine, graph: str, name: str) -> None:
    case, adj = CASES[name], next(adjacencies(graph, engine))
    run = partial(_results, case.ours, case.make(adj, 2, 3, torch.float32), adj, case.options(2))
    first = run(torch.float32)
    for engine.runtime.seed in range(1, 12):
        for mine, same in zip(run(torch.float32), first, strict=True):
            assert torch.equal(mine, same)


@pytest.mark.slow
@pytest.mark.skipif(SANITIZED, reason="is the process that this test starts")
def test_nothing_for_the_sanitizers_to_report() -> None:
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
            ),
            *(
                "-k",
                "structure or test_memory or (test_widths and (67 or 17 or 36))",
                *(str(HERE / name) for name in ("test_host_structure.py", "test_host_ops.py")),
            ),
        ],
        env={**os.environ, **sanitizer_environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def test_weights_are_put_in_order_once_and_never_go_stale() -> None:
    with installed(CUDAEngine(HostRuntime()), split=3):
        g = SQUARE["unsorted"]
        adj, x = g.adjacency, features(g.num_src, 5).requires_grad_()
        weight = features(g.num_edges, seed=1)

        def check(weight: Tensor) -> None:
            given = weight.unsqueeze(1) if weight.dim() == 1 else weight
            want = reference.spmm(x, given, adj, False)
            out = ops.spmm(x, adj, weight)
            torch.testing.assert_close(out, want)
            found = torch.autograd.grad(out.square().sum(), x)
            torch.testing.assert_close(found, torch.autograd.grad(want.square().sum(), x))

        for _ in range(3):
            check(weight)
        assert all(w.tensors for w in adj._weights.values())
        weight.mul_(2)  # the same memory, other values
        for _ in range(3):
            check(weight)
        for start in (0, 1):  # the same memory, another part of it
            buffer = features(g.num_edges + 1, seed=2)
            for _ in range(3):
                check(buffer[start : start + g.num_edges])
        for seed in range(5):  # new weights, perhaps where others were
            check(features(g.num_edges, seed=seed))
        check(features(g.num_edges, seed=9).requires_grad_())


def test_every_call_of_the_small_set_runs() -> None:
    with installed(CUDAEngine(HostRuntime())):
        every_kernel.run(torch.float32, every_kernel.Shape(3, 12, 5))
