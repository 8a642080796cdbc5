"""Counts of lines are written at the end: pytest-xdist ends its workers without."""

import runtime


def pytest_sessionfinish() -> None:
    runtime.write_counts()
