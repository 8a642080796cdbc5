r"""Times operations and layers on a GPU, stock PyG and others beside the fused path.

.. code-block:: bash

    python benchmarks/gpu.py --graphs DIR --out benchmarks/results/h200.csv
    python benchmarks/gpu.py --names arxiv-like --what ops

Every result is compared before it is timed: operations with float64, layers with stock PyG. Times
are medians of device times between two events, with work queued ahead so that the host is never
waited for; those of layers on cora are times of the host's clock. S is warm cuSPARSE (torch CSR),
float32, 128 features, on the same graph in the same run.
"""

import argparse
import csv
import math
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from gpu_graphs import REAL, SYNTHETIC, read
from torch import Tensor
from torch_geometric.nn import GATv2Conv, GCNConv, SAGEConv, TransformerConv

import pyg_ioaware
from pyg_ioaware import ops
from pyg_ioaware.graph.csr import Adjacency

WIDTH = 128
HEADS = (4, 32)
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCNConv": lambda: GCNConv(WIDTH, WIDTH),
    "GCNConv-cached": lambda: GCNConv(WIDTH, WIDTH, cached=True),
    "SAGEConv-max": lambda: SAGEConv(WIDTH, WIDTH, aggr="max"),
    "GATv2Conv-4x32": lambda: GATv2Conv(WIDTH, 32, heads=4),
    "TransformerConv-4x32": lambda: TransformerConv(WIDTH, 32, heads=4),
}
Run = Callable[[], Any]


