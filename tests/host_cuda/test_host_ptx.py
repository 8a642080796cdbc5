"""The table of inline PTX in kernels/README.md is complete, and each row has a test on a GPU."""

import re

import pytest
from ptx import PROBES, options, text

from pyg_ioaware.engines.cuda import sources

_ROW = re.compile(r"^\| `(common/\w+\.cuh)` \| `(\w+)` \|", re.MULTILINE)
_FUNCTION = re.compile(r"^DEVICE [\w ]*?(\w+)\(")


def branches() -> set[tuple[str, str]]:
    """Returns the file and name of each function in which PORTABLE makes a difference."""
    found = set()
    for path in sorted(sources.folder().rglob("*.cu*")):
        function = ""
        for line in path.read_text().splitlines():
            match = _FUNCTION.match(line)
            function = match[1] if match else function
            if line.startswith("}"):
                function = ""
            if function and ("PORTABLE" in line or "asm" in line):
                found.add((str(path.relative_to(sources.folder())), function))
            assert function or "asm" not in line, f"{path.name}: {line}"
    return found


def test_every_branch_is_listed() -> None:
    listed = set(_ROW.findall((sources.folder() / "README.md").read_text()))
    assert listed == branches()


def test_every_branch_has_a_test_on_a_gpu() -> None:
    assert {name.split(".")[0] for name in PROBES} == {name for _, name in branches()}


@pytest.mark.parametrize("portable", [False, True], ids=["ptx", "fallback"])
@pytest.mark.parametrize("name", PROBES)
def test_probes_compile(name: str, portable: bool) -> None:
    pytest.importorskip("cupy", reason="needs CuPy and NVRTC, but no GPU")
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(text(name), "probe.cu", [], [])
    given = [*options(name, portable), f"-I{sources.folder()}", "--gpu-architecture=sm_90"]
    try:
        nvrtc.compileProgram(program, given)
    except nvrtc.NVRTCError:
        raise AssertionError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)
