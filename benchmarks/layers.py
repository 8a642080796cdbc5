r"""Times layers, forward and backward, on the CPU: stock PyG and others beside the fused path.

.. code-block:: bash

    python benchmarks/layers.py --graphs DIR --out benchmarks/results/cpu.csv

Every provider's results are compared with stock PyG's before it is timed. Providers take turns, so
that a slow phase of the machine hits all of them.
"""

import argparse
import csv
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
from graphs import load, power_law
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    ClusterGCNConv,
    GATConv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    TAGConv,
)

import pyg_ioaware

WIDTH = 128
NAMES = ("tolokers", "amazon_computers", "coauthor_physics", "web_notredame", "roads_rome")


class WeightedMessage(MessagePassing):
    """A layer as users write it: a weight per edge, and a linear map."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j


def make_layers() -> dict[str, tuple[Any, Callable[..., tuple[Any, ...]]]]:
    """Returns each layer, and what it takes besides x and edge_index."""
    f = WIDTH

    def nothing(x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
        return (x, edge_index)

    def weight(x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
        return (x, edge_index, torch.linspace(0.5, 1.5, edge_index.size(1)))

    def initial(x: Tensor, edge_index: Tensor) -> tuple[Any, ...]:
        return (x, x.detach(), edge_index)

    return {
        "GCNConv": (GCNConv(f, f), nothing),
        "SAGEConv-max": (SAGEConv(f, f, aggr="max"), nothing),
        "GraphConv": (GraphConv(f, f), nothing),
        "GINConv": (GINConv(torch.nn.Linear(f, f)), nothing),
        "TAGConv": (TAGConv(f, f), nothing),
        "SGConv": (SGConv(f, f, K=2), nothing),
        "APPNP": (APPNP(K=5, alpha=0.1), nothing),
        "LGConv": (LGConv(), nothing),
        "GCN2Conv": (GCN2Conv(f, alpha=0.1), initial),
        "ChebConv": (ChebConv(f, f, K=3), nothing),
        "ClusterGCNConv": (ClusterGCNConv(f, f), nothing),
        "WeightedMessage": (WeightedMessage(f), weight),
        "GATConv": (GATConv(f, f // 4, heads=4), nothing),
    }


class Linears(torch.nn.Module):
    """The dense part of a layer alone: each of its linear maps applied once."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        names = ("Linear",)
        found = [m for m in layer.modules() if type(m).__name__ in names]
        self.maps = torch.nn.ModuleList(found)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([m(x).sum() for m in self.maps]).sum()


def step(
    call: Callable[..., Tensor], args: tuple[Any, ...], cotangent: Tensor
) -> Callable[[], Tensor]:
    """Returns one training step: forward, and backward to x and all parameters."""
    x = args[0]

    def run() -> Tensor:
        x.grad = None
        out = call(*args)
        torch.autograd.backward(out, cotangent if out.dim() else None)
        return out

    return run


def turns(
    steps: dict[str, Callable[[], Tensor]], seconds: float, least: int
) -> dict[str, list[float]]:
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


def compiled(layer: torch.nn.Module, threads: int) -> Callable[..., Tensor]:
    torch.set_num_threads(threads)
    call: Callable[..., Tensor] = torch.compile(layer, dynamic=False)
    return call


def check(name: str, ours: Callable[[], Tensor], stock: Callable[[], Tensor], x: Tensor) -> None:
    """Raises if a provider's output or input gradient is not stock's."""
    want, want_grad = stock(), x.grad
    got, got_grad = ours(), x.grad
    for a, b, what in ((got, want, "output"), (got_grad, want_grad, "gradient")):
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        if not error < 1e-4:
            raise SystemExit(f"{name}: {what} differs from stock PyG's by {error:.1e}: not timed")


def measure(
    graph: str, edge_index: Tensor, num_nodes: int, name: str, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields a row per provider of one layer on one graph."""
    torch.manual_seed(0)
    layer, inputs = make_layers()[name]
    x = torch.randn(num_nodes, WIDTH, requires_grad=True)
    given = inputs(x, edge_index)
    torch.set_num_threads(args.threads)
    with torch.no_grad():
        cotangent = torch.randn_like(layer(*given))
    stock, ours = step(on_stock(layer), given, cotangent), step(layer, given, cotangent)
    check(f"{name} on {graph}", ours, stock, x)
    steps = {"stock": stock, "ours": ours}
    dense = Linears(layer)
    if len(dense.maps):
        steps["linears"] = step(dense, (x,), cotangent)
    peers = args.peers and name in ("GCNConv", "SAGEConv-max")
    if peers:
        from torch_sparse import SparseTensor

        row, col = edge_index
        adj = SparseTensor(row=col, col=row, sparse_sizes=(num_nodes, num_nodes))
        steps["SparseTensor"] = step(on_stock(layer), (x, adj), cotangent)
    times = turns(steps, args.seconds, args.least)
    for threads in (1, 2) if peers else ():
        torch._dynamo.reset()
        peer = step(compiled(layer, threads), given, cotangent)
        times |= turns({f"torch.compile-{threads}": peer}, args.seconds / 2, args.least)
        torch.set_num_threads(args.threads)
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
    """Returns the speed-ups of one layer on one graph, from the median of each provider."""
    dense = times.get("linears", 0.0)
    peers = [v for k, v in times.items() if k == "SparseTensor" or k.startswith("torch.compile")]
    found = {
        "stock/ours": times["stock"] / times["ours"],
        "beyond linears": (times["stock"] - dense) / max(times["ours"] - dense, 1e-9),
    }
    return found | ({"best peer/ours": min(peers) / times["ours"]} if peers else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=Path, help="folder of npz files")
    parser.add_argument("--names", nargs="*", default=list(NAMES), help="files to read there")
    parser.add_argument("--layers", nargs="*", default=["GCNConv", "SAGEConv-max"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="per layer and graph")
    parser.add_argument("--least", type=int, default=5, help="runs at the least")
    parser.add_argument("--peers", action="store_true", help="SparseTensor and torch.compile too")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    graphs = {"power_law": (power_law(20_000, 400_000), 20_000)}
    if args.graphs:
        graphs |= {name: load(args.graphs / f"{name}.npz") for name in args.names}
    layers = list(make_layers()) if args.layers == ["all"] else args.layers
    pyg_ioaware.patch(strict=True)
    rows: list[dict[str, Any]] = []
    found: dict[tuple[str, str], list[float]] = {}
    for graph, (edge_index, num_nodes) in graphs.items():
        for layer in layers:
            new = list(measure(graph, edge_index, num_nodes, layer, args))
            rows += [row | environment(args.threads) for row in new]
            times = {row["provider"]: float(row["median_ms"]) for row in new}
            shown = "  ".join(f"{k} {v:.2f}" for k, v in times.items())
            speedups = "  ".join(f"{k} {v:.1f}x" for k, v in ratios(times).items())
            print(f"{layer:16} {graph:18} {shown} ms | {speedups}", flush=True)
            for key, value in ratios(times).items():
                found.setdefault((layer, key), []).append(value)
    for (layer, key), values in found.items():
        mean = math.exp(statistics.fmean(math.log(max(v, 1e-9)) for v in values))
        print(f"{layer:16} geometric mean of {len(values)}: {key} {mean:.2f}x")
    if args.out:
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
