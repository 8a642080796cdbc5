"""``python -m pyg_ioaware doctor``: what is installed, what works, what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from importlib.util import find_spec

DEMO = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "rich": "rich"}


def main(support_table: bool) -> int:
    """Prints the findings; the exit status is 1 if no engine works."""
    if support_table:
        from pyg_ioaware import tables

        print(tables.support_table().strip())
        return 0
    works, cpu = check_engine("cpu")
    lines = {
        "machine": f"Python {platform.python_version()}, {platform.platform()}",
        "versions": ", ".join(
            f"{name} {_version(name)}"
            for name in ("pyg_ioaware", "torch", "torch_geometric", "numpy", "numba")
        ),
        "optional": ", ".join(f"{name}: {flag}" for name, flag in _flags().items()),
        "threads": _threads(),
        "CPU engine": cpu,
        "CUDA engine": _cuda(),
        "kernel cache": _kernel_cache(),
        "to install": "; ".join(_advice()) or "nothing is missing",
    }
    for name, text in lines.items():
        print(f"{name + ':':14}{text}")
    return 0 if works else 1


def check_engine(device: str) -> tuple[bool, str]:
    """Trains two tiny layers fused and compares outputs and gradients with stock PyG."""
    import torch
    from torch_geometric.nn import GCNConv, SAGEConv

    import pyg_ioaware

    start = time.perf_counter()
    worst = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(50, 8).to(device)
        edges = torch.randint(50, (2, 300)).to(device)
        for made in (GCNConv(8, 8), SAGEConv(8, 8, aggr="max")):
            conv = made.to(device)
            name = type(conv).__name__

            def run(conv: torch.nn.Module = conv) -> list[torch.Tensor]:
                source = x.clone().requires_grad_()
                out: torch.Tensor = conv(source, edges)
                return [out, *torch.autograd.grad(out.square().sum(), source)]

            try:
                with pyg_ioaware.disabled():
                    expected = run()
                found = pyg_ioaware.explain(conv, x, edges)
                if not found.fused:
                    return False, f"does not work: {name} runs on stock ({found.reasons[0]})"
                with pyg_ioaware.patched():
                    got = run()
            except Exception as error:
                reason = " ".join(str(error).split())
                return False, f"does not work: {name}: {type(error).__name__}: {reason}"
            for a, b in zip(expected, got, strict=True):
                worst = max(worst, float(((a - b).abs().max() / a.abs().max()).detach()))
    if not worst < 1e-4:
        return False, f"does not work: it differs from stock PyG by {worst:.1g}"
    seconds = time.perf_counter() - start
    return True, f"works (differs from stock by {worst:.0e} at most; checked in {seconds:.1f} s)"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU that PyTorch can use"
    _, found = check_engine("cuda")
    return f"{found} on {torch.cuda.get_device_name()}"


def _flags() -> dict[str, str]:
    from torch_geometric import typing

    flags = {}
    for name in ("torch_sparse", "torch_scatter", "pyg_lib"):
        if getattr(typing, f"WITH_{name.upper()}"):
            flags[name] = "yes"
        else:
            flags[name] = "no" if find_spec(name) is None else "installed, but PyG cannot load it"
    return flags


def _threads() -> str:
    import torch

    return f"{torch.get_num_threads()} (torch.get_num_threads) on {os.cpu_count()} cores"


def _kernel_cache() -> str:
    if find_spec("numba") is None:
        return "none without numba"
    import numba
    from numba.misc.appdirs import AppDirs

    folder: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    folder = folder or AppDirs(appname="numba", appauthor=False).user_cache_dir
    parent = folder
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    usable = os.access(parent, os.W_OK)
    return folder if usable else f"{folder} (not writable: every process compiles anew)"


def _advice() -> list[str]:
    advice = []
    if find_spec("numba") is None:
        advice.append("numba, for the CPU engine: pip install numba")
    if find_spec("torch_sparse") is None:
        advice.append(
            "optional, for SparseTensor: pip install scipy, "
            "then pip install --no-build-isolation torch_sparse torch_scatter"
        )
    elif find_spec("scipy") is None:
        advice.append("scipy, which torch_sparse needs: pip install scipy")
    missing = [package for module, package in DEMO.items() if find_spec(module) is None]
    if missing:
        advice.append(f"for the demo ({', '.join(missing)}): pip install 'pyg_ioaware[demo]'")
    return advice


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        import pyg_ioaware

        return f"{pyg_ioaware.__version__} (not installed)" if name == "pyg_ioaware" else "missing"
