"""The attention operations against plain PyTorch: values, gradients of any order, dropout."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from graphs import (
    DEVICE,
    GRAPHS,
    HUB_DEGREE,
    NONDET_TOL,
    SQUARE,
    Graph,
    features,
    random_edges,
)
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.nn import GATv2Conv, TransformerConv

from pyg_ioaware import ops, philox
from pyg_ioaware.ops import attention, reference
from pyg_ioaware.ops.attention import Attention, EdgeFeatures
from pyg_ioaware.ops.library import keeps_scores
from pyg_ioaware.ops.transformer import _sum_products
from pyg_ioaware.testing import compare

pytestmark = pytest.mark.usefixtures("poison", "one_thread")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
Results = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Case:
    """How attention is called: the number of features of edges, self-loops, dropout."""

    heads: int = 2
    channels: int = 8
    edge_dim: int = 0
    loops: bool = False
    dropout: float = 0.0
    weights: bool = True


CASES: dict[str, Case] = {
    "plain": Case(weights=False),
    "weights": Case(),
    "one_channel": Case(3, 1),
    "ragged": Case(3, 21),
    "wide": Case(1, 67, edge_dim=5),
    "loops": Case(loops=True),
    "edges": Case(edge_dim=3),
    "edges_and_loops": Case(edge_dim=17, loops=True, weights=False),
    "dropout": Case(5, 4, dropout=0.4),
    "all": Case(3, 12, edge_dim=4, loops=True, dropout=0.5),
}
OPS = ("gatv2", "transformer")


def operands(op: str, g: Graph, case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Makes the rows that an operation takes, then what it takes of edges."""
    shape = (case.heads, case.channels)
    ends = [features(g.num_src, *shape, seed=i, dtype=dtype) for i in range(2)]
    ends = ends[:1] if op == "gatv2" else ends
    own = features(g.num_dst, *shape, seed=2, dtype=dtype)
    # Scores of size one: a softmax that is all or nothing has gradients of rounding errors.
    att = features(*shape, seed=3, dtype=dtype) * case.channels**-0.5
    found = [*ends, own, att] if op == "gatv2" else [own, *ends]
    if case.edge_dim:
        lin = features(case.heads * case.channels, case.edge_dim, seed=5, dtype=dtype)
        found.append(features(g.num_edges, case.edge_dim, seed=4, dtype=dtype))
        found.append(lin * case.edge_dim**-0.5)
        if op == "gatv2" and case.loops:
            found.append(features(loops_of(op, g, case), case.edge_dim, seed=6, dtype=dtype))
    return [t.requires_grad_() for t in found]


def loops_of(op: str, g: Graph, case: Case) -> int:
    return min(g.num_src, g.num_dst) if case.loops and op == "gatv2" else -1


def edges_of(given: tuple[Tensor, ...]) -> EdgeFeatures | None:
    if not given:
        return None
    return EdgeFeatures(given[0], given[2] if len(given) > 2 else None, given[1])


def by_ops(op: str, g: Graph, case: Case) -> Callable[..., Results]:
    adj, loops = g.adjacency, loops_of(op, g, case)

    def run(a: Tensor, b: Tensor, c: Tensor, *edges: Tensor) -> Results:
        more: dict[str, Any] = {"num_loops": loops} if op == "gatv2" else {}
        more |= {"dropout": case.dropout, "edges": edges_of(edges), "return_weights": case.weights}
        return getattr(ops, op)(a, b, c, adj, **more)

    return run


