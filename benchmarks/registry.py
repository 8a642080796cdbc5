r"""What is measured: each operation and layer once, with its inputs and the bytes it has to move.

A name ends in its shape: ``spmm-128`` and ``GCNConv-128`` have 128 features, ``gatv2-4x32`` and
``GATv2Conv-4x32`` have 4 heads of 32 channels; ``-edges`` adds edge features. Bytes are counted by
the formulas in the headers of the CUDA kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.utils import scatter, softmax

from benchmarks.graphs import Graph
from pyg_ioaware import ops
from pyg_ioaware.graph.csr import Adjacency

EDGE_DIM = 16
"""Features of an edge where the graph has none of its own."""
Module = torch.nn.Module | None


@dataclass(frozen=True)
class Traffic:
    r"""Bytes of one pass.

    Attributes:
        total (int): All that has to move.
        gathered (int): Of it, what is read in the order of the edges.
        row (int): Of one edge, how many of these lie together.
        table (int): The size of what they are gathered from.
    """

    total: int
    gathered: int
    row: int
    table: int


@dataclass(frozen=True)
class Case:
    r"""One operation or layer.

    Attributes:
        name (str): Its name, with the shape.
        kind (str): :obj:`"op"`, :obj:`"layer"`, or one of the kinds that are no call of a layer.
        stock (callable, optional): Runs it on PyG: :obj:`(module, graph, edge_index, *tensors)`.
        tensors (callable, optional): Makes the inputs for a graph.
        module (callable, optional): Makes the layer for a graph.
        ours (callable, optional): Runs an operation fused: :obj:`(adjacency, *tensors)`.
        adjacency (bool): Whether PyG takes other forms of adjacency in place of the edges.
        bipartite (bool): Whether sources and targets may be different nodes.
        traffic (callable, optional): The bytes of a pass, where they are known.
    """

    name: str
    kind: str
    stock: Callable[..., Tensor] | None = None
    tensors: Callable[[Graph], tuple[Tensor, ...]] | None = None
    module: Callable[[Graph], torch.nn.Module] | None = None
    ours: Callable[..., Tensor] | None = None
    adjacency: bool = False
    bipartite: bool = False
    traffic: Callable[[Graph, str, int], Traffic | None] | None = None

    @property
    def base(self) -> str:
        """The name without the shape."""
        return self.name.split("-")[0]

    def takes(self, graph: Graph) -> bool:
        return self.kind == "machine" or self.bipartite or not graph.bipartite


def case(name: str) -> Case:
    r"""Returns a case by its name.

    Raises:
        ValueError: If there is none.
    """
    base, *rest = name.split("-")
    make = MAKERS.get(base)
    with_edges = rest[-1:] == ["edges"]
    rest = rest[:-1] if with_edges else rest
    numbers = [int(n) for word in rest for n in word.split("x") if n.isdigit()]
    if make is None or len(rest) > 1 or (with_edges and base not in ATTENTION):
        raise ValueError(f"no case '{name}': one of {', '.join(MAKERS)} with a shape, as spmm-128")
    wanted = 2 if base in ATTENTION else 0 if base in OTHERS else 1
    if len(numbers) != wanted:
        raise ValueError(f"'{name}' needs a shape of {wanted} numbers (got {len(numbers)})")
    return make(name, *numbers, **({"edges": True} if with_edges else {}))


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


_PRIME = 2**23 - 15


def _distinct_rows(n: int, width: int) -> Tensor:
    """Returns numbers of which no two in a column are equal, nor any zero.

    Libraries differ in whom a tie gives to, and PyTorch counts a maximum of zero as one.
    """
    factors = torch.randint(1, _PRIME, (width,))
    numbers = torch.arange(1, n + 1).view(-1, 1) * factors % _PRIME
    return numbers.float().add_(0.5).div_(2**21).sub_(2).requires_grad_()


# Operations


def _spmm_stock(module: Module, graph: Graph, edges: Tensor, x: Tensor, *weight: Tensor) -> Tensor:
    src, dst = edges
    out = x.index_select(0, src)
    out = out * weight[0].view(-1, 1) if weight else out
    return scatter(out, dst, dim=0, dim_size=graph.num_dst, reduce="sum")


def _max_stock(module: Module, graph: Graph, edges: Tensor, x: Tensor) -> Tensor:
    src, dst = edges
    return scatter(x.index_select(0, src), dst, dim=0, dim_size=graph.num_dst, reduce="max")


def _gatv2_stock(
    module: Module, graph: Graph, edges: Tensor, x_l: Tensor, x_r: Tensor, att: Tensor
) -> Tensor:
    src, dst = edges
    value = x_l.index_select(0, src)
    hidden = torch.nn.functional.leaky_relu(value + x_r.index_select(0, dst), 0.2)
    alpha = softmax((hidden * att).sum(-1), dst, num_nodes=x_r.size(0))
    return scatter(value * alpha.unsqueeze(-1), dst, dim=0, dim_size=x_r.size(0), reduce="sum")


def _transformer_stock(
    module: Module, graph: Graph, edges: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    src, dst = edges
    n, scale = query.size(0), query.size(-1) ** -0.5
    score = (query.index_select(0, dst) * key.index_select(0, src)).sum(-1) * scale
    alpha = softmax(score, dst, num_nodes=n).unsqueeze(-1)
    return scatter(value.index_select(0, src) * alpha, dst, dim=0, dim_size=n, reduce="sum")


def _op(name: str, width: int, weighted: bool = False) -> Case:
    base = name.split("-")[0]

    def tensors(graph: Graph) -> tuple[Tensor, ...]:
        weight = (torch.rand(graph.num_edges).requires_grad_(),) if weighted else ()
        rows = _distinct_rows if base == "max" else _rows
        return (rows(graph.num_src, width), *weight)

    def ours(adj: Adjacency, x: Tensor, *weight: Tensor, **options: Any) -> Tensor:
        if base == "max":
            return ops.reduce(x, adj, **options)
        return ops.spmm(x, adj, *weight)

    stock = _max_stock if base == "max" else _spmm_stock
    return Case(
        *(name, "op", stock, tensors),
        ours=ours,
        bipartite=True,
        traffic=partial(_traffic, base, width, 1),
    )


def _attention_op(name: str, heads: int, channels: int) -> Case:
    base = name.split("-")[0]

    def tensors(graph: Graph) -> tuple[Tensor, ...]:
        sizes = (graph.num_src, graph.num_dst)
        if base == "gatv2":
            return *(_rows(n, heads, channels) for n in sizes), _rows(heads, channels)
        return tuple(_rows(n, heads, channels) for n in (sizes[1], sizes[0], sizes[0]))

    def ours(adj: Adjacency, *given: Tensor) -> Tensor:
        return (ops.gatv2 if base == "gatv2" else ops.transformer)(*given, adj)[0]

    stock = _gatv2_stock if base == "gatv2" else _transformer_stock
    return Case(
        *(name, "op", stock, tensors),
        ours=ours,
        bipartite=True,
        traffic=partial(_traffic, base, heads * channels, heads),
    )


def _traffic(
    base: str, width: int, heads: int, graph: Graph, mode: str, size: int
) -> Traffic | None:
    """Returns the bytes of a pass of an operation; `size` is that of a number."""
    e, row = graph.num_edges, width * size
    src, dst = graph.num_src, graph.num_dst
    back = mode == "backward"
    if mode not in ("inference", "forward", "backward"):
        return None
    if base in ("spmm", "spmmw"):
        rows, out = e * row, (src if back else dst) * row
        extra = e * 4 * (base == "spmmw")  # the gradient of weights is another pass, as large
        if back and extra:
            return Traffic(2 * rows + 12 * e + out, 2 * rows, row, dst * row)
        return Traffic(rows + 4 * e + extra + out, rows, row, (dst if back else src) * row)
    if base == "max":
        longest = int(torch.bincount(graph.edge_index[1]).max()) if e else 0
        mark = width * (1 if longest < 127 else 2 if longest < 2**15 - 1 else 4)
        if not back:
            kept = 0 if mode == "inference" else dst * mark
            return Traffic(e * (row + 4) + dst * row + kept, e * row, row, src * row)
        if size == 2:  # results and shares
            nodes = dst * (2 * row + mark) + 2 * src * row
            return Traffic(e * (2 * row + 4) + nodes, 2 * e * row, row, 2 * dst * row)
        # Marks, and gradients: all, or the sectors of those that are shared in.
        grads = min(e * row, 32 * dst * width)
        return Traffic(
            e * (mark + 8) + grads + src * row, e * mark + grads, mark, dst * (mark + row)
        )
    is_gatv2, on_gpu = base == "gatv2", graph.edge_index.is_cuda
    tables, signs = (1, width // 8) if is_gatv2 else (2, 0)
    if not back:
        numbers = e * (4 + (4 * heads + signs) * (on_gpu and mode == "forward"))
        nodes = dst * (2 * row + 8 * heads)
        return Traffic(
            tables * e * row + numbers + nodes, tables * e * row, row, tables * src * row
        )
    if on_gpu:  # three passes, with numbers and signs of edges from one to the next
        gathered = (1 if is_gatv2 else 3) * e * row
        numbers = e * ((12 if is_gatv2 else 20) + 36 * heads + 2 * signs)
        nodes = (2 * dst + (5 if is_gatv2 else 3) * src) * row
        return Traffic(gathered + numbers + nodes, gathered, row, dst * row)
    gathered = 2 * tables * e * row
    numbers = 2 * e * (4 + 8 * heads + signs)
    nodes = (2 * dst + tables * src) * row
    return Traffic(gathered + numbers + nodes, gathered, row, tables * src * row)


# Layers


class WeightedMessage(pyg.MessagePassing):
    """A layer as users write it: a weight per edge, and a linear map."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j


