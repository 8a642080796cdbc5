"""What the package says of a call: strict mode, 'explain', 'stats'; and who is concerned."""

import copy
import threading

import pytest
import torch
from graphs import ON_CPU, bad_index
from patching import EDGES, C, N, Net, Odd, X, assert_stock, functions, fused_calls
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    MedianAggregation,
    MessagePassing,
    SAGEConv,
    SumAggregation,
    TransformerConv,
)

import pyg_ioaware


def test_disabled_is_of_one_thread():
    pyg_ioaware.patch()
    model, found = Net(), {}  # made here: a thread has a default device of its own

    def work():
        found["thread"] = fused_calls(model, X, EDGES)

    with pyg_ioaware.disabled():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert fused_calls(Net(), X, EDGES) == 0
        with pyg_ioaware.disabled():
            pass
        assert fused_calls(Net(), X, EDGES) == 0
    assert found["thread"] == 2
    assert fused_calls(Net(), X, EDGES) == 2


def test_backward_needs_no_switch():
    """What the forward pass chose is what the backward pass runs."""
    model, x = Net().eval(), X.clone().requires_grad_()
    model(x, EDGES).sum().backward()
    expected, x.grad = x.grad, None
    with pyg_ioaware.patched():
        out = model(x, EDGES)
    with pyg_ioaware.disabled():
        out.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_strict_raises_with_every_reason():
    pyg_ioaware.patch(strict=True)
    Net()(X, EDGES)
    GATConv(C, C, heads=2)(X, EDGES)
    with pytest.raises(pyg_ioaware.FallbackError, match=r"'Odd'.*cumsum"):
        Odd()(X, EDGES)
    conv = SAGEConv(C, C)
    conv.register_message_forward_hook(lambda *args: None)
    with pytest.raises(pyg_ioaware.FallbackError, match="hooks"):
        conv(X, EDGES)
    conv.explain = True
    conv._edge_mask, conv._apply_sigmoid = torch.ones(30), True
    conv._loop_mask = EDGES[0] != EDGES[1]
    with pytest.raises(pyg_ioaware.FallbackError) as error:
        conv(X, EDGES)
    assert "hooks" in str(error.value)
    assert "explain" in str(error.value)
    with pyg_ioaware.disabled():
        Odd()(X, EDGES)
    Net()(X, EDGES)  # an error leaves nothing behind
    pyg_ioaware.patch(strict=False)
    Odd()(X, EDGES)


@bad_index
def test_strict_leaves_stock_errors_alone():
    """A call that stock rejects fails with stock's error."""
    pyg_ioaware.patch(strict=True)
    far, negative = EDGES.clone(), EDGES.clone()
    far[0] += N
    negative[0] -= 1
    with pytest.raises(IndexError, match="Found indices in 'edge_index'"):
        GCNConv(C, C, normalize=False)(X, far)
    with pytest.raises(IndexError, match="Found negative indices"):
        SAGEConv(C, C)(X, negative)


@bad_index
def test_error_where_both_ends_are_out_of_range():
    pyg_ioaware.patch()
    with pytest.raises(IndexError, match="Found indices in 'edge_index'"):
        GCNConv(C, C, normalize=False)(X, EDGES + N)


