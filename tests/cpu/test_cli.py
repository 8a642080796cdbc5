import os
import subprocess
import sys
import textwrap

import pytest
import torch
from graphs import ON_CPU

import pyg_ioaware
from pyg_ioaware import __main__ as command
from pyg_ioaware.cli import doctor, run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def python(*args, cwd, **kwargs):
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )


def pyg_ioaware_command(*args, cwd):
    return python("-m", "pyg_ioaware", *args, cwd=cwd)


PROBE = """
    import atexit, pickle, sys
    class Local: pass
    atexit.register(lambda: pickle.dumps(Local()))  # needs this module as __main__
    import helper
    print([__name__, __file__, __package__, __spec__, sys.argv, sys.path[0], helper.WHERE])
    assert sys.modules["__main__"].__dict__ is globals()
"""


@pytest.fixture
def folder(tmp_path):
    script = tmp_path / "scripts"
    script.mkdir()
    (script / "helper.py").write_text("WHERE = __file__\n")
    (script / "probe.py").write_text(textwrap.dedent(PROBE))
    return tmp_path


def test_run_looks_like_python(folder):
    plain = python("scripts/probe.py", "--epochs", "3", "-m", "x", cwd=folder)
    ours = pyg_ioaware_command("run", "scripts/probe.py", "--epochs", "3", "-m", "x", cwd=folder)
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    assert "Error" not in ours.stderr
    assert "pyg_ioaware: cache: " in ours.stderr


def test_run_trains_fused_and_keeps_the_exit_status(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import sys, torch
            from torch_geometric.nn import GCNConv
            x, edge_index = torch.randn(5, 4), torch.randint(5, (2, 9))
            GCNConv(4, 4)(x, edge_index).sum().backward()
            sys.exit(int(sys.argv[1]))
        """)
    )
    result = pyg_ioaware_command("run", "--strict", script, "7", cwd=tmp_path)
    assert result.returncode == 7
    assert "pyg_ioaware: GCNConv: 1 fused, 0 stock\n" in result.stderr


def test_run_shows_the_scripts_own_exception(tmp_path):
    (tmp_path / "fails.py").write_text("raise KeyError('mine')\n")
    result = pyg_ioaware_command("run", "--quiet", "fails.py", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.endswith("KeyError: 'mine'\n")
    assert "pyg_ioaware: " not in result.stderr


def test_run_module_and_folder(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(__name__, sys.argv, sys.path[0])\n")
    for target in (["-m", "package", "-x"], ["package", "-x"]):
        plain = python(*target, cwd=tmp_path)
        ours = pyg_ioaware_command("run", *target, cwd=tmp_path)
        # A folder is made absolute in sys.argv too, so that it is found after a chdir.
        expected = plain.stdout.replace("['package'", f"['{package}'")
        assert (ours.returncode, ours.stdout) == (0, expected), ours.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run"], "give a script"),
        (["run", "-m"], "give a script"),
        (["run", "no/such.py"], "no such script 'no/such.py'"),
        (["run", "-m", "no_such_module"], "no module 'no_such_module'"),
        (["run", "-m", "no_such.module"], "no module 'no_such.module'"),
    ],
)
def test_run_bad_target(argv, message, capsys):
    assert command.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: run: ")
    assert message in lines[0]
    assert not pyg_ioaware.is_patched()


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["run", "--fast", "x.py"], ["demo", "--epochs", "0"]]
)
def test_bad_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(argv)
    assert exit_.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["a.py", "-m", "b"], ([], False, ["a.py", "-m", "b"])),
        (["--strict", "a.py"], (["--strict"], False, ["a.py"])),
        (["--strict", "-m", "b", "--strict"], (["--strict"], True, ["b", "--strict"])),
        (["-h"], (["-h"], False, [])),
    ],
)
def test_split(argv, parts):
    assert run.split(argv) == parts


of_a_cpu = pytest.mark.skipif(not ON_CPU, reason="about the engine of the CPU")


@of_a_cpu
def test_doctor(capsys):
    assert command.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "CPU engine:   works" in out
    assert "CUDA engine:  no GPU that PyTorch can use" in out or torch.cuda.is_available()
    assert not pyg_ioaware.is_patched()


@of_a_cpu
def test_doctor_reports_an_engine_that_is_wrong(monkeypatch, capsys):
    from pyg_ioaware.engines.cpu import CPUEngine

    # Kernels that write nothing; new memory may hold stock's results from a moment before.
    monkeypatch.setattr(CPUEngine, "run", lambda self, kernel, csr, *args: None)
    monkeypatch.setattr(CPUEngine, "empty", lambda self, *args: torch.zeros(args[0], dtype=args[1]))
    works, text = doctor.check_engine("cpu")
    assert not works
    assert text.startswith("does not work")


def test_import_is_cheap(tmp_path):
    code = """
        import sys, torch_geometric
        before = set(sys.modules)
        import pyg_ioaware, pyg_ioaware.__main__
        pyg_ioaware.patch()
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        assert not new & {"numba", "llvmlite", "sklearn", "matplotlib", "rich", "cupy"}, new
        import torch
        assert not torch.cuda.is_initialized()
    """
    result = python("-c", textwrap.dedent(code), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
