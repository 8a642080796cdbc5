"""The operations against plain PyTorch: values, gradients of any order, and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import (
    BY_NUMBA,
    DEVICE,
    GRAPHS,
    HUB_DEGREE,
    NONDET_TOL,
    SQUARE,
    Graph,
    features,
    random_edges,
)
from test_attention_ops import PRIMITIVES
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.utils import scatter

from pyg_ioaware import engines, ops
from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.ops import reference
from pyg_ioaware.testing import assert_no_worse_than_stock, compare

pytestmark = pytest.mark.usefixtures("poison")

Op = Callable[..., Tensor]

# Shape of a row, shape of a weight per edge.
ROWS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "two_heads": ((2, 2), (2,)),
    "unit": ((5,), None),
    "weighted": ((5,), ()),
    "one_channel": ((1,), ()),
    "one_weight_for_all_heads": ((3, 4), ()),
    "heads": ((3, 4), (3,)),
    "empty_rows": ((0,), ()),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def operands(
    graph: Graph, rows: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    shape, weight_shape = ROWS[rows]
    x = features(graph.num_src, *shape, dtype=dtype).requires_grad_()
    if weight_shape is None:
        return x, None
    weight = features(graph.num_edges, *weight_shape, seed=1, dtype=dtype)
    return x, weight.requires_grad_()


def ties(graph: Graph, width: int = 6) -> Tensor:
    """Small integers, many of them zero: maxima that are tied, and maxima that are zero."""
    x = features(graph.num_src, width).mul(1.5).round()
    x[:, ::2] = x[:, ::2].relu()
    return x.requires_grad_()


def by_pyg(graph: Graph, reduce: str) -> Op:
    """Stock PyG's way: gather, multiply, scatter."""
    source, target = graph.edge_index.long()

    def run(x: Tensor, weight: Tensor | None = None) -> Tensor:
        messages = x.index_select(0, source)
        if weight is not None:
            messages = messages * weight.view(*weight.shape, *[1] * (x.dim() - weight.dim()))
        return scatter(messages, target, 0, graph.num_dst, reduce)

    return run