def device_ms(run: Run, least: int = 15) -> float:
    """Returns the median device time of a call in milliseconds."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(least):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(6_000_000)  # cycles: the host runs ahead meanwhile
        a.record()
        run()
        b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def host_ms(run: Run, least: int = 50) -> float:
    """Returns the median time of a call by the host's clock, the device's work included."""
    for _ in range(5):
        run()
    times = []
    for _ in range(least):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def gate(what: str, got: Tensor, want: Tensor, tolerance: float, size: float = 1e-30) -> None:
    """Raises if a result is wrong: nothing that is wrong is timed.

    :obj:`size` is the least size that its error is measured by: terms may cancel to nothing.
    """
    error = float((got.double() - want.double()).norm() / max(float(want.double().norm()), size))
    if not error < tolerance:
        raise SystemExit(f"{what}: wrong by {error:.1e}, not timed")


def exact_sum(x: Tensor, adj: Adjacency, transposed: bool) -> Tensor:
    """Returns the sums in float64, by slices of features to bound the memory."""
    src, dst = adj.edges()
    if transposed:
        src, dst = dst, src
    size = adj.num_src if transposed else adj.num_dst
    out = torch.zeros(size, x.size(1), dtype=torch.float64, device=x.device)
    for f in range(0, x.size(1), 16):
        part = x[:, f : f + 16].double().index_select(0, src)
        out[:, f : f + 16].index_add_(0, dst, part)
    return out


def op_rows(edge_index: Tensor, num_nodes: int) -> Iterator[dict[str, Any]]:
    adj = Adjacency.from_pair(*edge_index, num_nodes, num_nodes)
    assert adj is not None
    adj.by_source_in_place  # noqa: B018
    x32 = torch.randn(num_nodes, WIDTH, device="cuda")
    rowptr, idx = adj.by_target.rowptr, adj.by_target.idx
    ones = torch.ones(adj.num_edges, device="cuda")
    csr = torch.sparse_csr_tensor(rowptr, idx, ones, (num_nodes, num_nodes))
    s = device_ms(partial(torch.sparse.mm, csr, x32))
    yield {
        **{"op": "spmm", "pass": "forward", "dtype": "float32"},
        **{"provider": "torch CSR (S)", "ms": s},
    }
    del csr, ones
    for dtype in (torch.float32, torch.bfloat16):
        for op in ("spmm", "max"):
            yield from passes(op, x32.to(dtype).requires_grad_(), adj)
        for op in ("gatv2", "transformer"):
            yield from attention_passes(op, dtype, adj)


def attention_passes(op: str, dtype: torch.dtype, adj: Adjacency) -> Iterator[dict[str, Any]]:
    """Yields the passes of one attention operation, 4 heads of 32 channels."""
    shape, name = (adj.num_src, *HEADS), str(dtype).removeprefix("torch.")
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)]
    if op == "gatv2":
        inputs[2] = torch.randn(HEADS, device="cuda", dtype=dtype)
    inputs = [t.requires_grad_() for t in inputs]

    def call(*inputs: Tensor) -> Tensor:
        return getattr(ops, op)(*inputs, adj)[0]

    out, row = call(*inputs), {"op": f"{op}-4x32", "dtype": name, "provider": "ours"}
    cotangent = torch.randn_like(out)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, cotangent, retain_graph=True)

    if adj.num_edges < 4_000_000:
        from pyg_ioaware.ops import attention, reference

        flat = [t.detach().double().flatten(-2).requires_grad_() for t in inputs]
        factor = 0.2 if op == "gatv2" else HEADS[1] ** -0.5
        options = attention.Attention(adj, HEADS[0], -1, factor, 0.0, None, False)
        twin = getattr(reference, op)(options, *flat, *[None] * (3 if op == "gatv2" else 2))[0]
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        gate(f"{op} {name}", out.flatten(1), twin, tolerance)
        exact = torch.autograd.grad(twin, flat, cotangent.double().flatten(1))
        for got, want in zip(backward(), exact, strict=True):
            gate(f"{op} backward {name}", got.flatten(-2), want, tolerance)
        del twin, exact, flat
    yield row | {"pass": "forward", "ms": device_ms(lambda: call(*inputs))}
    yield row | {"pass": "backward", "ms": device_ms(backward)}


def passes(op: str, x: Tensor, adj: Adjacency) -> Iterator[dict[str, Any]]:
    """Yields the passes of one operation."""
    call = {"spmm": ops.spmm, "max": ops.reduce}[op]
    name = str(x.dtype).removeprefix("torch.")
    row = {"op": op, "dtype": name, "provider": "ours"}
    cotangent = torch.randn_like(x)
    out = call(x, adj)

    def backward() -> Tensor:
        return torch.autograd.grad(out, x, cotangent, retain_graph=True)[0]

    if op == "spmm":
        tolerance = 1e-5 if x.dtype == torch.float32 else 1e-2
        gate(f"spmm {name}", out, exact_sum(x, adj, False), tolerance)
        gate(f"spmm backward {name}", backward(), exact_sum(cotangent, adj, True), tolerance)
    with torch.no_grad():
        yield row | {"pass": "inference", "ms": device_ms(lambda: call(x, adj))}
    yield row | {"pass": "forward", "ms": device_ms(lambda: call(x, adj))}
    yield row | {"pass": "backward", "ms": device_ms(backward)}


def peak_mib(run: Run) -> float:
    """Returns the peak of a call above what is held before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def layer_rows(
    name: str,
    edge_index: Tensor,
    num_nodes: int,
    compile_too: bool,
    timer: Callable[[Run], float],
) -> Iterator[dict[str, Any]]:
    """Yields the providers of one layer."""
    torch.manual_seed(0)
    layer = LAYERS[name]().cuda()
    x = torch.randn(num_nodes, WIDTH, device="cuda", requires_grad=True)
    cotangent = torch.randn(num_nodes, WIDTH, device="cuda")
    leaves = [x, *layer.parameters()]
    maps = [m for m in layer.modules() if type(m).__name__ == "Linear"]

    def step(call: Callable[..., Tensor] = layer) -> list[Tensor]:
        out = call(x, edge_index)
        return [out, *torch.autograd.grad(out, leaves, cotangent)]

    def dense() -> list[Tensor]:
        own = [p for m in maps for p in m.parameters()]
        outs = [m(x) for m in maps]
        return list(torch.autograd.grad(outs, [x, *own], [cotangent] * len(outs)))

    row = {"op": name, "pass": "forward+backward", "dtype": "float32"}
    want = step()
    size = 1e-2 * max(float(t.double().norm()) for t in want[2:])
    with pyg_ioaware.patched(strict=True):
        for got, expected in zip(step(), want, strict=True):
            gate(f"ours of {name}", got, expected, 1e-4, size)
        ours = {"ms": timer(step), "mib": peak_mib(step)}
    yield row | {"provider": "stock", "ms": timer(step), "mib": peak_mib(step)}
    yield row | {"provider": "ours"} | ours
    yield row | {"provider": "linears", "ms": timer(dense)}
    if compile_too:
        torch._dynamo.reset()
        fast = torch.compile(layer, dynamic=False)
        for got, expected in zip(step(fast), want, strict=True):
            gate(f"torch.compile of {name}", got, expected, 1e-4, size)
        yield row | {"provider": "torch.compile", "ms": timer(lambda: step(fast))}


