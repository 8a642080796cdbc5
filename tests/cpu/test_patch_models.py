"""Models as users have them: old and new, subclassed, heterogeneous, copied, saved."""

import copy
import io
import pickle

import pytest
import torch
import torch_geometric
from graphs import DEVICE, features, random_edges
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    ChebConv,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphSAGE,
    HeteroConv,
    LightGCN,
    MessagePassing,
    SAGEConv,
    TransformerConv,
    to_hetero,
    to_hetero_with_bases,
)
from torch_geometric.typing import OptPairTensor

import pyg_ioaware
from pyg_ioaware.testing import compare

C = 8
N = 9
E = 30
EDGES = random_edges(N, N, E)

LAYERS = {
    "GCN": lambda: GCNConv(C, C),
    "SAGE_max": lambda: SAGEConv(C, C, aggr="max"),
    "SAGE_list": lambda: SAGEConv(C, C, aggr=["mean", "max"]),
    "Cheb": lambda: ChebConv(C, C, 2).to(DEVICE),  # its bias heeds no default device
    "GIN": lambda: GINConv(nn.Linear(C, C)),
    "GAT": lambda: GATConv(C, C, heads=2),
    "GATv2": lambda: GATv2Conv(C, C, heads=2),
    "Transformer": lambda: TransformerConv(C, C, heads=2),
}


def x():
    return features(N, C).requires_grad_()


def fused(layers):
    """Tells whether everything that was compared ran fused."""
    return bool(layers) and all(calls.fused and not calls.stock for calls in layers.values())


# Old and new instances.


@pytest.mark.parametrize("layer", LAYERS)
def test_built_before_and_after(layer):
    old = LAYERS[layer]()
    pyg_ioaware.patch()
    new = LAYERS[layer]()
    assert repr(old) == repr(new)
    assert old.state_dict().keys() == new.state_dict().keys()
    assert vars(old).keys() == vars(new).keys()
    assert fused(compare(old, x(), EDGES))
    assert fused(compare(new, x(), EDGES))


@pytest.mark.parametrize("make", [GCN, GraphSAGE, GIN])
def test_models_of_pyg(make):
    assert fused(compare(make(C, C, num_layers=2), x(), EDGES))


def test_gat_model():
    """Its last layer's attention has gradients that cancel to nothing: no relative error there."""
    model, found = GAT(C, C, num_layers=2, heads=2), []
    for scope in (pyg_ioaware.disabled, pyg_ioaware.patched):
        with scope():
            given = x()
            out = model(given, EDGES)
            leaves = [given, *model.parameters()]
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert pyg_ioaware.stats()["layers"]["GATConv"] == {"fused": 2, "stock": {}}


def test_light_gcn():
    model, pairs = LightGCN(N, C, 2), EDGES[:, :5]
    assert fused(compare(model, EDGES, pairs))
    assert fused(compare(model, EDGES, pairs, torch.rand(E).requires_grad_()))


def test_hetero_conv():
    kinds = {("a", "to", "b"): 7, ("b", "to", "a"): 5, ("a", "self", "a"): 5}
    convs = {kind: SAGEConv((C, C), C, aggr="max") for kind in kinds}
    sizes = {"a": 5, "b": 7}
    edges = {k: random_edges(sizes[k[0]], sizes[k[2]], 12) for k in kinds}
    xs = {name: features(n, C).requires_grad_() for name, n in sizes.items()}
    assert fused(compare(HeteroConv(convs), xs, edges))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), C)
        self.conv2 = SAGEConv((-1, -1), C, aggr="max")

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def hetero_data():
    data = HeteroData()
    data["a"].x, data["b"].x = features(5, C), features(7, C, seed=1)
    data["a", "to", "b"].edge_index = random_edges(5, 7, 20)
    data["b", "to", "a"].edge_index = random_edges(7, 5, 20)
    data["a", "self", "a"].edge_index = random_edges(5, 5, 20)
    return data


