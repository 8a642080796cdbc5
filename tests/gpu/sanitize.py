"""Runs every CUDA kernel, with every option, under compute-sanitizer on a GPU.

python tests/gpu/sanitize.py    # all tools at once; fails if a kernel of ours is reported

Writes what each tool found to benchmarks/results/sanitizer.csv. What it reports of PyTorch's own
kernels is counted apart.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import cupy
import torch

ROOT = Path(__file__).resolve().parents[2]
CALLS = [sys.executable, str(ROOT / "tests" / "every_kernel.py")]
OUT = ROOT / "benchmarks" / "results" / "sanitizer.csv"
TOOLS = {
    "memcheck": (),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}
ENVIRONMENT = {
    **os.environ,
    "TEST_DEVICE": "cuda",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    # Every tensor gets memory of its own, so that nothing after its end is another's.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
}


def reports(log: str) -> list[str]:
    """Returns what a tool says of each error: a line, and those that are indented below it."""
    found: list[str] = []
    for line in log.splitlines():
        if not line.startswith("========= "):
            continue
        text = line.removeprefix("========= ")
        if not text.startswith(" "):
            found.append(text)
        elif found:
            found[-1] += "\n" + text
    return [text for text in found if re.search(r"^ +at ", text, re.MULTILINE)]


def is_ours(report: str) -> bool:
    """Tells whether the code is ours: our kernels are of no namespace, as PyTorch's are."""
    place = re.search(r"^ +at (.*)", report, re.MULTILINE)
    return place is not None and "::" not in place[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--commit", help="what is checked; default: what git says")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise SystemExit("compute-sanitizer, which comes with the CUDA toolkit, is not in the path")
    # Before, without: kernels that do not compile are no matter of a tool's.
    subprocess.run(CALLS, env=ENVIRONMENT, check=True)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    described = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    origin = {
        "date": date.today().isoformat(),
        "commit": given.commit or described,
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cupy": cupy.__version__,
    }
    rows, bad = [], False

    def check(tool: str) -> tuple[str, str, int, int]:
        start = time.monotonic()
        command = [sanitizer, "--tool", tool, *TOOLS[tool], "--print-limit", "1000", *CALLS]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        seconds = round(time.monotonic() - start)
        return tool, done.stdout + done.stderr, done.returncode, seconds

    with ThreadPoolExecutor(len(given.tools)) as pool:
        checked = list(pool.map(check, given.tools))
    for tool, log, code, seconds in checked:
        found = reports(log)
        ours = [report for report in found if is_ours(report)]
        ended = code == 0 and " SUMMARY: " in log
        rows.append(
            {
                "tool": tool,
                "ended": ended,
                "ours": len(ours),
                "others": len(found) - len(ours),
                "seconds": seconds,
                **origin,
            }
        )
        print(f"{tool}: {len(ours)} reports of our kernels, {seconds} s", flush=True)
        if ours or not ended:
            bad = True
            with tempfile.NamedTemporaryFile("w", suffix=f"_{tool}.log", delete=False) as file:
                file.write(log)
            print("\n".join([*ours[:3], f"the whole is in {file.name}"]))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
