"""The kernels compile with NVRTC for every architecture, and take what the table says."""

import re

import pytest

from pyg_ioaware.engines.cuda import sources

pytest.importorskip("cupy", reason="needs CuPy and NVRTC, but no GPU")
import registers
from registers import ARCHITECTURES, COMMAND, MAIN, read, rows_of, version
from runtime import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++, by which structures are built")
SOURCES = sorted(path.stem for path in sources.folder().glob("*.cu"))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_take_what_the_table_says(arch: int, source: str) -> None:
    made_by, table = read()
    rows = rows_of(arch, source)
    assert rows
    if made_by != version():
        pytest.skip(f"they compile; the table is of {made_by}, this is {version()}")
    column = f"sm_{arch}"
    changed = [
        f"{' '.join(key)}: {name} was {table[key][name] if key in table else 'not known'}, "
        f"is {value}"
        for key, row in rows.items()
        for name, value in row.items()
        if key not in table or table[key][name] != value
    ]
    assert not changed, "\n".join([f"{column}: registers have changed ({COMMAND})", *changed])


def test_the_table_has_no_other_rows() -> None:
    _, table = read()
    known = {
        (name, registers.specialisation(unit))
        for arch in (MAIN, ARCHITECTURES[0])
        for unit, names in registers.matrix(arch).items()
        for name in names
    }
    assert set(table) == known, COMMAND


def test_every_kernel_is_in_the_matrix() -> None:
    found = {name for names in registers.matrix(ARCHITECTURES[0]).values() for name in names}
    declared = {
        name
        for path in sources.folder().glob("*.cu")
        for name in re.findall(r"__launch_bounds__\([^)]*\)\s+(\w+)\(", path.read_text())
    }
    assert found == declared
