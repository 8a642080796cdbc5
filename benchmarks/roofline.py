r"""How far from the limit of the machine: its copy and gather rates, and what operations reach.

.. code-block:: bash

    python -m benchmarks.roofline benchmarks/results/FILE.csv

The rates are rows of the same file, measured by ``benchmarks.run`` (cases ``copy`` and
``gather``). Gathering sums 32 random rows for each row that it writes; what counts is what is
read.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.measure import Options, Wanted
from benchmarks.rows import Row
from benchmarks.timing import Clock, Step, clocks, summary, turns

BAG = 32
"""Rows that are summed to one."""
READ = {"cpu": 2**26, "cuda": 2**30}
"""Bytes that one call gathers."""
ROWS = (64, 128, 256, 512, 1024, 2048)
TABLES = {
    "cpu": tuple(2**n for n in (18, 20, 22, 24, 26, 28)),
    "cuda": tuple(2**n for n in (22, 24, 25, 26, 27, 28, 30, 32)),
}

SOURCE = r"""
extern "C" __global__ void gather(const float4* __restrict__ table, const int* __restrict__ index,
                                  float4* __restrict__ out, int words, int count) {
  // As many lanes as a row has words of 16 bytes; 8 loads are under way at a time.
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / words;
  int lane = (blockIdx.x * blockDim.x + threadIdx.x) % words;
  if (row >= count) return;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int k = 0; k < 32; k += 8) {
    float4 v[8];
#pragma unroll
    for (int u = 0; u < 8; u++) v[u] = table[(long long)index[row * 32 + k + u] * words + lane];
#pragma unroll
    for (int u = 0; u < 8; u++) {
      sum.x += v[u].x; sum.y += v[u].y; sum.z += v[u].z; sum.w += v[u].w;
    }
  }
  out[(long long)row * words + lane] = sum;
}
"""


def gatherers(table: Tensor, index: Tensor) -> dict[str, Callable[[], object]]:
    """Returns ways to sum random rows; the fastest is the ceiling."""
    found: dict[str, Callable[[], object]] = {
        "embedding_bag": partial(
            torch.nn.functional.embedding_bag, index.view(-1, BAG), table, mode="sum"
        ),
        "index_select": lambda: table.index_select(0, index),
    }
    if table.is_cuda:
        import cupy

        kernel = cupy.RawKernel(SOURCE, "gather")
        count, words = index.numel() // BAG, table.size(1) // 4
        out, narrow = table.new_empty(count, table.size(1)), index.int()
        shape = ((count * words + 255) // 256,), (256,)
        given = [cupy.from_dlpack(t.detach()) for t in (table, narrow, out)]
        sizes = (cupy.int32(words), cupy.int32(count))

        def launch() -> Tensor:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                kernel(*shape, (*given, *sizes))
            return out

        found["kernel"] = launch
    return found


def measure(name: str, wanted: Wanted, options: Options) -> Iterator[dict[str, Any]]:
    r"""Yields the rates of the machine.

    Args:
        name (str): :obj:`"copy"` or :obj:`"gather"`.
        wanted (set): What is to be measured.
        options (Options): How it is.
    """
    clock = clocks(options.device, "", ("warm",))[0]
    for mode, l2, provider in sorted(wanted):
        row: dict[str, Any] = {"mode": mode, "l2": l2, "provider": provider, "status": "ok"}
        try:
            row |= _copy(clock, options) if name == "copy" else _gather(mode, clock, options)
        except (MemoryError, RuntimeError) as error:
            row |= {"status": "error", "note": str(error).splitlines()[0][:200]}
        yield row


def gather_modes(device: str) -> list[str]:
    """Returns a mode for each size of row and table."""
    return [f"rows of {r} in {t >> 10} KiB" for r in ROWS for t in TABLES[device]]


def _copy(clock: Clock, options: Options) -> dict[str, Any]:
    size = READ[options.device]
    source = torch.ones(size // 4, device=options.device)
    target = torch.empty_like(source)
    steps = {"": Step(lambda _: target.copy_(source))}
    times = turns(steps, clock, options.seconds, options.least)[""]
    return summary(times) | {"bytes": 2 * size, "gathered": 0}


def _gather(mode: str, clock: Clock, options: Options) -> dict[str, Any]:
    row, table = int(mode.split()[2]), int(mode.split()[4]) << 10
    data = torch.ones(table // row, row // 4, device=options.device)
    count = READ[options.device] // row // BAG * BAG
    torch.manual_seed(0)
    index = torch.randint(len(data), (count,)).to(options.device)
    ways = gatherers(data, index)
    steps = {name: Step(lambda _, f=call: f()) for name, call in ways.items()}
    times = turns(steps, clock, options.seconds, options.least)
    best = min(times, key=lambda name: sorted(times[name])[len(times[name]) // 2])
    traffic = {"gathered": count * row, "row_bytes": row, "table_bytes": table, "note": best}
    written = count * row // (1 if best == "index_select" else BAG)
    return summary(times[best]) | traffic | {"bytes": count * (row + 4) + written}


class Ceiling:
    r"""The rate at which rows of one size can be gathered from a table of one size.

    Between measured sizes it is interpolated on logarithmic scales; beyond them it is that of the
    nearest.

    Args:
        found (iterable): Rows of the case :obj:`"gather"`, all of one machine.
    """

    def __init__(self, found: Iterable[Row]) -> None:
        self.rates: dict[int, list[tuple[float, float]]] = {}
        for row in found:
            if row["case"] == "gather" and row["status"] == "ok":
                point = math.log2(float(row["table_bytes"])), math.log2(rate(row))
                self.rates.setdefault(int(row["row_bytes"]), []).append(point)

    def __bool__(self) -> bool:
        return bool(self.rates)

    def at(self, row_bytes: float, table_bytes: float) -> float:
        """Returns the ceiling in GB/s."""
        x, y = math.log2(max(row_bytes, 1)), math.log2(max(table_bytes, 1))
        lines = [
            (math.log2(size), _between(sorted(points), y)) for size, points in self.rates.items()
        ]
        return float(2.0 ** _between(sorted(lines), x))


def _between(points: list[tuple[float, float]], x: float) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in pairwise(points):
        if x <= b:
            return low + (high - low) * (x - a) / (b - a)
    return points[-1][1]


def rate(row: Row) -> float:
    """Returns the gathered gigabytes per second of a row."""
    return float(row["gathered"]) / float(row["median_ms"]) / 1e6


def reached(found: list[Row]) -> Iterator[tuple[Row, float, float]]:
    """Yields rows of operations, what each gathers per second, and the ceiling of its sizes."""
    for machine in sorted({(row["machine"], rows.threads(row)) for row in found}):
        here = [row for row in found if (row["machine"], rows.threads(row)) == machine]
        ceiling = Ceiling(here)
        for row in here:
            known = row["status"] == "ok" and row["gathered"] not in ("", "0")
            if ceiling and known and row["case"] != "gather":
                sizes = float(row["row_bytes"]), float(row["table_bytes"])
                yield row, rate(row), ceiling.at(*sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    args = parser.parse_args()
    found = rows.read(args.csv)
    for row in found:
        if row["case"] == "copy" and row["status"] == "ok":
            copied = float(row["bytes"]) / float(row["median_ms"]) / 1e6
            print(f"{row['machine']}: copies {copied:.0f} GB/s, read and written")
    print("| graph | operation | dtype | pass | L2 | provider | GB/s | ceiling | part |")
    print("|---|---|---|---|---|---|--:|--:|--:|")
    for row, got, top in reached(found):
        names = ("graph", "case", "dtype", "mode", "l2", "provider")
        cells = [*(row[name] for name in names), f"{got:.0f}", f"{top:.0f}", f"{got / top:.0%}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