def _layer_stock(module: Module, graph: Graph, adjacency: Any, x: Tensor, *rest: Tensor) -> Tensor:
    assert module is not None
    if isinstance(module, pyg.GCN2Conv):
        return module(x, x.detach(), adjacency)
    if graph.bipartite:
        return module((x, rest[0]), adjacency, *rest[1:])
    return module(x, adjacency, *rest)


def _layer(
    name: str,
    width: int,
    make: Callable[[int], torch.nn.Module],
    adjacency: bool = True,
    bipartite: bool = False,
    weighted: bool = False,
    distinct: bool = False,
) -> Case:
    def tensors(graph: Graph) -> tuple[Tensor, ...]:
        targets = (_rows(graph.num_dst, width),) if graph.bipartite else ()
        weight = (torch.linspace(0.5, 1.5, graph.num_edges),) if weighted else ()
        rows = _distinct_rows if distinct else _rows
        return (rows(graph.num_src, width), *targets, *weight)

    def module(graph: Graph) -> torch.nn.Module:
        return make(width)

    return Case(name, "layer", _layer_stock, tensors, module, None, adjacency, bipartite)


def _attention_layer(name: str, heads: int, channels: int, edges: bool = False) -> Case:
    width, cls = heads * channels, getattr(pyg, name.split("-")[0])

    def tensors(graph: Graph) -> tuple[Tensor, ...]:
        targets = (_rows(graph.num_dst, width),) if graph.bipartite else ()
        return (_rows(graph.num_src, width), *targets, *((attr(graph),) if edges else ()))

    def attr(graph: Graph) -> Tensor:
        own = graph.edge_attr
        return torch.randn(graph.num_edges, EDGE_DIM) if own is None else own

    def module(graph: Graph) -> torch.nn.Module:
        options: dict[str, Any] = {"edge_dim": attr(graph).size(1)} if edges else {}
        if graph.bipartite and cls is not pyg.TransformerConv:
            options["add_self_loops"] = False
        sides = (width, width) if graph.bipartite else width
        return cls(sides, channels, heads=heads, **options)

    return Case(
        *(name, "layer", _layer_stock, tensors, module),
        adjacency=not edges,
        bipartite=True,
    )


