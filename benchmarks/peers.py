r"""Other libraries, each in a few lines: their structure built once, then their own call.

Each yields pairs of a label and a call; where a library leaves a choice to the user, all choices
are yielded and the fastest counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.registry import Problem

Calls = Iterator[tuple[str, Callable[[], Tensor]]]


@dataclass(frozen=True)
class Peer:
    r"""A library.

    Attributes:
        name (str): Its name.
        make (callable): Prepares a problem.
        ops (tuple): The operations that it has.
        module (str): What has to be importable.
        device (str): The device that it needs, if it needs one.
    """

    name: str
    make: Callable[[Problem], Calls]
    ops: tuple[str, ...]
    module: str
    device: str = ""


def _dgl(problem: Problem) -> Calls:
    import dgl
    from dgl.nn.functional import edge_softmax

    (src, dst), graph = problem.graph.edge_index, problem.graph
    size = {"s": graph.num_src, "t": graph.num_dst}
    g = dgl.heterograph({("s", "e", "t"): (src, dst)}, size).int()
    g.create_formats_()
    t = problem.tensors

    def gatv2() -> Tensor:
        hidden = torch.nn.functional.leaky_relu(dgl.ops.u_add_v(g, t[0], t[1]), 0.2)
        alpha = edge_softmax(g, (hidden * t[2]).sum(-1, keepdim=True))
        return dgl.ops.u_mul_e_sum(g, t[0], alpha)

    def transformer() -> Tensor:
        alpha = edge_softmax(g, dgl.ops.u_dot_v(g, t[1], t[0]) * t[0].size(-1) ** -0.5)
        return dgl.ops.u_mul_e_sum(g, t[2], alpha)

    def largest() -> Tensor:
        out = dgl.ops.copy_u_max(g, t[0])
        return out.masked_fill(out.isinf(), 0)  # rows without edges, in some versions

    calls = {
        "spmm": lambda: dgl.ops.copy_u_sum(g, t[0]),
        "spmmw": lambda: dgl.ops.u_mul_e_sum(g, t[0], t[1].view(-1, 1)),
        "max": largest,
        "gatv2": gatv2,
        "transformer": transformer,
    }
    yield "", calls[problem.case.base]


def _turbo_gnn(problem: Problem) -> Calls:
    from turbo_gnn import AdjacencyForwardBackwardWithNodeBuckets as Buckets
    from turbo_gnn import gatv2_aggr, graph_transformer_aggr, reduction_aggr, spmm_aggr

    if problem.graph.bipartite:
        raise ValueError("takes no bipartite graphs")
    adj, t = problem.structure(), problem.tensors
    there, back = adj.by_target, adj.by_source
    # A symmetric graph may be given as undirected: both directions are then the same arrays.
    symmetric = torch.equal(there.rowptr, back.rowptr) and torch.equal(there.idx, back.idx)

    def call(g: Buckets) -> Tensor:
        if problem.case.base == "max":
            return reduction_aggr(g, t[0], reduce="max")
        if problem.case.base == "gatv2":
            out = gatv2_aggr(g, t[1], x_neighbors=t[0], attention_weights=t[2], negative_slope=0.2)
        elif problem.case.base == "transformer":
            scale = t[0].size(-1) ** -0.5
            # What it calls queries are those of the sources.
            out = graph_transformer_aggr(g, t[0], Q=t[1], K=t[0], V=t[2], scale=scale)
        else:
            return spmm_aggr(t[0], g.forward_indptr, g.forward_indices, "none", -1, 256)
        return out.view(t[1].shape)

    quantiles = (-1, 0.95, 0.99) if problem.case.base == "max" else (-1,)
    for quantile, undirected in product(quantiles, (False, True)[: 1 + symmetric]):
        ends = (there.rowptr, there.idx) if undirected else (back.rowptr, back.idx)
        g = Buckets.from_csr(
            *(there.rowptr, there.idx, *ends), quantile=quantile, index_dtype=torch.int32
        )
        yield f"{'undirected' if undirected else 'directed'}, quantile {quantile}", partial(call, g)


def _cudnn(problem: Problem) -> Calls:
    from cudnn.gnn import CscGraph, agg_simple, mha_gat_v2

    rows, t = problem.structure().by_target, problem.tensors
    g = CscGraph(rows.rowptr, rows.idx, problem.graph.num_src)
    base = problem.case.base
    if base != "gatv2":
        kind = "max" if base == "max" else "sum"
        yield "", lambda: agg_simple(g, node_features=t[0], aggr=kind)
        return

    def attend(graph: CscGraph, deterministic: bool) -> Tensor:
        ends = (t[0].flatten(1), t[1].flatten(1))
        out = mha_gat_v2(
            *(graph, ends, t[2].flatten()),
            num_heads=t[0].size(1),
            deterministic=deterministic,
        )
        return out.view(t[1].shape)

    yield "", partial(attend, g, False)
    yield "deterministic", partial(attend, g.with_reverse_csc(), True)


def _anemoi(problem: Problem) -> Calls:
    from anemoi.models.triton.gt import graph_transformer_attention_conv
    from anemoi.models.triton.utils import edge_index_to_csc

    query, key, value = problem.tensors
    sizes = (problem.graph.num_src, problem.graph.num_dst)
    csc, _, reverse = edge_index_to_csc(problem.graph.edge_index, sizes, reverse=True)
    # It has no form without edge features, which here are zero.
    edges = query.new_zeros(problem.graph.num_edges, *query.shape[1:])
    call = partial(graph_transformer_attention_conv, query, key, value, edges, csc, reverse)
    yield "zero edge features", call


PEERS = (
    Peer("dgl", _dgl, ("spmm", "spmmw", "max", "gatv2", "transformer"), "dgl"),
    Peer("turbo_gnn", _turbo_gnn, ("spmm", "max", "gatv2", "transformer"), "turbo_gnn", "cuda"),
    Peer("cudnn.gnn", _cudnn, ("spmm", "max", "gatv2"), "cudnn.gnn", "cuda"),
    Peer("Anemoi", _anemoi, ("transformer",), "anemoi.models.triton.gt", "cuda"),
)