# PyG 2.6 traces by a name that newer versions of PyTorch no longer have.
can_trace = pytest.mark.skipif(
    torch_geometric.__version__.startswith("2.6")
    and not hasattr(torch.fx._symbolic_trace, "Union"),
    reason="this PyG cannot trace with this PyTorch",
)


@can_trace
@pytest.mark.parametrize("when", ["before", "after"])
def test_to_hetero(when):
    data = hetero_data()
    if when == "after":
        pyg_ioaware.patch()
    model = to_hetero(TwoLayers(), data.metadata())
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    assert fused(compare(model, data.x_dict, data.edge_index_dict))


@can_trace
def test_to_hetero_with_bases():
    """It works by hooks on the messages, so these are formed."""
    data = hetero_data()
    model = to_hetero_with_bases(
        TwoLayers(), data.metadata(), num_bases=2, in_channels={"x": C, "edge_attr": 0}
    )
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    layers = compare(model, data.x_dict, data.edge_index_dict)
    assert all("hooks" in reason for calls in layers.values() for reason in calls.stock)


# Subclasses. What a user's method sees and returns is what it always was.


class OwnMessage(GCNConv):
    def message(self, x_j, edge_weight):
        assert isinstance(x_j, torch.Tensor)
        assert x_j.shape == (edge_weight.numel(), C)
        return 2 * edge_weight.view(-1, 1) * x_j.relu()


class OwnAggregate(SAGEConv):
    def aggregate(self, inputs, index, dim_size=None):
        out = inputs.new_zeros(dim_size, inputs.size(-1))
        return out.index_add_(0, index, inputs)


class OwnUpdate(SAGEConv):
    def update(self, inputs, x: OptPairTensor):
        return inputs.relu_() - x[1]


class SuperMessage(SAGEConv):
    def message(self, x_j):
        return super().message(x_j) + 1


class OwnForward(GCNConv):
    def forward(self, x, edge_index, edge_weight=None):
        return super().forward(x.tanh(), edge_index, edge_weight) * 2


class KeepsMessages(SAGEConv):
    """Looks at its messages after they were aggregated."""

    def message(self, x_j):
        self.seen = x_j
        return x_j

    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        return out + self.seen.mean(), self.seen * 1


class ChangesMessages(SAGEConv):
    def message(self, x_j):
        x_j += 1
        x_j.mul_(x_j.detach().sign())
        x_j[0] = 0
        return x_j


class UsesTargets(MessagePassing):
    def __init__(self, aggr="max"):
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(2 * C, C)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j - x_i], dim=-1))


class EdgeUpdate(MessagePassing):
    def __init__(self):
        super().__init__(aggr="sum")

    def forward(self, x, edge_index):
        weight = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, weight=weight)

    def edge_update(self, x_i, x_j):
        return (x_i * x_j).sum(-1, keepdim=True).sigmoid()

    def message(self, x_j, weight):
        return weight * x_j


class CallsAnything(MessagePassing):
    """A message that does with its input what tensors allow."""

    def __init__(self):
        super().__init__(aggr="mean")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        x_j.numpy(force=True)
        x_j.tolist()
        repr(x_j), str(x_j), bool(x_j.numel()), len(x_j), list(x_j)[:1], hash(x_j)
        copied = copy.copy(x_j.detach())
        buffer = io.BytesIO()
        torch.save(x_j.detach(), buffer)
        pickle.dumps(x_j.detach())
        if x_j.requires_grad:
            x_j.register_hook(lambda grad: grad * 2)
        out = torch.where(x_j > 0, x_j, 0.1 * x_j) + copied.new_ones(1)
        out = torch.func.vmap(torch.sin)(out) if not x_j.requires_grad else out.sin()
        return torch.utils.checkpoint.checkpoint(torch.tanh, out, use_reentrant=False)


