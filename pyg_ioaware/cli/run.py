"""``python -m pyg_ioaware run``: runs a script or module unchanged, patched."""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from typing import Any

from pyg_ioaware.cli.errors import CommandError


def split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Divides the arguments into ours, whether ``-m`` was given, and the target with its own.

    Everything from the script (or the module after ``-m``) on belongs to it, as in Python.
    """
    for i, argument in enumerate(argv):
        if argument == "-m":
            return list(argv[:i]), True, list(argv[i + 1 :])
        if not argument.startswith("-"):
            return list(argv[:i]), False, list(argv[i:])
    return list(argv), False, []


def main(target: Sequence[str], module: bool, strict: bool, stats: bool) -> int:
    """Patches, runs `target` as ``__main__``, and prints the counts to stderr at its end.

    The script's own exit status, exceptions and ``SystemExit`` pass through.
    """
    import pyg_ioaware

    if not target:
        raise CommandError("run: give a script, or -m and a module")
    name = target[0]
    _check(name, module)
    pyg_ioaware.patch(strict=strict or None)
    sys.argv = list(target)
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif pkgutil.get_importer(name) is None:
            _run_script(name)
        else:  # a folder or zip file with a __main__.py
            _set_first_path(None)
            runpy.run_path(os.path.abspath(name), run_name="__main__")
    finally:
        if stats:
            print(_summary(pyg_ioaware.stats()), file=sys.stderr, flush=True)
    return 0


def _summary(stats: dict[str, Any]) -> str:
    lines = [
        f"{layer}: {calls['fused']} fused, {sum(calls['stock'].values())} stock"
        + "".join(f"\n    {count} stock: {why}" for why, count in calls["stock"].items())
        for layer, calls in stats["layers"].items()
    ]
    cache = stats["cache"]
    lines.append(
        f"cache: {cache['hits']} hits, {cache['misses']} misses, {cache['entries']} entries, "
        f"{cache['bytes'] / 2**20:.1f} MiB"
    )
    return "\n".join(f"pyg_ioaware: {line}" for line in lines)


def _check(name: str, module: bool) -> None:
    if not module:
        if not os.path.exists(name):
            raise CommandError(f"run: no such script '{name}'")
        return
    try:
        found = find_spec(name)
    except (ImportError, ValueError) as error:
        raise CommandError(f"run: no module '{name}' ({error})") from None
    if found is None:
        raise CommandError(f"run: no module '{name}'")


def _run_script(path: str) -> None:
    """Runs a source file as Python would.

    `runpy.run_path` takes its module out of ``sys.modules`` at the end, too early for whatever
    still runs then (threads, exit handlers that pickle).
    """
    path = os.path.abspath(path)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _set_first_path(folder: str | None) -> None:
    """Replaces the working directory, which ``python -m`` has put first, unless told not to."""
    if getattr(sys.flags, "safe_path", False):
        return
    sys.path[:1] = [] if folder is None else [folder]
