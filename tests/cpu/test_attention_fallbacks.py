"""Where the attention layers are left to stock PyG, and why."""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from attention import LAYERS, OWN, C, D, F, attr, check, is_fused, why_not, x
from graphs import SQUARE, bad_index, features
from torch import Tensor
from torch_geometric import nn
from torch_geometric.nn.dense import Linear

import pyg_ioaware
from pyg_ioaware.nn import sources
from pyg_ioaware.record import RECORD
from pyg_ioaware.testing import compare

pytestmark = pytest.mark.usefixtures("poison", "one_thread")

G = SQUARE["unsorted"]
E = G.edge_index
ALL = pytest.mark.parametrize("name", LAYERS)


def layer(name: str, **options: Any) -> Any:
    return LAYERS[name](F, C, 2, **options)


def test_strict_mode() -> None:
    pyg_ioaware.patch(strict=True)
    for name in LAYERS:
        layer(name, edge_dim=D)(x(G), E, attr(G))
        conv = layer(name)
        conv.register_message_forward_hook(lambda *args: None)
        with pytest.raises(pyg_ioaware.FallbackError, match="hooks"):
            conv(x(G), E)
        with pytest.raises(RuntimeError if name == "Transformer" else AssertionError):
            layer(name)(x(G), E, attr(G))
        layer(name)(x(G), E)


@bad_index
def test_strict_mode_leaves_stock_errors_alone() -> None:
    pyg_ioaware.patch(strict=True)
    with pytest.raises(IndexError, match="Found indices in 'edge_index'"):
        layer("Transformer")(x(G), E + 9)


class Doubled(nn.GATv2Conv):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return 2 * super().message(x_j, alpha)


class Updated(nn.TransformerConv):
    def update(self, inputs: Tensor) -> Tensor:
        return inputs + 1


class Propagated(nn.TransformerConv):
    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        out: Tensor = nn.MessagePassing.propagate(self, edge_index, size, **kwargs)
        return out * 3


class Named(nn.TransformerConv):
    """Changes nothing."""


class Around(nn.GATv2Conv):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = super().forward(x, edge_index) * 2
        return out


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Doubled, "its own 'message'"),
        (Updated, "its own 'update'"),
        (Propagated, "its own 'propagate'"),
        (Named, ""),
        (Around, ""),
    ],
)
def test_subclasses(cls: Any, why: str) -> None:
    layers = compare(cls(F, C, 2), x(G), E)
    assert why in why_not(layers)
    assert is_fused(layers) == (not why)
    assert why in str(pyg_ioaware.explain(cls(F, C, 2), x(G), E))


def test_methods_of_one_layer_or_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * alpha.unsqueeze(-1) / 2

    conv = layer("GATv2")
    conv.message = halved
    with pyg_ioaware.patched():
        found = conv(x(G), E)
    torch.testing.assert_close(found, conv(x(G), E))
    assert "its own 'message'" in str(pyg_ioaware.explain(conv, x(G), E))
    monkeypatch.setattr(nn.TransformerConv, "update", Updated.update)
    assert "its own 'update'" in why_not(compare(layer("Transformer"), x(G), E))


def _message_hook(conv: Any) -> None:
    conv.register_message_forward_hook(lambda m, inputs, out: out * 2)


def _propagate_hook(conv: Any) -> None:
    conv.register_propagate_forward_hook(lambda m, inputs, out: out * 2)


def _pre_hook(conv: Any) -> None:
    conv.register_propagate_forward_pre_hook(lambda m, inputs: None)


def _edge_hook(conv: Any) -> None:
    conv.register_edge_update_forward_hook(lambda m, inputs, out: out * 2)


def _aggregation(conv: Any) -> None:
    conv.aggr_module = nn.MeanAggregation()


def _aggregation_hook(conv: Any) -> None:
    conv.aggr_module.register_forward_hook(lambda m, inputs, out: out * 2)


def _lin_edge_hook(conv: Any) -> None:
    conv.lin_edge.register_forward_hook(lambda m, inputs, out: out * 2)


