"""What the patch does to a process as a whole."""

import warnings

import pytest
import torch
from child import run_python
from patching import EDGES, Net, X
from torch import nn

import pyg_ioaware


def test_import_touches_neither_numba_nor_cuda():
    run_python(
        """
        import sys, warnings, torch_geometric
        warnings.simplefilter("error")
        before = set(sys.modules)
        import pyg_ioaware
        pyg_ioaware.patch()
        pyg_ioaware.unpatch()
        import torch
        assert not {"numba", "llvmlite", "cupy", "scipy"} & (set(sys.modules) - before)
        assert not torch.cuda.is_initialized()
        assert "torch_geometric.graphgym.models" not in sys.modules
        """
    )


def test_patch_without_an_engine():
    """Where Numba cannot be imported, stock runs, with one warning at most."""
    out = run_python(
        """
        import logging, sys
        sys.modules["numba"] = sys.modules["llvmlite"] = None
        logging.basicConfig(stream=sys.stdout, format="%(name)s")
        import torch, pyg_ioaware
        from torch_geometric.nn import GCNConv, SAGEConv
        x, edge_index = torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])
        convs = [GCNConv(4, 4), SAGEConv(4, 4, aggr="max"), SAGEConv(4, 4)]
        expected = [conv(x, edge_index) for conv in convs]
        pyg_ioaware.patch()
        for _ in range(2):
            for conv, known in zip(convs, expected):
                torch.testing.assert_close(conv(x, edge_index), known)
        """
    )
    assert out.splitlines() in ([], ["pyg_ioaware"])


VARIABLE = """
    import torch, pyg_ioaware
    from torch_geometric.nn import EdgeConv, MessagePassing, SAGEConv
    stock = MessagePassing._index_select_safe
    x, edge_index = torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])
    conv = SAGEConv(4, 4)
    pyg_ioaware.patch()
    with pyg_ioaware.patched():
        conv(x, edge_index)
    pyg_ioaware.accelerate(conv)(x, edge_index)
    print(stock is MessagePassing._index_select_safe, pyg_ioaware.is_patched())
    try:
        EdgeConv(torch.nn.Linear(8, 4), aggr="sum")(x, edge_index)
        print("ran")
    except pyg_ioaware.FallbackError:
        print("raised")
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "False True ran"),
        ({"PYG_IOAWARE_DISABLE": "1"}, "True False ran"),
        ({"PYG_IOAWARE_DISABLE": "0"}, "False True ran"),
        ({"PYG_IOAWARE_STRICT": "1"}, "False True raised"),
    ],
)
def test_environment_variables(environment, expected):
    assert run_python(VARIABLE, **environment).split() == expected.split()


def test_pickles_need_no_plugin(tmp_path):
    """A model saved while patched, and an accelerated one, load where the plugin is missing."""
    for name, model in (("patched", Net()), ("accelerated", pyg_ioaware.accelerate(Net()))):
        pyg_ioaware.patch()
        model(X, EDGES)
        del model.norm
        model.__class__ = nn.Module  # 'Net' lives in this file
        torch.save(model, tmp_path / name)
    run_python(
        """
        import sys, torch
        sys.modules["pyg_ioaware"] = None
        from torch_geometric.nn import GCNConv
        for path in sys.argv[1:]:
            model = torch.load(path, "cpu", weights_only=False)
            assert type(model.first) is GCNConv
            model.second(model.first(torch.ones(3, 8), torch.tensor([[0, 1], [1, 2]])),
                         torch.tensor([[0, 1], [1, 2]]))
        """,
        *map(str, tmp_path.iterdir()),
    )


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyg_ioaware.patch()
        Net()(X, EDGES)
        pyg_ioaware.unpatch()
