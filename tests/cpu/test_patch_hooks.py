"""Hooks and explainers, which look into a layer while it runs."""

import pytest
import torch
from graphs import DEVICE, features
from patching import EDGES, C, N
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.nn import (
    GAT,
    GCN,
    ChebConv,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphSAGE,
    SAGEConv,
    TransformerConv,
)

import pyg_ioaware
from pyg_ioaware.testing import compare

E = EDGES.size(1)
LAYERS = {
    "GCN": lambda: GCNConv(C, C),
    "SAGE_max": lambda: SAGEConv(C, C, aggr="max"),
    "GAT": lambda: GATConv(C, C, heads=2),
    "Cheb": lambda: ChebConv(C, C, 2).to(DEVICE),  # its bias heeds no default device
    "GATv2": lambda: GATv2Conv(C, C, heads=2),
    "Transformer": lambda: TransformerConv(C, C, heads=2),
}


def x():
    return features(N, C).requires_grad_()


def fused(layers):
    return bool(layers) and all(calls.fused and not calls.stock for calls in layers.values())


HOOKS = [f"register_{part}_forward{pre}_hook" for part in ("propagate", "message", "aggregate")
         for pre in ("_pre", "")]  # fmt: skip
MODULE_HOOKS = ["register_forward_pre_hook", "register_forward_hook"]


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("hook", [*HOOKS, *MODULE_HOOKS])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_hooks_see_the_same(layer, hook):
    conv, seen = LAYERS[layer](), []
    handle = getattr(conv, hook)(lambda module, *args: seen.append(plain(args)))
    out = conv(x(), EDGES)
    expected = list(seen)
    assert expected
    with pyg_ioaware.patched():
        for _ in range(2):
            seen.clear()
            torch.testing.assert_close(conv(x(), EDGES), out)
            assert len(seen) == len(expected)
            for ours, stock in zip(seen, expected, strict=True):
                torch.testing.assert_close(strip(ours), strip(stock))
        handle.remove()
        assert fused(compare(conv, x(), EDGES))


def strip(value):
    """Keeps the tensors of what a hook was given."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[k] for k in sorted(value, key=str)]
    return [t for v in value for t in strip(v)] if isinstance(value, list) else []


@pytest.mark.parametrize(
    "hook", ["register_message_forward_hook", "register_aggregate_forward_hook"]
)
def test_hooks_that_change_the_result(hook):
    conv = SAGEConv(C, C)
    getattr(conv, hook)(lambda module, inputs, out: out * 3)
    compare(conv, x(), EDGES)
    conv.aggr_module.register_forward_hook(lambda module, inputs, out: out + 1)
    compare(conv, x(), EDGES)
    conv = SAGEConv(C, C)
    conv.aggr_module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    compare(conv, x(), EDGES)
    conv.aggr_module.register_full_backward_hook(lambda module, gi, go: None)
    compare(conv, x(), EDGES)


# Explainers.


@pytest.mark.parametrize("make", [GCN, GraphSAGE])
@pytest.mark.parametrize("when", ["before", "after"])
def test_gnn_explainer(make, when):
    model = make(C, C, num_layers=2, out_channels=3) if when == "before" else None
    results = []
    for scope in (pyg_ioaware.disabled, pyg_ioaware.patched):
        with scope():
            torch.manual_seed(1)
            model = model or make(C, C, num_layers=2, out_channels=3)
            explainer = Explainer(
                model=model,
                algorithm=GNNExplainer(epochs=5),
                explanation_type="model",
                node_mask_type="attributes",
                edge_mask_type="object",
                model_config={
                    "mode": "multiclass_classification",
                    "task_level": "node",
                    "return_type": "raw",
                },
            )
            torch.manual_seed(2)
            explanation = explainer(features(N, C), EDGES, index=1)
            results.append((explanation.edge_mask, explanation.node_mask))
    assert results[1][0].gt(0).any()
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)
    assert fused(compare(model, x(), EDGES)), "the explainer leaves the model as it was"


@pytest.mark.parametrize("kind", ["GCN", "SAGE_max", "Edge"])
def test_edge_masks_get_gradients_and_change_the_output(kind):
    # PyG knows which loops were there before through the mask that an explainer sets.
    conv = {
        "GCN": lambda: GCNConv(C, C, add_self_loops=False),
        "Edge": lambda: EdgeConv(torch.nn.Linear(2 * C, C)),
    }.get(kind, LAYERS["SAGE_max"])()
    without = conv(x(), EDGES)
    found = []
    for scope in (pyg_ioaware.disabled, pyg_ioaware.patched):
        mask = torch.linspace(-1, 1, E).requires_grad_()
        conv.explain, conv._edge_mask = True, mask
        conv._loop_mask, conv._apply_sigmoid = EDGES[0] != EDGES[1], True
        with scope():
            out = conv(x(), EDGES)
        out.sum().backward()
        conv.explain, conv._edge_mask = None, None
        found.append((out, mask.grad))
        assert not torch.allclose(out, without)
        assert mask.grad.abs().sum() > 0
    torch.testing.assert_close(found[1], found[0])


def test_attention_explainer():
    model = GAT(C, C, num_layers=2, out_channels=3, heads=2)
    explainer = Explainer(
        model=model,
        algorithm=AttentionExplainer(),
        explanation_type="model",
        edge_mask_type="object",
        model_config={
            "mode": "multiclass_classification",
            "task_level": "node",
            "return_type": "raw",
        },
    )
    expected = explainer(features(N, C), EDGES).edge_mask
    with pyg_ioaware.patched():
        found = explainer(features(N, C), EDGES).edge_mask
    assert found.gt(0).any()
    torch.testing.assert_close(found, expected)
