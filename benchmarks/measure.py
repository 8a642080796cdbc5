"""Measures one case on one graph: the gate first, then time, memory and set-up."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch_geometric import typing

import pyg_ioaware
from benchmarks import gate
from benchmarks.gate import Gate
from benchmarks.graphs import Graph
from benchmarks.providers import PROVIDERS, Provider, Variant
from benchmarks.registry import Case, Problem
from benchmarks.timing import Clock, Step, clocks, peak, summary, turns

STEP = "forward+backward"
MODES = ("inference", "forward", "backward", STEP, "host")
Wanted = set[tuple[str, str, str]]
"""Modes, states of the L2 cache, and providers that have no row yet."""


@dataclass(frozen=True)
class Options:
    r"""How long is measured, and where.

    Attributes:
        device (str): :obj:`"cpu"` or :obj:`"cuda"`.
        seconds (float): The time for each provider and mode.
        least (int): How many runs there are at the least.
        memory (bool): Whether peak memory is measured.
        gate_on (Graph, optional): The graph on which results are compared, where the one that is
            timed is too large for stock PyG.
    """

    device: str
    seconds: float
    least: int
    memory: bool = True
    gate_on: Graph | None = None


@dataclass
class Entry:
    """A provider that passed, and what was found out on the way."""

    provider: Provider
    variant: Variant
    found: dict[str, Any]


def step(problem: Problem, variant: Variant, mode: str) -> Step:
    """Returns the timed part of a mode, and what comes before it."""
    grads: list[Tensor | None] = []  # the gradient of the output is made once

    def forward(_: object = None) -> Tensor:
        return variant.call()

    def inference(_: object) -> Tensor:
        with torch.no_grad():
            return variant.call()

    def backward(out: Tensor) -> object:
        if not grads:
            grads.append(gate.cotangent(out))
        return gate.gradients(problem, out, grads[0])

    def both(_: object) -> object:
        out = variant.call()
        return out, backward(out)

    if mode == "backward":
        return Step(backward, forward, scope=variant.scope)
    run = {"inference": inference, "forward": forward}.get(mode, both)
    return Step(run, scope=variant.scope)


def measure(
    case: Case, graph: Graph, dtype: torch.dtype, wanted: Wanted, options: Options
) -> Iterator[dict[str, Any]]:
    r"""Yields a row for each mode and provider that is wanted.

    Args:
        case (Case): The case.
        graph (Graph): The graph.
        dtype (torch.dtype): The dtype of the features.
        wanted (set): What is to be measured.
        options (Options): How it is.
    """
    problem = Problem.of(case, graph, dtype, options.device)
    with _scatter_that_works(problem) as note:
        for row in _measure(problem, dtype, wanted, options):
            notes = filter(None, (row.get("note"), note))
            yield row | {"note": "; ".join(notes)}


@contextmanager
def _scatter_that_works(problem: Problem) -> Iterator[str]:
    """Switches torch_scatter off where it fails; returns what to say of it."""
    messages = problem.graph.num_edges * problem.tensors[0][0].numel()
    if problem.graph.edge_index.is_cuda and messages >= 2**31 and typing.WITH_TORCH_SCATTER:
        with patch.object(typing, "WITH_TORCH_SCATTER", False):
            yield "stock without torch_scatter, which fails beyond 2^31 numbers"
    else:
        yield ""


def _measure(
    problem: Problem, dtype: torch.dtype, wanted: Wanted, options: Options
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a problem."""
    names = [name for name in PROVIDERS if any(name == w[2] for w in wanted)]
    try:
        judges = _judges(problem, dtype, options)
        failure: dict[str, Any] = {}
    except Exception as error:
        judges, failure = [], _failed(error)
        failure["note"] = f"no reference: {failure['note']}"
    passed = []
    for name in names:
        if judges:
            entry = _admit(PROVIDERS[name], problem, judges, options)
            if isinstance(entry, Entry):
                passed.append(entry)
                continue
            failure = entry
        for mode, l2, provider in sorted(wanted):
            if provider == name:
                yield {"mode": mode, "l2": l2, "provider": name} | failure
    del judges
    yield from _timed(passed, problem, wanted, options)