def by_reference(op: str, g: Graph, case: Case) -> Callable[..., Results]:
    """The same by edge-sized tensors, in the dtype of the operands."""
    adj, loops = g.adjacency, loops_of(op, g, case)

    def run(a: Tensor, b: Tensor, c: Tensor, *edges: Tensor) -> Results:
        seed = attention.seed_for(case.dropout, a.device)
        factor = 0.2 if op == "gatv2" else case.channels**-0.5
        options = Attention(adj, case.heads, loops, factor, case.dropout, seed, True)
        given = edges_of(edges)
        if op == "gatv2":
            features_of = (
                (None,) * 3 if given is None else (given.attr, given.loop_attr, given.weight)
            )
            rows = (a.flatten(1), b.flatten(1), c.flatten())
            out, weights = reference.gatv2(options, *rows, *features_of)
        else:
            # Mapped one by one here, where the operation maps queries and sums instead.
            mapped = None if given is None else given.attr @ given.weight.t()
            out, weights = attend(options, a, b, c, mapped)
        shape = (g.num_dst, case.heads, case.channels)
        return out.view(shape), weights[options.order()] if case.weights else None

    return run


def attend(
    options: Attention, query: Tensor, key: Tensor, value: Tensor, mapped: Tensor | None
) -> tuple[Tensor, Tensor]:
    src, dst = options.ends()
    key, value = key[src], value[src]
    if mapped is not None:
        perm = options.adj.by_target.perm
        mapped = (mapped if perm is None else mapped[perm]).view(key.shape)
        key, value = key + mapped, value + mapped
    scores = (query[dst] * key).sum(-1) * options.factor
    weights = reference._softmax(scores, dst, query.size(0))
    mask = options.mask(weights.dtype)
    kept = weights if mask is None else weights * mask
    return reference._weighted_sum(value.flatten(1), kept, dst, query.size(0)), weights


def check(op: str, g: Graph, case: Case, *given: Tensor, **kwargs: Any) -> None:
    compare(by_reference(op, g, case), *given, ours=by_ops(op, g, case), **kwargs)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", OPS)
def test_same_as_plain_pytorch(op: str, case: str, graph: str) -> None:
    # In float64: few edges have few roundings, whose largest is no measure of another's.
    g, draws = GRAPHS[graph], 8 if graph == "hub" else 3
    check(op, g, CASES[case], *operands(op, g, CASES[case], torch.float64), draws=draws)


@pytest.mark.parametrize("case", ["weights", "ragged", "wide", "edges_and_loops", "all"])
@pytest.mark.parametrize("op", OPS)
def test_rounds_no_more_than_plain_pytorch(op: str, case: str) -> None:
    g, options = Graph(random_edges(100, 100, 2000), 100, 100), CASES[case]
    runs = by_ops(op, g, options), by_reference(op, g, options)
    errors = torch.zeros(2, 8, dtype=torch.float64)
    for seed in range(4):
        given = operands(op, g, options)
        drawn = [features(*t.shape, seed=10 * seed + i) for i, t in enumerate(given)]
        exact = _results(runs[1], [t.double() for t in drawn], seed)
        for place, run in enumerate(runs):
            for i, (got, best) in enumerate(zip(_results(run, drawn, seed), exact, strict=True)):
                errors[place, i] += (got.double() - best).square().sum()
    ours, plain = errors.sqrt()
    assert (ours <= 2 * plain).all(), ours / plain


def _results(run: Callable[..., Results], given: list[Tensor], seed: int) -> list[Tensor]:
    """Returns the output, and the gradients for a direction that depends on the seed alone."""
    given = [t.detach().requires_grad_() for t in given]
    torch.manual_seed(seed)
    out, _ = run(*given)
    direction = features(*out.shape, seed=seed)
    return [out.detach(), *torch.autograd.grad(out, given, direction.to(out.dtype))]


