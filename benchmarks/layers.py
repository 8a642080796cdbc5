r"""Times layers, forward and backward, on the CPU: stock PyG and others beside the fused path.

.. code-block:: bash

    python benchmarks/layers.py --graphs DIR --out benchmarks/results/cpu.csv
    python benchmarks/layers.py --graphs DIR --layers attention --peers

The results of every provider are compared with stock PyG's before it is timed; where they differ
by more than usual, both are compared with stock PyG in float64. Providers take turns, so that a
slow phase of the machine hits all of them; those of torch.compile, which need another number of
threads, run alone.

A layer with edge features is timed in turns with its twin that has none (provider
"ours-no-edge_attr").
"""

import argparse
import contextlib
import copy
import csv
import functools
import math
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numba
import torch
import torch_geometric
from old_graphs import load, power_law
from old_registry import WIDTH, WITH_EDGES, Linears, layer_names, make_layers, peers_of
from torch import Tensor

import pyg_ioaware

NAMES = (
    "power_law",
    "tolokers",
    "amazon_computers",
    "coauthor_physics",
    "web_notredame",
    "roads_rome",
)


Step = Callable[[], Tensor]


def step(call: Callable[..., Tensor], args: tuple[Any, ...], cotangent: Tensor) -> Step:
    """Returns one training step: forward, and backward to x and all parameters."""
    x = args[0]

    def run() -> Tensor:
        x.grad = None
        out = call(*args)
        torch.autograd.backward(out, cotangent if out.dim() else None)
        return out

    return run


def turns(steps: dict[str, Step], seconds: float, least: int) -> dict[str, list[float]]:
    """Runs the steps in turn until the time is up; returns milliseconds per run."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def on_stock(layer: torch.nn.Module) -> Callable[..., Tensor]:
    """Returns the layer's call on stock PyG, while PyG is patched."""

    def call(*args: Any) -> Tensor:
        with pyg_ioaware.disabled():
            out: Tensor = layer(*args)
        return out

    return call


Results = tuple[Tensor, Tensor]
"""Output and gradient of x."""


def results(layer: Callable[..., Tensor], given: tuple[Any, ...], cotangent: Tensor) -> Results:
    """Returns what one step gives."""
    out = step(layer, given, cotangent)()
    return out.detach(), given[0].grad


def exactly(layer: torch.nn.Module, given: tuple[Any, ...], cotangent: Tensor) -> Results:
    """Returns what one step gives on stock PyG in float64."""
    double = [t.double() if t.is_floating_point() else t for t in given]
    double[0] = double[0].detach().requires_grad_()
    layer = copy.deepcopy(layer).double()
    return results(on_stock(layer), tuple(double), cotangent.double())


def errors(got: Results, want: Results) -> list[float]:
    """Returns the largest error of output and gradient, relative to the largest value."""
    pairs = zip(got, want, strict=True)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs]


def check(name: str, got: Results, stock: Results, exact: Callable[[], Results]) -> None:
    """Raises if a provider's output or input gradient is worse than stock's."""
    if max(errors(got, stock)) < 1e-4:
        return
    best = exact()
    for ours, theirs, what in zip(
        errors(got, best), errors(stock, best), ("output", "gradient"), strict=True
    ):
        if not ours < max(2 * theirs, 1e-4):
            raise SystemExit(
                f"{name}: error of the {what} is {ours:.1e}, of stock PyG {theirs:.1e}: not timed"
            )


