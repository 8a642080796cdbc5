"""Putting the patch in and taking it out, in every order, globally and for one model."""

import copy
import importlib
import io
import itertools
import pickle
import sys

import pytest
import torch
from patching import EDGES, C, Net, Odd, X, assert_stock, functions, fused_calls, patch_module
from torch_geometric.nn import GATConv, GCNConv, MessagePassing

import pyg_ioaware
from pyg_ioaware.patch import REGISTRY, Replacement

# Undo.


def test_undo_restores_the_very_same_functions():
    before = functions()
    for _ in range(3):
        pyg_ioaware.patch()
        changed = [place for place, f in functions().items() if f is not before.get(place)]
        assert len(changed) > len(REGISTRY)
        Net()(X, EDGES)
        GATConv(C, C)(X, EDGES)
        pyg_ioaware.unpatch()
        assert_stock(before)
    assert fused_calls(Net(), X, EDGES) == 0


def test_patching_twice_is_patching_once():
    before = functions()
    pyg_ioaware.patch()
    once = functions()
    pyg_ioaware.patch()
    assert functions() == once
    pyg_ioaware.unpatch()
    assert_stock(before)
    pyg_ioaware.unpatch()
    assert_stock(before)
    assert not pyg_ioaware.is_patched()


STEPS = ("patch", "unpatch", "patched", "accelerate", "decelerate")


@pytest.mark.parametrize("steps", itertools.permutations(STEPS, 3), ids="-".join)
def test_every_order(steps):
    """After each step, a model is fused if and only if it has to be."""
    before, model, other = functions(), Net().eval(), Net().eval()
    expected = [m(X, EDGES) for m in (model, other)]
    patched = accelerated = False

    def check(is_on):
        assert pyg_ioaware.is_patched() == is_on
        assert fused_calls(model, X, EDGES) == (2 if is_on or accelerated else 0)
        assert fused_calls(other, X, EDGES) == (2 if is_on else 0)
        for m, known in zip((model, other), expected, strict=True):
            torch.testing.assert_close(m(X, EDGES), known)
        with pyg_ioaware.disabled():
            assert fused_calls(model, X, EDGES) == 0
        assert pyg_ioaware.explain(other, X, EDGES).fused

    for step in steps:
        if step in ("patch", "unpatch"):
            getattr(pyg_ioaware, step)()
            patched = step == "patch"
        elif step in ("accelerate", "decelerate"):
            assert getattr(pyg_ioaware, step)(model) is model
            accelerated = step == "accelerate"
        else:
            with pyg_ioaware.patched():
                check(True)
        check(patched)
    pyg_ioaware.decelerate(model)
    pyg_ioaware.unpatch()
    assert_stock(before)


def test_scopes_leave_things_as_they_were():
    before = functions()
    with pyg_ioaware.patched():
        with pyg_ioaware.patched(strict=True), pytest.raises(pyg_ioaware.FallbackError):
            Odd()(X, EDGES)
        Odd()(X, EDGES)
        pyg_ioaware.unpatch()
        assert fused_calls(Net(), X, EDGES) == 0
    assert_stock(before)
    pyg_ioaware.patch(strict=True)
    with pyg_ioaware.patched(strict=False):
        Odd()(X, EDGES)
        pyg_ioaware.unpatch()
    assert fused_calls(Net(), X, EDGES) == 2
    with pytest.raises(pyg_ioaware.FallbackError):
        Odd()(X, EDGES)
    with pytest.raises(KeyError), pyg_ioaware.patched():
        raise KeyError
    with pytest.raises(KeyError), pyg_ioaware.disabled():
        raise KeyError
    assert fused_calls(Net(), X, EDGES) == 2


@pytest.mark.parametrize("row", range(len(REGISTRY)))
def test_exception_inside_patch_rolls_back(row, monkeypatch):
    def fail(original):
        raise RuntimeError("no")

    before = functions()
    broken = [
        Replacement(r.target, r.places, fail if i == row else r.make, r.purpose)
        for i, r in enumerate(REGISTRY)
    ]
    monkeypatch.setattr(patch_module, "REGISTRY", tuple(broken))
    for attempt in (pyg_ioaware.patch, lambda: pyg_ioaware.accelerate(Net())):
        with pytest.raises(RuntimeError, match="no"):
            attempt()
        assert not pyg_ioaware.is_patched()
        assert_stock(before)
    monkeypatch.undo()
    pyg_ioaware.patch()
    assert fused_calls(Net(), X, EDGES) == 2


