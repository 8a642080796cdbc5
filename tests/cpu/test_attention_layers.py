"""GATv2Conv and TransformerConv, patched, against themselves on stock PyG."""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from attention import LAYERS, C, D, F, attr, check, is_fused, pair, x
from convs import edge_weight
from graphs import (
    BIPARTITE,
    DEVICE,
    FORMS,
    GRAPHS,
    ON_CPU,
    SQUARE,
    Graph,
    features,
    graphs,
    random_edges,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch_geometric import EdgeIndex, nn
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import pyg_ioaware
from pyg_ioaware.testing import assert_no_worse_than_stock, compare

pytestmark = pytest.mark.usefixtures("poison", "one_thread")

FLOWS = ("source_to_target", "target_to_source")
FILLS = ["mean", "add", "min", "max", "mul", 0.5, torch.tensor([1.0, -2.0, 0.5])]
BOTH = [False, True]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def product(**options: Any) -> list[dict[str, Any]]:
    return [dict(zip(options, v, strict=True)) for v in itertools.product(*options.values())]


# Options ###################################################################################


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("edge_dim", [None, D])
def test_options_of_gatv2(heads: int, edge_dim: int | None) -> None:
    g = SQUARE["unsorted"]
    for options in product(concat=BOTH, residual=BOTH, share_weights=BOTH, add_self_loops=BOTH):
        bias = options["concat"] != options["residual"]
        conv = nn.GATv2Conv(F, C, heads, edge_dim=edge_dim, bias=bias, **options)
        check(conv, x(g), g.edge_index, attr(g) if edge_dim else None, draws=20)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("edge_dim", [None, D])
def test_options_of_transformer(heads: int, edge_dim: int | None) -> None:
    g = SQUARE["unsorted"]
    for options in product(concat=BOTH, beta=BOTH, root_weight=BOTH, bias=BOTH):
        conv = nn.TransformerConv(F, C, heads, edge_dim=edge_dim, **options)
        check(conv, x(g), g.edge_index, attr(g) if edge_dim else None)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0, 1.7, 3, -0.5])
def test_slopes(slope: float) -> None:
    g = SQUARE["unsorted"]
    conv = nn.GATv2Conv(F, C, 2, negative_slope=slope, edge_dim=D)
    check(conv, x(g), g.edge_index, attr(g))


@pytest.mark.parametrize("fill", FILLS, ids=lambda f: str(f).split("(")[0])
@pytest.mark.parametrize("graph", ["loops", "unsorted", "isolated"])
def test_features_of_added_loops(graph: str, fill: Any) -> None:
    g = SQUARE[graph]
    conv = nn.GATv2Conv(F, C, 2, edge_dim=D, fill_value=fill)
    check(conv, x(g), g.edge_index, attr(g))
    check(conv, x(g), g.edge_index, attr(g).detach(), steps=2)
    if not isinstance(fill, Tensor):
        vector = features(g.num_edges, seed=2).requires_grad_()
        check(nn.GATv2Conv(F, C, 2, edge_dim=1, fill_value=fill), x(g), g.edge_index, vector)


def test_a_map_of_edge_features_without_features() -> None:
    g = SQUARE["loops"]
    check(nn.GATv2Conv(F, C, 2, edge_dim=D), x(g), g.edge_index)