def measure(
    graph: str, edge_index: Tensor, num_nodes: int, name: str, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields a row per provider of one layer on one graph."""
    torch.manual_seed(0)
    layers = make_layers()
    layer, inputs = layers[name]
    x = torch.randn(num_nodes, WIDTH, requires_grad=True)
    given = inputs(x, edge_index)
    torch.set_num_threads(args.threads)
    with torch.no_grad():
        cotangent = torch.randn_like(layer(*given))

    exact = functools.partial(exactly, layer, given, cotangent)

    def checked(call: Callable[..., Tensor], args: tuple[Any, ...], what: str) -> Step:
        check(f"{what} of {name} on {graph}", results(call, args, cotangent), want, exact)
        return step(call, args, cotangent)

    stock = step(on_stock(layer), given, cotangent)
    want = results(on_stock(layer), given, cotangent)
    steps = {"stock": stock, "ours": checked(layer, given, "ours")}
    peers = peers_of(name) if args.peers else ()
    if "SparseTensor" in peers:
        adj = sparse_tensor(edge_index, num_nodes)
        steps["SparseTensor"] = checked(on_stock(layer), (x, adj), "SparseTensor")
    dense = Linears(layer)
    if len(dense.maps):
        steps["linears"] = step(dense, (x,), cotangent)
    if name.endswith(WITH_EDGES):
        twin, _ = layers[name.removesuffix(WITH_EDGES)]
        plain, what = (x, edge_index), f"ours without edge_attr of {name} on {graph}"
        found = [results(call, plain, cotangent) for call in (twin, on_stock(twin))]
        check(what, *found, functools.partial(exactly, twin, plain, cotangent))
        steps["ours-no-edge_attr"] = step(twin, plain, cotangent)
    times = turns(steps, args.seconds, args.least)
    for threads in (1, 2) if "torch.compile" in peers else ():
        with compiled(layer, threads) as call:
            peer = {f"torch.compile-{threads}": checked(call, given, "torch.compile")}
            times |= turns(peer, args.seconds / 2, args.least)
    for provider, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        yield {
            "layer": name,
            "graph": graph,
            "nodes": num_nodes,
            "edges": edge_index.size(1),
            "provider": provider,
            "median_ms": f"{median:.4f}",
            "q1_ms": f"{low:.4f}",
            "q3_ms": f"{high:.4f}",
            "runs": len(values),
        }


def sparse_tensor(edge_index: Tensor, num_nodes: int) -> Any:
    from torch_sparse import SparseTensor

    row, col = edge_index
    return SparseTensor(row=col, col=row, sparse_sizes=(num_nodes, num_nodes))


@contextlib.contextmanager
def compiled(layer: torch.nn.Module, threads: int) -> Iterator[Callable[..., Tensor]]:
    """Gives a layer compiled, nothing patched, and the threads to run it with."""
    before = torch.get_num_threads()
    pyg_ioaware.unpatch()
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    try:
        yield torch.compile(layer, dynamic=False)
    finally:
        torch.set_num_threads(before)
        pyg_ioaware.patch(strict=True)


def environment(threads: int) -> dict[str, Any]:
    """Returns the columns that say where a figure is from."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    model = [s.split(":")[1].strip() for s in _cpuinfo() if s.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD") + dirty,
        "machine": f"{model[0] if model else platform.machine()}, {threads} threads",
        "torch": torch.__version__,
        "pyg": torch_geometric.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Returns the ratios of one layer on one graph, from the median of each provider."""
    dense = times.get("linears", 0.0)
    peers = [v for k, v in times.items() if k == "SparseTensor" or k.startswith("torch.compile")]
    found = {
        "stock/ours": times["stock"] / times["ours"],
        "beyond linears": (times["stock"] - dense) / max(times["ours"] - dense, 1e-9),
    }
    if peers:
        found["best peer/ours"] = min(peers) / times["ours"]
    if "ours-no-edge_attr" in times:
        found["with/without edge_attr"] = times["ours"] / times["ours-no-edge_attr"]
    return found


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Appends rows to a CSV file, with a header if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(name: str, folder: Path) -> tuple[Tensor, int]:
    """Returns the edges and the number of nodes of a graph."""
    if name == "power_law":
        return power_law(20_000, 400_000), 20_000
    return load(folder / f"{name}.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=Path, help="folder of npz files")
    parser.add_argument("--names", nargs="+", help="power_law, and files there; default: six")
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=(*make_layers(), "attention", "all"),
        default=["GCNConv", "SAGEConv-max"],
        metavar="LAYER",
        help='names, "attention" or "all"; default: %(default)s',
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="per layer and graph")
    parser.add_argument("--least", type=int, default=5, help="runs at the least")
    parser.add_argument("--peers", action="store_true", help="SparseTensor and torch.compile too")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = args.names or (NAMES if args.graphs else NAMES[:1])
    if not args.graphs and set(names) - {"power_law"}:
        parser.error("--names of files need --graphs")
    layers = layer_names(args.layers)
    pyg_ioaware.patch(strict=True)
    found: dict[tuple[str, str], list[float]] = {}
    for graph in names:
        edge_index, num_nodes = read(graph, args.graphs)
        for layer in layers:
            new = list(measure(graph, edge_index, num_nodes, layer, args))
            if args.out:
                write([row | environment(args.threads) for row in new], args.out)
            times = {row["provider"]: float(row["median_ms"]) for row in new}
            shown = "  ".join(f"{k} {v:.2f}" for k, v in times.items())
            speedups = "  ".join(f"{k} {v:.2f}x" for k, v in ratios(times).items())
            print(f"{layer:28} {graph:18} {shown} ms | {speedups}", flush=True)
            for key, value in ratios(times).items():
                found.setdefault((layer, key), []).append(value)
    for (layer, key), values in found.items():
        mean = math.exp(statistics.fmean(math.log(max(v, 1e-9)) for v in values))
        print(f"{layer:28} geometric mean of {len(values)}: {key} {mean:.2f}x")


if __name__ == "__main__":
    main()
