"""Message passing that users write themselves: whatever the code does, it gets stock's answers."""

import sys
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from convs import C, F, edge_weight
from graphs import BAD_INDEX, FORMS, ON_CPU, SQUARE, Graph, bad_index, features, graphs
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import (
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MessagePassing,
    MultiAggregation,
    SoftmaxAggregation,
)
from torch_geometric.typing import WITH_TORCH_SPARSE, OptPairTensor, OptTensor
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

import pyg_ioaware
from pyg_ioaware.patch import _call_scripted
from pyg_ioaware.testing import compare

pytestmark = pytest.mark.usefixtures("poison", "one_thread")

# PyG reads the annotations of messages, and knows only this form of them.
OptInt = Optional[int]  # noqa: UP045

AGGREGATIONS: list[Any] = ["sum", "mean", "max", "min", ["sum", "max"], ["mean", "mul"]]


class Plain(MessagePassing):
    """The base class does the rest: the message is 'x_j'."""

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, size=size)


class Weighted(MessagePassing):
    def forward(self, x: Any, edge_index: Any, weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class WeightedFromTheRight(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j.mul(weight.unsqueeze(-1))


class WeightedByHead(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.unsqueeze(-1)


class WeightedWithOneHeadForAll(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1, 1) * x_j


class WeightedTwice(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * (weight.view(-1, 1) * x_j)


class WeightedInPlace(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        x_j *= weight.view(-1, 1)
        return x_j


class WeightedByAnInteger(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return 2 * x_j


class WeightedByChannel(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1).expand_as(x_j) * x_j


class WeightedByNodes(Weighted):
    def forward(self, x: Any, edge_index: Any, weight: Tensor) -> Tensor:
        norm = x.sum(-1).tanh()
        return self.propagate(edge_index, x=x, norm=norm.unsqueeze(-1))

    def message(self, x_j: Tensor, norm_i: Tensor, norm_j: Tensor) -> Tensor:
        return norm_i * norm_j * x_j


class ChangedAfterWeighting(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        out = weight.view(-1, 1) * x_j
        x_j.zero_()
        out.add_(1)
        return out


class SourceChangedAfterGathering(Weighted):
    def forward(self, x: Any, edge_index: Any, weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x.clone(), weight=weight)

    def message(self, x: Tensor, x_j: Tensor, weight: Tensor) -> Tensor:
        x.mul_(2)
        return x_j


class WeightChangedAfterWeighting(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        weight = weight.clone()
        out = weight.view(-1, 1) * x_j
        with torch.no_grad():
            weight.zero_()
        return out


class TwoEnds(Plain):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.cat([x_i, x_j - x_i], dim=-1)


class OnlyTheTarget(Plain):
    def message(self, x_i: Tensor) -> Tensor:
        return x_i


class ChangesInPlace(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        x_j[:, 0] = 1
        x_j.mul_(2)
        return x_j


class ChangesAView(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        x_j.view(-1)[:3] = 5
        return x_j


class ChangesThroughData(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        x_j.data.mul_(3)
        return x_j


class ChangesThroughNumpy(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        x_j.detach().numpy()[:] = 3
        return x_j


class LooksWithoutGradient(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        with torch.no_grad():
            mean = (x_j * 2).mean()
        with torch.inference_mode():
            mean_again = float(x_j.mean())
        return x_j * x_j.sigmoid() + mean + mean_again


class ChangesWithoutGradient(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        with torch.no_grad():
            x_j.mul_(3)
        return x_j


class LooksAndReturns(Plain):
    seen: Any = None

    def message(self, x_j: Tensor) -> Tensor:
        self.seen = (float(x_j.detach().sum()), tuple(x_j.shape), x_j.dtype, str(x_j.device))
        return x_j


class KeepsTheMessages(Plain):
    """Returns the messages beside the output, so that their gradient counts too."""

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Any:
        return self.propagate(edge_index, x=x), self.kept

    def message(self, x_j: Tensor) -> Tensor:
        self.kept = x_j
        return x_j

    def update(self, inputs: Tensor) -> Tensor:
        self.kept = self.kept * 1
        return inputs


class AsksOnlyForTheShape(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        assert x_j.dim() == 2
        assert x_j.size(-1) == x_j.shape[1] == F
        assert x_j.is_cpu == ON_CPU
        assert x_j.is_cuda != ON_CPU
        assert x_j.new_zeros(3).dtype == x_j.dtype
        assert isinstance(x_j, Tensor)
        return x_j


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class CustomFunction(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        return _Square.apply(x_j)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * float(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 3 * scale * grad, (grad * x).sum()


class CustomFunctionOfAParameter(Plain):
    """Its gradient is not that of the forward: three times as large."""

    def __init__(self, aggr: Any = "sum") -> None:
        super().__init__(aggr=aggr)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def message(self, x_j: Tensor) -> Tensor:
        return _Scale.apply(x_j, self.scale)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class ReversesTheGradient(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        return _Reverse.apply(x_j)


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x.sigmoid() * 2


class Scripted(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        return _scripted(x_j)


class ScriptedAfterWeighting(Weighted):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return _scripted(weight.view(-1, 1) * x_j)


class Relu(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


class InPlaceRelu(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.nn.functional.relu(x_j, inplace=True)


class Hooked(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        if x_j.requires_grad:
            x_j.register_hook(lambda grad: 2 * grad)
        return x_j


class Detached(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.detach()


class Aliased(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.view_as(x_j).contiguous()


class Sliced(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        a, b = x_j.chunk(2, dim=-1)
        return a * b + x_j[:, : a.size(1)]


class ArrayLike(Plain):
    def message(self, x_j: Tensor) -> Tensor:
        rows = list(x_j)
        return torch.stack(rows) + float(len(x_j)) if rows else x_j


class OwnScatter(Plain):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: OptInt = None) -> Tensor:
        return scatter(inputs, index, self.node_dim, dim_size, reduce="sum")


class OwnIndexAdd(Plain):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: OptInt = None) -> Tensor:
        assert dim_size is not None
        return inputs.new_zeros(dim_size, inputs.size(-1)).index_add(0, index, inputs)


class CallsBaseAggregate(Plain):
    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: OptTensor = None, dim_size: OptInt = None
    ) -> Tensor:
        return 2 * super().aggregate(inputs, index, ptr, dim_size)


class ChangesBeforeAggregating(CallsBaseAggregate):
    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: OptTensor = None, dim_size: OptInt = None
    ) -> Tensor:
        return super().aggregate(inputs + 1, index, ptr, dim_size)


class AggregatesTwice(Plain):
    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: OptTensor = None, dim_size: OptInt = None
    ) -> Tensor:
        first = super().aggregate(inputs, index, ptr, dim_size)
        return torch.cat([first, scatter(inputs, index, 0, dim_size, "max")], dim=-1)


class AggregatesElsewhere(Plain):
    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: OptTensor = None, dim_size: OptInt = None
    ) -> Tensor:
        assert dim_size is not None
        return super().aggregate(inputs, (index + 1) % max(dim_size, 1), None, dim_size)


class Updates(Plain):
    def update(self, inputs: Tensor, x: OptPairTensor) -> Tensor:
        return torch.cat([inputs.relu(), x if isinstance(x, Tensor) else x[1]], dim=-1)


class Attention(Plain):
    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: OptInt) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, num_nodes=size_i)
        return alpha.unsqueeze(-1) * x_j


class Tutorial(MessagePassing):
    """The layer of PyG's tutorial: its own self loops and degrees."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(F, C, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        norm = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        norm[norm == float("inf")] = 0
        out = self.propagate(edge_index, x=x, norm=norm[row] * norm[col])
        return out + self.bias

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class TwoGathers(MessagePassing):
    def forward(self, x: Tensor, z: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x, z=z)

    def message(self, x_j: Tensor, z_j: Tensor) -> Tensor:
        return z_j * x_j


class AlongTheFirstDimension(Plain):
    def __init__(self, aggr: Any = "sum") -> None:
        super().__init__(aggr=aggr, node_dim=0)


# The class, and whether its aggregations run fused.
UNWEIGHTED: dict[type[MessagePassing], bool | None] = {
    Plain: True,
    AsksOnlyForTheShape: True,
    LooksAndReturns: False,
    Updates: True,
    CallsBaseAggregate: True,
    ChangesBeforeAggregating: True,
    AlongTheFirstDimension: True,
    AggregatesElsewhere: True,
    AggregatesTwice: None,
    LooksWithoutGradient: None,
    KeepsTheMessages: None,
    Attention: None,
    TwoEnds: False,
    OnlyTheTarget: None,
    ChangesInPlace: False,
    ChangesAView: False,
    ChangesThroughData: False,
    ChangesWithoutGradient: False,
    Relu: True,
    Detached: False,
    CustomFunction: False,
    CustomFunctionOfAParameter: False,
    ReversesTheGradient: False,
    Scripted: False,
    InPlaceRelu: False,
    Aliased: None,
    Sliced: False,
    ArrayLike: False,
    Hooked: False,
    OwnScatter: None,
    OwnIndexAdd: False,
}
FACTORS: dict[type[MessagePassing], bool | None] = {
    Weighted: True,
    WeightedFromTheRight: True,
    WeightedByAnInteger: True,
    WeightedByNodes: True,
    WeightedTwice: False,
    WeightedInPlace: False,
    WeightedByChannel: None,
    ChangedAfterWeighting: False,
    ScriptedAfterWeighting: False,
}


def check(layers: dict[str, Any], expected: bool | None) -> None:
    if expected is not None:
        assert all(bool(c.fused) == expected for c in layers.values()), layers
        assert all(bool(c.stock) != expected for c in layers.values()), layers


def test_a_scripted_function_gets_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuser of TorchScript reads the memory of its arguments, and lazy messages have none."""
    given = []

    def record(scripted: Any, *args: Any) -> Any:
        given.extend(args)
        return _call_scripted(scripted, *args)

    monkeypatch.setattr(sys.modules["pyg_ioaware.patch"], "_call_scripted", record)
    g = SQUARE["unsorted"]
    for cls in (Scripted, ScriptedAfterWeighting):
        compare(cls(), features(g.num_src, F), g.edge_index)
    assert given
    assert all(type(value) is Tensor for value in given)


@pytest.mark.parametrize("aggr", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("cls", UNWEIGHTED)
def test_messages(cls: type[MessagePassing], aggr: Any) -> None:
    g = SQUARE["unsorted"]
    layers = compare(cls(aggr=aggr), features(g.num_src, F).requires_grad_(), g.edge_index)
    check(layers, UNWEIGHTED[cls] if "mul" not in aggr else None)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("aggr", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("cls", FACTORS)
def test_weighted_messages(cls: type[MessagePassing], aggr: Any, requires_grad: bool) -> None:
    g = SQUARE["unsorted"]
    x = features(g.num_src, F).requires_grad_()
    layers = compare(cls(aggr=aggr), x, g.edge_index, edge_weight(g, requires_grad))
    check(layers, FACTORS[cls] if "mul" not in aggr else None)


@pytest.mark.parametrize("cls", [*UNWEIGHTED, ChangesThroughNumpy])
def test_messages_without_gradient(cls: type[MessagePassing]) -> None:
    g = SQUARE["unsorted"]
    for aggr in ("sum", "max"):
        compare(cls(aggr=aggr), features(g.num_src, F), g.edge_index)


# Stock's own scatter has wrong gradients for int32, and these classes call it.
@pytest.mark.parametrize("graph", [name for name in SQUARE if name != "int32"])
@pytest.mark.parametrize("cls", [Weighted, Attention, Tutorial, AggregatesTwice, Relu, TwoEnds])
def test_messages_on_hostile_graphs(cls: type[MessagePassing], graph: str) -> None:
    g = SQUARE[graph]
    args: list[Any] = [features(g.num_src, F).requires_grad_(), g.edge_index]
    compare(cls(), *args, *([edge_weight(g)] if cls is Weighted else []))


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    ("cls", "heads"),
    [
        (WeightedByHead, (3,)),
        (WeightedByHead, (1,)),
        (WeightedWithOneHeadForAll, ()),
    ],
)
def test_weights_of_heads(cls: type[MessagePassing], heads: tuple[int, ...], aggr: str) -> None:
    g = SQUARE["unsorted"]
    weight = features(g.num_edges, *heads, seed=1).requires_grad_()
    x = features(g.num_src, 3, C).requires_grad_()
    layers = compare(cls(aggr=aggr, node_dim=0), x, g.edge_index, weight)
    check(layers, True)


@pytest.mark.parametrize("node_dim", [0, 1, -1, -2, -3])
@pytest.mark.parametrize("shape", [(12,), (12, 12), (12, 12, 12), (12, 12, 12, 2)], ids=str)
@pytest.mark.parametrize("aggr", ["sum", "max", ["sum", "max"]], ids=str)
def test_nodes_along_any_dimension(aggr: Any, shape: tuple[int, ...], node_dim: int) -> None:
    g = SQUARE["unsorted"]
    if not ON_CPU and -len(shape) <= node_dim < len(shape) and shape[node_dim] < g.num_src:
        pytest.skip(BAD_INDEX)
    compare(Plain(aggr=aggr, node_dim=node_dim), features(*shape).requires_grad_(), g.edge_index)


@pytest.mark.parametrize("width", [1, 2, 12])
def test_products_of_two_gathers(width: int) -> None:
    # With one channel, either factor could be the weight.
    g = SQUARE["unsorted"]
    x, z = features(g.num_src, width), features(g.num_src, 1, seed=1)
    for a, b in ((x, z), (z, x)):
        compare(TwoGathers(), a.requires_grad_(), b.requires_grad_(), g.edge_index)


AGGREGATION_MODULES: dict[str, Callable[[], Any]] = {
    "softmax": lambda: SoftmaxAggregation(learn=True),
    "degree_scaler": lambda: DegreeScalerAggregation(
        ["mean", "max"], ["identity", "amplification"], torch.tensor([1, 3, 4, 2])
    ),
    "multi": lambda: MultiAggregation(["max", "softmax"], mode="sum"),
    "modules": lambda: [MaxAggregation(), MeanAggregation()],
    "median": lambda: "median",
    "lstm": lambda: "lstm",
    "powermean": lambda: "powermean",
    "var": lambda: "var",
    "none": lambda: None,
}


@pytest.mark.parametrize("name", AGGREGATION_MODULES)
def test_aggregation_modules(name: str) -> None:
    g = SQUARE["sorted_by_target"]
    kwargs = {"in_channels": F, "out_channels": C} if name == "lstm" else None
    conv = Plain(aggr=AGGREGATION_MODULES[name](), aggr_kwargs=kwargs)
    x = features(g.num_src, F).abs().requires_grad_()
    compare(conv, x, g.edge_index)
    compare(conv, x, FORMS["EdgeIndex_col"](g, None)[0])


def test_aggregation_changed_after_construction() -> None:
    g = SQUARE["unsorted"]
    for aggr in ("mean", "max"):
        conv = Plain()
        conv.aggr = aggr
        for form in FORMS:
            compare(conv, features(g.num_src, F).requires_grad_(), FORMS[form](g, None)[0])


@pytest.mark.parametrize("form", [name for name in FORMS if name != "int32"])
@pytest.mark.parametrize("cls", [Plain, Relu, TwoEnds, Attention, OwnScatter])
def test_forms_of_the_adjacency(cls: type[MessagePassing], form: str) -> None:
    g = SQUARE["unsorted"]
    for aggr in ("sum", "max"):
        adjacency, _ = FORMS[form](g, None)
        compare(cls(aggr=aggr), features(g.num_src, F).requires_grad_(), adjacency)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("cls", [Plain, Relu, TwoEnds, Attention, Updates, AggregatesElsewhere])
def test_flows(cls: type[MessagePassing], flow: str) -> None:
    g = SQUARE["unsorted"]
    compare(cls(flow=flow), features(g.num_src, F).requires_grad_(), g.edge_index)


@pytest.mark.parametrize("aggr", ["sum", "max", "median"])
@pytest.mark.parametrize("cls", [SourceChangedAfterGathering, WeightChangedAfterWeighting])
def test_operands_changed_before_they_are_read(cls: type[MessagePassing], aggr: str) -> None:
    # Stock has copied them by then; an error is better than another answer.
    g = SQUARE["unsorted"]
    args = features(g.num_src, F), g.edge_index, edge_weight(g, requires_grad=False)
    with pyg_ioaware.patched(), pytest.raises(RuntimeError, match="in place between gathering"):
        cls(aggr=aggr)(*args)


# What stock refuses ########################################################################

OUT_OF_RANGE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "too_large_source": lambda: (features(4, F), torch.tensor([[0, 4], [1, 2]])),
    "too_large_target": lambda: (features(4, F), torch.tensor([[0, 1], [1, 9]])),
    "negative_source": lambda: (features(4, F), torch.tensor([[0, -1], [1, 2]])),
    "negative_target": lambda: (features(4, F), torch.tensor([[0, 1], [-1, 2]])),
}
WRONG: dict[str, Callable[[], tuple[Any, ...]]] = {
    "floats": lambda: (features(4, F), torch.tensor([[0.0, 1], [1, 2]])),
    "int16": lambda: (features(4, F), torch.tensor([[0, 1], [1, 2]], dtype=torch.int16)),
    "uint8": lambda: (features(4, F), torch.tensor([[0, 1], [1, 2]], dtype=torch.uint8)),
    "bool": lambda: (features(4, F), torch.tensor([[0, 1], [1, 2]], dtype=torch.bool)),
    "three_rows": lambda: (features(4, F), torch.zeros(3, 2, dtype=torch.long)),
    "one_dimension": lambda: (features(4, F), torch.zeros(3, dtype=torch.long)),
    "a_list": lambda: (features(4, F), [[0, 1], [1, 2]]),
    "wrong_size": lambda: (features(4, F), torch.tensor([[0, 1], [1, 2]]), (5, 5)),
    "no_features": lambda: (None, torch.tensor([[0, 1], [1, 2]])),
}


def _out_of_range(name: str) -> Any:
    return pytest.param(name, marks=bad_index)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", ["sum", "max"]], ids=str)
@pytest.mark.parametrize("wrong", [*WRONG, *map(_out_of_range, OUT_OF_RANGE)])
def test_same_error_as_stock(wrong: str, aggr: Any, requires_grad: bool) -> None:
    x, *rest = (WRONG | OUT_OF_RANGE)[wrong]()
    compare(Plain(aggr=aggr), None if x is None else x.requires_grad_(requires_grad), *rest)


@bad_index
@pytest.mark.parametrize("index", [[[0, 4], [1, 2]], [[0, -1], [1, 2]]])
def test_the_same_bad_index_again(index: list[list[int]]) -> None:
    edge_index, x = torch.tensor(index), features(4, F)
    conv = Plain(aggr="max")
    with pyg_ioaware.patched():
        for _ in range(3):
            with pytest.raises(IndexError, match=r"Found (negative )?indices in 'edge_index'"):
                conv(x, edge_index)
        edge_index[0, 1] = 3
        assert conv(x, edge_index).shape == (4, F)


@pytest.mark.parametrize("size", [49, 51, 1, 0])
def test_weights_that_do_not_fit_the_edges(size: int) -> None:
    g = SQUARE["unsorted"]
    compare(Weighted(), features(g.num_src, F), g.edge_index, features(size))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool], ids=str
)
@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_weights_of_other_dtypes(aggr: str, dtype: torch.dtype) -> None:
    g = SQUARE["unsorted"]
    weight = edge_weight(g, requires_grad=False).mul(2).to(dtype)
    if dtype.is_floating_point:
        weight.requires_grad_()
    compare(Weighted(aggr=aggr), features(g.num_src, F).requires_grad_(), g.edge_index, weight)


@pytest.mark.parametrize(
    "wrong", [*map(_out_of_range, ("too_large_source", "negative_source")), "three_rows"]
)
def test_strict_mode_leaves_errors_as_they_are(wrong: str) -> None:
    args = (WRONG | OUT_OF_RANGE)[wrong]()
    with pytest.raises((IndexError, ValueError)) as stock:
        Plain()(*args)
    with pyg_ioaware.patched(strict=True), pytest.raises(stock.type) as ours:
        Plain()(*args)
    assert str(ours.value) == str(stock.value)


# Any graph #################################################################################


@given(
    graph=graphs(square=False),
    aggr=st.sampled_from(["sum", "mean", "max", "min"]),
    heads=st.integers(0, 3),
    width=st.integers(1, 40),
    per_head=st.booleans(),
    integers=st.booleans(),
    flow=st.sampled_from(["source_to_target", "target_to_source"]),
)
def test_any_weighted_message(
    graph: Graph,
    aggr: str,
    heads: int,
    width: int,
    per_head: bool,
    integers: bool,
    flow: str,
) -> None:
    shape = (heads, width) if heads else (width,)
    cls = WeightedByHead if heads and per_head else WeightedWithOneHeadForAll
    weight = features(graph.num_edges, *([heads] if cls is WeightedByHead else []), seed=1)
    x = features(graph.num_src, *shape)
    if integers:
        x, weight = x.round(), weight.round()
    conv = (cls if heads else Weighted)(aggr=aggr, flow=flow, node_dim=0)
    there = flow == "source_to_target"
    assume(ON_CPU or there)  # PyG takes a pair's first half as sources either way
    edge_index = graph.edge_index if there else graph.edge_index.flip(0)
    pair = (x.requires_grad_(), features(graph.num_dst, 1))
    compare(conv, pair if there else pair[::-1], edge_index, weight.requires_grad_())


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch_sparse")
def test_user_code_that_multiplies_a_sparse_tensor() -> None:
    class OwnProduct(Plain):
        def message_and_aggregate(self, adj_t: Any, x: Tensor) -> Tensor:
            return adj_t.matmul(x, reduce="max")

    g = SQUARE["unsorted"]
    adjacency, _ = FORMS["SparseTensor"](g, None)
    compare(OwnProduct(), features(g.num_src, F).requires_grad_(), adjacency)


class Mapped(Plain):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lin = torch.nn.Linear(F, C)

    def message(self, x_j: Tensor) -> Tensor:
        return self.lin(x_j)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_features_made_in_inference_mode_that_learned_numbers_meet(aggr: str) -> None:
    """No gradient can keep them; that of stock keeps what is gathered from them."""
    g = SQUARE["unsorted"]
    with torch.inference_mode():
        x = features(g.num_src, F).clone()
    compare(Mapped(aggr=aggr), x, g.edge_index)
    compare(Weighted(aggr=aggr), x, g.edge_index, edge_weight(g))
