"""The fused attention layers: dropout, gradients, and layers as users have them."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric
from attention import LAYERS, OWN, C, D, F, attr, check, pair, x
from graphs import BIPARTITE, NONDET_TOL, SQUARE, features
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn
from torch_geometric.data import HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer

import pyg_ioaware
from pyg_ioaware.testing import compare

pytestmark = pytest.mark.usefixtures("poison", "one_thread")

G = SQUARE["unsorted"]
E = G.edge_index
ALL = pytest.mark.parametrize("name", LAYERS)


def layer(name: str, **options: Any) -> Any:
    return LAYERS[name](F, C, 2, **options)


# Dropout ###################################################################################


def drawn(conv: Any, seed: int, weights: bool = True) -> Any:
    pyg_ioaware.patch(strict=True)
    torch.manual_seed(seed)
    return conv(x(G).detach(), E, return_attention_weights=True if weights else None)


@ALL
def test_mean_over_dropout_is_the_result_without(name: str) -> None:
    conv = layer(name, dropout=0.4)
    outs = torch.stack([drawn(conv, seed, weights=False).detach() for seed in range(400)])
    expected = drawn(conv.eval(), 0)[0].detach()
    deviation = (outs.mean(0) - expected).abs() / (outs.std(0) / math.sqrt(len(outs)) + 1e-6)
    assert deviation.max() < 5
    assert outs.std(0).max() > 0.01


def test_each_weight_is_dropped_or_grows() -> None:
    conv = layer("GATv2", dropout=0.25)
    found = torch.stack([drawn(conv, seed)[1][1].detach() for seed in range(100)])
    alpha = drawn(conv.eval(), 0)[1][1].detach()
    kept = found != 0
    torch.testing.assert_close(found, torch.where(kept, alpha / 0.75, 0))
    rate = 1 - kept.float().mean()
    assert abs(rate - 0.25) < 5 * math.sqrt(0.25 * 0.75 / kept.numel())
    assert (kept[:, :, 0] != kept[:, :, 1]).any(), "each head drops its own"
    assert not torch.equal(found[0], found[1])


def test_transformer_returns_weights_before_dropout() -> None:
    conv = layer("Transformer", dropout=0.5)
    _, (_, found) = drawn(conv, 1)
    torch.testing.assert_close(found, drawn(conv.eval(), 1)[1][1])


@ALL
def test_same_seed_same_dropout(name: str) -> None:
    conv = layer(name, dropout=0.5)
    first, again, other = (drawn(conv, seed, weights=False) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("p", [0, 1.0, 1])
@ALL
def test_dropout_of_nothing_and_everything(name: str, p: float) -> None:
    check(layer(name, dropout=p), x(G), E, return_attention_weights=True)


@ALL
def test_no_dropout_outside_of_training(name: str) -> None:
    check(layer(name, dropout=0.7).eval(), x(G), E)


@pytest.mark.parametrize("p", [-0.1, 1.5])
@ALL
def test_impossible_dropout_is_stocks_error(name: str, p: float) -> None:
    compare(layer(name, dropout=p), x(G), E)
    compare(layer(name, dropout=p).eval(), x(G), E)


@pytest.mark.parametrize("reentrant", [False, True])
@ALL
def test_checkpoint_draws_the_same_again(name: str, reentrant: bool) -> None:
    # The mean is PyTorch's own sum, which on a GPU has another order each time.
    options = {"fill_value": 0.5} if name == "GATv2" else {}
    conv, found = layer(name, dropout=0.5, edge_dim=D, **options), []
    for run in (conv, lambda *args: checkpoint(conv, *args, use_reentrant=reentrant)):
        leaf = x(G)
        torch.manual_seed(1)
        with pyg_ioaware.patched(strict=True):
            run(leaf, E, attr(G)).square().sum().backward()
        found.append([leaf.grad, *(p.grad.clone() for p in conv.parameters())])
        conv.zero_grad()
    for direct, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, direct, rtol=0, atol=0)


# Autograd ##################################################################################


class InPlace(torch.nn.Module):
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.conv(*args)
        return out.relu_()


@pytest.mark.parametrize("options", [{}, {"concat": False}])
@ALL
def test_output_changed_in_place(name: str, options: dict[str, Any]) -> None:
    bare = {"bias": False} if name == "GATv2" else {"root_weight": False}
    for more in ({}, bare):
        check(InPlace(layer(name, **options, **more)), x(G), E)


@ALL
def test_gradcheck(name: str) -> None:
    g = SQUARE["duplicates"]
    conv = LAYERS[name](F, 2, 2, edge_dim=D).double()
    inputs = (x(g, dtype=torch.float64), attr(g, dtype=torch.float64))
    with pyg_ioaware.patched():
        for flag in (None, True):

            def run(x: Tensor, attr: Tensor) -> Any:
                out = conv(x, g.edge_index, attr, return_attention_weights=flag)  # noqa: B023
                return out if isinstance(out, Tensor) else (out[0], out[1][1])

            assert torch.autograd.gradcheck(run, inputs, nondet_tol=NONDET_TOL)
        assert torch.autograd.gradgradcheck(run, inputs, nondet_tol=NONDET_TOL)


SHARED: dict[str, Callable[[], Any]] = {
    "GATv2": lambda: layer("GATv2", edge_dim=D),
    "GATv2-shared": lambda: layer("GATv2", share_weights=True, edge_dim=D),
    "Transformer": lambda: layer("Transformer", edge_dim=D),
    "Transformer-beta": lambda: layer("Transformer", beta=True, edge_dim=D),
}


@pytest.mark.parametrize("kind", SHARED)
def test_second_derivatives(kind: str) -> None:
    """Of shared inputs too, and of an input that another input is made from."""
    conv, found = SHARED[kind]().double(), []
    if kind == "Transformer":
        conv.lin_key = conv.lin_value = conv.lin_query
    for scope in (pyg_ioaware.disabled, pyg_ioaware.patched):
        leaf, edges = x(G, dtype=torch.float64), attr(G, dtype=torch.float64)
        leaves = [leaf, edges, *conv.parameters()]
        with scope():
            loss = conv(leaf, E, edges).square().sum() + conv((leaf, leaf.sin()), E, edges).sum()
        plain = torch.autograd.grad(loss, leaves, retain_graph=True)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        torch.testing.assert_close(first, plain)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append((plain, second))
    torch.testing.assert_close(found[1], found[0])


def test_gradients_of_unused_sources_are_zero() -> None:
    g = BIPARTITE["unused_sources"]
    unused = torch.ones(g.num_src, dtype=torch.bool).index_fill_(0, g.edge_index[0], False)
    for name in LAYERS:
        options = {"add_self_loops": False} if name == "GATv2" else {}
        ends = pair(g)
        with pyg_ioaware.patched():
            LAYERS[name]((F, F + 1), C, 2, **options)(ends, g.edge_index).sum().backward()
        assert ends[0].grad is not None
        assert ends[0].grad[unused].eq(0).all()


@ALL
def test_many_calls_at_once(name: str) -> None:
    """A stack of layers, and one layer called twice before the backward pass."""
    conv = layer(name, edge_dim=D, concat=False)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv
            self.back = torch.nn.Linear(C, F)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            first = self.conv(x, E, edges)
            out: Tensor = self.conv(self.back(first), E.flip(0), edges) + first
            return out

    check(Twice(), x(G), attr(G))


DUALS = {
    "GATv2": ["x", "attr", "fill_value", "att", "bias", "lin_edge.weight", "lin_l.weight"],
    "Transformer": ["x", "attr", "lin_edge.weight", "lin_value.weight", "lin_skip.bias"],
}


@pytest.mark.parametrize(("name", "dual"), [(n, d) for n, duals in DUALS.items() for d in duals])
def test_forward_derivatives(name: str, dual: str) -> None:
    """Of anything, also where the values are the very memory of an earlier call."""
    conv, found = layer(name, edge_dim=D), []
    given: dict[str, Tensor] = {"x": features(12, F), "attr": attr(G).detach()}
    if name == "GATv2":
        conv.fill_value = given["fill_value"] = torch.ones(D)
    given |= {k: p.detach() for k, p in conv.named_parameters()}

    def run(scale: float) -> Tensor:
        parameters = {k: given[k] for k, _ in conv.named_parameters()}
        with forward_ad.dual_level():
            moved = forward_ad.make_dual(given[dual], given[dual] * scale)
            now = given | {dual: moved}
            if name == "GATv2":
                conv.fill_value = now["fill_value"]
            changed = parameters | ({dual: moved} if dual in parameters else {})
            out = functional_call(conv, changed, (now["x"], E, now["attr"]))
            tangent: Tensor = forward_ad.unpack_dual(out).tangent
            return tangent

    for scope in (pyg_ioaware.disabled, pyg_ioaware.patched):
        with scope():
            conv(given["x"], E, given["attr"])
            found.append([run(scale) for scale in (1.0, -2.0)])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("made", ["x", "attr", "fill_value", "lin_edge.weight"])
@ALL
def test_gradients_with_tensors_made_in_inference_mode(name: str, made: str, frozen: bool) -> None:
    """No gradient can keep them; stock, which copies some, may do without."""
    conv = LAYERS[name](8, C, 2, edge_dim=D)
    if name == "GATv2":
        conv.fill_value = torch.ones(D)
    for linear in ("lin_l", "lin_r", "lin_query", "lin_key", "lin_value"):
        if made == "x" and hasattr(conv, linear):
            setattr(conv, linear, torch.nn.Identity())
    conv.lin_edge.weight.requires_grad_(not frozen)
    given = {"x": x(G, 8), "attr": attr(G)}
    with torch.inference_mode():
        if made in given:
            given[made] = given[made].detach().clone()
        elif made == "fill_value":
            conv.fill_value = torch.ones(D)
        else:
            conv.lin_edge.weight = torch.nn.Parameter(torch.rand(2 * C, D), requires_grad=False)

    def run() -> Any:
        try:
            loss = conv(given["x"], E, given["attr"]).square().sum()
            return torch.autograd.grad(loss, [p for p in conv.parameters() if p.requires_grad])
        except RuntimeError as error:
            return str(error)

    expected = run()
    with pyg_ioaware.patched():
        found = run()
    assert isinstance(found, str) == isinstance(expected, str)
    if not isinstance(found, str):
        torch.testing.assert_close(found, expected)


# Layers as users have them #################################################################


@pytest.mark.parametrize("attribute", ["dropout", "negative_slope", "heads", "flow", "concat"])
def test_attributes_changed_between_calls(attribute: str) -> None:
    conv = nn.GATv2Conv(F, C, 2, bias=False)
    check(conv, x(G), E)
    value = {"dropout": 1.0, "negative_slope": 0.9, "flow": "target_to_source", "concat": False}
    if attribute == "heads":
        conv.heads, conv.out_channels = 4, 2
        conv.att = torch.nn.Parameter(conv.att.detach().view(1, 4, 2))
    else:
        setattr(conv, attribute, value[attribute])
    check(conv, x(G), E)


def test_loops_switched_off() -> None:
    conv = nn.GATv2Conv(F, C, 2)
    conv.add_self_loops = False
    check(conv, x(SQUARE["loops"]), SQUARE["loops"].edge_index)


@pytest.mark.parametrize("name", ["adjacency", "_given", "_out", "_num_loops", "_conv"])
def test_attributes_of_the_users(name: str) -> None:
    conv = layer("GATv2")
    setattr(conv, name, 3)
    check(conv, x(G), E)


@ALL
def test_a_structure_is_built_once(name: str) -> None:
    conv, edges = layer(name, edge_dim=D), attr(G).detach()
    with pyg_ioaware.patched():
        conv(x(G), E, edges).sum().backward()
        pyg_ioaware.stats(reset=True)
        for _ in range(3):
            conv(x(G), E, edges).sum().backward()
    assert pyg_ioaware.stats()["cache"]["misses"] == 0


@ALL
def test_edges_changed_in_place(name: str) -> None:
    conv, edge_index, edges = layer(name, edge_dim=D), E.clone(), attr(G).detach().clone()
    with pyg_ioaware.patched():
        conv(x(G), edge_index, edges)
        edge_index.copy_(edge_index.flip(0))
        edges.mul_(2)
        found = conv(x(G), edge_index, edges)
    torch.testing.assert_close(found, conv(x(G), edge_index, edges))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@ALL
def test_copies(name: str, duplicate: Callable[[Any], Any]) -> None:
    conv = layer(name)
    with pyg_ioaware.patched():
        conv(x(G), E)
        twin = duplicate(conv)
    assert vars(conv).keys() == vars(layer(name)).keys()
    check(twin, x(G), E)


@ALL
def test_one_model_alone(name: str) -> None:
    ours, other = layer(name), layer(name)
    pyg_ioaware.accelerate(ours)
    pyg_ioaware.stats(reset=True)
    ours(x(G), E)
    other(x(G), E)
    assert pyg_ioaware.stats()["layers"] == {f"{name}Conv": {"fused": 1, "stock": {}}}
    pyg_ioaware.decelerate(ours)
    ours(x(G), E)
    assert pyg_ioaware.stats()["layers"] == {f"{name}Conv": {"fused": 1, "stock": {}}}


def test_gat_model() -> None:
    model = nn.GAT(F, C, num_layers=2, v2=True, heads=2, edge_dim=D)
    check(model, x(G), E, edge_attr=attr(G))


# PyG 2.6 traces by a name that newer versions of PyTorch no longer have.
@pytest.mark.skipif(
    torch_geometric.__version__.startswith("2.6")
    and not hasattr(torch.fx._symbolic_trace, "Union"),
    reason="this PyG cannot trace with this PyTorch",
)
@ALL
def test_hetero_model(name: str) -> None:
    g = BIPARTITE["wide"]
    data = HeteroData()
    data["a"].x, data["b"].x = (
        t.detach() for t in (features(g.num_src, F), features(g.num_dst, F))
    )
    data["a", "to", "b"].edge_index = g.edge_index
    data["b", "of", "a"].edge_index = g.edge_index.flip(0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"add_self_loops": False} if name == "GATv2" else {}
            self.first = LAYERS[name]((-1, -1), C, 2, **options)
            self.second = LAYERS[name]((-1, -1), C, **options)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
            return out

    model = nn.to_hetero(Net(), data.metadata())
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    check(model, data.x_dict, data.edge_index_dict)


def _explained(model: Any, algorithm: Any, masks: dict[str, Any], **kwargs: Any) -> Tensor:
    torch.manual_seed(2)
    config = {
        "mode": "multiclass_classification",
        "task_level": "node",
        "return_type": "raw",
    }
    explainer = Explainer(model, algorithm, "model", model_config=config, **masks)
    mask: Tensor = explainer(features(12, F), E, **kwargs).edge_mask
    return mask


@pytest.mark.parametrize("own", [False, True])
@ALL
def test_explainers(name: str, own: bool) -> None:
    """They look at every message, patched or not."""
    stock = layer(name)
    ours = OWN[name](F, C, 2) if own else stock
    ours.load_state_dict(stock.state_dict())
    ours(x(G), E)
    masks = {"node_mask_type": "attributes", "edge_mask_type": "object"}
    for algorithm, options, kwargs in (
        (lambda: GNNExplainer(epochs=4), masks, {"index": 3}),
        (AttentionExplainer, {"edge_mask_type": "object"}, {}),
    ):
        expected = _explained(stock, algorithm(), options, **kwargs)
        with pyg_ioaware.patched():
            found = _explained(ours, algorithm(), options, **kwargs)
        assert found.gt(0).any()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    check(stock, x(G), E)
