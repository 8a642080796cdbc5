"""Runs the CUDA kernels on the CPU: see cuda_host.h for how they compile, host_cuda.cpp for how.

runtime = HostRuntime(seed=3)
with installed(CUDAEngine(runtime), split=4):
    ...  # the operations of pyg_ioaware run the CUDA kernels on tensors of the CPU
"""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pyg_ioaware import engines
from pyg_ioaware.engines.cuda import sources

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
# Set in processes that were started with the libraries of `sanitizer_environment`.
SANITIZED = os.environ.get("HOST_CUDA_SANITIZE") == "1"
# A folder for what kernel_coverage.py reads: the package's kernels are built to write it.
COVERAGE = os.environ.get("HOST_CUDA_COVERAGE")

_FLAGS = ("-std=c++17", "-g1", "-fPIC")
_LINKED = ("-shared", *(("-fuse-ld=gold",) if shutil.which("ld.gold") else ()))  # twice as fast
_KERNEL_FLAGS = ("-fvisibility=hidden", "-fno-strict-aliasing", "-DPORTABLE")
_SANITIZER_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-sanitize=pointer-overflow",  # offsets from null that nothing reads
    "-fsanitize-sections=host_shared",
)
# What counts its lines writes them at the end of a process, unless that ends by _exit.
_WRITE_COUNTS = """
extern "C" void __gcov_dump(void);
extern "C" __attribute__((visibility("default"))) void write_counts() { __gcov_dump(); }
"""
_counting: dict[Path, ctypes.CDLL] = {}


def write_counts() -> None:
    """Writes how often each line ran so far, for the last time in this process."""
    for library in _counting.values():
        library.write_counts()


class HostError(RuntimeError):
    """A kernel did what it must not."""


class HostRuntime:
    r"""Compiles kernels with g++ and runs them on the CPU. See ``launch.Runtime``.

    Args:
        seed (int, optional): Chooses the order of blocks, warps and lanes of each launch.
            (default: :obj:`0`)
        sanitize (bool, optional): If set, builds with AddressSanitizer and UBSan, which only load
            in a process with the environment of :func:`sanitizer_environment`.
            (default: whether this is such a process)
        kernels (Path, optional): The folder of the sources. (default: that of the package)
    """

    def __init__(
        self, seed: int = 0, sanitize: bool = SANITIZED, kernels: Path | None = None
    ) -> None:
        self.seed, self.sanitize = seed, sanitize
        self.kernels = sources.folder() if kernels is None else kernels

    def load(self, source: str, name: str, options: tuple[str, ...], device: int) -> Any:
        """Compiles a kernel, or finds it compiled."""
        path = _build(self.kernels, source, options, self.sanitize)
        library = ctypes.CDLL(str(path))
        if hasattr(library, "write_counts"):
            _counting[path] = library
        run = getattr(library, f"run_{name}")
        run.restype = ctypes.c_char_p
        run.argtypes = [*[ctypes.c_uint] * 3, ctypes.c_void_p, ctypes.c_ulonglong]

        def launch(x: int, y: int, threads: int, stream: int, params: int) -> None:
            error = run(x, y, threads, params, self.seed)
            if error is not None:
                raise HostError(error.decode())

        return launch

    def stream(self, device: int) -> int:
        """There are no streams: a launch returns when it is done."""
        return 0


class Unit(NamedTuple):
    """A file with a specialisation."""

    source: str
    options: tuple[str, ...]


class Recorder:
    """A runtime that notes what it is asked for.

    It runs nothing but what builds structures, on which depends what is launched.
    """

    def __init__(self) -> None:
        self.kernels: dict[tuple[Unit, str], None] = {}

    def load(self, source: str, name: str, options: tuple[str, ...], device: int) -> Any:
        """Notes a kernel."""
        self.kernels[Unit(source, options), name] = None
        if source == "structure":
            return HostRuntime().load(source, name, options, device)
        return lambda *args: None

    def stream(self, device: int) -> int:
        """There is none."""
        return 0


@contextmanager
def installed(engine: Any, split: int | None = None) -> Iterator[Any]:
    r"""Makes an engine the one of the CPU.

    Args:
        engine (CUDAEngine): The engine, on a :class:`HostRuntime`.
        split (int, optional): Edges beyond which it splits rows. (default: its own)
    """
    device, registry = torch.device("cpu"), engines._engines
    before = registry.pop(device, None)
    if split is not None:
        engine.split = split
    registry[device] = engine
    library = _as_on_cuda()
    try:
        yield engine
        # What falls back to plain PyTorch is right, too, and tests nothing.
        assert not engine.broken, engine.broken
        assert engine._builds
    finally:
        library._destroy()
        del registry[device]
        if before is not None:
            registry[device] = before


def _as_on_cuda() -> torch.library.Library:
    """Makes the primitives that only CUDA has run on tensors of the CPU, until it is destroyed."""
    from pyg_ioaware import ops  # noqa: F401 (it defines the primitives)

    library = torch.library.Library("pyg_ioaware", "FRAGMENT")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, op = name.partition("::")
        if space == library.ns and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            overload = getattr(torch.ops.pyg_ioaware, op).default
            library.impl(op, functools.partial(overload.redispatch, keys), "CPU")
    return library