def by_ops(graph: Graph, reduce: str, **options: Any) -> Op:
    adj = graph.adjacency
    if reduce in ("sum", "mean"):
        return lambda x, weight=None: ops.spmm(x, adj, weight, mean=reduce == "mean")
    return lambda x, weight=None: ops.reduce(x, adj, weight, reduce=reduce, **options)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_same_as_gather_and_scatter(graph: str, rows: str, reduce: str) -> None:
    g = GRAPHS[graph]
    compare(by_pyg(g, reduce), *operands(g, rows), ours=by_ops(g, reduce))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("rows", ["unit", "heads"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("graph", ["unsorted", "wide", "isolated"])
def test_dtypes(graph: str, dtype: torch.dtype, rows: str, reduce: str) -> None:
    g = GRAPHS[graph]
    compare(by_pyg(g, reduce), *operands(g, rows, dtype), ours=by_ops(g, reduce))


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_weight_of_another_dtype(
    weight_dtype: torch.dtype, x_dtype: torch.dtype, reduce: str
) -> None:
    g = GRAPHS["unsorted"]
    x, _ = operands(g, "weighted", x_dtype)
    _, weight = operands(g, "weighted", weight_dtype)
    compare(by_pyg(g, reduce), x, weight, ours=by_ops(g, reduce))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("width", [1, 2, 7, 17, 31, 33, 65, 129, 257])
def test_widths(width: int, heads: int, reduce: str) -> None:
    g = GRAPHS["unsorted"]
    x = features(g.num_src, heads, width).requires_grad_()
    weight = features(g.num_edges, heads, seed=1).requires_grad_()
    compare(by_pyg(g, reduce), x, weight, ours=by_ops(g, reduce))


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_operands_of_any_strides(reduce: str) -> None:
    g = GRAPHS["unsorted"]
    buffer = features(1, 4 * g.num_src * 6).view(-1)
    shifted = buffer[1 : 1 + 6 * g.num_src].view(g.num_src, 6)
    strided = buffer[: 2 * g.num_src * 6].view(g.num_src, 12)[:, ::2]
    transposed = buffer[: g.num_src * 6].view(6, g.num_src).t()
    expanded = buffer[:6].expand(g.num_src, 6)
    weights = features(2 * g.num_edges + 1, seed=1)
    for x in (shifted, strided, transposed, expanded):
        for weight in (weights[1 : g.num_edges + 1], weights[1::2], weights[:1].expand(50)):
            inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            compare(by_pyg(g, reduce), *inputs, ours=by_ops(g, reduce))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("graph", ["unsorted", "isolated", "hub"])
def test_nan_and_inf(graph: str, value: float, reduce: str) -> None:
    g = GRAPHS[graph]
    x, weight = operands(g, "weighted")
    with torch.no_grad():
        x[2, 1], x[5, 3], x[:, 4] = value, -value, value
    compare(by_pyg(g, reduce), x, ours=by_ops(g, reduce))
    compare(by_pyg(g, reduce), x, weight, ours=by_ops(g, reduce))


def test_the_hub_is_split() -> None:
    engine = engines.of(GRAPHS["hub"].edge_index.device)
    assert engine is not None
    assert engine.split < HUB_DEGREE
    adj = GRAPHS["hub"].adjacency
    assert len(adj.by_target.tiles) > 1
    assert len(adj.by_source.tiles) > 1


@pytest.mark.parametrize("more", [0, 1])
def test_rows_a_little_too_long_stay_whole(more: int) -> None:
    """Unless there is a longer one: then all that are longer than a tile are split."""
    engine = engines.of(torch.device(DEVICE))
    assert engine is not None
    degrees = torch.tensor([engine.split + 1, 3, 2 * engine.split + more], device=DEVICE)
    dst = torch.arange(3, device=DEVICE).repeat_interleave(degrees)
    adj = Adjacency.from_pair(torch.zeros_like(dst), dst, 1, 3)
    assert adj is not None
    tiles = adj.by_target.tiles.tolist()
    assert [row for row, _, _, first in tiles if first] == ([0, 2] if more else [])
    assert sum(end - begin for _, begin, end, _ in tiles) == (adj.num_edges - 3 if more else 0)
    sums = ops.spmm(torch.ones(1, 4, device=DEVICE), adj)
    assert torch.equal(sums, degrees.view(-1, 1).expand(3, 4).float())


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_bits_do_not_depend_on_threads_or_runs(reduce: str) -> None:
    g = GRAPHS["hub"]
    run = by_ops(g, reduce)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 2, 3, 1):
            torch.set_num_threads(threads)
            x, weight = operands(g, "heads")
            out = run(x, weight)
            found.append((out, *torch.autograd.grad(out.sum(), (x, weight))))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# Dot products ##############################################################################


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_sddmm(graph: str, heads: int, mean: bool) -> None:
    g = GRAPHS[graph]
    source, target = g.edge_index.long()
    degree = scatter(torch.ones(g.num_edges), target, 0, g.num_dst).clamp(min=1)

    def stock(a: Tensor, b: Tensor) -> Tensor:
        product = (a[target] * b[source]).view(g.num_edges, heads, -1 if g.num_edges else 1)
        out = product.sum(-1)
        return out / degree[target].view(-1, 1).to(out.dtype) if mean else out

    a = features(g.num_dst, 6).requires_grad_()
    b = features(g.num_src, 6, seed=1).requires_grad_()
    compare(stock, a, b, ours=lambda a, b: ops.sddmm(a, b, g.adjacency, heads, mean))


def test_sddmm_of_one_tensor_with_itself() -> None:
    g = GRAPHS["unsorted"]
    source, target = g.edge_index
    x = features(g.num_src, 6).requires_grad_()
    compare(
        lambda a, b: (a[target] * b[source]).sum(-1, keepdim=True),
        x,
        x,
        ours=lambda a, b: ops.sddmm(a, b, g.adjacency),
    )


# Ties ######################################################################################


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_ties_as_scatter_splits_them(graph: str, reduce: str) -> None:
    g = GRAPHS[graph]
    compare(by_pyg(g, reduce), ties(g), ours=by_ops(g, reduce))
    zeros = torch.zeros(g.num_src, 3, requires_grad=True)
    compare(by_pyg(g, reduce), zeros, ours=by_ops(g, reduce))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rule", ops.TIES)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("graph", [name for name in GRAPHS if name != "hub"])
def test_ties_as_documented(graph: str, reduce: str, rule: str, weighted: bool) -> None:
    g = GRAPHS[graph]
    x = ties(g)
    weight = torch.ones(g.num_edges, requires_grad=True) if weighted else None
    inputs = [x] if weight is None else [x, weight]
    direction = torch.arange(1.0, g.num_dst * x.size(1) + 1).view(g.num_dst, x.size(1))
    out = ops.reduce(x, g.adjacency, weight, reduce=reduce, ties=rule)
    found = torch.autograd.grad(out, inputs, direction)

    source, target = g.edge_index.tolist()
    shares = torch.zeros(g.num_edges, x.size(1))
    for i in range(g.num_dst):
        own = [e for e, t in enumerate(target) if t == i]
        for c in range(x.size(1)) if own else ():
            values = [float(x[source[e], c].detach()) for e in own]
            best = max(values) if reduce == "max" else min(values)
            assert float(out[i, c].detach()) == best
            winners = [e for e, value in zip(own, values, strict=True) if value == best]
            if rule == "first":
                shares[winners[0], c] = 1
            else:
                shares[winners, c] = 1 / (len(winners) + (rule == "even" and best == 0))
    received = shares * direction[target] if g.num_edges else shares
    expected = [torch.zeros_like(x).index_add(0, g.edge_index[0].long(), received)]
    if weighted:
        expected.append((received * x.detach()[source]).sum(1) if source else torch.zeros(0))
    torch.testing.assert_close(list(found), [e.detach() for e in expected], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rule", ["first", "exact"])
def test_each_output_passes_on_its_gradient_in_full(rule: str) -> None:
    x = torch.tensor([[1.0], [1], [1], [2], [0], [0]], requires_grad=True)
    graph = Graph(torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 2]]), 6, 4)
    (grad,) = torch.autograd.grad(ops.reduce(x, graph.adjacency, ties=rule).sum(), x)
    assert [float(grad[:3].sum()), float(grad[3]), float(grad[4:].sum())] == [1, 1, 1]


