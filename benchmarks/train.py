"""End to end: epochs of models of three layers, stock and fused in turns, to equal accuracy."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

import pyg_ioaware
from benchmarks.graphs import Graph
from benchmarks.measure import Options, Wanted
from benchmarks.registry import Case
from benchmarks.timing import Clock, summary
from pyg_ioaware.demo.worker import Net

PATCHED = partial(pyg_ioaware.patched, strict=False)
SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": nullcontext,
    "ours": PATCHED,
}
EPOCHS = 30
"""Epochs that are trained; the first is not timed."""
LOADER_EPOCHS = {"cpu": 30, "cuda": 10}
"""The same with a loader, by device: a GPU waits for the host, which samples alike for all."""
HIDDEN = 128
EQUAL = 0.02
"""By how much the accuracy of a fused run may differ from stock's."""


class Run:
    r"""One model in training; all runs of one graph start from the same parameters.

    Args:
        name (str): The model, as :class:`~pyg_ioaware.demo.worker.Net` calls it.
        graph (Graph): A graph with a task.
        loader (bool): Whether each epoch samples neighbours, batch by batch.
    """

    def __init__(self, name: str, graph: Graph, loader: bool) -> None:
        assert graph.task is not None
        x, y, train, test = graph.task
        torch.manual_seed(0)
        sizes = [x.size(1), HIDDEN, HIDDEN, int(y.max()) + 1]
        self.net = Net(name, sizes, dropout=0.0).to(x.device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.01)
        self.data = Data(x=x, y=y, edge_index=graph.edge_index, train_mask=train, test_mask=test)
        self.loader = _loader(self.data) if loader else None
        self.times: list[float] = []
        self.steps: list[float] = []
        self.clock = Clock()

    def epoch(self) -> None:
        """Trains for one epoch, and remembers how long it and its steps took."""
        self.clock.sync()
        start, steps = time.perf_counter(), 0.0
        for batch in [self.data] if self.loader is None else self.loader:
            batch = batch.to(self.data.x.device)
            begin = time.perf_counter()
            self._step(batch)
            self.clock.sync()
            steps += time.perf_counter() - begin
        self.times.append(1e3 * (time.perf_counter() - start))
        self.steps.append(1e3 * steps)

    def _step(self, batch: Data) -> None:
        self.optimizer.zero_grad()
        out = self.net(batch.x, batch.edge_index)
        chosen: Any = batch.train_mask
        if self.loader is not None:
            chosen = slice(0, batch.batch_size)
        F.cross_entropy(out[chosen], batch.y[chosen]).backward()
        self.optimizer.step()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Returns the share of test nodes that are classified rightly."""
        d = self.data
        right: Tensor = self.net(d.x, d.edge_index).argmax(-1) == d.y
        return float(right[d.test_mask].float().mean())


def _loader(data: Data) -> Any:
    from torch_geometric.loader import NeighborLoader

    return NeighborLoader(
        copy.copy(data).cpu(),
        [10, 10, 10],
        input_nodes=data.train_mask.cpu(),
        batch_size=512,
        shuffle=True,
    )


def measure(
    case: Case, graph: Graph, wanted: Wanted, options: Options, epochs: int | None = None
) -> Iterator[dict[str, Any]]:
    r"""Yields a row for each provider: the time of an epoch, and the accuracy at the end.

    Args:
        case (Case): The model.
        graph (Graph): A graph with a task.
        wanted (set): What is to be measured.
        options (Options): How it is.
        epochs (int, optional): How long to train; by default, as the case and the device say.
            (default: :obj:`None`)
    """
    row = {"mode": "epoch", "l2": "warm"}
    names = [p for p in SCOPES if ("epoch", "warm", p) in wanted]
    if graph.task is None:
        yield from (row | {"provider": p, "status": "error", "note": "no labels"} for p in names)
        return
    model = case.base.removeprefix("train_").lower()
    loader = model == "loader"
    if epochs is None:
        epochs = LOADER_EPOCHS[options.device] if loader else EPOCHS
    graph = graph.to(options.device)
    try:
        # Stock runs along, whoever is wanted: accuracies are compared.
        runs = {p: Run("sage" if loader else model, graph, loader) for p in SCOPES}
        for i in range(epochs + 1):
            for name, run in runs.items():
                torch.manual_seed(i)  # of the order of batches and the neighbours drawn
                with SCOPES[name]():
                    run.epoch()
        accuracy = {}
        for name, run in runs.items():
            with SCOPES[name]():
                accuracy[name] = run.accuracy()
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0][:200]
        yield from (row | {"provider": p, "status": "error", "note": text} for p in names)
        return
    for name in names:
        found: dict[str, Any] = {"provider": name, "accuracy": f"{accuracy[name]:.4f}"}
        if abs(accuracy[name] - accuracy["stock"]) > EQUAL:
            yield row | found | {"status": "wrong", "note": "accuracy is not that of stock"}
            continue
        steps = statistics.median(runs[name].steps[1:])
        note = f"of it the training steps {steps:.2f} ms" if loader else ""
        first = max(runs[name].times[0] - statistics.median(runs[name].times[1:]), 0)
        found |= {"status": "ok", "note": note, "setup_ms": f"{first:.2f}"}
        yield row | found | summary(runs[name].times[1:])
