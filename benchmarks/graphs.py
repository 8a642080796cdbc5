r"""Graphs to measure on: generators, and edge lists in npz files.

A graph is named by its generator and arguments, ``power_law:20000:400000:2.5``, by an alias below,
or by the stem of a file; ``NAME@400`` joins the nodes of one side of a bipartite file that share a
neighbour of degree 2 to 400. Edges are sorted by source, then target, as PyG's ``coalesce`` leaves
them, except for those of sampled batches, which come grouped by target from a loader.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pyg_ioaware.demo import data, npz

Array = npt.NDArray[np.int64]

ALIASES = {
    "arxiv-like": "social:169343:2330000:2.5",
    "products4-like": "social:600000:31000000:2.6",
    "road-like": "grid:1000:0.7",
    "tolokers-like": "social:11758:1040000:2.6",
}


@dataclass(frozen=True)
class Graph:
    r"""Edges from sources to targets, which are the same nodes unless the graph is bipartite.

    Attributes:
        edge_index (torch.Tensor): The edges, of shape :obj:`[2, E]`.
        num_src (int): The number of sources.
        num_dst (int): The number of targets.
        edge_attr (torch.Tensor, optional): Features of the edges.
        bipartite (bool): Whether sources and targets are different nodes.
        task (tuple, optional): Features, labels, and the masks of training and test nodes.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int
    edge_attr: Tensor | None = None
    bipartite: bool = False
    task: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    def to(self, device: str) -> "Graph":
        attr = None if self.edge_attr is None else self.edge_attr.to(device)
        task: Any = None if self.task is None else tuple(t.to(device) for t in self.task)
        return replace(self, edge_index=self.edge_index.to(device), edge_attr=attr, task=task)


def read(name: str, folder: Path | None = None, task: bool = False) -> Graph:
    r"""Returns a graph by its name.

    Args:
        name (str): A generator with arguments, an alias, or the stem of a file.
        folder (Path, optional): Where the files are. (default: :obj:`None`)
        task (bool, optional): If set, a file's features and labels are read, too.
            (default: :obj:`False`)

    Raises:
        ValueError: If there is no such graph.
    """
    generator, *words = ALIASES.get(name, name).split(":")
    if generator in GENERATORS:
        return GENERATORS[generator](*(ast.literal_eval(word) for word in words))
    stem, _, bound = name.partition("@")
    path = None if folder is None else folder / f"{stem}.npz"
    if path is None or not path.exists():
        known = ", ".join([*GENERATORS, *ALIASES])
        raise ValueError(f"no graph '{name}': neither one of {known} nor a file in --graphs")
    if bound:
        return project(path, int(bound))
    if task:
        found = data.from_file(str(path), seed=0)
        if found.y.dim() == 2:
            raise ValueError(f"'{name}' has several labels per node")
        n, labels = found.x.size(0), (found.x, found.y, found.train_mask, found.test_mask)
        return Graph(_sorted(found.edge_index.numpy()), n, n, task=labels)
    raw = npz.read(str(path))
    return _graph(raw["edges"], raw["num_nodes"])


def power_law(nodes: int, edges: int, exponent: float = 2.5, seed: int = 0) -> Graph:
    """Draws directed edges, parallel ones too; degrees follow a power law at both ends."""
    rng = np.random.default_rng(seed)
    return _graph(np.stack([_ends(rng, nodes, edges, exponent) for _ in range(2)]), nodes)


