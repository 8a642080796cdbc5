"""The graphs of the CUDA benchmarks: four synthetic ones, and real ones from a folder."""

from pathlib import Path

import numpy as np
import torch
from old_graphs import load
from torch import Tensor

SYNTHETIC = ("arxiv-like", "products4-like", "road-like", "tolokers-like")
REAL = (
    *("tolokers", "web_cnr2000", "gene_pubmed@400"),
    *("debian_contents", "mesh_wave", "roads_moscow"),
)


def power_law(num_nodes: int, num_edges: int, exponent: float, seed: int = 0) -> Tensor:
    """Draws an undirected graph whose degrees follow a power law, without parallel edges."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    options = {"device": "cuda", "dtype": torch.float64}
    chance = torch.arange(1, num_nodes + 1, **options) ** (-1.0 / (exponent - 1.0))
    cumulative = (chance / chance.sum()).cumsum(0)
    label = torch.randperm(num_nodes, generator=g, device="cuda")
    ends = [
        label[torch.searchsorted(cumulative, drawn).clamp_(max=num_nodes - 1)]
        for drawn in torch.rand(2, num_edges // 2, generator=g, **options)
    ]
    source, target = torch.cat(ends), torch.cat(ends[::-1])
    key = torch.unique(target * num_nodes + source)
    return torch.stack([key % num_nodes, key // num_nodes])


def road(num_nodes: int, kept: float = 0.7, seed: int = 0) -> tuple[Tensor, int]:
    """Draws a grid of which a part of the edges is kept."""
    side = int(num_nodes**0.5)
    i = torch.arange(side * side, device="cuda")
    right, down = i[i % side < side - 1], i[i < side * (side - 1)]
    edges = torch.cat([torch.stack([right, right + 1]), torch.stack([down, down + side])], dim=1)
    g = torch.Generator(device="cuda").manual_seed(seed)
    edges = edges[:, torch.rand(edges.size(1), generator=g, device="cuda") < kept]
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    return edges[:, edges[1].argsort(stable=True)], side * side


def project(path: Path, max_degree: int) -> tuple[Tensor, int]:
    """Joins nodes of one side of a bipartite graph that share a node of the other.

    Only nodes of the other side with 2 to :obj:`max_degree` neighbours count.
    """
    import scipy.sparse as sp

    with np.load(path, allow_pickle=False) as file:
        size, other = (int(s) for s in file["part_sizes"])
        ones = np.ones(len(file["row"]), np.float32)
        b = sp.csr_matrix((ones, (file["row"], file["col"] - size)), (size, other))
    degree = np.asarray(b.sum(0)).ravel()
    b = b[:, (degree >= 2) & (degree <= max_degree)]
    a = (b @ b.T).tocsr()
    a.setdiag(0)
    a.eliminate_zeros()
    a.sort_indices()
    a = a.tocoo()
    return torch.from_numpy(np.stack([a.col, a.row]).astype(np.int64)), size


def read(name: str, folder: Path | None) -> tuple[Tensor, int]:
    """Returns the edges, sorted by target, and the number of nodes of a graph, on the GPU."""
    if name == "arxiv-like":
        return power_law(169_343, 2_330_000, 2.5), 169_343
    if name == "products4-like":
        return power_law(600_000, 31_000_000, 2.6), 600_000
    if name == "road-like":
        return road(1_000_000)
    if name == "tolokers-like":
        return power_law(11_758, 1_040_000, 2.6), 11_758
    if folder is None:
        raise SystemExit(f"'{name}' needs --graphs, the folder of its file")
    name, _, bound = name.partition("@")
    path = folder / f"{name}.npz"
    edges, num_nodes = project(path, int(bound)) if bound else load(path)
    edges = edges.cuda()
    return edges[:, edges[1].argsort(stable=True)], num_nodes