LAYERS: dict[str, Callable[..., Case]] = {
    "GCNConv": partial(_layer, make=lambda f: pyg.GCNConv(f, f)),
    "GCNConv_cached": partial(
        _layer, make=lambda f: pyg.GCNConv(f, f, cached=True), adjacency=False
    ),
    "SAGEConv_max": partial(
        _layer, make=lambda f: pyg.SAGEConv(f, f, aggr="max"), bipartite=True, distinct=True
    ),
    "GraphConv": partial(_layer, make=lambda f: pyg.GraphConv(f, f), bipartite=True),
    "GINConv": partial(_layer, make=lambda f: pyg.GINConv(torch.nn.Linear(f, f))),
    "TAGConv": partial(_layer, make=lambda f: pyg.TAGConv(f, f)),
    "SGConv": partial(_layer, make=lambda f: pyg.SGConv(f, f, K=2)),
    "APPNP": partial(_layer, make=lambda f: pyg.APPNP(K=5, alpha=0.1)),
    "LGConv": partial(_layer, make=lambda f: pyg.LGConv()),
    "GCN2Conv": partial(_layer, make=lambda f: pyg.GCN2Conv(f, alpha=0.1)),
    "ChebConv": partial(_layer, make=lambda f: pyg.ChebConv(f, f, K=3), adjacency=False),
    "ClusterGCNConv": partial(_layer, make=lambda f: pyg.ClusterGCNConv(f, f)),
    "WeightedMessage": partial(_layer, make=WeightedMessage, adjacency=False, weighted=True),
}
ATTENTION: dict[str, Callable[..., Case]] = {
    **dict.fromkeys(("gatv2", "transformer"), _attention_op),
    **dict.fromkeys(("GATv2Conv", "TransformerConv", "GATConv"), _attention_layer),
}
TRAINED = ("GCN", "SAGE", "GATv2", "Transformer", "loader")
OTHERS: dict[str, Callable[..., Case]] = {
    "structure": lambda name: Case(name, "structure", bipartite=True),
    "copy": lambda name: Case(name, "machine"),
    "gather": lambda name: Case(name, "machine"),
    **{f"train_{name}": lambda name: Case(name, "train") for name in TRAINED},
}
MAKERS: dict[str, Callable[..., Case]] = {
    "spmm": _op,
    "spmmw": partial(_op, weighted=True),
    "max": _op,
    **ATTENTION,
    **LAYERS,
    **OTHERS,
}