def _judges(problem: Problem, dtype: torch.dtype, options: Options) -> list[Gate]:
    """Returns who compares results.

    Rounded to half precision, many maxima are ties, which libraries share by rules of their own:
    their gradients are compared in float32.
    """
    graph = options.gate_on or problem.graph
    judged = problem
    if options.gate_on is not None:
        judged = Problem.of(problem.case, graph, dtype, options.device)
    if "max" not in problem.case.base or dtype.itemsize >= 4:
        return [Gate(judged)]
    exact = Problem.of(problem.case, graph, torch.float32, options.device)
    return [Gate(judged, gradients=False), Gate(exact)]


def _failed(error: Exception) -> dict[str, Any]:
    """Returns the columns for what raised."""
    text = (str(error) or type(error).__name__).splitlines()[0][:200]
    full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text
    return {"status": "out of memory" if full else "error", "note": text}


def _admit(
    provider: Provider, problem: Problem, judges: list[Gate], options: Options
) -> Entry | dict[str, Any]:
    """Returns a provider's fastest variant if all are right, else the columns that say why not."""
    clock = Clock()

    def begin() -> tuple[Iterator[Variant], Variant, float]:
        """Returns the variants, the first of them, and how long it took to its first step.

        To patch PyG is not counted: it is done once, whatever the graph.
        """
        started = time.perf_counter()
        variants = provider.variants(problem)
        first = next(variants)
        made = time.perf_counter() - started
        with first.scope():
            started = time.perf_counter()
            clock.sample(step(problem, first, STEP))
            made += time.perf_counter() - started
        return variants, first, 1e3 * made

    try:
        # Before the verdict, so that compilers have seen nothing of the problem yet.
        pyg_ioaware.stats(reset=True)
        others, first, cold = begin()
        fallbacks = _fallbacks()
        variants = [first, *others]
        for judge in judges:
            judged = variants if judge.problem is problem else provider.variants(judge.problem)
            if wrong := _verdict(provider, judge, judged):
                return {"status": "wrong", "note": wrong}
        middle = {}
        for i, variant in enumerate(variants):
            found = turns({"": step(problem, variant, STEP)}, clock, 0, 3)[""]
            middle[i] = sorted(found)[1]
        best = min(middle, key=lambda i: middle[i])
        notes = filter(None, (variants[best].label, fallbacks))
        columns: dict[str, Any] = {"status": "ok", "note": "; ".join(notes)}
        if provider.compiles:
            columns |= {"setup_ms": "0", "compile_ms": f"{max(cold - middle[0], 0):.2f}"}
        else:  # kernels are compiled by now: what is left is the structure
            again = begin()[2]
            columns["setup_ms"] = f"{max(again - middle[0], 0):.2f}"
            columns["compile_ms"] = f"{max(cold - again, 0):.2f}"
        if options.memory:
            columns |= peak(step(problem, variants[best], STEP), options.device)
        return Entry(provider, variants[best], columns)
    except Exception as error:
        return _failed(error)


def _verdict(provider: Provider, judge: Gate, variants: Iterable[Variant]) -> str:
    """Returns what is wrong with any variant of a provider."""
    for variant in variants if provider.gated else ():
        with variant.scope():
            wrong = judge.verdict(variant.call)
        if wrong:
            return f"{variant.label}: {wrong}" if variant.label else wrong
    return ""


def _fallbacks() -> str:
    """Returns why calls of the fused path ran on stock PyG, if any did."""
    layers = pyg_ioaware.stats()["layers"].values()
    reasons = sorted({reason for calls in layers for reason in calls["stock"]})
    return f"in part on stock: {', '.join(reasons)}" if reasons else ""


