"""The CPU engine's kernels against plain torch in float64, on hostile graphs."""

import ctypes
import functools
import itertools
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import types
from typing import NamedTuple

import pytest
import torch
from graphs import ON_CPU
from torch import Tensor

from pyg_ioaware import engines

pytestmark = pytest.mark.skipif(not ON_CPU, reason="about the engine of the CPU")
ENGINE = engines.of(torch.device("cpu"))
EVEN, FIRST, EXACT = 0, 1, 2


class Rows(NamedTuple):
    rowptr: Tensor
    idx: Tensor
    perm: Tensor | None
    tiles: Tensor
    split: int


class Graph(NamedTuple):
    csr: Rows
    src: Tensor  # of each position
    dst: Tensor
    edge: Tensor  # input edge of each position
    num_src: int
    num_dst: int


def build(src, dst, num_src, num_dst, split=16, index=torch.int32, shuffled=True):
    perm = torch.argsort(dst, stable=True)
    src, dst = src[perm], dst[perm]
    rowptr = torch.zeros(num_dst + 1, dtype=torch.long)
    rowptr[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    tiles = []
    for row in range(num_dst):
        begin, end = rowptr[row].item(), rowptr[row + 1].item()
        if end - begin > split:
            for b in range(begin, end, split):
                tiles.append((row, b, min(b + split, end), len(tiles)))
    edge = perm if shuffled else torch.arange(src.numel())
    csr = Rows(
        rowptr.to(index),
        src.to(index),
        edge.to(index) if shuffled else None,
        torch.tensor(tiles, dtype=torch.long).view(-1, 4),
        split,
    )
    return Graph(csr, src, dst, edge, num_src, num_dst)


def graph(name, **options):
    g = torch.Generator().manual_seed(7)

    def ints(high, size):
        return torch.randint(0, high, (size,), generator=g)

    if name == "empty":
        none = torch.empty(0, dtype=torch.long)
        return build(none, none, 0, 0, **options)
    if name == "edgeless":
        none = torch.empty(0, dtype=torch.long)
        return build(none, none, 4, 5, **options)
    if name == "one edge":
        return build(torch.tensor([0]), torch.tensor([0]), 1, 1, **options)
    if (
        name == "hub"
    ):  # rows of many tiles, a row of exactly `split`, isolated rows, loops, duplicates
        dst = torch.cat([ints(40, 150), torch.full((301,), 3), torch.full((16,), 44)])
        src = torch.cat([ints(30, 150), ints(30, 301), ints(30, 16)])
        src[:40] = dst[:40].clamp(max=29)
        src[40:60], dst[40:60] = src[:20].clone(), dst[:20].clone()
        order = torch.randperm(dst.numel(), generator=g)
        return build(src[order], dst[order], 30, 47, **options)
    assert name == "large"  # enough work for several threads
    dst = torch.cat([ints(400, 3500), torch.full((1000,), 1)])
    return build(ints(300, 4500), dst, 300, 401, **options)


def features(rows, width, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype)


def messages(g, x, weight):
    m = x[g.src]
    if weight is not None:
        heads = weight.size(1)
        m = weight[g.edge].repeat_interleave(m.size(1) // heads, dim=1) * m
    return m


def degree(g):
    return torch.bincount(g.dst, minlength=g.num_dst).clamp(min=1).view(-1, 1)


def junk(*shape, dtype=torch.float32):
    return torch.full(shape, 77, dtype=dtype)


def run_spmm(g, x, weight=None, scale=None, mean=False):
    out = junk(g.num_dst, x.size(1), dtype=x.dtype)
    partial = junk(g.csr.tiles.size(0), x.size(1), dtype=x.dtype)
    ENGINE.run("spmm", g.csr, out, x, weight, scale, partial, mean)
    return out


def run_reduce(g, x, weight=None, is_max=True, with_arg=True):
    out = junk(g.num_dst, x.size(1), dtype=x.dtype)
    partial = junk(g.csr.tiles.size(0), x.size(1), dtype=x.dtype)
    partial_arg = junk(*partial.shape, dtype=torch.int32)
    arg = junk(*out.shape, dtype=torch.int32) if with_arg else None
    tied = junk(g.num_dst, dtype=torch.uint8) if with_arg else None
    ENGINE.run("reduce", g.csr, out, arg, tied, x, weight, partial, partial_arg, is_max)
    return out, arg, tied


def run_backward(g, grad, arg, tied, x, weight, ties):
    dx = torch.zeros_like(x)
    ENGINE.run("reduce_backward", g.csr, dx, grad, arg, tied, x, weight, ties)
    if weight is None:
        return dx, None
    dw = torch.zeros_like(weight)
    ENGINE.run("reduce_backward_weight", g.csr, dw, grad, arg, tied, x, weight, ties)
    return dx, dw


def stock_reduce(g, x, weight, is_max, grad):
    """Result and gradients of torch's own scatter_reduce, in the dtype of x."""
    x = x.clone().requires_grad_()
    weight = None if weight is None else weight.clone().requires_grad_()
    m = messages(g, x, weight)
    index = g.dst.view(-1, 1).expand_as(m)
    out = x.new_zeros(g.num_dst, x.size(1))
    out = out.scatter_reduce(0, index, m, "amax" if is_max else "amin", include_self=False)
    out.backward(grad)
    return out.detach(), x.grad, None if weight is None else weight.grad


def same(a, b, tolerance=1e-5):
    if a is None and b is None:
        return
    if a.dtype == torch.float64:
        tolerance = 1e-12
    torch.testing.assert_close(
        a.double(), b.double(), rtol=tolerance, atol=tolerance * 20, equal_nan=True
    )


WIDTHS = [(1, 1), (3, 1), (7, 1), (8, 1), (16, 1), (17, 1), (64, 1), (128, 1), (130, 1)]
HEADS = [(3, 3), (9, 3), (51, 3), (64, 8), (128, 8), (130, 2)]
SHAPES = WIDTHS + HEADS
VARIANTS = [  # dtype, index, shuffled
    (torch.float32, torch.int32, True),
    (torch.float64, torch.int64, False),
]


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request):
    return request.param


@pytest.fixture(params=["empty", "edgeless", "one edge", "hub", "large"])
def case(request, variant):
    dtype, index, shuffled = variant
    return dtype, graph(request.param, index=index, shuffled=shuffled)


@pytest.mark.parametrize(("width", "heads"), SHAPES)
def test_spmm(case, width, heads):
    dtype, g = case
    x, scale = features(g.num_src, width, dtype), features(1, g.num_src, dtype, 2)[0]
    weights = [None] if heads > 1 else [None, features(g.src.numel(), heads, dtype, 1)]
    if heads > 1:
        weights = [features(g.src.numel(), heads, dtype, 1)]
    for weight, by, mean in itertools.product(weights, (None, scale), (False, True)):
        m = messages(g, x.double(), None if weight is None else weight.double())
        if by is not None:
            m = m * by.double()[g.src].view(-1, 1)
        expected = x.new_zeros(g.num_dst, width, dtype=torch.float64).index_add(0, g.dst, m)
        same(run_spmm(g, x, weight, by, mean), expected / degree(g) if mean else expected)


@pytest.mark.parametrize(("width", "heads"), SHAPES)
@pytest.mark.parametrize("mean", [False, True])
def test_sddmm(case, width, heads, mean):
    dtype, g = case
    a, b = features(g.num_dst, width, dtype), features(g.num_src, width, dtype, 1)
    left = a.double() / degree(g) if mean else a.double()
    product = (left[g.dst] * b.double()[g.src]).view(g.src.numel(), heads, width // heads).sum(-1)
    expected = torch.empty_like(product)
    expected[g.edge] = product
    out = junk(g.src.numel(), heads, dtype=dtype)
    ENGINE.run("sddmm", g.csr, out, a, b, mean)
    same(out, expected)


@pytest.mark.parametrize("is_max", [True, False])
@pytest.mark.parametrize("values", ["distinct", "ties", "positive part"])
def test_reduce(case, is_max, values):
    dtype, g = case
    for width, heads in SHAPES:
        check_reduce(g, dtype, width, heads, is_max, values)


def check_reduce(g, dtype, width, heads, is_max, values):
    x = features(g.num_src, width, dtype)
    if values == "ties":
        x = (2 * x).round()
    elif values == "positive part":
        x = x.relu()
    weight = features(g.src.numel(), heads, dtype, 1)
    if values == "ties":
        weight = weight.sign()
    grad = features(g.num_dst, width, dtype, 3)
    for w in [weight] if heads > 1 else [None, weight]:
        expected, dx, dw = stock_reduce(g, x, w, is_max, grad)
        inference, _, _ = run_reduce(g, x, w, is_max, with_arg=False)
        out, arg, tied = run_reduce(g, x, w, is_max)
        assert torch.equal(out, expected)
        assert torch.equal(inference, expected)
        assert torch.equal(tied.bool(), (arg < 0).any(1))
        got_dx, got_dw = run_backward(g, grad, arg, tied, x, w, EVEN)
        same(got_dx, dx, 1e-5)
        same(got_dw, dw, 1e-5)


@pytest.mark.parametrize("ties", [FIRST, EXACT])
@pytest.mark.parametrize("is_max", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_reduce_other_rules_for_ties(variant, ties, is_max, weighted):
    dtype, index, shuffled = variant
    g = graph("hub", index=index, shuffled=shuffled)
    x, grad = features(g.num_src, 20, dtype).round(), features(g.num_dst, 20, dtype, 3)
    weight = features(g.src.numel(), 1, dtype, 1).sign() if weighted else None
    out, arg, tied = run_reduce(g, x, weight, is_max)
    hit = messages(g, x, weight) == out[g.dst]
    if ties == FIRST:
        place = torch.arange(g.src.numel()).view(-1, 1).expand_as(hit)
        none = torch.full(out.shape, g.src.numel())
        index = g.dst.view(-1, 1).expand_as(hit)
        first = none.scatter_reduce(0, index, place.where(hit, none[:1]), "amin")
        part = grad[g.dst] * (place == first[g.dst])
    else:
        count = torch.zeros_like(out).index_add(0, g.dst, hit.to(dtype))
        part = hit * (grad / count)[g.dst].nan_to_num()
    w = 1 if weight is None else weight[g.edge]
    dx = torch.zeros_like(x).index_add(0, g.src, part * w)
    got_dx, got_dw = run_backward(g, grad, arg, tied, x, weight, ties)
    same(got_dx, dx)
    if weighted:
        dw = torch.zeros_like(weight)
        dw[g.edge] = (part * x[g.src]).sum(1, keepdim=True)
        same(got_dw, dw)


@pytest.mark.parametrize("is_max", [True, False])
@pytest.mark.parametrize("where", ["x", "weight", "grad", "all"])
def test_not_finite(variant, is_max, where):
    dtype, index, shuffled = variant
    g = graph("hub", index=index, shuffled=shuffled)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
    x, grad = features(g.num_src, 37, dtype), features(g.num_dst, 37, dtype, 3)
    weight = features(g.src.numel(), 1, dtype, 1)
    if where in ("x", "all"):
        x[4:7, 2] = odd
        x[20, 19:22] = odd
    if where in ("weight", "all"):
        weight[5:8, 0] = odd
        x[11] = 0
    if where in ("grad", "all"):
        grad[2:5, 33] = odd
        grad[9, 4:7] = odd
    for w in (None, weight):
        expected, dx, dw = stock_reduce(g, x, w, is_max, grad)
        inference, _, _ = run_reduce(g, x, w, is_max, with_arg=False)
        out, arg, tied = run_reduce(g, x, w, is_max)
        same(out, expected)
        same(inference, expected)
        got_dx, got_dw = run_backward(g, grad, arg, tied, x, w, EVEN)
        same(got_dx, dx)
        same(got_dw, dw, 1e-4)
        m = messages(g, x, w)
        same(run_spmm(g, x, w), x.new_zeros(g.num_dst, 37).index_add(0, g.dst, m))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("edges", "n"), [(0, 0), (0, 3), (1, 1), (100, 7), (200_000, 5), (200_000, 300_000)]
)
def test_sort(index, edges, n):
    key = torch.randint(0, max(n, 1), (edges,)).to(index)
    rowptr, perm = ENGINE.sort_by_key(key, n)
    assert rowptr.dtype == perm.dtype == torch.int32
    assert torch.equal(perm.long(), torch.argsort(key, stable=True))
    count = torch.bincount(key, minlength=n)
    assert torch.equal(rowptr.long().diff(), count)
    assert rowptr[0] == 0


@functools.cache
def inputs():
    g = graph("large")
    x, weight = features(g.num_src, 96).round(decimals=1), features(g.src.numel(), 1, seed=1)
    return g, x, weight, features(g.num_dst, 96, seed=2)


def everything():
    """One result of every kernel, large enough for several threads."""
    g, x, weight, a = inputs()
    dots = junk(g.src.numel(), 1)
    ENGINE.run("sddmm", g.csr, dots, a, x, True)
    out, arg, tied = run_reduce(g, x, weight)
    narrow = x[:, :16].contiguous()
    _, arg_n, tied_n = run_reduce(g, narrow)
    return [
        run_spmm(g, x, weight, mean=True),
        dots,
        *(out, arg, tied),
        *run_backward(g, a, arg, tied, x, weight, EVEN),
        run_backward(g, a[:, :16].contiguous(), arg_n, tied_n, narrow, None, EVEN)[0],
        *ENGINE.sort_by_key(torch.arange(300_000) * 7919 % 1000, 1000),
    ]


def bits(tensors):
    return [bytes(t.numpy().tobytes()) for t in tensors]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_bits_do_not_depend_on_threads(threads):
    threads(1)
    expected = bits(everything())
    for count in (2, 3, 8):
        threads(count)
        for _ in range(3):
            assert bits(everything()) == expected


def test_python_threads_in_place_of_openmp(threads, monkeypatch):
    from pyg_ioaware.engines.cpu import pool

    threads(1)
    expected = bits(everything())
    threads(3)
    monkeypatch.setattr(pool, "_gomp", None)
    assert bits(everything()) == expected


def test_many_callers(threads):
    threads(2)
    expected, found = bits(everything()), []
    callers = [
        threading.Thread(target=lambda: found.append(bits(everything())), daemon=True)
        for _ in range(6)
    ]
    for c in callers:
        c.start()
    for c in callers:
        c.join(120)
    assert found == [expected] * 6


def _child(queue):
    from pyg_ioaware.engines.cpu import pool

    # torch's own operations may use one thread only after a fork, but the engine must see two.
    torch.set_num_threads(1)
    pool.torch = types.SimpleNamespace(get_num_threads=lambda: 2)
    queue.put(bits(everything()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork(threads):
    threads(2)
    expected = bits(everything())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,), daemon=True)
    child.start()
    try:
        assert queue.get(timeout=120) == expected
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert bits(everything()) == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenMP is shared on Linux only")
def test_threads_are_torch_s_own():
    from pyg_ioaware.engines.cpu import pool

    if pool._gomp is None:
        pytest.skip("torch is not built with OpenMP")

    class Info(ctypes.Structure):
        _fields_ = [
            ("path", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        ]

    info = Info()
    address = ctypes.cast(pool._gomp, ctypes.c_void_p)
    assert ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    with open("/proc/self/maps") as maps:
        loaded = {os.path.realpath(line.split()[-1]) for line in maps if "omp" in line}
    assert os.path.realpath(info.path.decode()) in loaded


SCRIPT = """
    import sys, torch
    from pyg_ioaware import engines
    engine = engines.of(torch.device("cpu"))
    assert "pyg_ioaware.engines.cpu.jit" not in sys.modules  # nor what it imports: Numba
    engine.sort_by_key(torch.tensor([1, 0]), 2)
    from pyg_ioaware.engines.cpu import sort
    print([f.cached for f in sort._entry._compiled.values()])
"""


def run_script(folder):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


def test_second_process_does_not_compile(tmp_path):
    assert run_script(tmp_path) == "[False]"
    assert run_script(tmp_path) == "[True]"


def test_no_folder_for_the_cache(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HOME", str(blocked))
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert run_script(blocked) == "[False]"