@dataclass(frozen=True)
class Problem:
    r"""A case on a graph: what every provider is given.

    Attributes:
        case (Case): The case.
        graph (Graph): The graph, on the device.
        module (torch.nn.Module, optional): The layer, the same for all providers.
        tensors (tuple): The inputs.
    """

    case: Case
    graph: Graph
    module: Module
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, case: Case, graph: Graph, dtype: torch.dtype, device: str) -> "Problem":
        """Makes the inputs and the layer on the device, from a fixed seed."""
        assert case.tensors is not None
        graph = graph.to(device)
        torch.manual_seed(0)
        with torch.device(device):
            module = None if case.module is None else case.module(graph).to(dtype)
            made = case.tensors(graph)
        given = (t.detach().to(dtype).requires_grad_(t.requires_grad) for t in made)
        return cls(case, graph, module, tuple(given))

    def structure(self) -> Adjacency:
        """Builds the structure of the fused operations."""
        ends, graph = self.graph.edge_index, self.graph
        adj = Adjacency.from_pair(ends[0], ends[1], graph.num_src, graph.num_dst)
        assert adj is not None
        return adj

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are taken of."""
        parameters = () if self.module is None else self.module.parameters()
        return [t for t in (*self.tensors, *parameters) if t.requires_grad]

    def run(self, adjacency: Any = None, module: Module = None) -> Tensor:
        """Runs it on PyG, or on what stands in for the edges or the layer."""
        assert self.case.stock is not None
        edges = self.graph.edge_index if adjacency is None else adjacency
        layer = self.module if module is None else module
        return self.case.stock(layer, self.graph, edges, *self.tensors)