def test_another_replacement_is_left_alone():
    """Who wraps a function after us keeps the wrapper, and ours inside does nothing."""
    stock = MessagePassing._index_select_safe
    try:
        with pyg_ioaware.patched():
            ours = MessagePassing._index_select_safe
            MessagePassing._index_select_safe = theirs = lambda *args: ours(*args)
            assert fused_calls(Net(), X, EDGES) == 2
        assert MessagePassing._index_select_safe is theirs
        assert fused_calls(Net(), X, EDGES) == 0
    finally:
        MessagePassing._index_select_safe = stock


def test_module_imported_while_patched(tmp_path, monkeypatch):
    (tmp_path / "late_layers.py").write_text(
        "from torch_geometric.nn.conv.gcn_conv import gcn_norm\n"
        "from torch_geometric.nn.aggr.base import scatter\n"
        "from torch_geometric.nn import GCNConv as Conv\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from torch_geometric.nn.aggr import base
    from torch_geometric.nn.conv import gcn_conv

    stock = gcn_conv.gcn_norm, base.scatter
    with pyg_ioaware.patched():
        late = importlib.import_module("late_layers")
        assert late.gcn_norm is not stock[0]
        assert fused_calls(late.Conv(C, C), X, EDGES) == 1
    assert (late.gcn_norm, late.scatter) == stock
    monkeypatch.delitem(sys.modules, "late_layers")


def test_pyg_module_reloaded_while_patched():
    """PyG's lazily imported modules may come while the patch is on."""
    name = "torch_geometric.nn.conv.lg_conv"
    from torch_geometric.nn.conv import gcn_conv

    before, old = gcn_conv.gcn_norm, sys.modules.pop(name)
    try:
        with pyg_ioaware.patched():
            late = importlib.import_module(name)
            assert fused_calls(late.LGConv(), X, EDGES) == 1
        assert late.gcn_norm is before
    finally:
        sys.modules[name] = old


# One model only.


def test_accelerate_touches_no_other_model():
    model, other = pyg_ioaware.accelerate(Net()), Net()
    assert fused_calls(model, X, EDGES) == 2
    assert fused_calls(other, X, EDGES) == 0
    assert not pyg_ioaware.is_patched()
    pyg_ioaware.stats(reset=True)
    GCNConv(C, C)(X, EDGES)
    cache = pyg_ioaware.stats()["cache"]
    assert cache["misses"] + cache["hits"] == 0
    pyg_ioaware.unpatch()
    assert fused_calls(model, X, EDGES) == 2
    pyg_ioaware.decelerate(model)
    assert fused_calls(model, X, EDGES) == 0


def test_accelerate_memoises_for_every_layer():
    model = pyg_ioaware.accelerate(GCNConv(C, C))
    for _ in range(2):
        misses = pyg_ioaware.stats(reset=True)["cache"]["misses"]
        model(X, EDGES)
    assert (misses, pyg_ioaware.stats()["cache"]["misses"]) == (2, 0)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_an_accelerated_model(how):
    model = pyg_ioaware.accelerate(Net().eval())
    expected = model(X, EDGES)
    twin = clone(model, how)
    assert fused_calls(twin, X, EDGES) == 2
    torch.testing.assert_close(twin(X, EDGES), expected)
    if how == "deepcopy":  # it stays fused when the original is gone
        del model
        pyg_ioaware.unpatch()
        assert fused_calls(twin, X, EDGES) == 2
    assert fused_calls(pyg_ioaware.decelerate(twin), X, EDGES) == 0


def clone(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_functions_stay_while_an_accelerated_model_lives():
    before = functions()
    first, second = pyg_ioaware.accelerate(Net()), pyg_ioaware.accelerate(Net())
    pyg_ioaware.decelerate(first)
    assert fused_calls(second, X, EDGES) == 2
    del second
    pyg_ioaware.unpatch()
    assert_stock(before)


def test_accelerate_changes_nothing_else():
    model = Net()
    seen = repr(model), list(model.state_dict()), dict(model.named_parameters())
    pyg_ioaware.accelerate(model)
    assert (repr(model), list(model.state_dict()), dict(model.named_parameters())) == seen
    assert [n for n, _ in model.named_buffers() if "ioaware" in n] == []
    for name in ("accelerate", "decelerate"):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            getattr(pyg_ioaware, name)("model")
