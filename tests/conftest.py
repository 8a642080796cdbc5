"""What all tests share: a seed, stock PyG again after each of them, memory that is never clean."""

import functools
import gc
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import hypothesis
import pytest
import torch
import torch_geometric.typing
from graphs import ON_HOST_CUDA
from torch_geometric.nn import SAGEConv

import pyg_ioaware
from pyg_ioaware import engines
from pyg_ioaware.nn import IOAwareSAGEConv
from pyg_ioaware.patch import REGISTRY, _accelerated, _call_formed

hypothesis.settings.register_profile("local", deadline=None, max_examples=15)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=15, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-of",
        type=int,
        default=1,
        metavar="N",
        help="run the first case of each parametrised test, and of the others one of N",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts, first = config.getoption("--one-of"), set()
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        name = item.nodeid.partition("[")[0]
        chosen = name not in first or zlib.crc32(item.nodeid.encode()) % parts == 0
        kept[chosen].append(item)
        first.add(name)
    if kept[False]:
        config.hook.pytest_deselected(items=kept[False])
        items[:] = kept[True]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def first_instances() -> None:
    """Makes PyG write the code of SAGEConv for an aggregation that takes sparse matrices.

    It is written for the first instance of a class; after one with an LSTM, no other takes them.
    """
    SAGEConv(1, 1)
    IOAwareSAGEConv(1, 1)


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> None:
    """Lets the garbage collector, which many tests call, pass over what is loaded by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def host_cuda() -> Iterator[None]:
    """Makes the CUDA kernels, run on the CPU, those of the CPU, where TEST_ENGINE asks for it."""
    if not ON_HOST_CUDA:
        yield
        return
    sys.path.insert(0, str(Path(__file__).parent / "host_cuda"))
    from runtime import HostRuntime, installed, write_counts

    from pyg_ioaware.engines.cuda import CUDAEngine

    engine = CUDAEngine(HostRuntime(seed=1))
    with installed(engine, split=4):  # small rows are tiles already
        yield
    write_counts()


@pytest.fixture(autouse=True, scope="session")
def pytorch_scatters() -> Iterator[None]:
    """Makes stock PyG reduce by PyTorch where there is a GPU.

    On CUDA, torch_scatter picks any of several equal maxima, skips NaN, and makes 0 of rows of
    infinities: nothing that can be compared.
    """
    before = torch_geometric.typing.WITH_TORCH_SCATTER
    if torch.cuda.is_available():
        torch_geometric.typing.WITH_TORCH_SCATTER = False
    yield
    torch_geometric.typing.WITH_TORCH_SCATTER = before


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds parameters and random values, so that a test does not depend on those before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def stock_again() -> Iterator[None]:
    """Takes the patch out after each test, checks that nothing of it is left, empties the cache."""
    yield
    for model in list(_accelerated):
        pyg_ioaware.decelerate(model)
    pyg_ioaware.unpatch()
    pyg_ioaware.clear_cache()
    pyg_ioaware.stats(reset=True)
    assert leftovers() == []
    # What falls back to plain PyTorch is right, too, and tests nothing.
    for engine in engines._engines.values():
        assert isinstance(engine, str) or not engine.broken, engine.broken


TARGETS = [row.target for row in REGISTRY]


def leftovers() -> list[str]:
    """Returns the places where a function of PyG is not PyG's own."""
    found = []
    for row in REGISTRY:
        cls = row.places
        if isinstance(cls, type) and cls.__dict__[row.target.__name__] is not row.target:
            found.append(row.name)
    if torch.jit.ScriptFunction.__call__ is _call_formed:
        found.append("torch.jit.ScriptFunction.__call__")
    return found + [
        f"{name}.{key}"
        for name, key in _places(len(sys.modules))
        if getattr(getattr(sys.modules.get(name), key, None), "__wrapped__", None) in TARGETS
    ]


@functools.lru_cache(maxsize=1)
def _places(_modules: int) -> list[tuple[str, str]]:
    """Returns where PyG's modules hold what is replaced, or what replaces it."""
    return [
        (name, key)
        for name, module in list(sys.modules.items())
        if name.startswith("torch_geometric")
        for key, value in list(vars(module).items())
        if type(value) is FunctionType
        and (value in TARGETS or getattr(value, "__wrapped__", None) in TARGETS)
    ]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what the package allocates without a value, so that a row nobody wrote shows."""

    def poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_and_fill(*args: Any, **kwargs: Any) -> Any:
            out = allocate(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("pyg_ioaware") and type(out) is torch.Tensor:
                # An integer that is a place in most graphs: garbage, but no crash.
                out.fill_(float("nan") if out.is_floating_point() else 1)
            return out

        return allocate_and_fill

    for owner, name in (
        (torch.Tensor, "new_empty"),
        (torch, "empty"),
        (torch, "empty_like"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread: on small tensors, more of them only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
