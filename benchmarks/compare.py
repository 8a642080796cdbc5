r"""Shows what became slower between two files of results.

.. code-block:: bash

    python -m benchmarks.compare BEFORE.csv AFTER.csv

A row is slower if its median grew by more than a part and the quartiles do not overlap; it needs
more if its peak memory grew by that part. What was right and is not any more counts, too.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import rows
from benchmarks.rows import Row

SAME = tuple(name for name in rows.KEY if name not in ("commit", "torch", "threads"))
"""What rows of both files agree in, and on a CPU the threads."""
PART = 0.1


def latest(found: list[Row]) -> dict[tuple[str, ...], Row]:
    """Returns the last row of each measurement, whatever its commit."""
    return {(*(row[name] for name in SAME), rows.threads(row)): row for row in found}


def changes(before: list[Row], after: list[Row], part: float = PART) -> Iterator[tuple[str, str]]:
    r"""Yields what changed: :obj:`"worse"` or :obj:`"better"`, and a line that says how.

    Args:
        before (list): Rows to start from.
        after (list): Rows to compare with them.
        part (float, optional): The relative change from which on it counts.
            (default: :obj:`0.1`)
    """
    old, new = latest(before), latest(after)
    for key, a in old.items():
        b = new.get(key)
        if b is None:
            continue
        name = " ".join(a[column] for column in SAME if column != "machine")
        if a["status"] != b["status"]:
            how = "better" if b["status"] == "ok" else "worse"
            yield how, f"{name}: {a['status']}, now {b['status']} {b['note']}".rstrip()
            continue
        if a["status"] != "ok":
            continue
        x, y = float(a["median_ms"]), float(b["median_ms"])
        if y > x * (1 + part) and float(b["q1_ms"]) > float(a["q3_ms"]):
            yield "worse", f"{name}: {x:.3g} ms, now {y:.3g} ms ({y / x:.2f}x)"
        elif x > y * (1 + part) and float(a["q1_ms"]) > float(b["q3_ms"]):
            yield "better", f"{name}: {x:.3g} ms, now {y:.3g} ms ({y / x:.2f}x)"
        if a["peak_mib"] and b["peak_mib"]:
            p, q = float(a["peak_mib"]), float(b["peak_mib"])
            if q > p * (1 + part) + 1:  # one MiB comes and goes
                yield "worse", f"{name}: peak {p:.0f} MiB, now {q:.0f} MiB"


def main(argv: list[str] | None = None) -> int:
    """Prints changes.

    Returns:
        int: 1 if anything is worse, or nothing could be compared.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--part", type=float, default=PART, help="what counts as a change")
    parser.add_argument("--provider", default="ours", help="whose rows; empty for all")
    args = parser.parse_args(argv)
    before, after = (
        [r for r in rows.read(path) if args.provider in ("", r["provider"])]
        for path in (args.before, args.after)
    )
    common = latest(before).keys() & latest(after).keys()
    found = list(changes(before, after, args.part))
    for how, line in sorted(found, reverse=True):
        print(f"{how}: {line}")
    worse = sum(how == "worse" for how, _ in found)
    gone = len(latest(before)) - len(common)
    print(f"{len(common)} compared, {worse} worse, {len(found) - worse} better, {gone} missing")
    return int(worse > 0 or not common)


if __name__ == "__main__":
    sys.exit(main())
