"""The demo's graphs: bundled digits, a PyG data set by name, or a file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_ioaware.cli.errors import CommandError, require
from pyg_ioaware.demo import npz

CLASSES = 5
"""Degree classes that stand in for missing labels."""
FEATURES = 64
"""Width of the random features that stand in for missing ones."""
WIDEST = 2**26
"""More feature values than this are projected to `PROJECTED` columns (256 MiB as float32)."""
PROJECTED = 256

PYG_DATASETS: dict[str, tuple[str, str | None]] = {
    **{name: ("Planetoid", name) for name in ("Cora", "CiteSeer", "PubMed")},
    **{name: ("Amazon", name) for name in ("Computers", "Photo")},
    **{name: ("Coauthor", name) for name in ("CS", "Physics")},
    **{
        name: ("HeterophilousGraphDataset", name)
        for name in ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions")
    },
    **{name: (name, None) for name in ("KarateClub", "WikiCS", "Actor", "Flickr", "Reddit")},
}
"""Name on the command line -> PyG's class and the name that it takes."""


@dataclass
class Graph:
    """A node-classification task; `x` is dense, and nodes outside every mask have no label.

    `y` is ``[N]`` (classes) or ``[N, L]`` (multi-label, 0 and 1).
    """

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train_mask: Tensor
    test_mask: Tensor
    notes: list[str] = field(default_factory=list)

    @property
    def outputs(self) -> int:
        """How many values a model gives for each node."""
        return self.y.size(1) if self.y.dim() == 2 else int(self.y.max()) + 1


def digits(seed: int, neighbours: int = 10) -> Graph:
    """The symmetric k-nearest-neighbour graph of scikit-learn's bundled digits (offline)."""
    require(["sklearn"], "demo")
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    images, labels = load_digits(return_X_y=True)
    adjacency = kneighbors_graph(images, neighbours)
    row, col = adjacency.maximum(adjacency.T).tocoo().coords
    return _complete(
        f"digits ({neighbours} nearest neighbours)",
        len(images),
        torch.from_numpy(np.stack([row, col]).astype(np.int64)),
        torch.from_numpy((images / 16).astype(np.float32)),
        torch.from_numpy(labels),
        {},
        seed,
    )


def from_file(path: str, seed: int) -> Graph:
    """The graph of an ``.npz`` file; see `pyg_ioaware.demo.npz.read` for its format."""
    raw = npz.read(path)
    x = raw.get("x")
    if isinstance(x, tuple):
        indptr, indices, data, width = x
        rows = np.repeat(np.arange(raw["num_nodes"]), np.diff(indptr))
        x = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([rows, indices])),
            torch.from_numpy(data),
            (raw["num_nodes"], width),
            check_invariants=True,
            device="cpu",
        )
    elif x is not None:
        x = torch.from_numpy(x)
    masks = {key: torch.from_numpy(raw[key]) for key in raw if key.endswith("_mask")}
    y = torch.from_numpy(raw["y"]) if "y" in raw else None
    name = os.path.basename(path).removesuffix(".npz")
    edges = torch.from_numpy(raw["edges"])
    try:
        return _complete(name, raw["num_nodes"], edges, x, y, masks, seed)
    except CommandError as error:
        raise CommandError(f"{path}: {error}") from None


def from_pyg(name: str, seed: int, root: str | None = None) -> Graph:
    """A data set that PyG downloads, by its name in any case."""
    known = {key.lower(): key for key in PYG_DATASETS}
    if name.lower() not in known:
        raise CommandError(f"unknown data set '{name}': choose from {', '.join(PYG_DATASETS)}")
    name = known[name.lower()]
    import torch_geometric
    import torch_geometric.datasets

    kind, argument = PYG_DATASETS[name]
    root = root or os.path.join(torch_geometric.get_home_dir(), "demo")
    try:
        make = getattr(torch_geometric.datasets, kind)
        arguments = [argument] if argument else []
        folder = os.path.join(root, kind)
        data = (make() if kind == "KarateClub" else make(folder, *arguments))[0].cpu()
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"data set '{name}' cannot be loaded: {reason}", code=1) from None
    masks = {}
    for key in ("train_mask", "test_mask"):
        mask = data.get(key)
        if mask is not None:
            masks[key] = mask[:, 0] if mask.dim() == 2 else mask
    return _complete(name, data.num_nodes, data.edge_index, data.x, data.y, masks, seed)


def _complete(
    name: str,
    n: int,
    edges: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    masks: dict[str, Tensor],
    seed: int,
) -> Graph:
    """Fills in what a source left out, always in the same way for one seed."""
    generator = torch.Generator().manual_seed(seed)  # of the CPU, whatever the default device is
    notes = []
    _check_memory(n * FEATURES * 4)  # the least that any graph of this size needs
    degree = torch.bincount(edges[1], minlength=n)
    if x is None:
        notes.append(f"no features: {FEATURES - 1} random ones and the degree are used")
        x = torch.randn(n, FEATURES, generator=generator, device="cpu")
        x[:, 0] = degree.float().log1p()
    elif x.numel() > WIDEST:
        notes.append(f"{x.size(1)} features: projected to {PROJECTED} random directions")
        _check_memory((n + x.size(1)) * PROJECTED * 4)
        directions = torch.randn(x.size(1), PROJECTED, generator=generator, device="cpu")
        x = x @ (directions / PROJECTED**0.5)
    elif x.layout != torch.strided:
        x = x.to_dense()
    if y is None:
        notes.append(f"no labels: {CLASSES} classes of equal size by degree are used")
        rank = degree.argsort(stable=True).argsort()
        y = rank * CLASSES // n
    labelled = torch.ones(n, dtype=torch.bool, device="cpu")
    if y.dim() == 1:
        # Negative classes mean "unknown", as in PyG.
        labelled = y >= 0
        if not labelled.any():
            raise CommandError("no node has a label")
        _, index = y[labelled].unique(return_inverse=True)
        y = torch.zeros_like(y).masked_scatter(labelled, index)
    train, test = _split(masks, labelled, generator, notes)
    return Graph(name, x.contiguous(), edges, y, train, test, notes)


def _split(
    masks: dict[str, Tensor], labelled: Tensor, generator: torch.Generator, notes: list[str]
) -> tuple[Tensor, Tensor]:
    if "train_mask" in masks:
        train = masks["train_mask"].bool() & labelled
        others = labelled & ~train
        test = masks["test_mask"].bool() & labelled if "test_mask" in masks else others
    else:
        notes.append("no split: a random 60 % of the nodes train, 40 % test")
        drawn = torch.rand(len(labelled), generator=generator, device="cpu")
        train = labelled & (drawn < 0.6)
        test = labelled & ~train
    if not train.any():
        raise CommandError("no labelled node is left to train on")
    return train, test


def _check_memory(size: int) -> None:
    """Refuses what cannot fit, before the allocator fails in a way of its own."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    if size > memory // 2:
        raise CommandError(
            f"its features need {size / 2**30:.0f} GiB, more than half of this machine's memory"
        )


def save(graph: Graph, path: str) -> None:
    """Writes a graph for a worker process."""
    torch.save(vars(graph), path)


def load(path: str) -> Graph:
    """Reads what `save` wrote."""
    fields: dict[str, Any] = torch.load(path, weights_only=True)
    return Graph(**fields)
