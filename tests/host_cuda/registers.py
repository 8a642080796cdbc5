"""The table of registers: what NVRTC makes of the kernels that the operations launch.

python tests/host_cuda/registers.py         # writes registers.csv; needs CuPy and NVRTC, but no GPU
python tests/host_cuda/registers.py spmm    # prints what the kernels of spmm.cu take on sm_90
"""

import argparse
import csv
import functools
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import every_kernel
from cupy_backends.cuda.libs import nvrtc
from every_kernel import DTYPES, Shape
from runtime import Recorder, Unit, installed

from pyg_ioaware.engines.cuda import CUDAEngine, sources

TABLE = Path(__file__).with_name("registers.csv")
COMMAND = "python tests/host_cuda/registers.py"
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
MAIN = 90  # for which every option is compiled
USUAL, WIDE, ODD = Shape(8, 16, 8), Shape(1, 256, 8), Shape(1, 7, 1)
# What is compiled for it: dtype, shape, and whether with every option or with all at once.
MATRIX = [
    (torch.float32, USUAL, True),
    *((torch.float64, WIDE, False), (torch.float16, WIDE, False), (torch.bfloat16, ODD, False)),
]


class Used(NamedTuple):
    """What a kernel takes: registers of a thread, and bytes."""

    registers: int
    spilled: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers}" + (f" spills {self.spilled}" if self.spilled else "")


def launched(dtype: torch.dtype, shape: Shape, every: bool) -> list[tuple[Unit, str]]:
    """Returns the kernels that the operations launch, each with its specialisation."""
    recorder = Recorder()
    with installed(CUDAEngine(recorder)):
        every_kernel.run(dtype, shape, every)
    return list(recorder.kernels)


@functools.cache
def matrix(arch: int) -> dict[Unit, list[str]]:
    """Returns the kernels to look at in each unit that is compiled for an architecture."""
    found: dict[Unit, dict[str, None]] = {}
    if arch == MAIN:
        for dtype, shape, every in MATRIX:
            for unit, name in launched(dtype, shape, every):
                found.setdefault(unit, {})[name] = None
    for dtype in DTYPES:  # of each kernel one specialisation
        of_name = {name: unit for unit, name in launched(dtype, USUAL, False)}
        for name, unit in of_name.items():
            found.setdefault(unit, {})[name] = None
    return {unit: list(names) for unit, names in found.items()}


def compiled(unit: Unit, arch: int) -> dict[str, Used]:
    """Compiles a unit; returns what each of its kernels takes."""
    program = nvrtc.createProgram(sources.text(unit.source), f"{unit.source}.cu", [], [])
    options = ["-std=c++17", f"-I{sources.folder()}", "--ptxas-options=-v", *unit.options]
    try:
        nvrtc.compileProgram(program, [*options, f"--gpu-architecture=sm_{arch}"])
        log: str = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        raise AssertionError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        shared = re.search(r"(\d+) bytes smem", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert registers, log
        used = Used(int(registers[1]), spilled, int(shared[1]) if shared else 0)
        found[part.split("'")[0]] = used
    return found


def version() -> str:
    """Returns the version of NVRTC, whose figures are its own."""
    return "NVRTC {}.{}".format(*nvrtc.getVersion())


def specialisation(unit: Unit) -> str:
    """Returns the macros of a unit but those that all have in common."""
    macros = [option.removeprefix("-D") for option in unit.options]
    return " ".join(m for m in macros if m not in ("INDEX=32", "THREADS=128"))


# Of the name of a kernel and its specialisation: the bytes of shared memory, and for each
# architecture the registers and what is spilled.
Rows = dict[tuple[str, str], dict[str, str]]


def read() -> tuple[str, Rows]:
    """Returns the version that the table is of, and its rows."""
    with TABLE.open(newline="") as file:
        made_by = file.readline().strip().removeprefix("# ")
        rows = {(row["kernel"], row["specialisation"]): row for row in csv.DictReader(file)}
    return made_by, rows


def rows_of(arch: int, source: str | None = None) -> Rows:
    """Compiles the units of an architecture, or those of one source, and returns their rows."""
    units = {u: n for u, n in matrix(arch).items() if source in (None, u.source)}
    with ThreadPoolExecutor(1 if source else os.cpu_count()) as pool:
        results = list(pool.map(functools.partial(compiled, arch=arch), units))
    found: Rows = {}
    for (unit, names), kernels in zip(units.items(), results, strict=True):
        for name in names:
            used = kernels[name]
            row = {"shared": str(used.shared), f"sm_{arch}": str(used)}
            found[name, specialisation(unit)] = row
    return found


def write() -> None:
    """Compiles everything, and writes the table."""
    rows: Rows = {}
    for arch in ARCHITECTURES:
        print(f"sm_{arch}", flush=True)
        for key, row in rows_of(arch).items():
            merged = rows.setdefault(key, {})
            assert merged.get("shared", row["shared"]) == row["shared"], key
            merged |= row
    with TABLE.open("w", newline="") as file:
        file.write(f"# {version()}\n")
        names = ["kernel", "specialisation", "shared", *(f"sm_{arch}" for arch in ARCHITECTURES)]
        out = csv.DictWriter(file, names, lineterminator="\n")
        out.writeheader()
        for (kernel, macros), row in sorted(rows.items()):
            out.writerow({"kernel": kernel, "specialisation": macros, **row})


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the table of registers (some minutes).")
    parser.add_argument("source", nargs="?", help="a file of kernels: print its rows, write none")
    source = parser.parse_args().source
    if source is None:
        write()
        return
    for (kernel, macros), row in sorted(rows_of(MAIN, source).items()):
        print(f"{row[f'sm_{MAIN}']} registers, {row['shared']} bytes shared: {kernel} {macros}")


if __name__ == "__main__":
    main()