def build_ms(edge_index: Tensor, num_nodes: int) -> dict[str, float]:
    """Returns the times of building the structure: sorted, unsorted, and the transpose."""
    mixed = edge_index[:, torch.randperm(edge_index.size(1), device="cuda")].contiguous()

    def build(edges: Tensor) -> Adjacency | None:
        return Adjacency.from_pair(*edges, num_nodes, num_nodes)

    def transpose() -> None:
        adj = build(edge_index)
        assert adj is not None
        adj.by_source_in_place  # noqa: B018

    times = {"sorted": host_ms(lambda: build(edge_index), 5)}
    times["unsorted"] = host_ms(lambda: build(mixed), 5)
    return times | {"transpose": host_ms(transpose, 5) - times["sorted"]}


def environment(commit: str | None = None) -> dict[str, Any]:
    import cupy

    if commit is None:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "date": date.today().isoformat(),
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "pyg": torch_geometric.__version__,
        "cupy": cupy.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=Path, help="folder of npz files")
    parser.add_argument("--names", nargs="+", default=None, help="graphs; default: all there are")
    parser.add_argument("--what", nargs="+", default=["ops", "layers", "build"])
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--commit", help="what is measured; default: what git says")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = args.names or [*SYNTHETIC, *(REAL if args.graphs else ())]
    origin = environment(args.commit)
    ratios: dict[tuple[str, ...], list[float]] = {}
    for graph in names:
        edge_index, num_nodes = read(graph, args.graphs)
        size = {"graph": graph, "nodes": num_nodes, "edges": edge_index.size(1)}
        small = edge_index.size(1) < 100_000
        rows: list[dict[str, Any]] = []
        if "ops" in args.what:
            rows += op_rows(edge_index, num_nodes)
            s = rows[0]["ms"]
            shown = [f"S {s:.4f}"]
            for r in rows[1:]:
                key = (r["op"], r["dtype"], r["pass"])
                ratios.setdefault(key, []).append(r["ms"] / s) if not small else None
                shown.append(f"{' '.join(key)} {r['ms']:.4f} ({r['ms'] / s:.2f} S)")
            print(f"{graph} {num_nodes} {edge_index.size(1)}: " + ", ".join(shown), flush=True)
        if "layers" in args.what:
            timer = host_ms if small else device_ms
            for name in LAYERS:
                found = list(layer_rows(name, edge_index, num_nodes, args.compile, timer))
                rows += found
                by = {r["provider"]: r for r in found}
                text = "  ".join(
                    f"{p} {r['ms']:.3f} ms" + (f" {r['mib']:.0f} MiB" if "mib" in r else "")
                    for p, r in by.items()
                )
                ratio = by["stock"]["ms"] / by["ours"]["ms"]
                memory = by["stock"]["mib"] / max(by["ours"]["mib"], 1e-3)
                print(f"    {name}: {text} | {ratio:.2f}x, {memory:.1f}x less memory", flush=True)
                if edge_index.size(1) >= 10 * num_nodes:
                    ratios.setdefault((name, "stock/ours, degree >= 10"), []).append(ratio)
        if "build" in args.what:
            times = build_ms(edge_index, num_nodes)
            rows += [
                {"op": "build", "pass": k, "dtype": "int64", "provider": "ours", "ms": v}
                for k, v in times.items()
            ]
            print("    build " + ", ".join(f"{k} {v:.2f} ms" for k, v in times.items()), flush=True)
        if args.out:
            _write([size | {"mib": ""} | r | origin for r in rows], args.out)
        torch.cuda.empty_cache()
        pyg_ioaware.clear_cache()
    for key, values in ratios.items():
        mean = math.exp(statistics.fmean(math.log(v) for v in values))
        print(f"geometric mean of {len(values)}: {' '.join(key)} {mean:.3f}")


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    fields = ("graph", "nodes", "edges", "op", "pass", "dtype", "provider", "ms", "mib")
    fields += tuple(environment())
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if new:
            writer.writeheader()
        for row in rows:
            row = dict(row)
            row["ms"] = f"{row['ms']:.4f}"
            row["mib"] = row["mib"] if row["mib"] == "" else f"{row['mib']:.1f}"
            writer.writerow(row)


if __name__ == "__main__":
    main()
