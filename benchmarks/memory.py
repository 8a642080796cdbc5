r"""Measures the peak memory of one training step of a SAGE-max layer, in fresh processes.

.. code-block:: bash

    python benchmarks/memory.py --nodes 100000 --edges 2000000

The figure is VmHWM after the step less VmRSS before it (both of /proc/self/status).
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from graphs import power_law
from torch_geometric.nn import SAGEConv

import pyg_ioaware


def status(field: str) -> float:
    """Returns a field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def step(variant: str, nodes: int, edges: int, width: int) -> float:
    """Runs one training step; returns the memory beyond what was there before, in MiB."""
    if variant == "ours":
        pyg_ioaware.patch(strict=True)
        # The compiler's memory is not the step's.
        pyg_ioaware.prepare(torch.tensor([[0, 1], [1, 0]]), size=2)
    edge_index = power_law(nodes, edges)
    torch.manual_seed(0)
    layer = SAGEConv(width, width, aggr="max")
    x = torch.randn(nodes, width, requires_grad=True)
    # The process's own peak so far, such as that of the generator, is forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    layer(x, edge_index).sum().backward()
    return status("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--variant", choices=("stock", "ours"), help="run this one only, here")
    args = parser.parse_args()
    if args.variant:
        print(step(args.variant, args.nodes, args.edges, args.width))
        return
    found = {}
    for variant in ("stock", "ours"):
        command = [sys.executable, __file__, "--variant", variant]
        command += ["--nodes", str(args.nodes), "--edges", str(args.edges)]
        command += ["--width", str(args.width)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[variant] = float(done.stdout.split()[-1])
    print(f"stock {found['stock']:.0f} MiB, ours {found['ours']:.0f} MiB: ", end="")
    print(f"{found['stock'] / found['ours']:.1f} times less")


if __name__ == "__main__":
    main()
