import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        yield file


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "pyg_ioaware").rglob("*.py")}
    assert modules <= set(names)
    assert "pyg_ioaware/py.typed" in names
    kernels = {str(p.relative_to(ROOT)) for p in (ROOT / "kernels").rglob("*.cu*")}
    assert kernels
    assert {f"pyg_ioaware/{name}" for name in kernels} <= set(names)
    assert {name.split("/")[0] for name in names} == {
        "pyg_ioaware",
        "pyg_ioaware-0.1.0.dist-info",
    }
    assert not any("__pycache__" in name or "/tests/" in name for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata(wheel):
    import pyg_ioaware

    lines = wheel.read("pyg_ioaware-0.1.0.dist-info/METADATA").decode().splitlines()
    assert f"Version: {pyg_ioaware.__version__}" in lines
    assert "Requires-Python: >=3.10" in lines
    needed = {line for line in lines if line.startswith("Requires-Dist") and "extra" not in line}
    assert {line.split()[1].split(">")[0].replace("-", "_") for line in needed} == {
        "torch",
        "torch_geometric",
        "numpy",
        "numba",
    }
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {"cuda12", "cuda13", "sparse", "demo", "bench", "test"}