@pytest.mark.parametrize("rule", ops.TIES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_reference_agrees_on_ties(graph: str, rule: str) -> None:
    # The reference takes over when a backward is recorded.
    g = GRAPHS[graph]
    x = ties(g).detach().double().requires_grad_()  # so that the order of sums does not show
    out = ops.reduce(x, g.adjacency, ties=rule)
    (plain,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (recorded,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(recorded, plain, rtol=1e-6, atol=1e-6)


# Gradients of any order ####################################################################

CASES: dict[str, tuple[str, str, str]] = {
    f"{reduce}-{rows}-{graph}": (reduce, rows, graph)
    for reduce in ("sum", "mean", "max")
    for rows in ("unit", "weighted", "two_heads")
    for graph in ("loops", "duplicates", "one_edge", "star")
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck_and_gradgradcheck(case: str) -> None:
    reduce, rows, graph = CASES[case]
    g = GRAPHS[graph]
    inputs = [t for t in operands(g, rows, torch.float64) if t is not None]
    options = {} if reduce in ("sum", "mean") else {"ties": "exact"}
    run = by_ops(g, reduce, **options)
    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs, nondet_tol=NONDET_TOL)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("graph", ["loops", "duplicates", "tall"])
def test_gradcheck_and_gradgradcheck_of_sddmm(graph: str, mean: bool) -> None:
    g = GRAPHS[graph]
    a = features(g.num_dst, 4, dtype=torch.float64).requires_grad_()
    b = features(g.num_src, 4, seed=1, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda a, b: ops.sddmm(a, b, g.adjacency, 2, mean), (a, b))
    assert gradgradcheck(
        lambda a, b: ops.sddmm(a, b, g.adjacency, 2, mean), (a, b), nondet_tol=NONDET_TOL
    )


def test_third_order() -> None:
    g = GRAPHS["duplicates"]
    x, weight = operands(g, "weighted", torch.float64)

    def slope(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = by_ops(g, "sum")(x, weight).pow(3).sum()
        return torch.autograd.grad(out, (x, weight), create_graph=True)

    assert gradgradcheck(slope, (x, weight), nondet_tol=NONDET_TOL)


def _from_ends(x: Tensor, g: Graph) -> Tensor:
    source, target = g.edge_index
    return (x[source] * x[target]).sum(-1).tanh()


# Ways in which the inputs of an operation hang together.
SHARED: dict[str, Callable[[Tensor, Graph, str], Tensor]] = {
    "one_input": lambda x, g, reduce: by_ops(g, reduce)(x),
    "weight_made_of_x": lambda x, g, reduce: by_ops(g, reduce)(x, _from_ends(x, g)),
    "x_made_of_weight": lambda x, g, reduce: by_ops(g, reduce)(
        x * x.sum(), x.sum() * torch.ones(g.num_edges, dtype=x.dtype)
    ),
    "weight_of_products": lambda x, g, reduce: by_ops(g, reduce)(
        x, ops.sddmm(x, x, g.adjacency).tanh()
    ),
    "twice": lambda x, g, reduce: by_ops(g, reduce)(by_ops(g, reduce)(x)),
    "x_is_its_own_neighbour": lambda x, g, reduce: x * by_ops(g, reduce)(x),
}


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("shared", SHARED)
def test_gradient_is_the_same_when_recorded(shared: str, reduce: str) -> None:
    g = GRAPHS["loops"]
    x = features(g.num_src, 4, dtype=torch.float64).requires_grad_()
    out = SHARED[shared](x, g, reduce).pow(2).sum()
    (plain,) = torch.autograd.grad(out, x, retain_graph=True)
    (recorded,) = torch.autograd.grad(out, x, create_graph=True)
    torch.testing.assert_close(recorded, plain, rtol=1e-12, atol=1e-12)
    assert gradcheck(lambda x: SHARED[shared](x, g, reduce), x, nondet_tol=NONDET_TOL)
    assert gradgradcheck(lambda x: SHARED[shared](x, g, reduce), x, nondet_tol=NONDET_TOL)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("rows", ["unit", "weighted", "heads"])
def test_batched_gradients(rows: str, reduce: str) -> None:
    g = GRAPHS["unsorted"]
    inputs = [t for t in operands(g, rows, torch.float64) if t is not None]
    out = by_ops(g, reduce)(*inputs)
    directions = torch.randn(3, *out.shape, dtype=torch.float64)
    batched = torch.autograd.grad(out, inputs, directions, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(out, inputs, d, retain_graph=True) for d in directions]
    for found, *expected in zip(batched, *single, strict=True):
        torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("rows", ["unit", "weighted"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_hessian(vectorize: bool, reduce: str, rows: str) -> None:
    g = GRAPHS["duplicates"]
    inputs = tuple(t for t in operands(g, rows, torch.float64) if t is not None)
    hessian = torch.autograd.functional.hessian
    ours = hessian(lambda *i: by_ops(g, reduce)(*i).pow(2).sum(), inputs, vectorize=vectorize)
    stock = hessian(lambda *i: by_pyg(g, reduce)(*i).pow(2).sum(), inputs)
    torch.testing.assert_close(ours, stock)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda out: out.sum(),
    "every_other_column": lambda out: out[:, ::2].sum(),
    "transposed": lambda out: (out.t().contiguous() * torch.arange(1.0, 9)).sum(),
    "one_row": lambda out: out[3].pow(2).sum(),
    "expanded_rows": lambda out: (out * torch.arange(1.0, 6).expand_as(out)).sum(),
    "relu_in_place": lambda out: out.relu_().pow(2).sum(),
    "changed_in_place": lambda out: out.mul_(2).add_(1).pow(2).sum(),
    "zeroed_in_place": lambda out: out.zero_().add_(1).sum(),
}


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("rows", ["unit", "weighted"])
@pytest.mark.parametrize("loss", LOSSES)
def test_output_gradients_of_any_strides(loss: str, rows: str, reduce: str) -> None:
    g = Graph(random_edges(12, 8, 50), 12, 8)

    def stock(*inputs: Tensor) -> Tensor:
        # A copy, since scatter keeps its maxima for the backward and forbids to change them.
        return scaled(by_pyg(g, reduce)(*inputs).clone())

    def ours(*inputs: Tensor) -> Tensor:
        return scaled(by_ops(g, reduce)(*inputs))

    def scaled(out: Tensor) -> Tensor:
        # The size of what is summed beside it: a sum may cancel, its rounding does not.
        return torch.stack([LOSSES[loss](out), out.detach().abs().sum()])

    inputs = [t for t in operands(g, rows) if t is not None]
    if "in_place" in loss and reduce in ("max", "min") and not BY_NUMBA:
        for run in (by_pyg(g, reduce), by_ops(g, reduce)):  # both keep them
            out = scaled(run(*(t.detach().requires_grad_() for t in inputs)))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        return
    compare(stock, *inputs, ours=ours)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_only_the_gradients_that_are_asked_for(reduce: str, needs: tuple[bool, bool]) -> None:
    g = GRAPHS["unsorted"]
    x, weight = (t.detach() for t in operands(g, "heads"))
    inputs = x.requires_grad_(needs[0]), weight.requires_grad_(needs[1])
    compare(by_pyg(g, reduce), *inputs, ours=by_ops(g, reduce))


def test_inference_mode() -> None:
    g = GRAPHS["unsorted"]
    with torch.inference_mode():
        for reduce in ("sum", "max"):
            x, weight = operands(g, "heads")
            ours, stock = (run(g, reduce)(x, weight) for run in (by_ops, by_pyg))
            exact = by_pyg(g, reduce)(x.double(), weight.double())
            assert_no_worse_than_stock(ours, stock, exact)


# The dispatcher's view #####################################################################


def _primitives() -> dict[str, Callable[[CSR, Tensor, Tensor], tuple[Any, ...]]]:
    def extremum(csr: CSR, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
        return x, *csr, int(csr.rowptr.diff().max()), weight, True, 0

    def given(csr: CSR, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out, arg, tied = torch.ops.pyg_ioaware.reduce(*extremum(csr, x, weight))
        return out, arg, tied if BY_NUMBA else out

    if not BY_NUMBA:
        # The rows by source of a symmetric structure, and any place, for shapes and schema.
        backward = {
            "reduce_gather": lambda csr, x, w: (*given(csr, x, w), x, *csr, csr.idx, w, 0),
            "reduce_weight": lambda csr, x, w: (*given(csr, x, w), x, *csr, w, 0),
            "column_sums": lambda csr, x, w: (x,),
        }
    else:
        backward = {
            "reduce_backward": lambda csr, x, w: (*given(csr, x, w), x, *csr, w, 0),
            "reduce_backward_weight": lambda csr, x, w: (*given(csr, x, w), x, *csr, w, 0),
        }
    return backward | {
        "spmm": lambda csr, x, w: (x, *csr, w, None, True),
        "sddmm": lambda csr, x, w: (x, x, *csr, 3, False),
        "reduce": extremum,
    }


def test_every_primitive_is_checked() -> None:
    names = torch._C._dispatch_get_all_op_names()
    own = {n.split("::")[1] for n in names if n.startswith("pyg_ioaware::")}
    numba = {"reduce_backward", "reduce_backward_weight"}
    cuda = {"reduce_gather", "reduce_weight", "column_sums"}
    other = cuda if BY_NUMBA else numba
    assert own == set(_primitives()) | set(PRIMITIVES) | other


@pytest.mark.parametrize("graph", ["unsorted", "sorted_by_target", "no_edges", "hub"])
@pytest.mark.parametrize("name", _primitives())
def test_opcheck(name: str, graph: str) -> None:
    g = SQUARE[graph]
    x = features(g.num_src, 12)
    weight = features(g.num_edges, 3, seed=1)
    args = _primitives()[name](g.adjacency.by_target, x, weight)
    torch.library.opcheck(getattr(torch.ops.pyg_ioaware, name).default, args)


# References ################################################################################


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("graph", GRAPHS)
def test_reference_of_spmm(graph: str, transposed: bool, mean: bool) -> None:
    g = GRAPHS[graph]
    x = features(g.num_dst if transposed else g.num_src, 6, dtype=torch.float64)
    weight = features(g.num_edges, 3, seed=1, dtype=torch.float64)
    adj = g.adjacency
    ours = ops.spmm.__globals__["SpMM"].apply(x, weight, adj, mean, transposed)
    torch.testing.assert_close(ours, reference.spmm(x, weight, adj, mean, transposed))


# Errors ####################################################################################


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda adj: ops.spmm(torch.ones(11, 3), adj), r"'x' with 12 rows .*\(got shape \[11, 3\]"),
        (lambda adj: ops.spmm(torch.ones(12), adj), r"at least two dimensions \(got shape \[12\]"),
        (
            lambda adj: ops.spmm(torch.ones(12, 3), adj, torch.ones(49)),
            r"'weight' per edge, of shape \[50\] or \[50, H\] \(got shape \[49\]\)",
        ),
        (
            lambda adj: ops.reduce(torch.ones(12, 3), adj, torch.ones(50, 2)),
            r"2 weights per edge expects 'x' of shape \[N, 2, C\] \(got shape \[12, 3\]\)",
        ),
        (
            lambda adj: ops.reduce(torch.ones(12, 3), adj, torch.ones(50, 0)),
            r"0 weights per edge expects 'x' of shape \[N, 0, C\] \(got shape \[12, 3\]\)",
        ),
        (
            lambda adj: ops.spmm(torch.ones(12, 3), adj, torch.ones(50, device="meta")),
            r"on one device \(got '.*' and 'meta'\)",
        ),
        (
            lambda adj: ops.reduce(torch.ones(12, 3), adj, reduce="sum"),
            r"'reduce' must be 'max' or 'min' \(got 'sum'\)",
        ),
        (
            lambda adj: ops.reduce(torch.ones(12, 3), adj, ties="last"),
            r"'ties' must be one of \['even', 'first', 'exact'\] \(got 'last'\)",
        ),
        (
            lambda adj: ops.sddmm(torch.ones(12, 3), torch.ones(12, 4), adj),
            r"two operands of one width and dtype",
        ),
        (
            lambda adj: ops.sddmm(torch.ones(12, 3), torch.ones(12, 3), adj, heads=2),
            r"width that 'heads' divides \(got 3 and 2\)",
        ),
        (
            lambda adj: ops.sddmm(torch.ones(9, 3), torch.ones(12, 3), adj),
            r"'x' with 12 rows",
        ),
    ],
)
def test_operands_that_do_not_fit(call: Callable[[Any], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(GRAPHS["unsorted"].adjacency)


@pytest.mark.parametrize(
    ("edges", "num_src", "num_dst"),
    [([[0, 4], [1, 1]], 4, 2), ([[0, 1], [1, 2]], 4, 2), ([[0, -1], [1, 1]], 4, 2)],
)
def test_indices_out_of_range_make_no_structure(
    edges: list[list[int]], num_src: int, num_dst: int
) -> None:
    from pyg_ioaware.graph.csr import Adjacency

    assert Adjacency.from_pair(*torch.tensor(edges), num_src, num_dst) is None


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("ties", ["first", "exact"])
def test_maxima_that_are_not_finite_have_their_gradient_through_plain_pytorch_too(
    ties: str, reduce: str
) -> None:
    """What is infinite or NaN in an edge that gets no share stays out of all others."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1, -inf, 2, inf, nan, nan, 2], device=DEVICE).view(-1, 1)
    pairs = [(0, 0), (1, 0), (2, 0), (6, 0), (3, 1), (2, 1), (4, 2), (3, 2), (5, 2), (1, 3), (3, 3)]
    src, dst = torch.tensor(pairs, device=DEVICE).t()
    adj = Graph(torch.stack([src, dst]), 7, 4).adjacency
    found = []
    for create_graph in (False, True):
        leaf = x.clone().requires_grad_()
        out = ops.reduce(leaf, adj, reduce=reduce, ties=ties)
        cotangent = torch.arange(1.0, 5, device=DEVICE).view(4, 1)
        grads = torch.autograd.grad(out, leaf, cotangent, create_graph=create_graph)
        rule = reference.reduce(x, None, adj, reduce == "max", ties)
        torch.testing.assert_close(out, rule, equal_nan=True)
        found.append(grads[0])
    torch.testing.assert_close(found[1], found[0])
