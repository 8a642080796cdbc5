"""The one CSV file of results: its columns, its key, and where its figures are from."""

import csv
import functools
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

KEY = (
    *("commit", "machine", "threads", "torch"),
    *("graph", "case", "dtype", "mode", "l2", "provider"),
)
"""No two rows agree in all of these."""
MEASURED = (
    *("status", "median_ms", "q1_ms", "q3_ms", "runs", "peak_mib", "total_mib"),
    *("setup_ms", "compile_ms", "bytes", "gathered", "row_bytes", "table_bytes"),
    *("accuracy", "note"),
)
SIZES = ("sources", "targets", "edges")
ENVIRONMENT = (
    *("date", "commit", "device", "machine", "threads", "driver", "cuda"),
    *("python", "torch", "pyg", "cupy", "numba"),
)
COLUMNS = ("graph", *SIZES, "case", "dtype", "mode", "l2", "provider", *MEASURED, *ENVIRONMENT)
Row = dict[str, str]


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def read(path: Path) -> list[Row]:
    r"""Reads the rows of a file.

    Raises:
        ValueError: If its columns are others, or a key is there twice.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"'{path}' is no file of this version of benchmarks.run: it has other columns "
                f"(got {reader.fieldnames})"
            )
        rows = list(reader)
    seen = set()
    for row in rows:
        if key(row) in seen:
            raise ValueError(f"{path}: {dict(zip(KEY, key(row), strict=True))} is there twice")
        seen.add(key(row))
    return rows


def threads(row: Row) -> str:
    """Returns the number of threads where it matters: on a CPU."""
    return "" if row["device"] == "cuda" else row["threads"]


class Table:
    r"""A file that rows are appended to, one by one, so that what is measured is never lost.

    Args:
        path (Path, optional): The file; without one, rows are kept in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.rows = path, []
        if path is not None and path.exists():
            self._mend(path)
            self.rows = read(path)
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write([], "w")
        self._keys = {key(row) for row in self.rows}

    @staticmethod
    def _mend(path: Path) -> None:
        """Cuts off a line that was not finished, and leaves no file without a header."""
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if not whole:
            whole = (",".join(COLUMNS) + "\r\n").encode()
        if whole != text:
            path.write_bytes(whole)

    def _write(self, rows: Iterable[Row], how: str) -> None:
        if self.path is None:
            return
        with self.path.open(how, newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if how == "w":
                writer.writeheader()
            writer.writerows(rows)

    def failed(self, row: Mapping[str, Any]) -> bool:
        """Tells whether there is a row of the same key that is not of status :obj:`"ok"`."""
        found = [other for other in self.rows if key(other) == key(row)]
        return any(other["status"] != "ok" for other in found)

    def forget(self, dropped: Iterable[Mapping[str, Any]]) -> None:
        """Drops the rows of some keys, whatever they hold."""
        gone = {key(row) for row in dropped}
        self.rows = [row for row in self.rows if key(row) not in gone]
        self._keys -= gone
        self._write(self.rows, "w")

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        return key(row) in self._keys

    def add(self, row: Mapping[str, Any]) -> None:
        r"""Appends a row.

        Raises:
            ValueError: If its key is there already, or it has a column that does not exist.
        """
        if row in self:
            raise ValueError(f"row {key(row)} exists")
        if unknown := row.keys() - set(COLUMNS):
            raise ValueError(f"no columns {sorted(unknown)}")
        full = {name: str(row.get(name, "")) for name in COLUMNS}
        self._write([full], "a")
        self.rows.append(full)
        self._keys.add(key(full))


def environment(device: str, commit: str | None = None) -> dict[str, Any]:
    """Returns the columns that say where a figure is from."""
    return _machine(device) | {
        "date": date.today().isoformat(),
        "commit": commit or _commit(),
        "device": device,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if device == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyg": _version("torch_geometric"),
        "cupy": _version("cupy-cuda13x") or _version("cupy-cuda12x") or _version("cupy"),
        "numba": _version("numba"),
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


@functools.cache
def _commit() -> str:
    """Returns the commit; a plus sign tells that files differ from it."""
    dirty = _output("git", "status", "--porcelain", "--untracked-files=no")
    return _output("git", "rev-parse", "--short", "HEAD") + ("+" if dirty else "")


@functools.cache
def _machine(device: str) -> dict[str, str]:
    if device == "cuda":
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = _output(*query).splitlines()
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        return {"machine": name, "driver": driver[0] if driver else ""}
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {"machine": names[0] if names else platform.machine(), "driver": ""}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
