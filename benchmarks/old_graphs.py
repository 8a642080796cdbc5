"""Graphs to measure on: a generator, and edge lists in npz files."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def power_law(num_nodes: int, num_edges: int, exponent: float = 2.5, seed: int = 0) -> Tensor:
    r"""Draws a directed graph whose degrees follow a power law at both ends.

    Args:
        num_nodes (int): The number of nodes.
        num_edges (int): The number of edges; parallel edges may occur.
        exponent (float, optional): The exponent of the degree distribution.
            (default: :obj:`2.5`)
        seed (int, optional): The seed. (default: :obj:`0`)

    Returns:
        torch.Tensor: An :obj:`edge_index` of shape :obj:`[2, num_edges]`, unsorted.
    """
    rng = np.random.default_rng(seed)
    chance = np.arange(1, num_nodes + 1) ** (-1.0 / (exponent - 1.0))
    cumulative = np.cumsum(chance / chance.sum())
    ends = []
    for _ in range(2):
        drawn = np.searchsorted(cumulative, rng.random(num_edges)).clip(max=num_nodes - 1)
        ends.append(rng.permutation(num_nodes)[drawn])
    return torch.from_numpy(np.stack(ends))


def load(path: Path) -> tuple[Tensor, int]:
    r"""Reads the edges of an npz file with :obj:`row`, :obj:`col` and :obj:`num_nodes`.

    A file whose :obj:`directed` is false holds each edge once; the reverse is added.

    Returns:
        tuple: The :obj:`edge_index` of shape :obj:`[2, E]` and the number of nodes.
    """
    with np.load(path, allow_pickle=False) as file:
        row, col = file["row"].astype(np.int64), file["col"].astype(np.int64)
        num_nodes = int(file["num_nodes"])
        if "directed" in file.files and not bool(file["directed"]):
            other = row != col
            row, col = np.concatenate([row, col[other]]), np.concatenate([col, row[other]])
    return torch.from_numpy(np.stack([row, col])), num_nodes
