"""Fresh Python processes, for what one process can only do once."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def environment(**more: str) -> dict[str, str]:
    """Returns the environment in which a process finds the package and the tests."""
    folders = [str(_ROOT), str(_ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(f for f in folders if f), **more}


def run_python(code: str, *args: str, **more: str) -> str:
    """Runs code in a new process that must succeed; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *args],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