@pytest.mark.parametrize("edge_dim", [1, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_widths_of_edge_features(name: str, edge_dim: int) -> None:
    g = SQUARE["unsorted"]
    check(LAYERS[name](F, 9, 2, edge_dim=edge_dim), x(g), g.edge_index, attr(g, edge_dim))


@pytest.mark.parametrize("graph", ["unsorted", "hub"])
def test_gradients_of_a_wide_map_are_summed_in_little_memory(graph: str) -> None:
    """Partial sums are as large as the map: a small graph must not have many of them."""
    g, dim = SQUARE[graph], 1600
    conv = nn.GATv2Conv(F, 32, 4, edge_dim=dim)
    inputs = x(g), g.edge_index, attr(g, dim).detach()
    check(conv, *inputs, draws=3)
    with pyg_ioaware.patched(strict=True):
        out = conv(*inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out.sum().backward()
    usage = "self_cpu_memory_usage" if ON_CPU else "self_device_memory_usage"
    largest = max(getattr(event, usage) for event in seen.events())
    assert largest <= 8 * 128 * max(g.num_edges + g.num_src, 2 * dim)


# Graphs and forms ##########################################################################

KINDS: dict[str, Any] = {
    "GATv2": partial(nn.GATv2Conv, heads=2),
    "GATv2-edges": partial(nn.GATv2Conv, heads=2, edge_dim=D),
    "GATv2-no-loops": partial(nn.GATv2Conv, heads=3, add_self_loops=False),
    "Transformer": partial(nn.TransformerConv, heads=2),
    "Transformer-edges": partial(nn.TransformerConv, heads=2, edge_dim=D, beta=True),
}


CASES = [(g, FLOWS[0]) for g in SQUARE] + [(g, FLOWS[1]) for g in ("loops", "strided", "unsorted")]


@pytest.mark.parametrize(("graph", "flow"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs(kind: str, graph: str, flow: str) -> None:
    g = SQUARE[graph]
    conv = KINDS[kind](F, C, flow=flow)
    edges = attr(g) if kind.endswith("edges") else None
    check(conv, x(g), g.edge_index, edges, steps=2)


@pytest.mark.parametrize("graph", BIPARTITE)
@pytest.mark.parametrize("kind", KINDS)
def test_bipartite(kind: str, graph: str) -> None:
    edges = attr(BIPARTITE[graph]) if kind.endswith("edges") else None
    # Stock computes features of loops for the nodes of the smaller side only, and fails for others:
    # by an index out of range, which ends a process that uses CUDA.
    options = {"fill_value": 0.5} if kind == "GATv2-edges" else {}
    for g in (BIPARTITE[graph], BIPARTITE[graph].transposed):
        check(KINDS[kind]((F, F + 1), C, **options), pair(g), g.edge_index, edges)
        if ON_CPU or kind != "GATv2-edges" or g.num_dst <= g.num_src:
            compare(KINDS[kind]((F, F + 1), C), pair(g), g.edge_index, edges)


@pytest.mark.parametrize("name", LAYERS)
def test_bipartite_against_the_flow(name: str) -> None:
    for graph, fits in (("unsorted", True), ("wide", False)):
        g = GRAPHS[graph]
        conv = LAYERS[name]((F, F + 1), C, 2, flow="target_to_source")
        # An index that is out of range for stock ends a process that uses CUDA.
        if ON_CPU or fits:
            layers = compare(conv, pair(g), g.edge_index.flip(0))
            assert is_fused(layers) == (fits or name == "Transformer")
            compare(conv, pair(g), g.edge_index)


@pytest.mark.parametrize("name", LAYERS)
def test_one_tensor_as_both_ends(name: str) -> None:
    g, one = SQUARE["unsorted"], x(SQUARE["unsorted"])
    check(LAYERS[name]((F, F), C, 2), (one, one), g.edge_index)


@pytest.mark.parametrize("weights", [None, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["GATv2", "GATv2-no-loops", "Transformer"])
def test_forms(kind: str, form: str, weights: bool | None) -> None:
    if form == "int32" and weights:
        pytest.skip("stock is given int64 for int32, and returns it")
    for graph, with_values in (("loops", True), ("unsorted", False)):
        g = SQUARE[graph]
        value = edge_weight(g, requires_grad=False) if with_values else None
        conv, adjacency = KINDS[kind](F, C), FORMS[form](g, value)[0]
        same = check if form != "torch_csc" else compare
        same(conv, x(g), adjacency, return_attention_weights=weights, steps=2)


@pytest.mark.parametrize("form", [f for f in FORMS if f.startswith(("torch", "Sparse"))])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_matrices_with_edge_features(kind: str, form: str) -> None:
    g = SQUARE["unsorted"]
    adjacency, _ = FORMS[form](g, None)
    edges = attr(Graph(g.edge_index.unique(dim=1), 12, 12)) if "torch" in form else attr(g)
    compare(KINDS[kind](F, C), x(g), adjacency, edges)
    compare(KINDS[kind](F, C, flow="target_to_source"), x(g), adjacency)


@pytest.mark.parametrize("loops", BOTH)
def test_matrix_with_duplicates_and_unsorted_columns(loops: bool) -> None:
    rows, cols = torch.tensor([0, 3, 5, 7]), torch.tensor([2, 1, 2, 1, 0, 2, 0])
    adj = torch.sparse_csr_tensor(rows, cols, torch.ones(7), (3, 3))
    conv = nn.GATv2Conv(F, C, 2, add_self_loops=loops)
    check(conv, features(3, F), adj, return_attention_weights=True)
    check(conv, features(3, F), adj, steps=2)


@pytest.mark.parametrize("fill", FILLS, ids=lambda f: str(f).split("(")[0])
def test_values_of_the_loops_of_a_matrix(fill: Any) -> None:
    """Stock computes them for the values, fails for some, and then uses none."""
    g = SQUARE["unsorted"]
    compare(nn.GATv2Conv(F, C, 2, fill_value=fill), x(g), FORMS["torch_csr"](g, None)[0])


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch_sparse")
@pytest.mark.parametrize("name", LAYERS)
def test_values_of_several_numbers_are_edge_features(name: str) -> None:
    g = SQUARE["unsorted"]
    row, col = g.edge_index.flip(0)
    adj = SparseTensor(row=row, col=col, value=attr(g).detach(), sparse_sizes=(12, 12))
    options = {"add_self_loops": False} if name == "GATv2" else {}
    compare(LAYERS[name](F, C, 2, edge_dim=D, **options), x(g), adj)


@pytest.mark.parametrize("size", [None, (12, 12), (13, 12), (12, 11), (3, None)])
@pytest.mark.parametrize("name", LAYERS)
def test_sizes_of_an_edge_index(name: str, size: Any) -> None:
    g = SQUARE["unsorted"]
    for flow in FLOWS:
        conv = LAYERS[name](F, C, 2, flow=flow)
        layers = compare(conv, x(g), EdgeIndex(g.edge_index, sparse_size=size))
        assert is_fused(layers) == (size in (None, (12, 12)))


@pytest.mark.parametrize("name", LAYERS)
def test_int32_edges_are_returned_as_stock_returns_them(name: str) -> None:
    g, conv = SQUARE["int32"], LAYERS[name](F, C, 2)
    expected = conv(x(g), g.edge_index, return_attention_weights=True)
    with pyg_ioaware.patched():
        found = conv(x(g), g.edge_index, return_attention_weights=True)
    torch.testing.assert_close(found, expected)


# Weights that are returned #################################################################


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("graph", ["loops", "unsorted", "no_edges"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights(kind: str, graph: str, flag: bool | None) -> None:
    """Values, order, gradients, and which of the flags gives them, which PyG has changed."""
    g = SQUARE[graph]
    edges = attr(g) if kind.endswith("edges") else None
    check(KINDS[kind](F, C), x(g), g.edge_index, edges, return_attention_weights=flag)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_weights_alone(kind: str) -> None:
    g = SQUARE["loops"]
    edges = attr(g) if kind.endswith("edges") else None

    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = KINDS[kind](F, C)

        def forward(self, *args: Any) -> Tensor:
            out: Tensor = self.conv(*args, return_attention_weights=True)[1][1]
            return out

    check(Weights(), x(g), g.edge_index, edges)


def test_order_of_the_weights() -> None:
    """The edges that were given, without self-loops, then all self-loops."""
    edge_index = torch.tensor([[2, 0, 1, 1], [0, 1, 1, 2]])
    conv = nn.GATv2Conv(F, C, edge_dim=1)
    with pyg_ioaware.patched(strict=True):
        _, (edges, alpha) = conv(
            features(3, F), edge_index, torch.arange(4.0), return_attention_weights=True
        )
    assert edges.tolist() == [[2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 1, 2]]
    total = torch.zeros(3).index_add(0, edges[1], alpha.view(-1))
    torch.testing.assert_close(total, torch.ones(3))


def test_returned_edges_belong_to_the_caller() -> None:
    """Changing them changes no later call."""
    g, conv = SQUARE["unsorted"], nn.GATv2Conv(F, C, 2)
    with pyg_ioaware.patched():
        expected = conv(x(g), g.edge_index)
        for _ in range(2):
            _, (edges, alpha) = conv(x(g), g.edge_index, return_attention_weights=True)
            edges.zero_()
            alpha.detach().zero_()
            torch.testing.assert_close(conv(x(g), g.edge_index), expected)


# Dtypes ####################################################################################

HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*HALF, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    g = SQUARE["unsorted"]
    edges = attr(g, dtype=dtype) if kind.endswith("edges") else None
    conv = KINDS[kind](F, C).to(dtype)
    check(conv, x(g, dtype=dtype), g.edge_index, edges, return_attention_weights=True)


@pytest.mark.parametrize("x_dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str, x_dtype: torch.dtype) -> None:
    g = SQUARE["unsorted"]
    edges = attr(g) if kind.endswith("edges") else None
    autocast = partial(torch.autocast, DEVICE.type, torch.bfloat16)
    args = (x(g, dtype=x_dtype), g.edge_index, edges, True)
    check(KINDS[kind](F, C), *args, context=autocast)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients(kind: str, context: Any) -> None:
    g = SQUARE["unsorted"]
    edges = attr(g) if kind.endswith("edges") else None
    check(KINDS[kind](F, C), x(g), g.edge_index, edges, context=context)


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_made_in_inference_mode(name: str, width: int) -> None:
    with torch.inference_mode():
        g, edge_index = SQUARE["unsorted"], SQUARE["unsorted"].edge_index.clone()
        layers = compare(LAYERS[name](F, width), x(g).detach(), edge_index)
    assert is_fused(layers) == (width == 40)


# Extreme values ############################################################################


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_scores(kind: str) -> None:
    g = SQUARE["unsorted"]
    edges = attr(g) if kind.endswith("edges") else None
    inputs = x(g).detach().mul(1e-30).requires_grad_()
    check(KINDS[kind](F, C), inputs, g.edge_index, edges, return_attention_weights=True)


@pytest.mark.parametrize("kind", KINDS)
def test_huge_scores(kind: str) -> None:
    """Their rounding decides between close ones, so that only the errors of many calls compare.

    A close decision that rounding turns over is thousands of times as wrong as others: of squares
    over all calls one would be the whole sum.
    """
    g, scale = SQUARE["unsorted"], 1e3
    edges = attr(g).detach() if kind.endswith("edges") else None
    conv = KINDS[kind](F, C)

    def run(dtype: torch.dtype) -> Tensor:
        layer, found = copy.deepcopy(conv).to(dtype), []
        for seed in range(60):
            inputs = features(12, F, seed=seed).mul(scale).to(dtype).requires_grad_()
            out = layer(inputs, g.edge_index, None if edges is None else edges.to(dtype))
            (grad,) = torch.autograd.grad(out.square().sum() / scale**2, inputs)
            found.append(torch.cat([out.flatten() / scale, grad.flatten()]))
        return torch.stack(found).detach()

    exact, stock = run(torch.float64), run(torch.float32)
    with pyg_ioaware.patched(strict=True):
        ours = run(torch.float32)
    assert ours.isfinite().all()
    ours_error, stock_error = ((t - exact).square().mean(1).sqrt().mean() for t in (ours, stock))
    assert ours_error < 2 * stock_error


@pytest.mark.parametrize("name", LAYERS)
def test_scores_beyond_any_difference(name: str) -> None:
    """One edge takes all, or equal ones share it."""
    g = SQUARE["unsorted"]
    options = {"add_self_loops": False} if name == "GATv2" else {}
    check(LAYERS[name](F, C, 2, **options), x(g).detach().mul(1e8).requires_grad_(), g.edge_index)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_features(kind: str, value: float) -> None:
    g = SQUARE["unsorted"]
    inputs = features(12, F)
    inputs[3, 2], inputs[7] = value, -value
    edges = attr(g) if kind.endswith("edges") else None
    check(KINDS[kind](F, C), inputs, g.edge_index, edges, True)


@pytest.mark.parametrize(
    ("channels", "edges"),
    [*((c, 50) for c in (1, 7, 8, 17, 20, 132)), (20, 100), (17, 100)],
)
def test_an_infinite_edge_feature_whose_weight_is_zero(channels: int, edges: int) -> None:
    g = Graph(random_edges(12, 12, edges), 12, 12)
    conv = nn.GATv2Conv(F, channels, 2, edge_dim=1, add_self_loops=False)
    with torch.no_grad():
        conv.lin_edge.weight.fill_(1.0)
        conv.att.fill_(-0.5)
    edge_attr = features(g.num_edges, 1)
    edge_attr[1] = float("inf")

    def run() -> tuple[Tensor, Tensor]:
        inputs = x(g)
        out = conv(inputs, g.edge_index, edge_attr)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    expected = run()
    assert all(t.isfinite().all() for t in expected)
    with pyg_ioaware.patched(strict=True):
        found = run()
    torch.testing.assert_close(found, expected)


def test_rows_whose_scores_are_all_minus_infinity() -> None:
    g, inputs = SQUARE["path"], features(5, 1).abs() + 1
    gatv2 = nn.GATv2Conv(1, 1)
    transformer = nn.TransformerConv(1, 1, bias=False)
    with torch.no_grad():
        for p in (*gatv2.parameters(), *transformer.parameters()):
            p.fill_(1.0)
        gatv2.att.fill_(-float("inf"))
        transformer.lin_query.weight.fill_(-float("inf"))
    for conv in (gatv2, transformer):
        check(conv, inputs, g.edge_index, return_attention_weights=True)
        with pyg_ioaware.patched():
            assert conv(inputs, g.edge_index).isnan().any()


def test_products_that_leave_half_precision() -> None:
    """The raw product overflows in float16; the scaled one does not."""
    width, g = 256, SQUARE["unsorted"]
    conv = nn.TransformerConv(width, width, root_weight=False)
    with torch.no_grad():
        for linear in (conv.lin_query, conv.lin_key, conv.lin_value):
            linear.weight.copy_(torch.eye(width))
            linear.bias.zero_()
    inputs = features(12, width).abs().add(1).mul(16).half()
    largest = (inputs.double() @ inputs.double().t()).max()
    assert largest > 65504 > largest / width**0.5
    exact = conv.double()(inputs.double(), g.edge_index).detach()
    with pyg_ioaware.patched():
        found = conv.half()(inputs, g.edge_index).detach()
    assert_no_worse_than_stock(found, exact.half(), exact)


# Any graph #################################################################################

DRAWN: dict[str, dict[str, Any]] = {
    "GATv2": {
        "heads": st.integers(1, 3),
        "concat": st.booleans(),
        "add_self_loops": st.booleans(),
        "share_weights": st.booleans(),
        "residual": st.booleans(),
        "fill_value": st.sampled_from(["mean", "max", 1.0]),
    },
    "Transformer": {
        "heads": st.integers(1, 3),
        "concat": st.booleans(),
        "beta": st.booleans(),
        "root_weight": st.booleans(),
    },
}


@given(
    graph=graphs(),
    flow=st.sampled_from(FLOWS),
    edge_dim=st.sampled_from([None, 1, 5]),
    channels=st.integers(1, 9),
    weights=st.booleans(),
    data=st.data(),
)
@pytest.mark.parametrize("name", LAYERS)
def test_any_graph_and_options(
    name: str,
    graph: Graph,
    flow: str,
    edge_dim: int | None,
    channels: int,
    weights: bool,
    data: st.DataObject,
) -> None:
    options = data.draw(st.fixed_dictionaries(DRAWN[name]))
    torch.manual_seed(0)
    conv = LAYERS[name](F, channels, edge_dim=edge_dim, flow=flow, **options)
    edges = None if edge_dim is None else attr(graph, edge_dim)
    flag = True if weights else None
    check(conv, x(graph), graph.edge_index, edges, flag, steps=2)
