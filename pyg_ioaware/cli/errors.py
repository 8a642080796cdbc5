"""The one error that the command line shows as a single line."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec


class CommandError(Exception):
    """A mistake in what the user gave; shown as one line, without a traceback.

    Args:
        message: The line to show.
        code: The exit status: 2 for bad input, 1 for a failed run.
    """

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code


def require(modules: Iterable[str], extra: str) -> None:
    """Raises a `CommandError` naming `extra` unless every module can be imported."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"this needs {', '.join(missing)}: pip install 'pyg_ioaware[{extra}]'", code=1
        )
