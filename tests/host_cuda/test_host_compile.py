"""The kernels compile with NVRTC for every architecture, and spill next to nothing to memory."""

import itertools
import re
from typing import Any

import pytest

from pyg_ioaware.engines.cuda import sources

pytest.importorskip("cupy", reason="needs CuPy and NVRTC, but no GPU")
from cupy_backends.cuda.libs import nvrtc

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
# Numbers of one access, lanes and accesses of rows of 128 numbers, by the code of the dtype.
WIDE = {0: (4, 32, 1), 1: (2, 32, 2), 2: (8, 16, 1), 3: (8, 16, 1)}
MOST_SPILLED = 64  # bytes, by a few specialisations on some architectures
SPECIALISATIONS: dict[str, list[dict[str, int]]] = {
    "spmm": [{"WEIGHTED": w, "SCALED": s} for w, s in itertools.product((0, 1), repeat=2)],
    "sddmm": [{}],
    "reduce": [
        {"WEIGHTED": w, "WITH_ARG": a, "MINIMUM": m}
        for w, a, m in itertools.product((0, 1), repeat=3)
    ],
    "reduce_backward": [
        *({"WEIGHTED": w, "TIES": t} for w, t in itertools.product((0, 1), range(3))),
        *(
            {"WEIGHTED": w, "TIES": t, "SHARES": 1, "PASS": p, "WORDS": 4}
            for w, t, p in itertools.product((0, 1), range(3), range(4))
        ),
    ],
}


def compiled(source: str, arch: int, macros: dict[str, int]) -> str:
    """Compiles a source and returns the assembler's report."""
    options = [f"-D{name}={value}" for name, value in macros.items()]
    program = nvrtc.createProgram(sources.text(source), f"{source}.cu", [], [])
    options += ["-std=c++17", f"-I{sources.folder()}", "--ptxas-options=-v"]
    try:
        nvrtc.compileProgram(program, [*options, f"--gpu-architecture=sm_{arch}"])
        log: str = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        raise AssertionError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)
    return log


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SPECIALISATIONS)
def test_kernels_compile(source: str, arch: int) -> None:
    cases: list[Any] = SPECIALISATIONS[source]
    # Every specialisation for one architecture, one of each dtype for the others.
    for (code, (vec, lanes, vectors)), case in itertools.product(WIDE.items(), cases):
        if arch != 90 and case is not cases[code % len(cases)]:
            continue
        macros = {"SCALAR": code, "INDEX": 32, "VEC": vec, "LANES": lanes, "NV": vectors}
        log = compiled(source, arch, macros | {"THREADS": 128} | case)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        assert spilled, log
        assert max(spilled) <= MOST_SPILLED, f"{source} {macros | case} for sm_{arch}:\n{log}"
