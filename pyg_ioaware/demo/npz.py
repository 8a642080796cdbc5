"""Reads an edge list from an ``.npz`` file; every defect becomes one clear line."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pyg_ioaware.cli.errors import CommandError

Array = npt.NDArray[Any]

MAX_NODES = 2**31 - 1


class _File:
    """The members of one ``.npz`` file, read one by one; all its errors name the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not os.path.isfile(path):
            raise self.error("no such file")
        try:
            self.npz = np.load(path, allow_pickle=False)
        except PermissionError:
            raise self.error("no permission to read it") from None
        except Exception:
            raise self.error("not an .npz file") from None
        if not isinstance(self.npz, np.lib.npyio.NpzFile):
            raise self.error("not an .npz file, but a single array")

    def error(self, message: str) -> CommandError:
        return CommandError(f"{self.path}: {message}")

    def check(self, condition: Any, message: str) -> None:
        if not condition:
            raise self.error(message)

    def __contains__(self, key: str) -> bool:
        return key in self.npz.files

    def read(self, key: str) -> Array:
        self.check(key in self, f"has no '{key}'")
        try:
            return np.asarray(self.npz[key])
        except Exception as error:
            # Damaged and pickled members raise errors of many kinds, zlib's and lzma's included.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self.error(f"'{key}' cannot be read ({reason})") from None

    def integers(self, key: str) -> Array:
        array = self.read(key)
        self.check(array.dtype.kind in "iu", f"'{key}' must hold integers (got {array.dtype})")
        self.check(array.ndim == 1, f"'{key}' must have one dimension (got {array.ndim})")
        # An unsigned value past the int64 range turns negative here and fails the range check.
        return array.astype(np.int64)

    def numbers(self, key: str) -> Array:
        array = self.read(key)
        self.check(array.dtype.kind in "iufb", f"'{key}' must hold numbers (got {array.dtype})")
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        self.check(np.isfinite(array).all(), f"'{key}' holds NaN or infinite values")
        return array

    def indices(self, key: str, size: int) -> Array:
        array = self.integers(key)
        if array.size:
            low, high = int(array.min()), int(array.max())
            bad = low if low < 0 else high
            self.check(low >= 0 and high < size, f"'{key}' holds {bad}, not in 0 to {size - 1}")
        return array

    def scalar(self, key: str, kinds: str, what: str) -> int:
        array = self.read(key)
        self.check(
            array.size == 1 and array.dtype.kind in kinds,
            f"'{key}' must be one {what} (got {array.dtype} of shape {list(array.shape)})",
        )
        return int(array.item())


def read(path: str) -> dict[str, Any]:
    """Reads and checks a graph file.

    Args:
        path: An ``.npz`` file with ``row`` and ``col`` (edges run row -> col) and ``num_nodes``.
            Optional: ``directed`` (false: every edge is stored once and its reverse is added),
            features ``x`` or, as CSR, ``x_indptr``, ``x_indices``, ``x_shape`` and ``x_data``
            (ones where left out), labels ``y`` (``[N]`` classes, or ``[N, L]`` multi-label) and
            ``train_mask``, ``val_mask``, ``test_mask`` (``[N]``, or ``[splits, N]``).

    Returns:
        ``num_nodes``, ``edges`` (``[2, E]``) and what the file has of ``x`` (a dense array, or a
        CSR triple with its width), ``y`` and the masks (boolean, the first split).

    Raises:
        CommandError: If the file is missing, damaged or inconsistent.
    """
    file = _File(path)
    with file.npz:
        for key in ("row", "col", "num_nodes"):
            file.check(key in file, f"has no '{key}'")
        n = file.scalar("num_nodes", "iu", "integer")
        file.check(0 <= n <= MAX_NODES, f"'num_nodes' must be in 0 to {MAX_NODES} (got {n})")
        file.check(n > 0, "the graph has no nodes")
        graph: dict[str, Any] = {"num_nodes": n, "edges": _edges(file, n)}
        x = _features(file, n)
        if x is not None:
            graph["x"] = x
        if "y" in file:
            graph["y"] = _labels(file, n)
        for key in ("train_mask", "val_mask", "test_mask"):
            if key in file:
                graph[key] = _mask(file, key, n)
        return graph


def _edges(file: _File, n: int) -> Array:
    row, col = file.indices("row", n), file.indices("col", n)
    file.check(
        len(row) == len(col), f"'row' and 'col' differ in length ({len(row)} and {len(col)})"
    )
    file.check(len(row), "the graph has no edges")
    edges = np.stack([row, col])
    if "directed" in file and not file.scalar("directed", "iub", "true or false"):
        edges = np.concatenate([edges, edges[::-1, row != col]], axis=1)
    return edges


def _features(file: _File, n: int) -> Array | tuple[Array, Array, Array, int] | None:
    if "x" in file:
        x = file.numbers("x")
        file.check(
            x.ndim == 2 and len(x) == n and x.shape[1] > 0,
            f"'x' must have the shape [{n}, features] (got {list(x.shape)})",
        )
        return x
    if "x_indptr" not in file:
        return None
    shape = file.integers("x_shape")
    file.check(
        len(shape) == 2 and shape[0] == n and 0 < shape[1] <= MAX_NODES,
        f"'x_shape' must be [{n}, features] (got {shape.tolist()})",
    )
    indices = file.indices("x_indices", int(shape[1]))
    indptr = file.integers("x_indptr")
    file.check(
        len(indptr) == n + 1
        and indptr[0] == 0
        and indptr[-1] == len(indices)
        and (np.diff(indptr) >= 0).all(),
        f"'x_indptr' must rise from 0 to {len(indices)} in {n + 1} entries",
    )
    data = file.numbers("x_data") if "x_data" in file else np.ones(len(indices), np.float32)
    file.check(
        data.shape == indices.shape,
        f"'x_data' must have {len(indices)} entries (got {list(data.shape)})",
    )
    return indptr, indices, data, int(shape[1])


def _labels(file: _File, n: int) -> Array:
    y = file.read("y")
    file.check(y.dtype.kind in "iufb", f"'y' must hold integers (got {y.dtype})")
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    file.check(
        y.ndim in (1, 2) and len(y) == n and y.size,
        f"'y' must have {n} rows, one a node (got shape {list(y.shape)})",
    )
    whole = y.astype(np.int64) if y.dtype.kind != "f" or np.isfinite(y).all() else None
    file.check(whole is not None and (whole == y).all(), "'y' holds values that are not integers")
    assert whole is not None
    if y.ndim == 2:
        file.check(np.isin(whole, (0, 1)).all(), "multi-label 'y' must hold 0 and 1 only")
    return whole


def _mask(file: _File, key: str, n: int) -> Array:
    mask = file.read(key)
    file.check(
        mask.dtype.kind in "iub" and np.isin(mask, (0, 1)).all(),
        f"'{key}' must hold true and false (got {mask.dtype})",
    )
    if mask.ndim == 2 and len(mask):
        mask = mask[0]
    file.check(mask.shape == (n,), f"'{key}' must have {n} entries (got shape {list(mask.shape)})")
    return mask.astype(bool)
