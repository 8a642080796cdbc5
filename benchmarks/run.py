r"""Measures everything with one command; see ``--help`` and the README.

.. code-block:: bash

    python -m benchmarks.run --graphs DIR --out benchmarks/results/NAME.csv
    python -m benchmarks.run --quick

A provider is timed only if it gives what stock PyG gives. Rows are appended to one file as they
are found; the same command goes on where it was stopped.
"""

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch_geometric.typing import WITH_TORCH_SPARSE
from tqdm import tqdm

import pyg_ioaware
from benchmarks import graphs, measure, roofline, rows, train
from benchmarks.graphs import Graph
from benchmarks.measure import STEP, Options, Wanted
from benchmarks.presets import NONE, PRESETS, Study
from benchmarks.providers import PROVIDERS
from benchmarks.registry import Case, Problem, case

SMALL = Graph(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]), 3, 3)


@dataclass(frozen=True)
class Work:
    r"""One case on one graph, and the rows that it gives.

    Attributes:
        graph (str): The name of the graph.
        case (Case): The case.
        dtype (str): The dtype of the features.
        wanted (set): Modes, states of the L2 cache, and providers.
        gate_on (str): The graph on which results are compared, if it is another.
    """

    graph: str
    case: Case
    dtype: str
    wanted: Wanted
    gate_on: str

    def key(self, mode: str, l2: str, provider: str) -> dict[str, str]:
        """Returns the columns that tell its rows apart."""
        names = {"graph": self.graph, "case": self.case.name, "dtype": self.dtype}
        return names | {"mode": mode, "l2": l2, "provider": provider}


def providers_of(case: Case, device: str, bipartite: bool = False) -> list[str]:
    """Returns who can run a case here."""
    small = replace(SMALL, bipartite=bipartite)
    problem = Problem.of(case, small, torch.float32, "cpu")
    return [n for n, p in PROVIDERS.items() if not p.absent(device) and p.takes(problem)]


def combinations(study: Study, case: Case, device: str, bipartite: bool) -> Wanted:
    """Returns the modes, states of the L2 cache, and providers of a case."""
    if case.kind == "machine":
        modes = ("copy",) if case.name == "copy" else tuple(roofline.gather_modes(device))
        return {(mode, "warm", "machine") for mode in modes}
    if case.kind == "train":
        return {("epoch", "warm", provider) for provider in train.SCOPES}
    if case.kind == "structure":
        names = ("ours", "EdgeIndex", *(("SparseTensor",) if WITH_TORCH_SPARSE else ()))
        modes = ("sorted", "unsorted", "both directions")
        return {(mode, "warm", name) for mode in modes for name in names}
    names = tuple(providers_of(case, device, bipartite))
    chosen = study.providers or names
    names = tuple(name for name in names if name in chosen and name not in study.without)
    found = set()
    for name in names:
        # Compilers take long, and keep no memory for a backward pass of its own.
        compiles = PROVIDERS[name].compiles
        modes = (STEP,) if compiles and case.kind == "op" else study.modes
        modes = (STEP,) if name == "linears" else modes
        for mode in modes:
            states = study.l2 if device == "cuda" and mode != "host" else ("warm",)
            found |= {(mode, l2, name) for l2 in states}
    return found


def plan(args: argparse.Namespace) -> Iterator[Work]:
    """Yields what a preset and the filter ask for, each row once."""
    chosen, seen = re.compile(args.filter), set()
    for study in PRESETS[args.preset][args.device]:
        names, kinds = study.names(args.graphs), {case(name).kind for name in study.cases}
        if args.names and study.graphs != (NONE,):
            names = tuple(args.names)
        for name, case_name in product(names, args.cases or study.cases):
            found, bipartite = case(case_name), name.startswith("bipartite:")
            fits = (found.kind == "machine") == (name == NONE)
            if not fits or found.kind not in kinds or (bipartite and not found.bipartite):
                continue
            dtypes = study.dtypes if found.kind in ("op", "layer") else ("float32",)
            for dtype in dtypes:
                work = Work(name, found, dtype, set(), study.gate_on)
                for key in combinations(study, found, args.device, bipartite):
                    text = " ".join(work.key(*key).values())
                    if text not in seen and chosen.search(text):
                        seen.add(text)
                        work.wanted.add(key)
                if work.wanted:
                    yield work


def rows_of(work: Work, graph: Graph, options: Options) -> Iterator[dict[str, Any]]:
    """Yields the rows of one piece of work."""
    if work.case.kind == "machine":
        return roofline.measure(work.case.name, work.wanted, options)
    if work.case.kind == "train":
        return train.measure(work.case, graph, work.wanted, options)
    if work.case.kind == "structure":
        return measure.structures(graph, work.wanted, options)
    dtype = getattr(torch, work.dtype)
    return measure.measure(work.case, graph, dtype, work.wanted, options)


