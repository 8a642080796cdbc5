"""Layers that aggregate without making messages, and when they do not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convs import C, F, edge_weight
from graphs import BIPARTITE, SQUARE, bad_index, features, random_edges
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    GCNConv,
    GINConv,
    GraphConv,
    MeanAggregation,
    MessagePassing,
    SAGEConv,
    SumAggregation,
)

import pyg_ioaware
from pyg_ioaware.graph.identity import identity, rows_of
from pyg_ioaware.nn import IOAwareGCNConv, IOAwareSAGEConv, shortcut, sources
from pyg_ioaware.testing import compare

pytestmark = pytest.mark.usefixtures("poison", "one_thread")

G = SQUARE["unsorted"]
E = G.edge_index
N = G.num_src

LAYERS: dict[str, Callable[[], Any]] = {
    "GCN": lambda: GCNConv(F, C),
    "GCN-cached": lambda: GCNConv(F, C, cached=True, improved=True),
    "GCN-no-norm": lambda: GCNConv(F, C, normalize=False, bias=False),
    "GCN-mean": lambda: GCNConv(F, C, aggr="mean"),
    "GCN-max": lambda: GCNConv(F, C, aggr="max"),
    "SAGE": lambda: SAGEConv(F, C),
    "SAGE-sum": lambda: SAGEConv(F, C, aggr="sum", root_weight=False),
    "SAGE-max": lambda: SAGEConv(F, C, aggr="max", project=True, normalize=True),
    "SAGE-min": lambda: SAGEConv(F, C, aggr="min", bias=False),
    "Graph": lambda: GraphConv(F, C),
    "Graph-max": lambda: GraphConv(F, C, aggr="max"),
    "GIN": lambda: GINConv(nn.Linear(F, C), train_eps=True),
    "IOAwareGCN": lambda: IOAwareGCNConv(F, C),
    "IOAwareSAGE": lambda: IOAwareSAGEConv(F, C, aggr="max"),
}


def x(num_nodes: int = N, width: int = F) -> Tensor:
    return features(num_nodes, width).requires_grad_()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lists, for each propagation of a layer with a shortcut, whether it was taken."""
    found: list[bool] = []
    stock = shortcut.Shortcut.aggregate

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(self, *args, **kwargs)
        found.append(out is not None)
        return out

    monkeypatch.setattr(shortcut.Shortcut, "aggregate", noted)
    return found


def check(taken: list[bool], expected: bool, conv: Any, *args: Any, **kwargs: Any) -> None:
    """Compares a layer with stock PyG, and tells whether the shortcut was taken."""
    layers = compare(conv, *args, **kwargs)
    assert set(taken) == {expected}
    assert sum(calls.fused for calls in layers.values()) in (1, 2) or not expected


