"""Which lines of the kernels the host tests execute; fails unless it is all of them.

HOST_CUDA_COVERAGE=FOLDER python -m pytest tests/host_cuda -m "not slow"
python tests/host_cuda/kernel_coverage.py FOLDER
"""

import argparse
import json
import subprocess
from collections import defaultdict
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
TOGETHER = 100  # files of one call of gcov

# Lines that cannot be reached, by their text, and why.
UNREACHABLE: dict[str, dict[str, str]] = {}


def executed(folder: Path) -> dict[Path, dict[int, int]]:
    """Returns how often each line that was compiled ran, of all specialisations together."""
    counts: dict[Path, dict[int, int]] = defaultdict(dict)
    files = sorted(path.name for path in folder.glob("*.gcda"))
    for first in range(0, len(files), TOGETHER):
        command = ["gcov", "--json-format", "--stdout", *files[first : first + TOGETHER]]
        found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        for report in found.stdout.splitlines():
            for file in json.loads(report)["files"]:
                lines = counts[Path(file["file"])]
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, 0) + line["count"]
    return {path: lines for path, lines in counts.items() if path.is_relative_to(KERNELS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    counts = executed(parser.parse_args().folder)
    total = missing = 0
    for path in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("common/*.cuh")]):
        name, lines = path.relative_to(KERNELS), counts.get(path, {})
        text = path.read_text().splitlines()
        unreachable = UNREACHABLE.get(str(name), {})
        for why in unreachable:
            assert any(why in line for line in text), f"{name} has no line '{why}'"
        left = [n for n, count in sorted(lines.items()) if not count]
        left = [n for n in left if not any(part in text[n - 1] for part in unreachable)]
        total, missing = total + len(lines), missing + len(left)
        for n in left:
            print(f"{name}:{n} never ran: {text[n - 1].strip()}")
        if not lines and path.suffix == ".cu":
            raise SystemExit(f"{name} never ran")
    print(f"{total - missing} of {total} lines of the kernels ran")
    if missing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
