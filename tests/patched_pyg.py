"""A pytest plugin that puts the patch in for a whole run: ``pytest -p patched_pyg``."""

import os

import pytest

import pyg_ioaware


def pytest_configure() -> None:
    if os.environ.get("PATCHED_PYG") != "0":
        pyg_ioaware.patch()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    layers = pyg_ioaware.stats()["layers"].values()
    terminalreporter.write_line(f"fused aggregations: {sum(layer['fused'] for layer in layers)}")