# Where it is taken #########################################################################


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("graph", ["unsorted", "loops", "isolated", "no_edges"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_taken(name: str, graph: str, flow: str, taken: list[bool]) -> None:
    g, conv = SQUARE[graph], LAYERS[name]()
    conv.flow = flow
    check(taken, True, conv, x(g.num_src), g.edge_index, steps=2)
    if "SAGE" not in name and "GIN" not in name:
        check(taken, True, conv, x(g.num_src), g.edge_index, edge_weight(g))
        check(taken, True, conv, x(g.num_src), g.edge_index, edge_weight(g, requires_grad=False))


@pytest.mark.parametrize("with_size", [False, True])
@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("graph", BIPARTITE)
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("layer", [SAGEConv, GraphConv])
def test_two_sets_of_nodes(
    layer: Any, aggr: str, graph: str, with_targets: bool, with_size: bool, taken: list[bool]
) -> None:
    g = BIPARTITE[graph]
    pair = x(g.num_src), (features(g.num_dst, 5, seed=1).requires_grad_() if with_targets else None)
    size = (g.num_src, g.num_dst) if with_size or not with_targets else None
    check(taken, True, layer((F, 5), C, aggr=aggr), pair, g.edge_index, size=size)


def test_a_subclass_that_changes_nothing(taken: list[bool]) -> None:
    class Named(GCNConv):
        pass

    class Around(SAGEConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = super().forward(x, edge_index) * 2
            return out

    check(taken, True, Named(F, C), x(), E)
    check(taken, True, Around(F, C), x(), E)
    assert pyg_ioaware.explain(Named(F, C), x(), E).layers.keys() == {"Named"}


@pytest.mark.parametrize("name", ["GCN", "SAGE"])
def test_a_layer_that_was_explained_once(name: str, taken: list[bool]) -> None:
    """PyG binds a propagation to it, and the layer keeps its own attributes alone."""
    conv = LAYERS[name]()
    conv.explain = True
    conv.explain = False
    assert "propagate" in conv.__dict__
    names = set(conv.__dict__)
    with pyg_ioaware.patched(strict=True):
        found = conv(x(), E)
    torch.testing.assert_close(found, conv(x(), E))
    assert set(conv.__dict__) == names
    assert taken == [True]


def test_what_is_cached_is_kept_by_the_layer() -> None:
    conv = GCNConv(F, C, cached=True)
    stock = copy.deepcopy(conv)
    stock(x(), E)
    with pyg_ioaware.patched():
        conv(x(), E)
        held = conv._cached_edge_index
        assert held is not None
        assert stock._cached_edge_index is not None
        for mine, theirs in zip(held, stock._cached_edge_index, strict=True):
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(conv(x(), random_edges(N, N, 3)), stock(x(), E))
        assert conv._cached_edge_index is held
        conv.reset_parameters()
        assert conv._cached_edge_index is None


def test_edges_that_change(taken: list[bool]) -> None:
    conv, edges = SAGEConv(F, C, aggr="max"), E.clone()
    for _ in range(3):
        with pyg_ioaware.patched():
            found = conv(x(), edges)
        torch.testing.assert_close(found, conv(x(), edges))
        edges.copy_(edges.roll(1, 1).flip(0))
        edges = edges.clone() if len(taken) == 2 else edges
    assert taken == [True] * 3


@pytest.mark.parametrize(
    "edges",
    [E, E.int(), E.t().contiguous().t(), E[:, ::2], E[:, 3:], E[:, :0], E.flip(0)],
    ids=["whole", "int32", "strided", "every second", "offset", "none", "flipped"],
)
def test_rows_are_known_without_being_made(edges: Tensor) -> None:
    whole = identity(edges)
    assert whole is not None
    assert rows_of(whole) == (identity(edges[0]), identity(edges[1]))
    assert pyg_ioaware.graph.cache.CACHE.edges(edges, True, N, N) is not None
    misses = pyg_ioaware.stats()["cache"]["misses"]
    for forwards in (True, False):
        src, dst = (edges[0], edges[1]) if forwards else (edges[1], edges[0])
        held = pyg_ioaware.graph.cache.CACHE.adjacency(src, dst, N, N)
        assert pyg_ioaware.graph.cache.CACHE.edges(edges, forwards, N, N) is held
    assert pyg_ioaware.stats()["cache"]["misses"] == misses + 1


# Where it is not ###########################################################################


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda conv: setattr(conv, name, value)


def _twice(*args: Any) -> Any:
    return args[-1] * 2


class Doubled(SumAggregation):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        return out * 2


def _explained(conv: Any) -> None:
    conv.explain = True
    conv._edge_mask, conv._apply_sigmoid = torch.rand(E.size(1)), True
    conv._loop_mask = E[0] != E[1]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "message hook": lambda conv: conv.register_message_forward_hook(_twice),
    "message pre-hook": lambda conv: conv.register_message_forward_pre_hook(lambda *args: None),
    "aggregate hook": lambda conv: conv.register_aggregate_forward_hook(_twice),
    "propagate hook": lambda conv: conv.register_propagate_forward_hook(_twice),
    "propagate pre-hook": lambda conv: conv.register_propagate_forward_pre_hook(lambda *args: None),
    "hook of the aggregation": lambda conv: conv.aggr_module.register_forward_hook(_twice),
    "aggregation": _set("aggr_module", Doubled()),
    "message": _set("message", lambda x_j, **_: x_j * 2),
    "update": _set("update", lambda inputs, **_: inputs * 2),
    "aggregate": _set("aggregate", lambda inputs, *_, **__: inputs.sum(0, keepdim=True)),
    "propagate": _set("propagate", lambda edge_index, x, **_: (x[0] if len(x) == 2 else x) * 2),
    "explain": _explained,
    "decomposed layers": _set("decomposed_layers", 2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["GCN", "SAGE-sum", "Graph", "GIN", "IOAwareGCN"])
def test_a_layer_that_was_changed(name: str, change: str, taken: list[bool]) -> None:
    conv = LAYERS[name]()
    CHANGES[change](conv)
    check(taken, False, conv, x(), E)


def test_a_change_between_two_calls(taken: list[bool]) -> None:
    conv = GCNConv(F, C)
    with pyg_ioaware.patched():
        before = conv(x(), E)
        handle = conv.register_message_forward_hook(_twice)
        during = conv(x(), E)
        handle.remove()
        after = conv(x(), E)
    assert taken == [True, False, True]
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(during - conv.bias, 2 * (before - conv.bias))


def test_a_hook_inside_of_the_forward(taken: list[bool]) -> None:
    conv = GCNConv(F, C)
    conv.lin.register_forward_hook(lambda *_: setattr(conv, "aggr_module", MeanAggregation()))
    with pyg_ioaware.patched():
        found = conv(x(), E)
        conv.lin.register_forward_hook(lambda *_: setattr(conv, "aggr_module", Doubled()))
        doubled = conv(x(), E)
    torch.testing.assert_close(doubled, conv(x(), E))
    assert not torch.allclose(doubled, found)
    assert taken == [True, False]


class Halved(GCNConv):
    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j / 2


class Propagated(SAGEConv):
    def propagate(self, edge_index: Tensor, x: Any, size: Any = None) -> Tensor:  # type: ignore
        out: Tensor = MessagePassing.propagate(self, edge_index, size, x=x)
        return out * 3


class Checked(GraphConv):
    def _check_input(self, edge_index: Any, size: Any) -> Any:
        raise KeyError("checked")


@pytest.mark.parametrize("cls", [Halved, Propagated, Checked])
def test_a_subclass_with_methods_of_its_own(cls: Any, taken: list[bool]) -> None:
    check(taken, False, cls(F, C), x(), E)


def test_methods_that_are_replaced_for_all(
    taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gin, sage, forward = LAYERS["GIN"](), LAYERS["SAGE"](), MeanAggregation.forward
    monkeypatch.setattr(GINConv, "message", lambda self, x_j: x_j * 2)
    check(taken, False, gin, x(), E)
    monkeypatch.setattr(MeanAggregation, "forward", lambda *args, **kw: forward(*args, **kw) * 2)
    check(taken, False, sage, x(), E)


def test_hooks_of_all_modules(taken: list[bool]) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *args: _twice(*args) if isinstance(module, SumAggregation) else None
    )
    try:
        check(taken, False, LAYERS["GCN"](), x(), E)
    finally:
        handle.remove()


def test_a_version_that_is_not_known(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KNOWN", {})
    sources.is_known.cache_clear()
    try:
        check(taken, False, LAYERS["GCN"](), x(), E)
    finally:
        sources.is_known.cache_clear()


INPUTS: dict[str, tuple[Any, ...]] = {
    "3-D features": (features(N, F).expand(2, N, F).clone().requires_grad_(), E),
    "EdgeIndex": (x(), EdgeIndex(E, sparse_size=(N, N))),
    "sparse": (x(), torch.eye(N).to_sparse_csr()),
    "integers": (torch.ones(N, F, dtype=torch.long), E),
    "float edges": (x(), E.float()),
    "three rows": (x(), torch.cat([E, E[:1]])),
    "one row": (x(), E[0]),
    "no edges at all": (x(), None),
    "a triple": ((x(), x(), x()), E),
    "no sources": ((None, x()), E),
    "sizes that do not fit": ((x(), x(N + 1)), E, (N, N)),
    "sources that do not fit": ((x(), x()), E, (N + 2, N)),
}
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "too large": (x(), E + N),
    "negative": (x(), E - N),
    "targets that do not fit": ((x(), None), E, (N, 2)),
}


@pytest.mark.parametrize(
    "inputs", [*INPUTS, *(pytest.param(name, marks=bad_index) for name in OUT_OF_RANGE)]
)
@pytest.mark.parametrize("name", ["GCN", "SAGE", "GIN"])
def test_other_inputs(name: str, inputs: str, taken: list[bool]) -> None:
    args = (INPUTS | OUT_OF_RANGE)[inputs]
    compare(LAYERS[name](), *args[: 2 if name == "GCN" else 3])
    assert not any(taken)


@pytest.mark.parametrize(
    "weight",
    [torch.rand(E.size(1), 1), torch.rand(1), torch.rand(3), torch.ones(E.size(1)).long(), 2.0],
    ids=["column", "one", "three", "integers", "number"],
)
def test_other_weights(weight: Any, taken: list[bool]) -> None:
    compare(GraphConv(F, C), x(), E, weight)
    assert not any(taken)
