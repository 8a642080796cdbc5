"""Trains one model in a process of its own: ``python -m pyg_ioaware.demo.worker CONFIG``.

A fresh process for every model and variant gives each one the same start and makes the peak of
its memory its own. Every line of stdin is a number of epochs to train; at its end the worker
measures and stops. What it finds goes to stdout, one JSON object a line.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATv2Conv, GCNConv, SAGEConv, TransformerConv

from pyg_ioaware.demo import data, memory

WARM_UP = 3
"""Epochs that the median leaves out: the first ones build, compile and fill caches."""
HEADS = 4
"""Attention heads of a layer."""


@dataclass(frozen=True)
class Config:
    """What one worker trains."""

    graph: str
    model: str
    fused: bool
    hidden: int
    layers: int
    seed: int
    threads: int
    dropout: float = 0.5
    lr: float = 0.01


@dataclass(frozen=True)
class Result:
    """What one worker found; seconds and bytes, None where the system does not tell."""

    losses: list[float]
    score: float
    first_epoch: float
    epoch: float
    step_memory: int | None
    process_memory: int | None
    fused_calls: int


class Net(torch.nn.Module):
    """A stack of PyG's own layers, used as anyone would; nothing here is special.

    The heads of an attention layer share its width, rounded up to a multiple of their number; those
    of the last layer are averaged. Attention weights are not dropped: a fused layer would drop
    others than a stock one, and the losses could not be compared.
    """

    def __init__(self, model: str, sizes: list[int], dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        layer, heads = {
            "gcn": (GCNConv, 1),
            "sage": (functools.partial(SAGEConv, aggr="max"), 1),
            "gatv2": (functools.partial(GATv2Conv, heads=HEADS), HEADS),
            "transformer": (functools.partial(TransformerConv, heads=HEADS), HEADS),
        }[model]
        per_head = [-(-size // heads) for size in sizes[1:-1]]
        inputs = [sizes[0], *(heads * size for size in per_head)]
        last = {"concat": False} if heads > 1 else {}
        self.convs = torch.nn.ModuleList(map(layer, inputs, per_head))
        self.convs.append(layer(inputs[-1], sizes[-1], **last))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores of every node."""
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), self.dropout, self.training)
        out: Tensor = self.convs[-1](x, edge_index)
        return out


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy; for multi-label `y` the binary one."""
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
    return F.cross_entropy(out, y)


def score_of(out: Tensor, y: Tensor) -> float:
    """Accuracy; for multi-label `y` the micro-averaged F1. NaN without nodes."""
    if y.dim() == 2:
        found = out > 0
        both = (found & (y == 1)).sum()
        return float(2 * both / (found.sum() + y.sum()))
    return float((out.argmax(-1) == y).float().mean())


def train(config: Config) -> Result:
    """Trains as `config` and stdin say, printing the loss of every epoch."""
    torch.set_num_threads(config.threads)
    graph = data.load(config.graph)
    if config.fused:
        import pyg_ioaware

        pyg_ioaware.patch()
    torch.manual_seed(config.seed)
    sizes = [graph.x.size(1), *[config.hidden] * (config.layers - 1), graph.outputs]
    net = Net(config.model, sizes, config.dropout)
    optimizer = torch.optim.Adam(net.parameters(), config.lr)

    def step() -> float:
        optimizer.zero_grad()
        out = net(graph.x, graph.edge_index)
        loss = loss_of(out[graph.train_mask], graph.y[graph.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, times = [], []
    _say(ready=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            start = time.perf_counter()
            losses.append(step())
            times.append(time.perf_counter() - start)
            _say(loss=losses[-1])
    net.eval()
    with torch.no_grad():
        out = net(graph.x, graph.edge_index)
    score = score_of(out[graph.test_mask], graph.y[graph.test_mask])
    del out

    net.train()
    optimizer.zero_grad()
    process_memory = memory.process_peak()  # before `peak_of`, which starts the count again
    fused_calls = 0
    if config.fused:
        fused_calls = _fused_calls()
        pyg_ioaware.clear_cache()  # so that the step's peak includes building the structure
    step_memory = memory.peak_of(step)
    return Result(
        losses=losses,
        score=score,
        first_epoch=times[0],
        epoch=statistics.median(times[min(WARM_UP, len(times) - 1) :]),
        step_memory=step_memory,
        process_memory=process_memory,
        fused_calls=fused_calls,
    )


def _say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def _fused_calls() -> int:
    import pyg_ioaware

    return sum(layer["fused"] for layer in pyg_ioaware.stats()["layers"].values())


def main() -> None:
    """Reads the configuration (JSON) from the command line and prints the result."""
    result = train(Config(**json.loads(sys.argv[1])))
    _say(result=asdict(result))


if __name__ == "__main__":
    main()