def options_of(args: argparse.Namespace, gate_on: str) -> Options:
    """Returns the options of the command line, and the graph of the gate."""
    known = {"cpu": (1.0, 5), "cuda": (0.2, 15)}[args.device]
    if args.preset == "quick":
        known = (0.0, 3)
    seconds = known[0] if args.seconds is None else args.seconds
    judged = graphs.read(gate_on, args.graphs) if gate_on else None
    return Options(args.device, seconds, args.least or known[1], True, judged)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measures.")
    found.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    found.add_argument("--preset", choices=tuple(PRESETS), default="main")
    found.add_argument("--quick", action="store_const", dest="preset", const="quick")
    found.add_argument("--graphs", type=Path, help="folder of npz files")
    found.add_argument("--names", nargs="+", help="graphs, in place of the preset's")
    found.add_argument("--cases", nargs="+", help="cases, in place of the preset's")
    found.add_argument(
        "--filter", default="", help="regular expression for 'graph case dtype mode l2 provider'"
    )
    found.add_argument("--out", type=Path, help="CSV file to append to")
    found.add_argument("--retry", action="store_true", help="measure again what was not ok")
    found.add_argument("--budget", type=float, help="minutes after which nothing new is begun")
    found.add_argument("--seconds", type=float, help="for each provider and mode")
    found.add_argument("--least", type=int, help="runs of each at the least")
    found.add_argument("--threads", type=int, help="default: as many as torch takes")
    found.add_argument("--commit", help="what is measured; default: what git says")
    found.add_argument("--list", action="store_true", help="show what would be measured")
    return found


def alive(device: str) -> bool:
    """Returns whether a device still works: one bad access ends it for the whole process."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def shown(row: dict[str, Any]) -> str:
    """Returns a line for a row."""
    names = ("graph", "case", "dtype", "mode", "l2", "provider")
    text = " ".join(str(row[name]) for name in names)
    if row["status"] != "ok":
        return f"{text}: {row['status']}: {row.get('note', '')}"
    memory = f", {row['peak_mib']} MiB" if row.get("peak_mib") else ""
    spread = f"{row['q1_ms']} to {row['q3_ms']}"
    return f"{text}: {row['median_ms']} ms ({spread}){memory} {row.get('note', '')}".rstrip()


def main(argv: list[str] | None = None) -> int:
    """Measures what has no row yet.

    Returns:
        int: 1 if the fused path failed anywhere, or a graph or the device was lost, else 0.
    """
    args = parser().parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    if args.device == "cuda" and not (torch.cuda.is_available() or args.list):
        raise SystemExit("no CUDA device was found")
    origin = rows.environment(args.device, args.commit)
    table = rows.Table(args.out)
    if args.out is None:
        print("no --out: rows are only shown", file=sys.stderr)
    for name, provider in PROVIDERS.items():
        if reason := provider.absent(args.device):
            print(f"not measured: {name}: {reason}", file=sys.stderr)
    due, again = [], []
    for work in plan(args):
        keys = {w: work.key(*w) | origin for w in work.wanted}
        retried = {w for w in keys if args.retry and table.failed(keys[w])}
        again += [keys[w] for w in retried]
        if left := retried | {w for w in keys if keys[w] not in table}:
            due.append(replace(work, wanted=left))
    total = sum(len(work.wanted) for work in due)
    if args.list:
        for work in due:
            for key in sorted(work.wanted):
                print(*work.key(*key).values())
        return 0
    if again:
        table.forget(again)
    began, counts, failed, lost = time.monotonic(), Counter[str](), False, ""
    cached: tuple[Any, Graph] = (None, SMALL)
    with tqdm(total=total, unit="row", disable=None) as bar:
        for work in due:
            if lost or (args.budget and time.monotonic() - began > 60 * args.budget):
                tqdm.write(lost or "the time is up: the same command goes on from here")
                break
            bar.set_description(f"{work.graph} {work.case.name}")
            name = (work.graph, work.case.kind == "train")
            if cached[0] != name and work.case.kind != "machine":
                try:
                    cached = (name, graphs.read(work.graph, args.graphs, name[1]))
                except Exception as error:
                    tqdm.write(f"{work.graph} {work.case.name}: no graph: {error}")
                    failed = True
                    continue
            graph = cached[1]
            counted = (graph.num_src, graph.num_dst, graph.num_edges)
            sizes = dict(zip(rows.SIZES, counted, strict=True))
            sizes = {} if work.case.kind == "machine" else sizes
            for found in rows_of(work, graph, options_of(args, work.gate_on)):
                if lost and not lost.startswith(f"{found['provider']}:"):
                    break
                row = work.key(found["mode"], found["l2"], found["provider"]) | sizes
                row |= found | origin
                table.add(row)
                tqdm.write(shown(row))
                bar.update()
                counts[row["status"]] += 1
                failed |= found["provider"].startswith("ours") and row["status"] != "ok"
                if row["status"] == "error" and not alive(args.device):
                    failed = True
                    lost = f"{found['provider']}: the device is lost: the same command goes on"
            pyg_ioaware.clear_cache()
            if args.device == "cuda" and not lost:
                torch.cuda.empty_cache()
    print(", ".join(f"{n} {status}" for status, n in counts.items()) or "nothing left to measure")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
