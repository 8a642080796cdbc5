"""The CUDA engine's launch layer, without a GPU: declared arguments, failures, empty work."""

import logging
from typing import Any

import pytest
import torch
from graphs import GRAPHS, ON_CPU, features
from torch_geometric.nn import GCNConv, SAGEConv

import pyg_ioaware
from pyg_ioaware import engines, ops
from pyg_ioaware.engines.cuda import CUDAEngine, choice, sources
from pyg_ioaware.engines.cuda.launch import Kernel
from pyg_ioaware.engines.cuda.plan import head_layout, layout, pace
from pyg_ioaware.ops import bias, reference
from pyg_ioaware.testing import compare

pytestmark = pytest.mark.skipif(not ON_CPU, reason="puts another engine in the CPU's place")

MACROS = (("SCALAR", 0), ("INDEX", 32))
KERNEL = Kernel("spmm", "copy", [("x", "T*"), ("index", "I*"), ("n", "i64"), ("factor", "f32")])


class Recording:
    """A runtime that notes what it is asked for, and runs nothing."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []
        self.launched: list[tuple[int, ...]] = []

    def load(self, source: str, name: str, options: tuple[str, ...], device: int) -> Any:
        self.loaded.append((source, name))
        return lambda *args: self.launched.append(args)

    def stream(self, device: int) -> int:
        return 7


class Broken(Recording):
    """A runtime whose compiler fails."""

    def load(self, source: str, name: str, options: tuple[str, ...], device: int) -> Any:
        self.loaded.append((source, name))
        raise RuntimeError("error: expected a ';'")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    runtime = Broken()
    engine = CUDAEngine(runtime)
    engine._builds = False
    monkeypatch.setattr(CUDAEngine, "gathers", False)  # the primitive is not for the CPU
    monkeypatch.setitem(engines._engines, torch.device("cpu"), engine)
    return runtime


def test_a_launch_passes_what_is_declared() -> None:
    runtime, x, index = Recording(), torch.ones(3), torch.zeros(2, dtype=torch.int32)
    KERNEL(runtime, MACROS, (4, 2), 64, x, index, 5, 0.5)
    KERNEL(runtime, MACROS, (4, 2), 64, x, None, 5, 1)
    assert runtime.loaded == [("spmm", "copy")]
    assert [call[:4] for call in runtime.launched] == [(4, 2, 64, 7)] * 2


def test_pointers_are_declared_before_values() -> None:
    with pytest.raises(AssertionError):
        Kernel("spmm", "copy", [("n", "i64"), ("x", "T*")])


def test_nothing_is_launched_for_empty_work() -> None:
    runtime = Recording()
    for grid in ((0, 1), (1, 0)):
        KERNEL(runtime, MACROS, grid, 64, torch.ones(0), None, 0, 0.0)
    assert not runtime.loaded


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(3), None, 5), r"takes 4 arguments \(got 3\)"),
        ((torch.ones(3).double(), None, 5, 1.0), r"x: 'torch.float64' for 'torch.float32'"),
        ((torch.ones(4)[::2], None, 5, 1.0), r"strides \(2,\)"),
        ((torch.ones(3), torch.ones(3), 5, 1.0), r"index: 'torch.float32' for 'torch.int32'"),
        ((None, None, 5, 1.0), r"at least one tensor \(got none\)"),
    ],
)
def test_an_argument_that_is_not_as_declared(args: tuple[Any, ...], message: str) -> None:
    runtime = Recording()
    with pytest.raises(TypeError, match=message):
        KERNEL(runtime, MACROS, (1, 1), 64, *args)
    assert not runtime.launched


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_a_step_is_finished_where_a_kernel_does_not_compile(
    broken: Broken, reduce: str, caplog: pytest.LogCaptureFixture
) -> None:
    g = GRAPHS["unsorted"]
    adj = g.adjacency
    x = features(g.num_src, 6).requires_grad_()
    weight = features(g.num_edges, 1, seed=1).requires_grad_()
    with caplog.at_level(logging.WARNING, "pyg_ioaware"):
        if reduce == "max":
            out = ops.reduce(x, adj, weight)
            want = reference.reduce(x, weight, adj, True, "even")
        else:
            out = ops.spmm(x, adj, weight, mean=reduce == "mean")
            want = reference.spmm(x, weight, adj, reduce == "mean")
        torch.testing.assert_close(out, want)
        found = torch.autograd.grad(out.square().sum(), (x, weight))
        expected = torch.autograd.grad(want.square().sum(), (x, weight))
    torch.testing.assert_close(found, expected)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert "does not compile (see '" in messages[0]
    with open(messages[0].split("'")[3]) as log:
        text = log.read()
    assert "expected a ';'" in text
    assert "-DSCALAR=0" in text


def test_the_gradient_of_a_bias_is_finished_where_a_kernel_does_not_compile(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bias, "MANY", 1)
    x, leaf = features(9, 6), torch.zeros(6, requires_grad=True)
    assert bias.sums_columns(x, x.numel())
    bias.biased(x.clone(), leaf).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * x.sum(0))
    assert broken.loaded == [("column_sums", "column_sums")]
    assert not bias.sums_columns(x, x.numel())


@pytest.mark.parametrize("make", [lambda: GCNConv(4, 4), lambda: SAGEConv(4, 4, aggr="max")])
def test_stock_runs_after_a_kernel_that_does_not_compile(broken: Broken, make: Any) -> None:
    g, conv = GRAPHS["unsorted"], make()
    x = features(g.num_src, 4).requires_grad_()
    compare(conv, x, g.edge_index)
    count = len(broken.loaded)
    layers = compare(conv, x, g.edge_index)
    assert len(broken.loaded) == count
    ((reason, _),) = next(iter(layers.values())).stock.items()
    assert "does not compile" in reason
    # Another dtype still gets its chance.
    compare(conv.double(), x.detach().double().requires_grad_(), g.edge_index)
    assert len(broken.loaded) > count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_that_is_given_up_is_that_of_the_features(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    engine = CUDAEngine(Broken())
    engine._builds = False
    monkeypatch.setitem(engines._engines, torch.device("cpu"), engine)
    csr = GRAPHS["unsorted"].adjacency.by_target
    x = torch.zeros(12, 4, dtype=dtype)
    sums = torch.zeros(50, 1)  # the first tensor, of the dtype of sums
    mark, weight = torch.zeros(12, 4, dtype=torch.int8), torch.zeros(50, 1, dtype=dtype)
    with pytest.raises(engines.KernelError):
        engine.run("reduce_weight", csr, sums, x, mark, x, x, weight, 0)
    assert set(engine.broken) == {dtype}


def test_pytorch_builds_structures_where_a_kernel_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, g = CUDAEngine(Broken()), GRAPHS["unsorted"]
    wanted = g.adjacency
    monkeypatch.setitem(engines._engines, torch.device("cpu"), engine)
    found = [g.adjacency, g.adjacency]
    for adj in found:
        for rows in ("by_target", "by_source"):
            mine, other = getattr(adj, rows), getattr(wanted, rows)
            assert all(torch.equal(mine[i], other[i]) for i in range(3))
    assert [r.getMessage().split("(")[0] for r in caplog.records] == [
        "a CUDA kernel that does not compile "
    ]
    assert not engine.broken  # features have their chance


def test_sources_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    sources.folder.cache_clear()
    monkeypatch.setattr(sources, "PLACES", (tmp_path / "one", tmp_path / "two"))
    try:
        with pytest.raises(FileNotFoundError, match=r"one' and '.*two'\); install"):
            sources.folder()
    finally:
        sources.folder.cache_clear()


@pytest.mark.parametrize(
    ("width", "unit", "dtype", "offset", "expected"),
    [
        (128, 128, torch.float32, 0, (4, 32, 1, 1, True)),
        (128, 128, torch.bfloat16, 0, (8, 16, 1, 1, True)),
        (128, 128, torch.float64, 0, (2, 32, 2, 1, True)),
        (64, 64, torch.float32, 0, (4, 16, 1, 1, True)),
        (512, 512, torch.float32, 0, (4, 32, 2, 2, True)),
        (47, 47, torch.float32, 0, (1, 32, 2, 1, False)),
        (6, 6, torch.float32, 0, (2, 4, 1, 1, False)),
        (64, 8, torch.bfloat16, 0, (8, 8, 1, 1, True)),
        (12, 3, torch.float32, 0, (1, 16, 1, 1, False)),
        (128, 128, torch.float32, 1, (1, 32, 2, 2, True)),
        (128, 128, torch.float16, 2, (2, 32, 2, 1, True)),
        (1, 1, torch.float16, 0, (1, 1, 1, 1, True)),
        (0, 0, torch.float32, 0, (4, 1, 1, 1, False)),
    ],
)
def test_layouts(
    width: int, unit: int, dtype: torch.dtype, offset: int, expected: tuple[int, ...]
) -> None:
    table = torch.empty(1024, dtype=dtype)[offset:]
    assert layout(width, unit, table) == expected


SHORT, USUAL, LONG = 2, 15, 90  # mean degrees


@pytest.mark.parametrize(
    ("kernel", "heads", "channels", "dtype", "degree", "expected"),
    [
        ("spmm", 1, 128, torch.float32, USUAL, (8, 12)),
        ("spmm", 1, 128, torch.float32, LONG, (16, 8)),
        ("spmm", 1, 128, torch.bfloat16, LONG, (8, 8)),
        ("spmm", 1, 128, torch.bfloat16, SHORT, (4, 16)),
        ("spmm", 1, 256, torch.float32, LONG, (4, 1)),
        ("spmm", 1, 128, torch.float64, SHORT, (4, 1)),
        ("reduce", 1, 128, torch.bfloat16, USUAL, (8, 1)),
        ("reduce", 1, 128, torch.float32, SHORT, (4, 1)),
        ("reduce", 1, 128, torch.float32, LONG, (8, 1)),
        ("reduce_gather", 1, 128, torch.float32, USUAL, (4, 8)),
        ("reduce_gather", 1, 128, torch.float32, SHORT, (4, 8)),
        ("reduce_gather", 2, 256, torch.float32, USUAL, (4, 1)),
        ("reduce_scan", 1, 128, torch.float32, LONG, (2, 10)),
        ("reduce_scan", 1, 128, torch.float64, LONG, (2, 8)),
        ("gatv2", 4, 32, torch.float32, USUAL, (4, 7)),
        ("gatv2", 4, 32, torch.float32, LONG, (8, 6)),
        ("gatv2", 4, 64, torch.float64, USUAL, (4, 1)),
        ("gatv2_kept", 4, 32, torch.float32, USUAL, (4, 8)),
        ("gatv2_kept", 8, 8, torch.float32, USUAL, (4, 6)),
        ("attention_values", 4, 32, torch.float32, USUAL, (4, 9)),
        ("attention_values", 4, 32, torch.float32, LONG, (8, 6)),
        ("attention_values", 8, 32, torch.float32, USUAL, (4, 4)),
        ("attention_values", 4, 64, torch.float64, USUAL, (4, 1)),
        ("gatv2_source", 4, 32, torch.float32, SHORT, (4, 16)),
        ("gatv2_source", 4, 32, torch.bfloat16, LONG, (16, 9)),
        ("gatv2_target", 4, 32, torch.float32, USUAL, (16, 8)),
        ("gatv2_target", 4, 32, torch.float64, LONG, (8, 1)),
        ("gatv2_target", 1, 7, torch.float32, LONG, (8, 8)),
        ("transformer", 4, 32, torch.float32, USUAL, (4, 9)),
        ("transformer", 4, 32, torch.bfloat16, USUAL, (4, 8)),
        ("transformer_target", 4, 32, torch.float32, USUAL, (8, 8)),
        ("transformer_target", 4, 32, torch.float32, SHORT, (2, 12)),
        ("transformer_target", 1, 8, torch.bfloat16, SHORT, (2, 12)),
        ("transformer_source", 4, 32, torch.float32, LONG, (8, 8)),
        ("transformer_source", 4, 64, torch.float64, LONG, (2, 1)),
    ],
)
def test_edges_at_once(
    kernel: str,
    heads: int,
    channels: int,
    dtype: torch.dtype,
    degree: int,
    expected: tuple[int, int],
) -> None:
    table = torch.empty(4096, dtype=dtype)[:0]
    plan = head_layout(heads, channels, table) if heads > 1 else layout(channels, channels, table)
    assert pace(kernel, plan, table, 100 * degree, 100) == expected


def test_weights_have_a_pace_of_their_own() -> None:
    table = torch.empty(0)
    plan = layout(128, 128, table)
    paces = [pace("spmm", plan, table, 200, 100, True, heads > 1) for heads in (1, 4)]
    assert paces == [(2, 16), (4, 1)]


def test_no_rows_have_a_pace() -> None:
    table = torch.empty(0)
    assert pace("spmm", layout(8, 8, table), table, 0, 0).batch > 0


@pytest.mark.parametrize("kernel", ["gatv2", "gatv2_kept", "transformer"])
def test_features_of_edges_take_registers(kernel: str) -> None:
    table = torch.empty(0)
    plan = head_layout(4, 32, table)
    plain, featured = (pace(kernel, plan, table, 1500, 100, f) for f in (False, True))
    assert featured.batch <= plain.batch
    assert featured.resident == 1
    assert pace(kernel, plan, table, 1500, 100, False, True).resident <= plain.resident


def test_no_gpu_is_needed_to_import_the_engine() -> None:
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
    assert pyg_ioaware.engines.of(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("library", "why"),
    [
        ("auto", "its bits repeat, and it is faster without weights"),
        ("kernel", "as was asked for"),
        ("cusparse", "the tensors are not on a GPU"),
    ],
)
def test_explain_tells_which_library_sums(
    monkeypatch: pytest.MonkeyPatch, library: str, why: str
) -> None:
    monkeypatch.setattr(CUDAEngine, "gathers", False)
    monkeypatch.setitem(engines._engines, torch.device("cpu"), CUDAEngine(Recording()))
    monkeypatch.setattr(choice, "_preferred", "auto")
    assert pyg_ioaware.preferred_spmm(library) == pyg_ioaware.preferred_spmm() == library
    layer, x, edges = GCNConv(4, 4), torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
    found = pyg_ioaware.explain(layer, x, edges)
    assert found.chosen == {f"sums by own kernel: {why}": 1}
    assert f"sums by own kernel: {why} (1x)" in str(found)
    assert engines.NOTES.get() is None


def test_nothing_is_watched_once_explain_has_failed() -> None:
    class Uncopyable(torch.nn.Module):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise RuntimeError("no copies")

    with pytest.raises(RuntimeError, match="no copies"):
        pyg_ioaware.explain(Uncopyable())
    assert engines.NOTES.get() is None


def test_libraries_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"must be one of .*'cusparse'.* \(got 'cublas'\)"):
        pyg_ioaware.preferred_spmm("cublas")
    assert pyg_ioaware.preferred_spmm() == "auto"
