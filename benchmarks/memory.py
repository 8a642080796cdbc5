r"""Measures the peak memory of one training step of a layer, each in a fresh process.

.. code-block:: bash

    python benchmarks/memory.py --nodes 100000 --edges 2000000
    python benchmarks/memory.py --large

The figure is VmHWM after the step less VmRSS before it (both of /proc/self/status).
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from old_graphs import power_law
from torch_geometric.nn import GATv2Conv, SAGEConv, TransformerConv

import pyg_ioaware

LAYERS = {
    "sage": lambda width: SAGEConv(width, width, aggr="max"),
    "gatv2": lambda width: GATv2Conv(width, width // 4, heads=4),
    "transformer": lambda width: TransformerConv(width, width // 4, heads=4),
}
LIMIT = 8 * 1024
"""MiB that a process may take in all at the large size."""


def status(field: str) -> float:
    """Returns a field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def step(name: str, variant: str, nodes: int, edges: int, width: int) -> tuple[float, float]:
    """Runs one training step.

    Returns, in MiB, the memory beyond what was there before, and that of the whole process.
    """
    if variant == "ours":
        pyg_ioaware.patch(strict=True)
    torch.manual_seed(0)
    layer = LAYERS[name](width)
    # The compiler's memory is not the step's, nor is what libraries take at their first use.
    layer(torch.randn(100, width, requires_grad=True), power_law(100, 1000)).sum().backward()
    layer.zero_grad()
    edge_index = power_law(nodes, edges)
    x = torch.randn(nodes, width, requires_grad=True)
    # The process's own peak so far, such as that of the generator, is forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    layer(x, edge_index).sum().backward()
    peak = status("VmHWM")
    return peak - before, peak


def measure(name: str, variant: str, args: argparse.Namespace) -> tuple[float, float]:
    """Returns what `step` finds in a process of its own."""
    command = [sys.executable, __file__, "--here", name, variant]
    command += ["--nodes", str(args.nodes), "--edges", str(args.edges)]
    command += ["--width", str(args.width)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    beyond, whole = (float(word) for word in done.stdout.split()[-2:])
    return beyond, whole


def compare(args: argparse.Namespace) -> None:
    """Prints stock and fused for each layer."""
    for name in args.layers:
        stock, ours = (measure(name, variant, args)[0] for variant in ("stock", "ours"))
        print(f"{name:12} stock {stock:.0f} MiB, ours {ours:.0f} MiB: ", end="")
        print(f"{stock / ours:.1f} times less", flush=True)


def large(args: argparse.Namespace) -> None:
    """Prints the fused step alone; ends with an error if a process takes more than the limit."""
    above = []
    for name in args.layers:
        ours, whole = measure(name, "ours", args)
        print(f"{name:12} ours {ours:.0f} MiB; the whole process {whole:.0f} MiB", flush=True)
        if whole > LIMIT:
            above.append(name)
    if above:
        raise SystemExit(f"more than {LIMIT} MiB: {', '.join(above)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--nodes", type=int, help="default: 100,000; 500,000 with --large")
    parser.add_argument("--edges", type=int, help="default: 20 times the nodes")
    parser.add_argument("--width", type=int, default=128, help="default: 128; attention: 4 heads")
    parser.add_argument("--large", action="store_true", help="fused alone; must fit in 8 GiB")
    parser.add_argument("--here", nargs=2, metavar=("LAYER", "VARIANT"), help="in this process")
    args = parser.parse_args()
    args.nodes = args.nodes or (500_000 if args.large else 100_000)
    args.edges = args.edges or 20 * args.nodes
    if args.here:
        print(*step(*args.here, args.nodes, args.edges, args.width))
    elif args.large:
        large(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