def _timed(
    passed: list[Entry], problem: Problem, wanted: Wanted, options: Options
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the providers that passed."""
    size = problem.tensors[0].element_size()
    for mode in MODES:
        for clock in clocks(options.device, mode, tuple(sorted({c for _, c, _ in wanted}))):
            due = [e for e in passed if (mode, clock.l2, e.provider.name) in wanted]
            steps = {e.provider.name: step(problem, e.variant, mode) for e in due}
            # Compiled code is run alone: it depends on the number of threads.
            groups = [{e.provider.name} for e in due if e.provider.compiles]
            groups.append({e.provider.name for e in due if not e.provider.compiles})
            times: dict[str, list[float]] = {}
            run = partial(turns, clock=clock, seconds=options.seconds, least=options.least)
            for group in groups:
                times |= run({name: steps[name] for name in steps if name in group})
            traffic = None
            if problem.case.traffic is not None:
                traffic = problem.case.traffic(problem.graph, mode, size)
            for entry in due:
                row = {"mode": mode, "l2": clock.l2, "provider": entry.provider.name}
                row |= entry.found if mode == STEP else _brief(entry.found)
                row |= summary(times[entry.provider.name])
                if traffic is not None:
                    row |= {"bytes": traffic.total, "gathered": traffic.gathered}
                    row |= {"row_bytes": traffic.row, "table_bytes": traffic.table}
                yield row


def _brief(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("status", "note")}


def structures(graph: Graph, wanted: Wanted, options: Options) -> Iterator[dict[str, Any]]:
    """Yields what it takes to build the structure of a graph, in several orders of its edges."""
    from torch_geometric import EdgeIndex
    from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

    from pyg_ioaware.graph.csr import Adjacency

    graph = graph.to(options.device)
    sizes = (graph.num_src, graph.num_dst)
    dst = graph.edge_index[1]
    order = dst.argsort(stable=True)
    torch.manual_seed(0)
    mixed = torch.randperm(graph.num_edges).to(order.device)
    orders = {"sorted": order, "unsorted": mixed}
    edges = {name: graph.edge_index[:, o].contiguous() for name, o in orders.items()}
    edges["both directions"] = edges["unsorted"]

    def ours(pair: Tensor, mode: str) -> object:
        adj = Adjacency.from_pair(*pair, *sizes)
        assert adj is not None
        if mode == "both directions":
            adj.by_source_in_place  # noqa: B018
        return adj

    def sparse(pair: Tensor, mode: str) -> object:
        adj = SparseTensor(row=pair[1], col=pair[0], sparse_sizes=sizes[::-1])
        adj.storage.rowptr()
        if mode == "both directions":
            adj.storage.csr2csc(), adj.storage.colptr()
        return adj

    def edge_index(pair: Tensor, mode: str) -> object:
        adj = EdgeIndex(pair, sparse_size=sizes).sort_by("col").values
        return adj.fill_cache_(no_transpose=mode != "both directions")

    makers: dict[str, Any] = {"ours": ours, "EdgeIndex": edge_index}
    if WITH_TORCH_SPARSE:
        makers["SparseTensor"] = sparse
    degree = torch.bincount(dst, minlength=graph.num_dst)
    for mode, pair in edges.items():
        steps, row = {}, {"mode": mode, "l2": "warm"}
        for name, make in makers.items():
            if (mode, "warm", name) not in wanted:
                continue
            made = make(pair, mode)
            rowptr = {"ours": lambda m: m.by_target.rowptr, "SparseTensor": lambda m: m.csr()[0]}
            pointers = rowptr.get(name, lambda m: m.get_csc()[0][0])(made)
            if not torch.equal(pointers.diff().long(), degree):
                yield row | {"provider": name, "status": "wrong", "note": "degrees differ"}
                continue
            steps[name] = Step(lambda _, f=make, p=pair, m=mode: f(p, m), scope=nullcontext)
        for name, times in turns(steps, Clock(), options.seconds, options.least).items():
            yield row | {"provider": name, "status": "ok"} | summary(times)