@pytest.mark.parametrize("edge_dim", [0, 6])
@pytest.mark.parametrize("op", OPS)
def test_the_reference_is_pyg(op: str, edge_dim: int) -> None:
    g = GRAPHS["unsorted"]
    make = GATv2Conv if op == "gatv2" else TransformerConv
    conv = make(7, 5, heads=3, edge_dim=edge_dim or None, bias=False).double()
    x = features(g.num_src, 7, dtype=torch.float64)
    edge = features(g.num_edges, edge_dim, dtype=torch.float64) if edge_dim else None
    more = {"fill_value": 2.0, "add_self_loops": True} if op == "gatv2" else {}
    for name, value in more.items():
        setattr(conv, name, value)
    out, (_, weights) = conv(x, g.edge_index, edge, return_attention_weights=True)
    case = Case(3, 5, edge_dim, loops=True)
    edges = [] if edge is None else [edge, conv.lin_edge.weight]
    if op == "gatv2":
        if edge is not None:
            edges.append(torch.full((g.num_dst, edge_dim), 2.0, dtype=torch.float64))
        rows = [conv.lin_l(x).view(-1, 3, 5), conv.lin_r(x).view(-1, 3, 5), conv.att[0]]
    else:
        out = out - conv.lin_skip(x)
        layers = (conv.lin_query, conv.lin_key, conv.lin_value)
        rows = [layer(x).view(-1, 3, 5) for layer in layers]
    found = by_reference(op, g, case)(*rows, *edges)
    torch.testing.assert_close(found[0].flatten(1), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["weights", "edges", "all"])
@pytest.mark.parametrize("op", OPS)
def test_dtypes(op: str, case: str, dtype: torch.dtype) -> None:
    g = GRAPHS["unsorted"]
    check(op, g, CASES[case], *operands(op, g, CASES[case], dtype))


@pytest.mark.parametrize(
    ("heads", "channels"),
    [
        *((3, c) for c in (1, 3, 7, 8, 9, 17, 32, 33, 65, 100, 129, 257, 513)),
        *itertools.product((1, 8), (1, 8, 9, 47, 128, 257)),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_widths(op: str, heads: int, channels: int) -> None:
    g, case = GRAPHS["unsorted"], Case(heads, channels)
    check(op, g, case, *operands(op, g, case))


@pytest.mark.parametrize("edge_dim", [1, 2, 8, 31, 64, 130])
@pytest.mark.parametrize("op", OPS)
def test_widths_of_edge_features(op: str, edge_dim: int) -> None:
    g, case = GRAPHS["unsorted"], Case(2, 9, edge_dim, loops=True)
    check(op, g, case, *operands(op, g, case))


@pytest.mark.parametrize("op", OPS)
def test_operands_of_any_strides(op: str) -> None:
    g, case = GRAPHS["unsorted"], Case(2, 3, edge_dim=2)
    given = [t.detach() for t in operands(op, g, case)]
    strided = [torch.stack([t, t], dim=-1)[..., 0].requires_grad_() for t in given]
    transposed = [t.t().contiguous().t() if t.dim() == 2 else t for t in given]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in given]
    for rows in (strided, transposed, shifted):
        check(op, g, case, *(t.requires_grad_() for t in rows))


LOSSES: dict[str, Callable[[Results], Tensor]] = {
    "expanded": lambda found: found[0].sum() + found[1].sum(),
    "transposed": lambda found: found[0].transpose(0, 1).contiguous().square().sum(),
    "strided": lambda found: found[0][:, :, ::2].square().sum(),
    "only_weights": lambda found: found[1].square().sum(),
    "weights_too": lambda found: found[0].square().sum() + found[1][::3].sin().sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("op", OPS)
def test_output_gradients(op: str, loss: str) -> None:
    g, case = GRAPHS["unsorted"], CASES["all"]
    stock, ours = by_reference(op, g, case), by_ops(op, g, case)
    given = operands(op, g, case)
    compare(lambda *a: LOSSES[loss](stock(*a)), *given, ours=lambda *a: LOSSES[loss](ours(*a)))


@pytest.mark.parametrize("op", OPS)
def test_only_the_gradients_that_are_asked_for(op: str) -> None:
    g, case = GRAPHS["unsorted"], CASES["all"]
    given = operands(op, g, case)
    for place in range(len(given)):
        one = [t.detach().requires_grad_(i == place) for i, t in enumerate(given)]
        check(op, g, case, *one)


# Numbers that are not finite, and scores that are large ####################################


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_nan_and_inf(op: str, value: float) -> None:
    g, case = GRAPHS["unsorted"], Case()
    given = [t.detach() for t in operands(op, g, case)]
    given[0][3, 1, 2] = value
    check(op, g, case, *given)


@pytest.mark.parametrize("op", OPS)
def test_rows_whose_scores_are_all_minus_infinity(op: str) -> None:
    g, case = GRAPHS["unsorted"], Case(1, 1)
    ones = torch.ones(g.num_dst, 1, 1)
    low = torch.full((g.num_src, 1, 1), float("-inf"))
    low[:6] = 1.0
    given = (low, ones, torch.ones(1, 1)) if op == "gatv2" else (ones, low, torch.ones_like(low))
    check(op, g, case, *given)
    out, _ = by_ops(op, g, case)(*given)
    degree = torch.bincount(g.edge_index[1][g.edge_index[0] < 6], minlength=g.num_dst)
    assert torch.equal(out.isnan().view(-1), degree == 0) or op == "gatv2"


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e6])
@pytest.mark.parametrize("graph", ["unsorted", "hub"])
@pytest.mark.parametrize("op", OPS)
def test_large_scores(op: str, graph: str, scale: float) -> None:
    g, case = GRAPHS[graph], Case()
    given = [(scale * t.detach()).requires_grad_() for t in operands(op, g, case)]
    out, weights = by_ops(op, g, case)(*given)
    assert out.isfinite().all()
    assert (weights >= 0).all()
    if graph == "unsorted":  # at the hub, the result is one or two of its edges: no average
        check(op, g, case, *(t.detach() for t in given))


