r"""Times training epochs of GraphSAGE with neighbour sampling: a new graph at every step.

.. code-block:: bash

    python benchmarks/loader.py --graph DIR/tolokers.npz
"""

import argparse
import contextlib
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from old_graphs import load
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

import pyg_ioaware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--aggr", default="mean")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    edge_index, num_nodes = load(args.graph)
    torch.manual_seed(0)
    data = Data(x=torch.randn(num_nodes, 64), edge_index=edge_index)
    data.y = torch.randint(0, 2, (num_nodes,))
    loader = NeighborLoader(data, num_neighbors=[10, 10], batch_size=512, shuffle=True)
    model = GraphSAGE(64, 64, num_layers=2, out_channels=2, aggr=args.aggr)
    optimizer = torch.optim.Adam(model.parameters())

    def epoch() -> tuple[float, float]:
        whole = training = 0.0
        start = time.perf_counter()
        for batch in loader:
            begin = time.perf_counter()
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            training += time.perf_counter() - begin
        whole = time.perf_counter() - start
        return whole, training

    pyg_ioaware.patch(strict=True)
    times: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": []}
    for i in range(args.epochs + 1):
        for name, switch in (("stock", pyg_ioaware.disabled), ("ours", contextlib.nullcontext)):
            with switch():
                measured = epoch()
            if i:
                times[name].append(measured)
    for name, values in times.items():
        whole, training = (statistics.median(v) for v in zip(*values, strict=True))
        print(f"{name:6} epoch {whole:.3f} s, of it the training steps {training:.3f} s")


if __name__ == "__main__":
    main()
