"""Calls of the operations that reach every CUDA kernel with every option, on small graphs.

tests/host_cuda/registers.py compiles what they launch, and tests/gpu/sanitize.py runs them under
compute-sanitizer (as a script: python tests/every_kernel.py, with TEST_DEVICE=cuda).
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from graphs import DEVICE, Graph, features, random_edges
from torch import Tensor

from pyg_ioaware import engines, ops
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.ops.attention import EdgeFeatures
from pyg_ioaware.ops.bias import biased
from pyg_ioaware.ops.reduce import TIES

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BOTH = (False, True)


class Shape(NamedTuple):
    """Heads, numbers of a head, and features of an edge."""

    heads: int
    channels: int
    dim: int


def _hubs() -> Graph:
    """Rows of up to 120 edges, whose tiles are more than one warp merges, and some of none.

    There is a source without edges, too: the only rows by source that are not split.
    """
    edges = random_edges(9, 12, 60)
    edges[1, :20] = 3
    hub = torch.stack([random_edges(9, 9, 120, seed=1)[0], torch.full((120,), 5, device=DEVICE)])
    return Graph(torch.cat([edges, hub], dim=1), 10, 14)


_DENSE = Graph(random_edges(5, 4, 200), 6, 4)
_LONG = Graph(random_edges(5, 1, 300), 6, 1)  # whose marks are scanned
# Each with the edges beyond which a row is split; whole rows have full batches of edges.
GRAPHS = [(_DENSE, 128), (_DENSE, 3), (_hubs(), 3)]

Call = Callable[[Adjacency, torch.dtype, Shape], None]


def _step(out: Tensor, *leaves: Tensor | None) -> None:
    given = [leaf for leaf in leaves if leaf is not None]
    torch.autograd.grad(out.float().square().sum(), given, allow_unused=True)


def _weight(adj: Adjacency, dtype: torch.dtype, heads: int) -> Tensor | None:
    return features(adj.num_edges, heads, seed=1, dtype=dtype).requires_grad_() if heads else None


def _sum(heads: int | None, mean: bool) -> Call:
    def call(adj: Adjacency, dtype: torch.dtype, shape: Shape) -> None:
        x = features(adj.num_src, shape.heads, shape.channels, dtype=dtype).requires_grad_()
        weight = _weight(adj, dtype, shape.heads if heads is None else heads)
        _step(ops.spmm(x, adj, weight, mean), x, weight)

    return call


def _best(heads: int | None, kind: str, ties: str) -> Call:
    def call(adj: Adjacency, dtype: torch.dtype, shape: Shape) -> None:
        x = features(adj.num_src, shape.heads, shape.channels, dtype=dtype).mul(1.5).round()
        x.view(-1)[0] = float("nan")  # what is not finite takes paths of its own
        weight = _weight(adj, dtype, shape.heads if heads is None else heads)
        ops.reduce(x, adj, None if weight is None else weight.detach(), kind, ties)
        _step(ops.reduce(x.requires_grad_(), adj, weight, kind, ties), x, weight)

    return call


def _attention(op: str, weights: bool, dropout: bool, edges: bool, loops: bool = False) -> Call:
    def call(adj: Adjacency, dtype: torch.dtype, shape: Shape) -> None:
        heads, channels, dim = shape

        def rows(n: int, *rest: int, seed: int) -> Tensor:
            return features(n, *rest, seed=seed, dtype=dtype).requires_grad_()

        more: dict[str, Any] = {"dropout": 0.3 * dropout, "return_weights": weights}
        own, key = (rows(n, heads, channels, seed=n) for n in (adj.num_dst, adj.num_src))
        leaves = [own, key]
        if edges:
            attr = rows(adj.num_edges, dim, seed=3)
            lin = rows(heads * channels, dim, seed=4)
            num_loops = min(adj.num_src, adj.num_dst)
            added = rows(num_loops, dim, seed=5) if loops else None
            more["edges"] = EdgeFeatures(attr, added, lin)
            leaves += [attr, lin]
        if op == "gatv2":
            if loops:
                more["num_loops"] = min(adj.num_src, adj.num_dst)
            leaves.append(rows(heads, channels, seed=6))
            out, given = ops.gatv2(key, own, leaves[-1], adj, **more)
        else:
            leaves.append(rows(adj.num_src, heads, channels, seed=7))
            out, given = ops.transformer(own, key, leaves[-1], adj, **more)
        _step(out if given is None else torch.cat([out.flatten(), given.flatten()]), *leaves)

    return call


def _column_sums(dtype: torch.dtype, shape: Shape) -> None:
    """Sums more rows than there are of any graph: a batch of them for each lane, and a tail."""
    x = features(700, shape.heads * shape.channels, dtype=dtype)
    bias = x.new_zeros(x.size(1)).requires_grad_()
    _step(biased(x, bias), bias)


def _structures() -> None:
    """Builds structures from either kind of index, in any order, both directions."""
    for graph, dtype in itertools.product((_DENSE, _hubs()), (torch.int32, torch.int64)):
        adj = graph.adjacency
        rowptr, idx, _, _, _ = adj.by_target
        src, dst = graph.edge_index.to(dtype)
        found = [
            Adjacency.from_pair(src, dst, graph.num_src, graph.num_dst),
            Adjacency.from_pair(dst, src, graph.num_dst, graph.num_src),
            Adjacency.from_rows(rowptr.to(dtype), idx.to(dtype), graph.num_src),
        ]
        assert all(adj is not None and adj.by_source_in_place for adj in found)


def calls() -> Iterator[tuple[str, Call]]:
    """Yields every way of calling an operation, by name; of each, the one with all comes last."""
    for heads, mean in itertools.product((0, 1, None), BOTH):
        yield "sum", _sum(heads, mean)
    for heads, kind, ties in itertools.product((0, None), ("max", "min"), TIES):
        yield "best" if heads == 0 else "weighted_best", _best(heads, kind, ties)
    for options in itertools.product(BOTH, repeat=4):
        yield "gatv2", _attention("gatv2", *options)
    for weights, dropout, edges in itertools.product(BOTH, repeat=3):
        yield "transformer", _attention("transformer", weights, dropout, edges)


def run(dtype: torch.dtype, shape: Shape, every: bool = True) -> None:
    r"""Runs the calls on the engine of the device.

    Args:
        dtype (torch.dtype): The dtype of all operands.
        shape (Shape): Their shape.
        every (bool, optional): If not set, only the last of each name. (default: :obj:`True`)
    """
    chosen = [call for _, call in calls()] if every else dict(calls()).values()
    engine = engines.of(DEVICE)
    assert engine is not None, engines.why_none(DEVICE)
    _structures()
    _column_sums(dtype, shape)
    for (graph, engine.split), call in itertools.product(GRAPHS, chosen):
        call(graph.adjacency, dtype, shape)
    for engine.split, ties in itertools.product((3, 128), TIES if every else TIES[:1]):
        _best(0, "max", ties)(_LONG.adjacency, dtype, shape)


def main() -> None:
    run(torch.float32, Shape(3, 12, 5))
    for dtype in DTYPES[1:]:
        run(dtype, Shape(3, 12, 5), every=False)
    for dtype in (torch.float32, torch.bfloat16):  # numbers one by one
        run(dtype, Shape(1, 7, 1), every=False)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