def test_explain_changes_nothing():
    model, edge_index = Net(), EDGES.clone()
    model.cached = GCNConv(C, C, cached=True)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    found = functions()
    for _ in range(2):
        explanation = pyg_ioaware.explain(model, X, edge_index)
        assert explanation.fused
        assert str(explanation).count("fused (") == 2
    pyg_ioaware.explain(model.cached, X, edge_index)
    torch.testing.assert_close(model.state_dict(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert model.cached._cached_edge_index is None
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    assert torch.equal(edge_index, EDGES)
    assert_stock(found)
    assert not pyg_ioaware.is_patched()


def test_explain_tells_other_threads_nothing():
    """A thread that runs stock meanwhile goes on doing so, and strictness stays."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Net):
        def forward(self, x, edge_index):
            inside.set()
            assert go_on.wait(60)
            return super().forward(x, edge_index)

        def __deepcopy__(self, memo):
            return self

    model, explanations = Slow(), []
    thread = threading.Thread(
        target=lambda: explanations.append(pyg_ioaware.explain(model, X, EDGES))
    )
    thread.start()
    assert inside.wait(60)
    assert not pyg_ioaware.is_patched()
    assert fused_calls(Net(), X, EDGES) == 0
    pyg_ioaware.patch(strict=True)
    go_on.set()
    thread.join()
    assert explanations[0].fused
    with pytest.raises(pyg_ioaware.FallbackError):
        Odd()(X, EDGES)


def test_explain_gives_reasons_and_errors():
    explanation = pyg_ioaware.explain(Odd(), X, EDGES)
    assert not explanation.fused
    assert "cumsum" in explanation.reasons[0]
    assert "cumsum" in str(explanation)
    wrong_width = pyg_ioaware.explain(SAGEConv(C, C), X[:, 1:], EDGES)
    assert "Error" in wrong_width.error
    assert not pyg_ioaware.explain(nn.Linear(C, C), X).fused
    with pyg_ioaware.disabled():
        assert not pyg_ioaware.explain(Net(), X, EDGES).fused
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        pyg_ioaware.explain("model", X)


WEIGHT = torch.ones(EDGES.size(1), 1)
REASONS = {
    "'cat' takes the messages of all edges": lambda x_j: torch.cat([x_j, x_j], -1),
    "'relu_' may change messages in place": lambda x_j: x_j.relu_(),
    "'Tensor.data' shows the memory": lambda x_j: x_j.data,
    "'mul' by more than one weight per edge": lambda x_j: x_j * WEIGHT * WEIGHT,
}


@pytest.mark.parametrize("reason", REASONS)
def test_explain_tells_which_function_needed_the_messages(reason):
    class Own(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return REASONS[reason](x_j)

    (found,) = pyg_ioaware.explain(Own(), X, EDGES).reasons
    assert found.startswith(f"Own: {reason}")
    assert ";" not in found


@bad_index
def test_explain_gives_the_error_of_an_index():
    assert "Error" in pyg_ioaware.explain(SAGEConv(C, C), X, EDGES + N).error


def test_stats():
    pyg_ioaware.patch()
    model = Net()
    for _ in range(3):
        model(X, EDGES)
    Odd()(X, EDGES)
    stats = pyg_ioaware.stats()
    assert stats["layers"]["GCNConv"] == {"fused": 3, "stock": {}}
    assert stats["layers"]["SAGEConv"] == {"fused": 3, "stock": {}}
    assert stats["layers"]["Odd"]["fused"] == 0
    ((reason, count),) = stats["layers"]["Odd"]["stock"].items()
    assert count == 1
    assert "cumsum" in reason
    cache = stats["cache"]
    assert cache["misses"] == cache["entries"] == 3  # a graph, one with loops, and how it is made
    assert cache["hits"] == 6
    assert cache["bytes"] > 0
    pyg_ioaware.stats(reset=True)
    after = pyg_ioaware.stats()
    assert after["layers"] == {}
    assert after["cache"]["hits"] == 0
    assert after["cache"]["entries"] == 3


def test_aggregation_changed_after_construction():
    """Stock reads 'aggr' for sparse adjacencies only, and the aggregation module otherwise."""
    conv = SAGEConv(C, C, aggr="mean")
    conv.aggr = "max"
    expected = conv(X, EDGES)
    adj_t = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(30), (N, N)).to_sparse_csr()
    if ON_CPU:  # stock has no maximum of a sparse tensor on a GPU
        expected_sparse = conv(X, adj_t)
    with pyg_ioaware.patched():
        torch.testing.assert_close(conv(X, EDGES), expected)
        if ON_CPU:
            torch.testing.assert_close(conv(X, adj_t), expected_sparse)
        conv.aggr_module = SumAggregation()
    with pyg_ioaware.disabled():
        expected = conv(X, EDGES)
    pyg_ioaware.patch()
    torch.testing.assert_close(conv(X, EDGES), expected)


@pytest.mark.skipif(not ON_CPU, reason="about the kernels of the CPU")
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("make", [GATv2Conv, TransformerConv])
def test_prepared_attention_compiles_nothing_more(make, edge_dim):
    from pyg_ioaware.engines.cpu import (
        attention_edges,
        attention_forward,
        attention_source,
        attention_target,
    )

    with_edges = edge_dim is not None
    pyg_ioaware.prepare(EDGES, N, compile=False, attention=(2, 16), edge_attr=with_edges)
    modules = [attention_forward, attention_target, attention_source, attention_edges]
    before = [set(m._entry._compiled) for m in modules]
    edge_attr = torch.randn(30, edge_dim, requires_grad=True) if with_edges else None
    conv = make(C, 16, heads=2, edge_dim=edge_dim)
    with pyg_ioaware.patched(strict=True):
        conv(X, EDGES, edge_attr).sum().backward()
        with torch.no_grad():
            conv(X, EDGES, edge_attr)
    assert [set(m._entry._compiled) for m in modules] == before
    assert all(before[: 4 if with_edges else 3])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_prepare_in_a_mode_without_gradients(mode):
    with mode():
        pyg_ioaware.prepare(EDGES, N, attention=(2, 16), edge_attr=True)
    with pyg_ioaware.patched(strict=True):
        GATv2Conv(C, 16, heads=2)(X, EDGES).sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": 8}, r"as in \(4, 32\) \(got 8\)"),
        ({"attention": (0, 8)}, r"as in \(4, 32\) \(got \(0, 8\)\)"),
        ({"attention": ("a", 8)}, r"as in \(4, 32\)"),
        ({"attention": (2, 8), "edge_attr": torch.ones(30, 3)}, r"True or False \(got 'Tensor'\)"),
        ({"edge_attr": True}, "'edge_attr' needs 'attention'"),
    ],
)
def test_prepare_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        pyg_ioaware.prepare(EDGES, N, compile=False, **options)


def test_reasons_of_a_failed_call_are_not_those_of_the_next():
    pyg_ioaware.patch()
    with pytest.raises(AssertionError):
        GATv2Conv(C, 4)(X, EDGES, torch.ones(30, 3))  # features without 'edge_dim'
    conv = GATv2Conv(C, 4)
    conv.aggr_module = MedianAggregation()
    conv(X, EDGES)
    (reasons,) = pyg_ioaware.stats()["layers"]["GATv2Conv"]["stock"]
    assert "MedianAggregation" in reasons
    assert "edge_dim" not in reasons


def test_an_error_without_words_is_named():
    found = pyg_ioaware.explain(GATv2Conv(C, 4), X, EDGES, torch.ones(30, 3))
    assert found.error == "the call fails: AssertionError: no message"