def sanitizer_environment() -> dict[str, str]:
    """Returns the variables with which a process can load what is built with sanitizers."""
    assert COMPILER is not None
    libraries = [
        subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")  # the latter, so that exceptions are seen
    ]
    return {
        "LD_PRELOAD": " ".join(libraries),
        # Python frees little at its end; its tensors come from posix_memalign, which is watched.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "HOST_CUDA_SANITIZE": "1",
    }


def cache() -> Path:
    """Returns the folder of what is compiled."""
    folder = os.environ.get("HOST_CUDA_CACHE")
    found = Path(folder or Path(tempfile.gettempdir()) / f"pyg_ioaware_host_{os.getuid()}")
    found.mkdir(parents=True, exist_ok=True)
    return found


def _noted() -> Path:
    """Returns the folder of what counts its lines."""
    folder = Path(str(COVERAGE)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")


def _build(kernels: Path, source: str, options: tuple[str, ...], sanitize: bool) -> Path:
    """Returns the library of the kernels of one file."""
    covered = COVERAGE is not None and kernels == sources.folder() and not sanitize
    # Where lines are counted, none is merged with another.
    flags = (*_FLAGS, *_KERNEL_FLAGS, *(("-O0", "--coverage") if covered else ("-O1",)))
    flags += _SANITIZER_FLAGS if sanitize else ()
    path = kernels / f"{source}.cu"
    names = "".join(f"HOST_KERNEL({name})\n" for name in _KERNEL.findall(path.read_text()))
    text = f'#include "cuda_host.h"\n#include "{path}"\n{names}'
    headers = sorted((kernels / "common").glob("*.cuh"))
    inputs = (path, *headers, HERE / "cuda_host.h", HERE / "host_cuda.h")
    driver = _driver(sanitize)
    places = (f"-I{_header(flags).parent}", f"-I{HERE}", f"-I{kernels}")
    if covered:
        text += _WRITE_COUNTS
    linked = (*_LINKED, str(driver), "-lm")
    return _compiled(f"{source}.so", (*flags, *options, *places), text, inputs, linked)


@functools.cache
def _header(flags: tuple[str, ...]) -> Path:
    """Returns what every kernel includes, compiled ahead: g++ takes it in place of the header."""
    inputs = HERE / "cuda_host.h", HERE / "host_cuda.h"
    flags = (*(f for f in flags if f != "--coverage"), "-w", f"-I{HERE}", "-x", "c++-header")
    made = _compiled("header.gch", flags, f'#include "{inputs[0]}"\n', inputs, ())
    folder = made.with_suffix("")
    folder.mkdir(exist_ok=True)
    found = folder / "cuda_host.h.gch"
    if not found.exists():
        link = folder / f"{os.getpid()}"
        link.symlink_to(made)
        link.replace(found)
    return found


@functools.cache
def _driver(sanitize: bool) -> Path:
    """Returns the library of the driver: one for all kernels, since it holds the stacks."""
    inputs = HERE / "host_cuda.cpp", HERE / "host_cuda.h", HERE / "fiber.h"
    flags = (*_FLAGS, "-O2", *(_SANITIZER_FLAGS if sanitize else ()), f"-I{HERE}")
    return _compiled("driver.so", flags, f'#include "{inputs[0]}"\n', inputs, _LINKED)


def _compiled(
    name: str, flags: tuple[str, ...], text: str, inputs: tuple[Path, ...], linked: tuple[str, ...]
) -> Path:
    """Compiles a text unless it is in the cache; what is there is whole, whoever else writes."""
    if COMPILER is None:
        raise FileNotFoundError("g++ is missing")
    digest = hashlib.sha256(repr((_version(), flags, text, linked)).encode())
    for path in inputs:
        digest.update(path.read_bytes() + b"\0")
    place = _noted() if "--coverage" in flags else cache()
    out = place / f"{digest.hexdigest()[:24]}-{name}"
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=place) as folder:
            made = Path(folder) / name
            main = Path(folder) / "main.cpp"
            main.write_text(text)
            command = [COMPILER, *flags, str(main), *linked, "-o", str(made)]
            if "--coverage" in flags:
                # The same notes whoever compiles: runs in other processes add to their counts.
                command += [f"-frandom-seed={out.stem}", "-dumpdir", str(out.with_suffix(""))]
            done = subprocess.run(command, env=_plain(), capture_output=True, text=True)
            if done.returncode != 0:
                raise HostError(f"{' '.join(command)}\n{done.stderr}")
            made.replace(out)
    return out


@functools.cache
def _version() -> str:
    assert COMPILER is not None
    done = subprocess.check_output([COMPILER, "--version"], env=_plain(), text=True)
    return done.split("\n")[0]


def _plain() -> dict[str, str]:
    """The environment without what is loaded for the sanitizers: the compiler has no need of it."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