# Gradients of higher order #################################################################

SMALL: dict[str, Case] = {
    "plain": Case(2, 3),
    "loops": Case(1, 2, loops=True),
    "all": Case(2, 2, edge_dim=2, loops=True, dropout=0.5),
}


@pytest.mark.parametrize("graph", ["loops", "duplicates", "tall"])
@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck_and_gradgradcheck(op: str, case: str, graph: str) -> None:
    g = GRAPHS[graph]
    run = by_ops(op, g, SMALL[case])

    def seeded(*given: Tensor) -> Results:
        torch.manual_seed(3)
        return run(*given)

    given = operands(op, g, SMALL[case], torch.float64)
    assert gradcheck(seeded, given)
    # Along random directions: number by number it takes seconds for each of these.
    assert gradgradcheck(seeded, given, nondet_tol=NONDET_TOL, fast_mode=True)


def _own(op: str, g: Graph, case: Case, x: Tensor) -> Tensor:
    """Attends where one tensor is all ends, and the ancestor of the rest."""
    run = by_ops(op, g, case)
    if op == "gatv2":
        return run(x, x, x.mean(0))[0]
    return run(x, x, x)[0] + run(x.sin(), x, x * x.sum())[0]


@pytest.mark.parametrize("op", OPS)
def test_gradient_of_shared_inputs_is_the_same_when_recorded(op: str) -> None:
    g, case = GRAPHS["loops"], Case(2, 3, weights=False)
    x = features(g.num_src, 2, 3, dtype=torch.float64).requires_grad_()
    out = _own(op, g, case, x).pow(2).sum()
    (plain,) = torch.autograd.grad(out, x, retain_graph=True)
    (recorded,) = torch.autograd.grad(out, x, create_graph=True)
    torch.testing.assert_close(recorded, plain, rtol=1e-12, atol=1e-12)
    assert gradcheck(partial(_own, op, g, case), x)
    assert gradgradcheck(partial(_own, op, g, case), x, nondet_tol=NONDET_TOL)


