"""One training step from an installed wheel; fails unless the package is the installed one."""

import torch
from torch_geometric.nn import GCNConv

import pyg_ioaware

assert "site-packages" in pyg_ioaware.__file__, pyg_ioaware.__file__
conv = GCNConv(4, 4)
x, edge_index = torch.randn(6, 4), torch.randint(6, (2, 20))
conv(x, edge_index).square().sum().backward()
calls = pyg_ioaware.stats()["layers"]["GCNConv"]
assert calls == {"fused": 1, "stock": {}}, calls
