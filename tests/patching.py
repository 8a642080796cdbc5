"""A small model, and what the patch has done to it and to PyG."""

import sys
import types

from graphs import features, random_edges
from torch import nn
from torch_geometric.nn import GCNConv, MessagePassing, SAGEConv

import pyg_ioaware

patch_module = sys.modules["pyg_ioaware.patch"]  # the package has the function by this name

C = 8
N = 9
EDGES = random_edges(N, N, 30)
X = features(N, C)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GCNConv(C, C)
        self.norm = nn.BatchNorm1d(C)
        self.second = SAGEConv(C, C, aggr="max")

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index)).relu()
        return self.second(nn.functional.dropout(x, 0.5, self.training), edge_index)


class Odd(MessagePassing):
    """A layer that always forms its messages."""

    def __init__(self):
        super().__init__(aggr="sum")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.cumsum(0)


def fused_calls(call, *args):
    """Returns how many aggregations of a call run fused."""
    pyg_ioaware.stats(reset=True)
    call(*args)
    return sum(layer["fused"] for layer in pyg_ioaware.stats()["layers"].values())


def functions():
    """Returns every function that PyG's modules and its base class hold, by place."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch_geometric") and isinstance(module, types.ModuleType):
            found |= {
                (name, key): value
                for key, value in list(vars(module).items())
                if type(value) is types.FunctionType
            }
    for cls in (MessagePassing, *MessagePassing.__subclasses__()):
        for key, value in vars(cls).items():
            # A class gets its generated functions with its first instance.
            if type(value) is types.FunctionType and "propagate" not in key:
                found[f"{cls.__module__}.{cls.__qualname__}", key] = value
    return found


def assert_stock(before):
    after = functions()
    assert [place for place in before if after.get(place) is not before[place]] == []
    new = [place for place in after if place not in before]
    ours = [p for p in new if after[p].__code__.co_filename.startswith(patch_module.__file__)]
    assert ours == []
