"""Stand-ins for libraries that need a GPU: their calls as they are documented, in plain torch."""

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch_geometric.utils import scatter, softmax


def expand(rowptr):
    counts = rowptr.long().diff()
    return torch.arange(len(counts)).repeat_interleave(counts)


def attend(score, value, dst, n):
    alpha = softmax(score, dst, num_nodes=n).unsqueeze(-1)
    return scatter(value * alpha, dst, dim=0, dim_size=n, reduce="sum")


def gatv2(x_l, x_r, att, slope, src, dst):
    value = x_l[src]
    hidden = torch.nn.functional.leaky_relu(value + x_r[dst], slope)
    return attend((hidden * att).sum(-1), value, dst, len(x_r))


def module(monkeypatch, name, **members):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    vars(sys.modules[name]).update(members)


class Buckets:
    """turbo_gnn's graph."""

    @classmethod
    def from_csr(cls, indptr, indices, back_indptr, back_indices, quantile, index_dtype):
        assert index_dtype == torch.int32
        self = cls()
        self.forward_indptr, self.forward_indices = indptr, indices
        self.src, self.dst = indices.long(), expand(indptr)
        self.back = sorted(zip(expand(back_indptr).tolist(), back_indices.tolist(), strict=True))
        assert self.back == sorted(zip(self.src.tolist(), self.dst.tolist(), strict=True))
        return self


def turbo_gnn(monkeypatch):
    def reduction_aggr(g, x, reduce):
        return scatter(x[g.src], g.dst, dim=0, dim_size=len(x), reduce=reduce)

    def gatv2_aggr(g, x, x_neighbors, attention_weights, negative_slope):
        return gatv2(x_neighbors, x, attention_weights, negative_slope, g.src, g.dst).flatten(1)

    def graph_transformer_aggr(g, x, Q, K, V, scale):
        return attend((Q[g.src] * K[g.dst]).sum(-1) * scale, V[g.src], g.dst, len(x))

    def spmm_aggr(x, indptr, indices, norm_type, algorithm, block_dim):
        assert norm_type == "none"
        return scatter(x[indices.long()], expand(indptr), dim=0, dim_size=len(x), reduce="sum")

    module(
        monkeypatch,
        "turbo_gnn",
        AdjacencyForwardBackwardWithNodeBuckets=Buckets,
        reduction_aggr=reduction_aggr,
        gatv2_aggr=gatv2_aggr,
        graph_transformer_aggr=graph_transformer_aggr,
        spmm_aggr=spmm_aggr,
    )


def cudnn(monkeypatch):
    class CscGraph:
        def __init__(self, offsets, indices, num_src_nodes):
            assert offsets.dtype == indices.dtype
            self.src, self.dst, self.n = indices.long(), expand(offsets), len(offsets) - 1

        def with_reverse_csc(self):
            return self

    def agg_simple(graph, *, node_features, aggr):
        return scatter(node_features[graph.src], graph.dst, dim=0, dim_size=graph.n, reduce=aggr)

    def mha_gat_v2(graph, features, attn_weights, *, num_heads, deterministic):
        x_l, x_r = (f.unflatten(1, (num_heads, -1)) for f in features)
        att = attn_weights.view(num_heads, -1)
        return gatv2(x_l, x_r, att, 0.2, graph.src, graph.dst).flatten(1)

    members = {"CscGraph": CscGraph, "agg_simple": agg_simple, "mha_gat_v2": mha_gat_v2}
    module(monkeypatch, "cudnn.gnn", **members)


def anemoi(monkeypatch):
    def edge_index_to_csc(edge_index, num_nodes, reverse):
        row, col = edge_index[:, edge_index[1].argsort(stable=True)]
        colptr = torch._convert_indices_from_coo_to_csr(col, num_nodes[1])
        return (row, colptr), None, (None, None, col)

    def graph_transformer_attention_conv(query, key, value, edges, csc, reverse):
        row, colptr = csc
        dst = expand(colptr)
        score = (query[dst] * (key[row] + edges)).sum(-1) * query.size(-1) ** -0.5
        return attend(score, value[row] + edges, dst, len(query))

    gt = {"graph_transformer_attention_conv": graph_transformer_attention_conv}
    module(monkeypatch, "anemoi.models.triton.gt", **gt)
    module(monkeypatch, "anemoi.models.triton.utils", edge_index_to_csc=edge_index_to_csc)


def dgl(monkeypatch):
    class Heterograph:
        def __init__(self, edges, sizes):
            (((source, _, target), (self.src, self.dst)),) = edges.items()
            self.num_src, self.num_dst = sizes[source], sizes[target]

        def int(self):
            return self

        def create_formats_(self):
            pass

    def add(g, messages, reduce="sum"):
        return scatter(messages, g.dst, dim=0, dim_size=g.num_dst, reduce=reduce)

    ops = SimpleNamespace(
        copy_u_sum=lambda g, x: add(g, x[g.src]),
        copy_u_max=lambda g, x: add(g, x[g.src], "max"),
        u_mul_e_sum=lambda g, x, w: add(g, x[g.src] * w),
        u_add_v=lambda g, x, y: x[g.src] + y[g.dst],
        u_dot_v=lambda g, x, y: (x[g.src] * y[g.dst]).sum(-1, keepdim=True),
    )
    normalise = {"edge_softmax": lambda g, s: softmax(s, g.dst, num_nodes=g.num_dst)}
    module(monkeypatch, "dgl", heterograph=Heterograph, ops=ops)
    module(monkeypatch, "dgl.nn.functional", **normalise)


FAKES = {"turbo_gnn": turbo_gnn, "cudnn.gnn": cudnn, "Anemoi": anemoi, "dgl": dgl}
