import re
from pathlib import Path

import pytest

from pyg_ioaware import __main__ as command
from pyg_ioaware import tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()


def command_lines():
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", README, re.S)
        for line in block.splitlines()
    ]


def test_two_commands_of_one_line_each():
    demo, test = command_lines()
    for line, extra in ((demo, "demo"), (test, "test")):
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -e ")
        assert f"'.[{extra}]'" in line
    assert demo.endswith(" && .venv/bin/python -m pyg_ioaware demo")


def test_ci_runs_the_readmes_test_command():
    ours = command_lines()[1].split(" && ")[-1].removeprefix(".venv/bin/")
    (ci,) = re.findall(r'^TEST="(.*?)"', CI, re.M)
    assert ci == ours


def test_every_command_and_option_exists(capsys):
    for line in re.findall(r"python -m pyg_ioaware (\w+)", README):
        with pytest.raises(SystemExit) as exit_:
            command.main([line, "--help"])
        assert exit_.value.code == 0
    text = capsys.readouterr().out
    rows = "\n".join(re.findall(r"^\| `python -m pyg_ioaware .*$", README, re.M))
    options = set(re.findall(r"--[a-z]+", rows)) - {"--help"}
    assert options
    assert all(option in text for option in options)


def test_python_examples_compile_and_use_the_api():
    import pyg_ioaware

    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        compile(block, "README.md", "exec")
    names = re.findall(r"pyg_ioaware\.([a-z_]+)\b(?!\.md)", README)
    assert {name for name in names if not hasattr(pyg_ioaware, name)} <= {"png"}


def test_support_table(capsys):
    (table,) = re.findall(r"<!-- support:begin -->\n(.*?)<!-- support:end -->", README, re.S)
    assert table.strip() == tables.support_table().strip()
    assert command.main(["doctor", "--support-table"]) == 0
    assert capsys.readouterr().out.strip() == table.strip()


def test_links_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), f"{name}: {link}"