def social(nodes: int, edges: int, exponent: float = 2.5, seed: int = 0) -> Graph:
    """Draws an undirected graph whose degrees follow a power law, without parallel edges."""
    rng = np.random.default_rng(seed)
    chance, label = _chance(nodes, exponent), rng.permutation(nodes)
    drawn = [label[_draw(rng, chance, edges // 2)] for _ in range(2)]
    return _undirected(np.stack(drawn), nodes)


def rmat(scale: int, degree: int, a: float = 0.57, b: float = 0.19, c: float = 0.19) -> Graph:
    """Draws a recursive-matrix (Graph500) graph of 2**scale nodes; parallel edges stay."""
    rng = np.random.default_rng(0)
    ends = np.zeros((2, degree << scale), np.int64)
    for _ in range(scale):
        quadrant = np.searchsorted(np.cumsum([a, b, c]), rng.random(ends.shape[1]))
        ends = 2 * ends + np.stack([quadrant >> 1, quadrant & 1])
    return _graph(rng.permutation(1 << scale)[ends], 1 << scale)


def hub(nodes: int, edges: int, largest: int) -> Graph:
    """Draws uniform edges, of which the first `largest` run to one node."""
    ends = np.random.default_rng(0).integers(0, nodes, (2, edges))
    ends[1, :largest] = 0
    return _graph(ends, nodes)


def grid(side: int, kept: float = 1.0) -> Graph:
    """Returns a square grid, of whose edges a part is kept, as roads are."""
    i = np.arange(side * side)
    right, down = i[i % side < side - 1], i[: side * (side - 1)]
    ends = np.concatenate([[right, right + 1], [down, down + side]], axis=1)
    ends = ends[:, np.random.default_rng(0).random(ends.shape[1]) < kept]
    return _undirected(ends, side * side)


def mesh(nodes: int) -> Graph:
    """Triangulates random points, numbered by rows of cells; edges know their displacement."""
    from scipy.spatial import Delaunay

    points = np.random.default_rng(0).random((nodes, 2))
    points = points[np.lexsort((points[:, 0], (points[:, 1] * nodes**0.5).astype(int)))]
    corners = Delaunay(points).simplices.astype(np.int64)
    pairs = np.concatenate([corners[:, [0, 1]], corners[:, [1, 2]], corners[:, [2, 0]]]).T
    graph = _undirected(pairs, nodes)
    return replace(graph, edge_attr=_displacement(points, points, graph.edge_index))


def bipartite(sources: int, targets: int, degree: int) -> Graph:
    """Joins each target to its nearest sources, as between a grid and a mesh."""
    from scipy.spatial import KDTree

    rng = np.random.default_rng(0)
    x, y = rng.random((sources, 2)), rng.random((targets, 2))
    near = KDTree(x).query(y, degree)[1].reshape(-1)
    edge_index = _sorted(np.stack([near, np.arange(targets).repeat(degree)]))
    attr = _displacement(x, y, edge_index)
    return Graph(edge_index, sources, targets, attr, bipartite=True)


def molecules(count: int, kinds: int = 4) -> Graph:
    """Batches trees of 9 to 40 atoms with some rings; edges know the kind of their bond."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(9, 41, count)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    atom = np.arange(sizes.sum())
    place = atom - first
    # Each atom but the first of a molecule is bonded to one of the three before it.
    before = np.maximum(place - rng.integers(1, 4, len(atom)), 0)
    tree = np.stack([atom, first + before])[:, place > 0]
    ring = np.stack([atom, atom - 5])[:, (place >= 5) & (rng.random(len(atom)) < 0.1)]
    graph = _undirected(np.concatenate([tree, ring], axis=1), len(atom))
    low, high = graph.edge_index.min(0).values, graph.edge_index.max(0).values
    kind = (low * 7 + high * 3) % kinds  # that of both directions
    return replace(graph, edge_attr=torch.nn.functional.one_hot(kind, kinds).float())


def sampled(nodes: int, edges: int, seeds: int, fanout: int = 10, hops: int = 2) -> Graph:
    """Samples neighbours of some nodes of a power-law graph, as NeighborLoader's batches are."""
    rng = np.random.default_rng(0)
    src, dst = power_law(nodes, edges).edge_index.numpy()
    src = src[np.argsort(dst, kind="stable")]
    start = np.searchsorted(np.sort(dst), np.arange(nodes + 1))
    known = np.full(nodes, -1)
    found = rng.permutation(nodes)[:seeds]
    known[found] = np.arange(seeds)
    frontier, total, pairs = found, seeds, []
    for _ in range(hops):
        degree = start[frontier + 1] - start[frontier]
        taken = np.minimum(degree, fanout)
        target = np.repeat(frontier, taken)
        nth = np.arange(len(target)) - np.repeat(np.cumsum(taken) - taken, taken)
        shift = np.repeat(rng.integers(0, 2**31, len(frontier)), taken)
        source = src[start[target] + (nth + shift) % (start[target + 1] - start[target])]
        new = np.unique(source[known[source] < 0])
        known[new] = total + np.arange(len(new))
        pairs.append(np.stack([known[source], known[target]]))
        frontier, total = new, total + len(new)
    return Graph(torch.from_numpy(np.concatenate(pairs, axis=1)), total, total)


def planted(nodes: int, edges: int, classes: int = 10, width: int = 64) -> Graph:
    """Draws labelled communities: most edges stay inside, features are noisy."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, classes, nodes)
    members, start = np.argsort(y, kind="stable"), np.searchsorted(np.sort(y), np.arange(classes))
    count = np.bincount(y, minlength=classes)
    src = _ends(rng, nodes, edges // 2, 2.5)
    inside = members[start[y[src]] + rng.integers(0, 2**31, len(src)) % count[y[src]]]
    dst = np.where(rng.random(len(src)) < 0.6, inside, rng.integers(0, nodes, len(src)))
    graph = _undirected(np.stack([src, dst]), nodes)
    x = rng.normal(0, 0.4, (classes, width))[y] + rng.normal(size=(nodes, width))
    train = torch.from_numpy(rng.random(nodes) < 0.5)
    labels = torch.from_numpy(x).float(), torch.from_numpy(y), train, ~train
    return replace(graph, task=labels)


def project(path: Path, max_degree: int) -> Graph:
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
    a = (b @ b.T).tocoo()
    ends = np.stack([a.row, a.col]).astype(np.int64)
    return _graph(ends[:, ends[0] != ends[1]], size)


GENERATORS: dict[str, Callable[..., Graph]] = {
    f.__name__: f
    for f in (
        *(power_law, social, rmat, hub, grid, mesh),
        *(bipartite, molecules, sampled, planted),
    )
}


def _chance(nodes: int, exponent: float) -> npt.NDArray[np.float64]:
    chance = np.arange(1, nodes + 1) ** (-1.0 / (exponent - 1.0))
    return np.cumsum(chance / chance.sum())


def _draw(rng: np.random.Generator, cumulative: npt.NDArray[np.float64], count: int) -> Array:
    return np.searchsorted(cumulative, rng.random(count)).clip(max=len(cumulative) - 1)


def _ends(rng: np.random.Generator, nodes: int, edges: int, exponent: float) -> Array:
    drawn = _draw(rng, _chance(nodes, exponent), edges)
    return rng.permutation(nodes)[drawn]


def _sorted(ends: Array) -> Tensor:
    order = np.lexsort((ends[1], ends[0]))
    return torch.from_numpy(np.ascontiguousarray(ends[:, order], np.int64))


def _graph(ends: Array, nodes: int) -> Graph:
    return Graph(_sorted(ends), nodes, nodes)


def _undirected(ends: Array, nodes: int) -> Graph:
    ends = ends[:, ends[0] != ends[1]]
    src, dst = np.concatenate([ends, ends[::-1]], axis=1).astype(np.int64)
    key = np.unique(src * nodes + dst)
    return Graph(torch.from_numpy(np.stack([key // nodes, key % nodes])), nodes, nodes)


def _displacement(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], edge_index: Tensor
) -> Tensor:
    src, dst = edge_index.numpy()
    step = x[src] - y[dst]
    found = np.concatenate([step, np.linalg.norm(step, axis=1, keepdims=True)], axis=1)
    return torch.from_numpy(found).float()
