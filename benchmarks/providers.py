r"""Who is measured: stock PyG, its other forms, other libraries, and the fused path.

A provider gives one or several variants of a problem (such as numbers of threads); all have to
pass the gate, and the fastest is reported, with its label. What it prepares for a graph is made
in the variant, so that it can be timed apart.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

import pyg_ioaware
from benchmarks import peers
from benchmarks.registry import Problem

Call = Callable[[], Tensor]
Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    r"""One way to run a problem.

    Attributes:
        call (callable): Runs the forward pass.
        label (str): What sets it apart from the others of its provider.
        scope (callable): Makes the context in which it is run.
    """

    call: Call
    label: str = ""
    scope: Scope = nullcontext


@dataclass(frozen=True)
class Provider:
    r"""A way to run problems.

    Attributes:
        name (str): Its name.
        variants (callable): Prepares a problem's variants, one after the other.
        takes (callable): Whether it knows a problem.
        module (str): What has to be importable.
        device (str): The device that it needs, if it needs one.
        compiles (bool): Whether a compiler runs for each problem; it is then timed alone.
        gated (bool): Whether it computes what stock PyG computes.
    """

    name: str
    variants: Callable[[Problem], Iterator[Variant]]
    takes: Callable[[Problem], bool]
    module: str = ""
    device: str = ""
    compiles: bool = False
    gated: bool = True

    def absent(self, device: str) -> str:
        """Returns why it cannot run here; nothing if it can."""
        if self.device not in ("", device):
            return f"needs {self.device}"
        found = True
        with contextlib.suppress(ModuleNotFoundError):
            found = not self.module or importlib.util.find_spec(self.module) is not None
            return "" if found else f"no module '{self.module}'"
        return f"no module '{self.module}'"


def is_op(problem: Problem, *bases: str) -> bool:
    """Returns whether a problem is an operation, of these names if any are given."""
    return problem.case.kind == "op" and (not bases or problem.case.base in bases)


def _kind(*kinds: str) -> Callable[[Problem], bool]:
    return lambda problem: problem.case.kind in kinds


def _stock(problem: Problem) -> Iterator[Variant]:
    yield Variant(problem.run)


def _ours(problem: Problem, **options: Any) -> Iterator[Variant]:
    if problem.case.ours is None:
        pyg_ioaware.clear_cache()
        yield Variant(problem.run, scope=partial(pyg_ioaware.patched, strict=False))
    else:
        adj = problem.structure()
        adj.by_source_in_place  # noqa: B018
        yield Variant(partial(problem.case.ours, adj, *problem.tensors, **options))


@contextlib.contextmanager
def _by_cusparse() -> Iterator[None]:
    before = pyg_ioaware.preferred_spmm()
    pyg_ioaware.preferred_spmm("cusparse")
    try:
        yield
    finally:
        pyg_ioaware.preferred_spmm(before)


def _ours_by_cusparse(problem: Problem) -> Iterator[Variant]:
    for variant in _ours(problem):
        yield replace(variant, scope=_by_cusparse)


def _sparse_tensor(problem: Problem) -> Iterator[Variant]:
    import torch_sparse

    (src, dst), graph = problem.graph.edge_index, problem.graph
    sizes = (graph.num_dst, graph.num_src)
    adj = torch_sparse.SparseTensor(row=dst, col=src, sparse_sizes=sizes).fill_cache_()
    if problem.case.kind == "layer":
        yield Variant(partial(problem.run, adj))
    else:
        kind = "max" if is_op(problem, "max") else "sum"
        yield Variant(lambda: torch_sparse.matmul(adj, problem.tensors[0], reduce=kind))


def _edge_index(problem: Problem) -> Iterator[Variant]:
    graph = problem.graph
    size = (graph.num_src, graph.num_dst)
    adj = EdgeIndex(graph.edge_index, sparse_size=size).sort_by("col").values.fill_cache_()
    if problem.case.kind == "layer":
        yield Variant(partial(problem.run, adj))
    else:
        yield Variant(lambda: adj.matmul(problem.tensors[0], transpose=True))


def _compiled(problem: Problem) -> Iterator[Variant]:
    torch._dynamo.reset()
    torch._inductor.config.force_disable_caches = True  # or the time to compile would not be one
    for threads in thread_counts(problem.graph.edge_index.device.type):
        with _threads(threads):
            target = problem.module if problem.module is not None else problem.run
            fast = torch.compile(target, dynamic=False)
            call = fast if problem.module is None else partial(problem.run, module=fast)
            yield Variant(call, f"{threads} threads" if threads else "", partial(_threads, threads))


def thread_counts(device: str) -> list[int]:
    """Returns the numbers of threads to try: one, and as many as are used; 0 leaves them."""
    return [0] if device != "cpu" else sorted({1, torch.get_num_threads()})


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Product(torch.autograd.Function):
    """A product with a CSR matrix, whose transpose is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, transpose: Tensor) -> Tensor:
        ctx.transpose = transpose
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.sparse.mm(ctx.transpose, grad), None, None


def _torch_csr(problem: Problem) -> Iterator[Variant]:
    adj, x, graph = problem.structure(), problem.tensors[0], problem.graph
    ones = torch.ones(graph.num_edges, dtype=x.dtype, device=x.device)
    matrices = [
        torch.sparse_csr_tensor(rows.rowptr, rows.idx, ones, size)
        for rows, size in (
            (adj.by_target, (graph.num_dst, graph.num_src)),
            (adj.by_source, (graph.num_src, graph.num_dst)),
        )
    ]
    yield Variant(lambda: _Product.apply(x, *matrices))


def _linears(problem: Problem) -> Iterator[Variant]:
    assert problem.module is not None
    maps = dense_maps(problem)
    x = problem.tensors[0]
    yield Variant(lambda: torch.stack([m(x).sum() for m in maps]).sum())


def dense_maps(problem: Problem) -> list[torch.nn.Module]:
    """Returns the linear maps of nodes in a layer: the part that nobody here speeds up."""
    if problem.module is None or problem.graph.bipartite:
        return []
    named = problem.module.named_modules()
    return [m for name, m in named if type(m).__name__ == "Linear" and name != "lin_edge"]


def _plain(problem: Problem) -> bool:
    return problem.case.adjacency and not problem.graph.bipartite


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("stock", _stock, _kind("op", "layer")),
        Provider("ours", _ours, _kind("op", "layer")),
        *(
            Provider(f"ours ties={ties}", partial(_ours, ties=ties), lambda p: is_op(p, "max"))
            for ties in ("first", "exact")
        ),
        Provider(
            "ours by cuSPARSE",
            _ours_by_cusparse,
            lambda p: is_op(p, "spmm", "spmmw"),
            device="cuda",
        ),
        Provider(
            "SparseTensor",
            _sparse_tensor,
            lambda p: _plain(p) or is_op(p, "spmm", "max"),
            module="torch_sparse",
        ),
        Provider("EdgeIndex", _edge_index, lambda p: _plain(p) or is_op(p, "spmm")),
        Provider("torch CSR", _torch_csr, lambda p: is_op(p, "spmm")),
        Provider("torch.compile", _compiled, _kind("op", "layer"), compiles=True),
        Provider("linears", _linears, lambda p: bool(dense_maps(p)), gated=False),
        *(
            Provider(
                peer.name,
                lambda problem, make=peer.make: (Variant(c, label) for label, c in make(problem)),
                lambda problem, bases=peer.ops: is_op(problem, *bases),
                module=peer.module,
                device=peer.device,
            )
            for peer in peers.PEERS
        ),
    )
}