@pytest.mark.parametrize("op", OPS)
def test_gradient_recorded_under_autocast(op: str) -> None:
    # The products of the size of nodes are PyTorch's own, and follow the mode.
    g, case = GRAPHS["unsorted"], Case(edge_dim=3 if op == "gatv2" else 0)
    given = operands(op, g, case)
    out, _ = by_ops(op, g, case)(*given)
    plain = torch.autograd.grad(out.square().sum(), given, retain_graph=True)
    loss = out.square().sum()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        recorded = torch.autograd.grad(loss, given, create_graph=True)
    for a, b in zip(recorded, plain, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_batched_gradients(op: str) -> None:
    g, case = GRAPHS["unsorted"], Case(edge_dim=3)
    given = operands(op, g, case, torch.float64)
    out, _ = by_ops(op, g, case)(*given)
    directions = torch.randn(3, *out.shape, dtype=torch.float64)
    batched = torch.autograd.grad(out, given, directions, is_grads_batched=True, retain_graph=True)
    for i, direction in enumerate(directions):
        single = torch.autograd.grad(out, given, direction, retain_graph=True)
        for a, b in zip(batched, single, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-10, atol=1e-10)


# Dropout ###################################################################################


def test_philox_known_answers() -> None:
    # The known-answer vectors that the generator's authors publish with it.
    zero = torch.zeros(1, dtype=torch.long)
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox.words(zero, zero, zero).tolist() == [expected]


def test_masks_are_independent_and_fair() -> None:
    seed = torch.tensor([123])
    mask = philox.mask(40_000, 6, 0.3, seed, torch.float64)
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.7}
    kept = (mask > 0).double()
    deviation = (0.3 * 0.7 / 40_000) ** 0.5
    assert (kept.mean(0) - 0.7).abs().max() < 5 * deviation
    assert (torch.corrcoef(kept.t()) - torch.eye(6)).abs().max() < 5 / 200
    assert abs(torch.corrcoef(torch.stack([kept[:-1, 0], kept[1:, 0]]))[0, 1]) < 5 / 200
    other = philox.mask(40_000, 6, 0.3, seed + 1, torch.float64)
    both = torch.stack([kept[:, 0], (other[:, 0] > 0).double()])
    assert abs(torch.corrcoef(both)[0, 1]) < 5 / 200