SUBCLASSES = {
    "message": lambda: OwnMessage(C, C),
    "aggregate": lambda: OwnAggregate(C, C),
    "update": lambda: OwnUpdate(C, C),
    "super_message": lambda: SuperMessage(C, C),
    "forward": lambda: OwnForward(C, C),
    "keeps": lambda: KeepsMessages(C, C),
    "changes": lambda: ChangesMessages(C, C),
    "targets": UsesTargets,
    "edge_update": EdgeUpdate,
    "anything": CallsAnything,
    "edge_conv": lambda: EdgeConv(nn.Linear(2 * C, C)),
}


@pytest.mark.parametrize("subclass", SUBCLASSES)
def test_subclasses(subclass):
    compare(SUBCLASSES[subclass](), x(), EDGES)
    with torch.no_grad():
        compare(SUBCLASSES[subclass](), features(N, C), EDGES)


def test_method_on_the_instance():
    conv = SAGEConv(C, C)
    conv.message = lambda x_j: x_j.sin()
    compare(conv, x(), EDGES)


def test_classes_created_while_patched_outlive_the_patch():
    """PyG generates functions at the first instance of a class; none of them may be ours."""
    pyg_ioaware.patch()
    local = type("MadeWhilePatched", (UsesTargets,), {"__module__": __name__})
    conv = local()
    conv(x(), EDGES)
    pyg_ioaware.unpatch()
    for function in (local.propagate, local._orig_propagate, local._jinja_propagate):
        code = function.__code__.co_filename
        assert "pyg_ioaware" not in code.rsplit("/", 1)[-1]
    pyg_ioaware.stats(reset=True)
    expected = conv(x(), EDGES)
    torch.testing.assert_close(copy.deepcopy(conv)(x(), EDGES), expected)
    conv.decomposed_layers = 2
    conv.decomposed_layers = 1
    torch.testing.assert_close(conv(x(), EDGES), expected)
    assert pyg_ioaware.stats()["layers"] == {}


@pytest.mark.parametrize("layer", ["SAGE_max", "GIN"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_decomposed_layers(layer, when):
    make = {
        "SAGE_max": lambda: SAGEConv(C, C, aggr="max", decomposed_layers=2),
        "GIN": lambda: GINConv(nn.Linear(C, C), decomposed_layers=2),
    }[layer]
    conv = make() if when == "before" else None
    pyg_ioaware.patch()
    layers = compare(conv or make(), x(), EDGES)
    assert all("decomposed" in reason for calls in layers.values() for reason in calls.stock)


# Copies and checkpoints.


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_after_a_call(layer, how):
    """Neither the patch nor what it keeps travels, and a copy works on another graph."""
    conv, other = LAYERS[layer](), random_edges(N, N, 25, seed=3)
    before = len(pickle.dumps(conv))
    pyg_ioaware.patch()
    conv(x(), EDGES)
    if how == "deepcopy":
        twin = copy.deepcopy(conv)
    elif how == "pickle":
        data = pickle.dumps(conv)
        assert len(data) == before
        assert b"pyg_ioaware" not in data
        twin = pickle.loads(data)
    else:
        buffer = io.BytesIO()
        torch.save(conv, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert fused(compare(twin, x(), other))
    with pyg_ioaware.disabled():
        expected = conv(x(), other)
    torch.testing.assert_close(twin(x(), other), expected)


def test_checkpoints_fit_both_ways(tmp_path):
    torch.manual_seed(0)
    stock = GCN(C, C, num_layers=2)
    expected = stock(x(), EDGES)
    torch.save(stock.state_dict(), tmp_path / "stock.pt")
    with pyg_ioaware.patched():
        model = GCN(C, C, num_layers=2)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
        model.load_state_dict(torch.load(tmp_path / "stock.pt"))
        torch.testing.assert_close(model(x(), EDGES), expected)
        torch.save(model.state_dict(), tmp_path / "ours.pt")
    fresh = GCN(C, C, num_layers=2)
    fresh.load_state_dict(torch.load(tmp_path / "ours.pt"))
    for found, saved in zip(fresh.parameters(), stock.parameters(), strict=True):
        assert torch.equal(found, saved)
    torch.testing.assert_close(fresh(x(), EDGES), expected)
