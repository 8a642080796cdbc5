"""Finds the kernel sources, and tells versions of them apart."""

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
PLACES = (_PACKAGE / "kernels", _PACKAGE.parent / "kernels")  # in a wheel; in a checkout


@functools.cache
def folder() -> Path:
    r"""Returns the folder of the sources.

    Raises:
        FileNotFoundError: If there is none.
    """
    for place in PLACES:
        if (place / "common").is_dir():
            return place
    raise FileNotFoundError(
        f"the sources of the CUDA kernels are missing (looked in '{PLACES[0]}' and '{PLACES[1]}'); "
        "install pyg_ioaware again"
    )


@functools.cache
def text(name: str) -> str:
    """Returns the source of a kernel, by the name of its file without ``.cu``."""
    return (folder() / f"{name}.cu").read_text()


@functools.cache
def digest() -> str:
    """Returns a digest of all headers: CuPy's disk cache does not look into them."""
    found = hashlib.sha256()
    for header in sorted((folder() / "common").glob("*.cuh")):
        found.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return found.hexdigest()[:16]