@pytest.mark.parametrize("op", OPS)
def test_dropout_at_its_ends_and_by_seed(op: str) -> None:
    g = GRAPHS["unsorted"]
    given = operands(op, g, Case())
    none, _ = by_ops(op, g, Case())(*given)
    state = torch.get_rng_state()
    torch.testing.assert_close(by_ops(op, g, Case(dropout=0.0))(*given)[0], none, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    gone, _ = by_ops(op, g, Case(dropout=1.0))(*given)
    assert torch.equal(gone, torch.zeros_like(gone))
    for gradient in torch.autograd.grad(gone.sum(), given):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    half = by_ops(op, g, Case(dropout=0.5))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(half(*given)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("op", OPS)
def test_dropout_is_unbiased(op: str) -> None:
    g, case = GRAPHS["loops"], Case(2, 3, dropout=0.5, weights=False)
    given = [t.detach() for t in operands(op, g, case, torch.float64)]
    expected, _ = by_ops(op, g, Case(2, 3, weights=False))(*given)
    torch.manual_seed(0)
    outs = torch.stack([by_ops(op, g, case)(*given)[0] for _ in range(2000)])
    error = (outs.mean(0) - expected).abs()
    assert (error < 5 * outs.std(0) / 2000**0.5 + 1e-12).all()


@pytest.mark.parametrize("op", OPS)
def test_what_no_edge_reaches_stays_out_of_gradients(op: str) -> None:
    g = Graph(GRAPHS["path"].edge_index, 6, 6)  # the last node has no edges
    given = operands(op, g, Case())
    with torch.no_grad():
        for rows in given:
            if rows.size(0) == 6:
                rows[-1] = float("nan")
    out, _ = getattr(ops, op)(*given, g.adjacency)
    for gradient in torch.autograd.grad(out.sum(), given):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("nodes", [1, 7, 40, 41])
def test_products_of_narrow_rows_are_summed_in_parts(nodes: int) -> None:
    x, y = (features(40, 3, c, seed=c, dtype=torch.float64).requires_grad_() for c in (4, 2))

    def run(x: Tensor, y: Tensor) -> Tensor:
        return _sum_products(x, y, nodes)

    torch.testing.assert_close(run(x, y), torch.einsum("nhp,nhq->hpq", x, y))
    assert torch.autograd.gradcheck(run, (x, y))


# Order, runs, threads ######################################################################


@pytest.mark.parametrize("op", OPS)
def test_the_hub_is_split(op: str) -> None:
    g = GRAPHS["hub"]
    assert g.adjacency.by_target.tiles.size(0) > 1
    assert g.transposed.adjacency.by_source.tiles.size(0) > 1
    assert g.num_edges >= HUB_DEGREE


@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_threads_or_runs(op: str) -> None:
    case = CASES["all"]
    for g in (GRAPHS["hub"], GRAPHS["hub"].transposed):
        given = operands(op, g, case)
        found = []
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            out, weights = by_ops(op, g, case)(*given)
            gradients = torch.autograd.grad(out.square().sum() + weights.sum(), given)
            found.append([out, weights, *gradients])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("graph", ["unsorted", "sorted_by_target", "loops", "wide"])
def test_weights_come_in_the_order_of_the_edges(graph: str) -> None:
    g = GRAPHS[graph]
    loops = min(g.num_src, g.num_dst)
    x_l, x_r, att = operands("gatv2", g, Case())
    _, weights = ops.gatv2(x_l, x_r, att, g.adjacency, num_loops=loops, return_weights=True)
    kept = g.edge_index[:, g.edge_index[0] != g.edge_index[1]]
    source, target = torch.cat([kept, torch.arange(loops).expand(2, -1)], dim=1)
    scores = (torch.nn.functional.leaky_relu(x_l[source] + x_r[target], 0.2) * att).sum(-1)
    torch.testing.assert_close(weights, reference._softmax(scores, target, g.num_dst))


# The dispatcher's view #####################################################################


def primitive_arguments(name: str, g: Graph, case: Case) -> tuple[Any, ...]:
    """Returns arguments for a primitive; every position of the graph is used."""
    op, adj = name.split("_")[0], g.adjacency
    rows = [t.detach().flatten(1) for t in operands(op, g, case)[:3]]
    edges = [t.detach() for t in operands(op, g, case)[3:]]
    seed = torch.tensor([5]) if case.dropout else None
    call = getattr(torch.ops.pyg_ioaware, op)
    grad = features(g.num_dst, case.heads * case.channels, seed=8)
    if op == "gatv2":
        rows[2] = rows[2].flatten()
        attr, lin, loop_attr = [*edges, None, None, None][:3]
        options = (case.heads, loops_of(op, g, case), 0.2, case.dropout, seed)
        more, grads = (attr, loop_attr, lin, *options), (grad, None)
        kept = (True, True)
    else:
        attr = edges[0] if edges else None
        asked = features(g.num_dst, case.heads * case.edge_dim, seed=9) if edges else None
        more, grads = (attr, asked, case.heads, 0.5, case.dropout, seed), (grad, asked, None)
        kept = (True,)
    given = (*rows, *adj.by_target, *more, *kept)
    if name == op:
        return given
    outputs = call(*given)
    keeps = keeps_scores(grad.device, bool(edges) and op == "gatv2")
    stats, *formed = outputs[1:] if op == "gatv2" else outputs[2:]
    formed = formed if keeps else [None] * len(formed)
    rows = (*grads, *rows, stats, *adj.by_target, *adj.by_source_in_place)
    return (*rows, *more, case.edge_dim > 0, True, *formed)


PARTS = ("", "_backward")
PRIMITIVES = [op + part for op in OPS for part in PARTS]


@pytest.mark.parametrize("graph", ["unsorted", "path", "no_edges", "hub"])
@pytest.mark.parametrize("case", ["plain", "all"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_opcheck(name: str, case: str, graph: str) -> None:
    g = SQUARE[graph]
    source, target = g.edge_index
    without_loops = Graph(g.edge_index[:, source != target], g.num_src, g.num_dst)
    arguments = primitive_arguments(name, without_loops, CASES[case])
    torch.library.opcheck(getattr(torch.ops.pyg_ioaware, name).default, arguments)


@pytest.mark.parametrize("case", ["plain", "all"])
@pytest.mark.parametrize("op", OPS)
def test_who_listens_sees_the_primitives_and_changes_nothing(op: str, case: str) -> None:
    g, found = GRAPHS["unsorted"], []
    given = operands(op, g, CASES[case])
    for listens in (False, True):
        torch.manual_seed(0)
        with torch.profiler.profile() if listens else contextlib.nullcontext() as seen:
            out, weights = by_ops(op, g, CASES[case])(*given)
            total = out.square().sum() + (0 if weights is None else weights.sum())
            found.append([out, *torch.autograd.grad(total, given)])
        if seen is not None:
            names = {event.name for event in seen.events()}
            assert {f"pyg_ioaware::{op}{part}" for part in PARTS} <= names
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_a_parameter_may_be_an_operand(op: str) -> None:
    g = GRAPHS["unsorted"]
    given = operands(op, g, CASES["plain"])
    results = []
    for make in (torch.Tensor.clone, torch.nn.Parameter):
        rows = [make(t.detach()).requires_grad_() for t in given]
        out = by_ops(op, g, CASES["plain"])(*rows)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), rows)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_attention_vectors_as_pyg_holds_them() -> None:
    g, case = GRAPHS["unsorted"], CASES["plain"]
    x_l, x_r, att = operands("gatv2", g, case)
    results = []
    for vectors in (att, att.unsqueeze(0)):
        out = ops.gatv2(x_l, x_r, vectors, g.adjacency)[0]
        assert not out._is_view()  # or it could not be changed in place
        results.append([out, *torch.autograd.grad(out.square().sum(), (x_l, x_r, att))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Errors ####################################################################################


def _call(op: str, **changes: Any) -> Results:
    g = GRAPHS["wide"]  # 17 sources, 5 targets
    x_l, x_r = features(17, 2, 3), features(5, 2, 3)
    if op == "gatv2":
        given = {"x_l": x_l, "x_r": x_r, "att": features(2, 3)}
    else:
        given = {"query": x_r, "key": x_l, "value": x_l}
    return getattr(ops, op)(**given | changes, adj=g.adjacency)


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("gatv2", {"x_l": features(5, 2, 3)}, r"shape \[17, H, C\] \(got shape \[5, 2, 3\]"),
        ("gatv2", {"x_r": features(17, 2, 3)}, r"shape \[5, H, C\] \(got shape \[17, 2, 3\]"),
        ("gatv2", {"x_l": features(17, 6)}, r"shape \[17, H, C\] \(got shape \[17, 6\]"),
        ("gatv2", {"x_l": features(17, 3, 2)}, r"same heads, .* \(got \[3, 2\]"),
        ("gatv2", {"att": features(3, 2)}, r"vectors of shape \[2, 3\] \(got shape \[3, 2\]"),
        ("gatv2", {"num_loops": 6}, r"'num_loops' .* \(got 6 for 17 sources and 5 targets"),
        ("gatv2", {"dropout": 1.5}, r"'dropout' must be in \[0, 1\] \(got 1.5"),
        ("transformer", {"key": features(4, 2, 3)}, r"shape \[17, H, C\] \(got shape \[4, 2, 3\]"),
        ("transformer", {"value": features(17, 2, 4)}, r"same heads, .* \(got \[2, 4\]"),
        (
            "transformer",
            {"edges": EdgeFeatures(features(3, 2), None, features(6, 2))},
            r"edge features of shape \[40, 2\] \(got shape \[3, 2\]",
        ),
        (
            "gatv2",
            {"edges": EdgeFeatures(features(40, 2), None, features(5, 2))},
            r"map of edge features of shape \[6, D\] \(got shape \[5, 2\]",
        ),
        (
            "gatv2",
            {"num_loops": 5, "edges": EdgeFeatures(features(40, 2), None, features(6, 2))},
            r"features of the 5 self-loops \(got none",
        ),
    ],
)
def test_operands_that_do_not_fit(op: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(op, **changes)
