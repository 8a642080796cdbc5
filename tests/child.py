"""Fresh Python processes, for what one process can only do once."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_python(code: str, *args: str, **environment: str) -> str:
    """Runs code in a new process that must succeed; returns what it prints."""
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(f for f in folders if f)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *args],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