def _lin_edge_replaced(conv: Any) -> None:
    conv.lin_edge = torch.nn.Sequential(torch.nn.Linear(D, 2 * C), torch.nn.ReLU())


def _lin_edge_bias(conv: Any) -> None:
    conv.lin_edge = torch.nn.Linear(D, 2 * C)


def _lin_edge_parametrized(conv: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(conv.lin_edge)


def _lin_edge_wrapped(conv: Any) -> None:
    conv.lin_edge.forward = MethodType(lambda self, x: Linear.forward(self, x) * 2, conv.lin_edge)


CHANGES = {
    _message_hook: "message or aggregate hooks",
    _propagate_hook: "hooks on the way",
    _pre_hook: "hooks on the way",
    _edge_hook: "hooks on the way",
    _aggregation: "aggregation by 'MeanAggregation'",
    _aggregation_hook: "hooks of the aggregation",
    _lin_edge_hook: "hooks of 'lin_edge'",
    _lin_edge_replaced: "'lin_edge' of type 'Sequential'",
    _lin_edge_bias: "more than one matrix",
    _lin_edge_parametrized: "'lin_edge' of type",
    _lin_edge_wrapped: "its own 'forward'",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@ALL
def test_changed_layers(name: str, change: Callable[[Any], None]) -> None:
    conv, found = layer(name, edge_dim=D), []
    change(conv)
    # The very same layer: in PyG 2.6, a copy of a linear layer has lost its hooks.
    for scope in (pyg_ioaware.disabled, pyg_ioaware.patched):
        leaves = x(G), attr(G)
        with scope(), RECORD.watch() as layers:
            out = conv(leaves[0], E, leaves[1])
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(found[1], found[0])
    assert CHANGES[change] in why_not(layers)


@ALL
def test_a_lazy_map_is_fused_once_it_is_there(name: str) -> None:
    conv = layer(name, edge_dim=-1)
    assert "hooks of 'lin_edge'" in why_not(compare(conv, x(G), E, attr(G)))
    conv(x(G), E, attr(G))
    check(conv, x(G), E, attr(G))
    check(LAYERS[name](-1, C, 2), x(G), E)


@ALL
def test_hooks_of_all_modules(name: str) -> None:
    seen: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, out: seen.append(type(module).__name__)
    )
    try:
        conv = layer(name, edge_dim=D)
        conv(x(G), E, attr(G))
        expected = seen.copy()
        seen.clear()
        with pyg_ioaware.patched():
            conv(x(G), E, attr(G))
    finally:
        handle.remove()
    assert seen == expected


@pytest.mark.parametrize(
    "change",
    [
        {"edge_attr": features(50, D + 1)},
        {"edge_attr": features(49, D)},
        {"edge_attr": features(50)},
        {"edge_attr": features(50, 2, D)},
        {"edge_attr": features(50, D).double()},
        {"edge_attr": features(50, D).long()},
        {"edge_attr": None},
        pytest.param({"edge_index": E + 9}, marks=bad_index),
        pytest.param({"edge_index": E - 1}, marks=bad_index),
        {"edge_index": E.float()},
        {"edge_index": E.short()},
        {"edge_index": E[0]},
        {"edge_index": torch.cat([E, E])},
        {"edge_index": None},
        {"x": features(12, F + 1)},
        {"x": features(3, 12, F)},
        {"x": (features(12, F), None)},
        {"x": features(12, F).long()},
        pytest.param({"x": (features(12, F), features(11, F))}, marks=bad_index),
    ],
    ids=lambda change: next(iter(change)),
)
@ALL
def test_what_stock_rejects_is_stocks_error(name: str, change: dict[str, Any]) -> None:
    """Or its result, where it takes it."""
    given = {"x": x(G), "edge_index": E, "edge_attr": attr(G)} | change
    compare(layer(name, edge_dim=D), **given)
    compare(layer(name, edge_dim=D), **given, return_attention_weights=True)


@ALL
def test_edge_features_that_no_map_is_for(name: str) -> None:
    compare(layer(name), x(G), E, attr(G))
    layers = compare(layer(name), x(G), E, features(50, 2, C).requires_grad_())
    assert not is_fused(layers)
    options = {"add_self_loops": False} if name == "GATv2" else {}
    one = LAYERS[name](F, C, 2, edge_dim=1, **options)
    compare(one, x(G), E, features(50).requires_grad_())


@pytest.mark.parametrize("shape", [(16, D), (4, D), (D,), (2, 8, D), (0, D)])
@pytest.mark.parametrize("num_edges", [2, 50])
@ALL
def test_maps_of_edge_features_of_another_shape(
    name: str, num_edges: int, shape: tuple[int, ...]
) -> None:
    """Stock rejects them, or broadcasts what they give."""
    options = {"add_self_loops": False} if name == "GATv2" else {}
    conv = layer(name, edge_dim=D, **options)
    conv.lin_edge.weight = torch.nn.Parameter(torch.rand(shape))
    compare(conv, x(G), E[:, :num_edges], attr(G).detach()[:num_edges])


def test_bad_fill_values_are_stocks_error() -> None:
    for fill in ("median", None, [1.0], torch.ones(D + 1)):
        conv = nn.GATv2Conv(F, C, 2, edge_dim=D, fill_value=fill)
        compare(conv, x(G), E, attr(G))
        check(conv, x(G), E)


def test_odd_parameters_of_gatv2() -> None:
    conv = nn.GATv2Conv(F, C, 2)
    conv.att = torch.nn.Parameter(torch.ones(1, 1, C))
    assert "'att' and features" in why_not(compare(conv, x(G), E))
    conv.att = torch.nn.Parameter(torch.ones(1, 2, C + 1))
    compare(conv, x(G), E)
    conv = nn.GATv2Conv(F, C, 2, negative_slope="0.2")
    compare(conv, x(G), E)


def test_unknown_versions_run_on_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KNOWN", {})
    sources.is_known.cache_clear()
    try:
        for name in LAYERS:
            why = why_not(compare(layer(name), x(G), E))
            assert "an unknown version of the layer" in why
    finally:
        sources.is_known.cache_clear()


def test_a_digest_tells_what_a_function_does() -> None:
    def first() -> Any:
        def f(x: int) -> int:
            """Says something."""
            return x + 1  # and more

        return f

    def second() -> Any:
        # fmt: off
        def f(x: int) -> int:

            return (x
                    + 1)
        # fmt: on
        return f

    def third() -> Any:
        def f(x: int) -> int:
            return x + 2

        return f

    digests = [sources.digest(make()) for make in (first, second, third)]
    assert digests[0] == digests[1] != digests[2]
    wrapper = functools.wraps(first())(lambda x: 0)
    assert sources.digest(wrapper) not in digests
    assert sources.digest(len) is None


@ALL
def test_compile(name: str) -> None:
    """The IOAware layers; for the stock ones it is tested among all layers."""
    torch._dynamo.reset()
    conv = OWN[name](F, C, 2, edge_dim=D)
    with pyg_ioaware.disabled():
        expected = conv(x(G), E, attr(G))
    with pyg_ioaware.patched():
        compiled = torch.compile(conv, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x(G), E, attr(G)), expected)


class Inside(torch.nn.Module):
    """TorchScript calls a layer of several signatures from another module only."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script() -> None:
    conv = layer("Transformer")
    expected = conv(x(G), E)
    with pyg_ioaware.patched():
        scripted = torch.jit.script(Inside(copy.deepcopy(conv)))
        torch.testing.assert_close(scripted(x(G), E), expected)
    torch.testing.assert_close(scripted(x(G), E), expected)
    torch.testing.assert_close(torch.jit.script(Inside(conv))(x(G), E), expected)
    own = OWN["Transformer"](F, C, 2)
    torch.testing.assert_close(torch.jit.script(own)(x(G), E), own(x(G), E))
