"""Structures that CUDA kernels build, run on the CPU, against those that PyTorch builds."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import Graph, by_target, graphs, random_edges
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import COMPILER, HostRuntime, installed
from structures import HOSTILE, assert_same, by_pytorch, check, check_graph, rows_of
from torch import Tensor

from pyg_ioaware.engines.cuda import CUDAEngine, structure
from pyg_ioaware.graph.csr import Adjacency

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("poison", "one_thread"),
]


@pytest.fixture
def engine() -> Iterator[CUDAEngine]:
    """The CUDA engine on the CPU, as that of the CPU."""
    with installed(CUDAEngine(HostRuntime())) as found:
        yield found


@pytest.mark.parametrize("split", [1, 4, 128])
@pytest.mark.parametrize("name", HOSTILE)
def test_same_as_pytorch(engine: CUDAEngine, name: str, split: int) -> None:
    engine.split = split
    check_graph(engine, HOSTILE[name])
    ordered = by_target(HOSTILE[name].edge_index)
    check_graph(engine, Graph(ordered, HOSTILE[name].num_src, HOSTILE[name].num_dst))


def test_rows_of_more_than_the_most_tiles(engine: CUDAEngine) -> None:
    engine.split = 1
    check_graph(engine, rows_of(2, 2047, 2048, 2049, 4096, 4097, 1, 6200))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["hubs_in_many_blocks", "around_the_split", "unsorted"])
def test_few_blocks_that_take_much(
    engine: CUDAEngine, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    engine.split, engine.runtime.seed = 3, seed
    monkeypatch.setattr(structure, "_MOST_BLOCKS", 2)
    monkeypatch.setattr(structure, "_MOST_CHUNKS", 2)
    check_graph(engine, HOSTILE[name])


@settings(max_examples=60, deadline=None)
@given(graphs(square=False), st.integers(1, 6), st.integers(0, 99))
def test_any_graph(graph: Graph, split: int, seed: int) -> None:
    with installed(CUDAEngine(HostRuntime(seed)), split=split) as engine:
        check_graph(engine, graph)


def _strided(values: Tensor) -> Tensor:
    return torch.stack([values, values], dim=1)[:, 0]


FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "int32": lambda src, dst: (src.int(), dst.int()),
    "int32_and_int64": lambda src, dst: (src.int(), dst),
    "int16": lambda src, dst: (src.short(), dst.short()),
    "strided": lambda src, dst: (_strided(src), _strided(dst)),
    "strided_int32": lambda src, dst: (_strided(src.int()), dst.int()),
    "expanded": lambda src, dst: (src[:1].expand_as(src), dst),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["unsorted", "around_the_split", "one_edge"])
def test_forms_of_indices(engine: CUDAEngine, name: str, form: str) -> None:
    graph = HOSTILE[name]
    src, dst = FORMS[form](*graph.edge_index)
    check(engine, lambda: Adjacency.from_pair(src, dst, graph.num_src, graph.num_dst))
    adj = Adjacency.from_pair(src, dst, graph.num_src, graph.num_dst)
    assert adj is not None
    kept = {t.untyped_storage().data_ptr() for t in adj.tensors}
    assert not kept & {src.untyped_storage().data_ptr(), dst.untyped_storage().data_ptr()}


OUTSIDE = {
    torch.int32: [-1, -(2**31), 12, 2**31 - 1],
    torch.int64: [-1, 12, 2**31, 2**32, 2**32 + 3, -(2**32), 2**62, -(2**62)],
}


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("dtype", "value"), [(t, v) for t, vs in OUTSIDE.items() for v in vs])
def test_an_index_out_of_range(
    engine: CUDAEngine, dtype: torch.dtype, value: int, is_sorted: bool
) -> None:
    edges = by_target(random_edges(12, 12, 300)).to(dtype)
    for row in (0, 1):
        for place in (0, 150, 299):
            bad = edges.clone()
            bad[row, place] = value
            bad = by_target(bad) if is_sorted else bad
            assert Adjacency.from_pair(*bad, 12, 12) is None
    assert Adjacency.from_pair(*edges, 12, 11) is None
    assert Adjacency.from_pair(*edges, 0, 0) is None
    assert engine._builds


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("rowptr", "col"),
    [
        ([0, 2, 1, 3], [0, 1, 2]),
        ([0, 1, 2, 4], [0, 1, 2]),
        ([0, 1, 2, 2], [0, 1, 2]),
        ([1, 1, 2, 3], [0, 1, 2]),
        ([-1, 1, 2, 3], [0, 1, 2]),
        ([0, 2**31 - 1, 2, 3], [0, 1, 2]),
        ([0, -(2**31), 2, 3], [0, 1, 2]),
        ([0, 1, 2, 3], [0, 5, 2]),
        ([0, 1, 2, 3], [0, -1, 2]),
        ([0, 1], []),
        ([1], []),
        ([0], [0]),
    ],
)
def test_rows_that_are_none(
    engine: CUDAEngine, rowptr: list[int], col: list[int], dtype: torch.dtype
) -> None:
    given = torch.tensor(rowptr, dtype=dtype), torch.tensor(col, dtype=dtype)
    assert Adjacency.from_rows(*given, 5) is None
    with by_pytorch(engine):
        assert Adjacency.from_rows(*given, 5) is None


@pytest.mark.parametrize("value", [2**62, -(2**62), 2**32 + 1])
def test_row_pointers_beyond_int32(engine: CUDAEngine, value: int) -> None:
    rowptr = torch.tensor([0, value, 2, 3])
    assert Adjacency.from_rows(rowptr, torch.tensor([0, 1, 2]), 5) is None


def test_rows_by_source_in_either_order(engine: CUDAEngine) -> None:
    """Whichever is asked for first."""
    graph = HOSTILE["unsorted"]
    found, wanted = graph.adjacency, graph.adjacency
    _ = found.by_source, wanted.by_source_in_place
    assert_same(found, wanted)
    assert found.by_source.idx is found.by_source_in_place.idx
    assert wanted.by_source.idx is wanted.by_source_in_place.idx


def test_a_symmetric_graph_is_held_once(engine: CUDAEngine) -> None:
    adj = HOSTILE["symmetric"].adjacency
    there, back = adj.by_target, adj.by_source
    assert back.rowptr is there.rowptr
    assert back.idx is there.idx


def test_read_backs(engine: CUDAEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return read(*args, **kwargs)

        return run

    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    monkeypatch.setattr(torch, "equal", counted(torch.equal))

    def taken(work: Callable[[], Any]) -> int:
        nonlocal count
        count = 0
        work()
        return count

    graph = HOSTILE["around_the_split"]
    src, dst = graph.edge_index
    adj, other = graph.adjacency, Adjacency.from_pair(dst, src, graph.num_dst, graph.num_src)
    assert other is not None
    assert taken(lambda: graph.adjacency) == 1
    assert taken(lambda: adj.by_source_in_place) == 1
    assert taken(lambda: graph.transposed.adjacency) == 2  # it has to be sorted
    assert taken(lambda: other.by_source) == 1
    assert taken(lambda: other.by_source_in_place) == 0
    assert taken(lambda: Adjacency.from_rows(*adj.by_target[:2], graph.num_src)) == 1


def test_every_order_gives_the_same(engine: CUDAEngine) -> None:
    graph, engine.split = HOSTILE["hubs_in_many_blocks"].transposed, 3
    first = graph.adjacency
    _ = first.by_source_in_place
    for engine.runtime.seed in range(1, 8):
        assert_same(graph.adjacency, first)
