"""``python -m pyg_ioaware demo``: trains the same models stock and fused, side by side."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyg_ioaware.cli.errors import CommandError, require

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from pyg_ioaware.demo.data import Graph
    from pyg_ioaware.demo.worker import Result

MODELS = {"gcn": "GCN", "sage": "SAGE-max", "gatv2": "GATv2", "transformer": "Transformer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", metavar="NAME", help="a PyG data set, downloaded if needed")
    source.add_argument("--graph", metavar="FILE.npz", help="row, col, num_nodes; optional x, y")
    parser.add_argument("--root", metavar="FOLDER", help="where --dataset keeps its files")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    for name, default, note in (
        ("epochs", 100, ""),
        ("hidden", 64, "; shared by the 4 heads of an attention layer"),
        ("layers", 2, ""),
    ):
        text = f"default: {default}{note}"
        parser.add_argument(f"--{name}", type=positive, default=default, help=text)
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--threads", type=positive, help="default: torch's choice")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--out", metavar="FILE.png", default="pyg_ioaware_demo.png")


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {number})")
    return number


def main(args: argparse.Namespace) -> int:
    """Runs the command; the exit status is 1 if stock and fused losses part."""
    require(["rich", "matplotlib"], "demo")
    folder = os.path.dirname(os.path.abspath(args.out))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise CommandError(f"--out {args.out}: cannot write into {folder}")
    if args.graph is not None and not os.path.isfile(args.graph):
        raise CommandError(f"{args.graph}: no such file")

    from rich.console import Console

    from pyg_ioaware.demo import report

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    graph = _graph(args)
    nodes, features = graph.x.shape
    console.print(
        f"{graph.name}: {nodes:,} nodes, {graph.edge_index.size(1):,} edges, "
        f"{features} features, {graph.outputs} classes",
        highlight=False,
    )
    for note in graph.notes:
        console.print(f"  {note}", highlight=False)
    pairs = _train_all(graph, args)
    score = "test micro-F1" if graph.y.dim() == 2 else "test accuracy"
    console.print(report.table(pairs, score))
    console.print(
        "step memory: peak of one training step, structure rebuilt, beyond the idle process",
        highlight=False,
    )
    failures = []
    for model, (stock, fused) in pairs.items():
        gap = report.difference(stock, fused)
        console.print(f"{model}: losses differ by at most {gap:.2g}", highlight=False)
        where = report.disagreement(stock, fused)
        if where is not None:
            failures.append(f"{model} does not agree with stock at {where}")
        if not fused.fused_calls:
            failures.append(f"{model} ran no fused call: see `python -m pyg_ioaware doctor`")
    report.picture(pairs, graph.name, args.out)
    console.print(f"picture: {args.out}", highlight=False)
    if failures:
        raise CommandError("; ".join(failures), code=1)
    return 0


def _graph(args: argparse.Namespace) -> Graph:
    from pyg_ioaware.demo import data

    if args.graph is not None:
        return data.from_file(args.graph, args.seed)
    if args.dataset is not None:
        return data.from_pyg(args.dataset, args.seed, args.root)
    return data.digits(args.seed)


def _train_all(graph: Graph, args: argparse.Namespace) -> dict[str, tuple[Result, Result]]:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from pyg_ioaware.demo import data
    from pyg_ioaware.demo.process import Worker, side_by_side
    from pyg_ioaware.demo.worker import Config

    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        path = os.path.join(folder, "graph.pt")
        data.save(graph, path)

        def train(model: str) -> tuple[Result, Result]:
            workers, reports = [], []
            for fused in (False, True):
                title = f"{MODELS[model]} {'fused' if fused else 'stock'}"
                config = Config(
                    graph=path,
                    model=model,
                    fused=fused,
                    hidden=args.hidden,
                    layers=args.layers,
                    seed=args.seed,
                    threads=args.threads or torch.get_num_threads(),
                )
                workers.append(Worker(config, title))
                task = progress.add_task(title, total=args.epochs, loss="")
                reports.append(_reporter(progress, task))
            with workers[0], workers[1]:
                return side_by_side((workers[0], workers[1]), args.epochs, tuple(reports))

        return {MODELS[model]: train(model) for model in dict.fromkeys(args.models)}


def _reporter(progress: Progress, task: TaskID) -> Callable[[float], None]:
    return lambda loss: progress.update(task, advance=1, loss=f"loss {loss:.4f}")
