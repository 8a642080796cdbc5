"""PyG's own tests, with the patch on: what passes on stock passes patched."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from child import environment

CHECKOUT = os.environ.get("PYG_TESTS_DIR", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="PYG_TESTS_DIR names no checkout of PyG"),
]


def run(folder, report, patched):
    """Runs a folder of PyG's tests; returns the outcome of each, and the number fused."""
    options = ["-q", "-p", "patched_pyg", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=folder,
        env=environment(PATCHED_PYG=str(int(patched))),
        capture_output=True,
        text=True,
    )
    assert report.exists(), done.stdout + done.stderr
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = bad[0].text if bad else ""
    fused = re.search(r"fused aggregations: (\d+)", done.stdout)
    return outcomes, int(fused.group(1)) if fused else 0


@pytest.mark.parametrize("part", ["conv", "aggr", "models", "dense", "../explain"])
def test_pyg_suite(part, tmp_path):
    root = Path(CHECKOUT)
    folder = next(f / "nn" / part for f in (root / "test", root) if (f / "nn").is_dir()).resolve()
    stock, none = run(folder, tmp_path / "stock.xml", patched=False)
    ours, fused = run(folder, tmp_path / "ours.xml", patched=True)
    assert none == 0
    assert fused > 0 or part not in ("conv", "models")
    assert len(stock) > 10
    assert ours.keys() == stock.keys()
    worse = {name: text for name, text in ours.items() if text and not stock[name]}
    assert not worse, "\n\n".join(f"{name}\n{text}" for name, text in worse.items())
