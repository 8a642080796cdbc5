"""The demo's worker processes, seen from the process that starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pyg_ioaware.cli.errors import CommandError
from pyg_ioaware.demo.worker import Config, Result

BLOCK = 10
"""Epochs that one process trains before it is the other's turn."""


class Worker:
    """One training process; it trains when told to and waits in between."""

    def __init__(self, config: Config, title: str) -> None:
        self.title = title
        folder = os.path.abspath(__file__)
        for _ in range(3):
            folder = os.path.dirname(folder)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pyg_ioaware.demo.worker", json.dumps(asdict(config))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def wait_ready(self) -> None:
        """Returns when the process has loaded everything."""
        self._read("ready")

    def train(self, epochs: int, each: Callable[[float], None]) -> None:
        """Trains for so many epochs, calling `each` with the loss of every one."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(f"{epochs}\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        for _ in range(epochs):
            each(self._read("loss"))

    def finish(self) -> Result:
        """Ends the training and returns what was found."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None
        return Result(**self._read("result"))

    def _read(self, key: str) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f'{{"{key}"'):
                return json.loads(line)[key]
        raise self._failure()

    def _failure(self) -> CommandError:
        """Shows all that the failed process wrote; its last line becomes the error."""
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().strip()
        if text:
            print(text, file=sys.stderr)
        reason = text.splitlines()[-1] if text else f"the process ended with status {code}"
        return CommandError(f"{self.title}: {reason}", code=1)


def side_by_side(
    workers: tuple[Worker, Worker], epochs: int, each: tuple[Callable[[float], None], ...]
) -> tuple[Result, Result]:
    """Trains two models by turns, so that a machine that is busy for a while slows both alike."""
    for worker in workers:
        worker.wait_ready()
    for start in range(0, epochs, BLOCK):
        for worker, report in zip(workers, each, strict=True):
            worker.train(min(BLOCK, epochs - start), report)
    stock, fused = (worker.finish() for worker in workers)
    return stock, fused
