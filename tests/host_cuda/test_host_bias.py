"""Gradients of biases by a CUDA kernel, on the CPU: its sums, and the layers against stock PyG."""

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from graphs import SQUARE, features
from runtime import COMPILER, HostRuntime, installed
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    Linear,
    SAGEConv,
    TransformerConv,
)

import pyg_ioaware
from pyg_ioaware.engines.cuda import CUDAEngine
from pyg_ioaware.nn import IOAwareGCNConv
from pyg_ioaware.ops import bias, library
from pyg_ioaware.testing import compare

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("poison", "one_thread"),
]

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
F, C = 8, 6
G = SQUARE["unsorted"]
E, N = G.edge_index, G.num_src


@pytest.fixture(autouse=True)
def engine() -> Iterator[CUDAEngine]:
    """The CUDA engine on the CPU, as that of the CPU."""
    with installed(CUDAEngine(HostRuntime())) as found:
        yield found


@pytest.fixture(autouse=True)
def summed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Makes every output a large one, and lists the shapes of what the kernel sums."""
    found: list[tuple[int, ...]] = []
    kernel = bias._column_sums

    def noted(x: Tensor) -> Tensor:
        found.append(tuple(x.shape))
        out: Tensor = kernel(x)
        return out

    monkeypatch.setattr(bias, "_column_sums", noted)
    monkeypatch.setattr(bias, "MANY", 1)
    return found


def x(num_rows: int = N) -> Tensor:
    return features(num_rows, F).requires_grad_()


# The kernel ################################################################################


def check_sums(rows: int, width: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Compares sums with those in float64; an offset moves rows off the alignment of memory."""
    memory = features(rows * width + offset, dtype=dtype)
    given = memory[offset:].view(rows, width)
    found = bias._column_sums(given)
    assert found.dtype == torch.float64
    bound = given.double().abs().sum(0) * 2.0**-45
    assert ((found - given.double().sum(0)).abs() <= bound).all()
    return found


@pytest.mark.parametrize("rows", [0, 1, 1000])
@pytest.mark.parametrize("width", [1, 3, 8, 47, 129, 256, 257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype: torch.dtype, width: int, rows: int) -> None:
    check_sums(rows, width, dtype)
    check_sums(rows, width, dtype, offset=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_all_widths(dtype: torch.dtype) -> None:
    for width in range(1, 258):
        check_sums(67, width, dtype)


def test_every_order_gives_the_same_bits(engine: CUDAEngine) -> None:
    first = check_sums(300, 67, torch.float32)
    for engine.runtime.seed in range(1, 6):
        assert torch.equal(check_sums(300, 67, torch.float32), first)


def test_an_only_operand_is_looked_at_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(library, "is_plain", lambda *values: not seen.append(values))
    given = features(1000, 4)
    bias._column_sums(given)
    assert [[id(value) for value in values] for values in seen] == [[id(given)]]


def test_derivatives() -> None:
    leaves = features(5, 3, dtype=torch.float64), features(3, dtype=torch.float64)
    leaves = tuple(t.requires_grad_() for t in leaves)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return bias.biased(a.sin() + b.detach(), b).cos()

    assert gradcheck(run, leaves, check_batched_grad=True)
    assert gradgradcheck(run, leaves, check_batched_grad=True)
    torch.library.opcheck(torch.ops.pyg_ioaware.column_sums.default, (features(9, 3),))


def _with(place: tuple[int, int], value: float) -> Tensor:
    grad = features(N, C)
    grad[place] = value
    return grad


# Gradients of an output, and whether the kernel sums them.
GRADIENTS = {
    "plain": (features(N, C), True),
    "nan": (_with((2, 3), float("nan")), True),
    "infinite": (_with((2, 3), float("inf")), True),
    "expanded": (torch.ones(()).expand(N, C), False),
    "transposed": (features(C, N).t(), False),
    "strided": (features(N, 2 * C)[:, ::2], False),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_any_form(name: str, summed: list[Any]) -> None:
    grad, is_summed = GRADIENTS[name]
    leaf, given = torch.zeros(C, requires_grad=True), features(N, C, seed=1)
    found = torch.autograd.grad(bias.biased(given.clone(), leaf), leaf, grad)
    torch.testing.assert_close(found, torch.autograd.grad(given + leaf, leaf, grad), equal_nan=True)
    assert summed == [(N, C)] * is_summed


# Where layers use it #######################################################################

# Each with the number of its biases.
LAYERS: dict[str, tuple[Callable[[], Any], int]] = {
    "GCN": (lambda: GCNConv(F, C), 1),
    "IOAwareGCN": (lambda: IOAwareGCNConv(F, C), 1),
    "GCN-lazy": (lambda: GCNConv(-1, C), 1),
    "SAGE": (lambda: SAGEConv(F, C), 1),
    "SAGE-no-root": (lambda: SAGEConv(F, C, aggr="max", root_weight=False), 1),
    "SAGE-project": (lambda: SAGEConv(F, C, project=True), 2),
    "Graph": (lambda: GraphConv(F, C), 1),
    "GIN": (lambda: GINConv(Linear(F, C)), 1),
    "GATv2": (lambda: GATv2Conv(F, C, heads=2), 3),
    "GATv2-shared": (lambda: GATv2Conv(F, C, heads=2, share_weights=True), 2),
    "GATv2-mean": (lambda: GATv2Conv(F, C, heads=2, concat=False, residual=True), 3),
    "Transformer": (lambda: TransformerConv(F, C, heads=2), 4),
    "Transformer-beta": (lambda: TransformerConv(F, C, heads=2, beta=True), 4),
}


@pytest.mark.parametrize("graph", ["unsorted", "no_edges", "one_node"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: torch.dtype, graph: str, summed: list[Any]) -> None:
    make, num_biases = LAYERS[name]
    g, conv = SQUARE[graph], make().to(dtype)
    given = features(g.num_src, F, dtype=dtype).requires_grad_()
    conv(given, g.edge_index)
    compare(conv, given, g.edge_index, draws=1)
    assert len(summed) == num_biases


@pytest.mark.parametrize("name", LAYERS)
def test_no_nodes(name: str, summed: list[Any]) -> None:
    conv = LAYERS[name][0]()
    conv(x(), E)
    compare(conv, x(0), E[:, :0])
    assert summed == []


@pytest.mark.parametrize("layer", [SAGEConv, GATv2Conv, TransformerConv])
def test_two_sets_of_nodes(layer: Any, summed: list[Any]) -> None:
    compare(layer((F, F), C), (x(N + 3), features(N, F, seed=1).requires_grad_()), E)
    assert summed


@pytest.mark.parametrize("name", ["GCN", "SAGE-no-root", "GIN", "GATv2", "GATv2-mean"])
def test_outputs_are_no_views(name: str) -> None:
    conv = LAYERS[name][0]()
    with pyg_ioaware.patched():
        out = conv(x(), E)
        assert not out._is_view()
        assert not out.detach_().requires_grad


class Used(nn.Module):
    """A layer, and a way of using it."""

    def __init__(self, conv: nn.Module, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.use = conv, use

    def forward(self, given: Tensor) -> Any:
        return self.use(lambda given: self.conv(given, E), given)


def _added_to(conv: Any, given: Tensor) -> Tensor:
    out: Tensor = conv(given)
    out += 1
    return out.mul_(2)


def _differentiated(conv: Any, given: Tensor) -> Any:
    given = given * 1
    return torch.autograd.grad(conv(given).pow(3).sum(), given, create_graph=True)


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "relu_": lambda conv, given: conv(given).relu_(),
    "added_to": _added_to,
    "dropout": lambda conv, given: nn.functional.dropout(conv(given), 0.5, inplace=True),
    "twice": lambda conv, given: conv(given) + conv(given * 2).sin(),
    "second_order": _differentiated,
    "checkpoint": lambda conv, given: checkpoint(conv, given, use_reentrant=False).relu_(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["GCN", "SAGE-no-root", "GATv2"])
def test_uses(name: str, use: str, summed: list[Any]) -> None:
    compare(Used(LAYERS[name][0](), USES[use]), x())
    assert summed


@pytest.mark.parametrize("name", ["GCN", "SAGE-no-root", "GATv2"])
def test_inputs_and_weights_without_gradients(name: str, summed: list[Any]) -> None:
    make, num_biases = LAYERS[name]
    conv = make()
    for key, parameter in conv.named_parameters():
        parameter.requires_grad_(key.endswith("bias"))
    compare(Used(conv, USES["relu_"]), x().detach(), draws=1)
    assert len(summed) == num_biases


def _hooked(conv: Any, given: Tensor) -> list[Tensor]:
    conv.bias.register_hook(lambda grad: grad * 2)
    seen: list[Tensor] = []
    conv.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        conv(given, E).square().sum().backward()
    return seen


def _backward_twice(conv: Any, given: Tensor) -> list[Tensor]:
    out = conv(given, E)
    out.square().sum().backward(retain_graph=True)
    out.sin().sum().backward()
    return [conv.bias.grad, conv.lin.weight.grad]


def _reentrant(conv: Any, given: Tensor) -> list[Tensor]:
    checkpoint(conv, given, E, use_reentrant=True).square().sum().backward()
    return [conv.bias.grad, given.grad]


def _others(conv: Any, given: Tensor) -> list[Tensor]:
    params = {name: (p * 2).detach().requires_grad_() for name, p in conv.named_parameters()}
    out = torch.func.functional_call(conv, params, (given, E))
    return [out, *torch.autograd.grad(out.square().sum(), list(params.values()))]


def _batched(conv: Any, given: Tensor) -> list[Tensor]:
    grads = features(3, N, C)
    return [*torch.autograd.grad(conv(given, E), conv.bias, grads, is_grads_batched=True)]


def _jacobian(conv: Any, given: Tensor) -> list[Tensor]:
    def run(params: Any) -> Any:
        return torch.func.functional_call(conv, params, (given.detach(), E))

    params = {name: p.detach() for name, p in conv.named_parameters()}
    return [torch.func.jacrev(run)(params)["bias"], *torch.func.jvp(run, (params,), (params,))]


def _mapped(conv: Any, given: Tensor) -> list[Tensor]:
    return [torch.vmap(lambda given: conv(given, E))(torch.stack([given, given * 2]))]


def _compiled(conv: Any, given: Tensor) -> list[Tensor]:
    out = torch.compile(conv, backend="eager")(given, E)
    return [out, *torch.autograd.grad(out.square().sum(), conv.bias)]


# Each with whether the kernel is used.
RUNS: dict[str, tuple[Callable[[Any, Tensor], list[Tensor]], bool]] = {
    "hooks": (_hooked, True),
    "backward_twice": (_backward_twice, True),
    "reentrant": (_reentrant, True),
    "other_parameters": (_others, True),
    "batched": (_batched, False),
    "jacobian": (_jacobian, False),
    "mapped": (_mapped, False),
    "compiled": (_compiled, False),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, summed: list[Any]) -> None:
    run, is_summed = RUNS[name]
    found = []
    for context in (pyg_ioaware.disabled, partial(pyg_ioaware.patched, strict=False)):
        torch.manual_seed(0)
        conv = GCNConv(F, C)
        nn.init.normal_(conv.bias)
        with context():
            found.append([t.detach() for t in run(conv, x())])
    torch.testing.assert_close(*found)
    assert bool(summed) == is_summed


# Where they do not #########################################################################


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda lin: setattr(lin, name, value)


class Doubled(Linear):
    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = super().forward(given) * 2
        return out


def _own_forward(lin: Any) -> None:
    lin.forward = types.MethodType(Doubled.forward, lin)
    lin.__class__ = Doubled


def _twice(_module: Any, *args: Any) -> Any:
    return args[-1] * 2 if isinstance(args[-1], Tensor) else tuple(t * 2 for t in args[-1])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward_hook": lambda lin: lin.register_forward_hook(_twice),
    "pre_hook": lambda lin: lin.register_forward_pre_hook(_twice),
    "backward_hook": lambda lin: lin.register_full_backward_hook(_twice),
    "backward_pre_hook": lambda lin: lin.register_full_backward_pre_hook(_twice),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": lambda lin: parametrizations.spectral_norm(lin).eval(),
    "subclass": _set("__class__", Doubled),
    "own_forward": _own_forward,
    "frozen": lambda lin: lin.bias.requires_grad_(False),
    "matrix": _set("bias", nn.Parameter(torch.ones(1, C))),
    "one_number": _set("bias", nn.Parameter(torch.ones(1))),
    "too_long": _set("bias", nn.Parameter(torch.ones(C + 1))),
    "float64": _set("bias", nn.Parameter(torch.ones(C, dtype=torch.float64))),
    "none": _set("bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_maps_that_are_not_as_pyg_made_them(name: str, summed: list[Any]) -> None:
    conv = SAGEConv(F, C)
    CHANGES[name](conv.lin_l)
    compare(conv, x(), E)
    assert summed == []


def test_a_map_that_is_compiled(summed: list[Any]) -> None:
    """A copy of it would not be."""
    conv, found = SAGEConv(F, C), []
    conv.lin_l.compile(backend="eager")
    for patch in (pyg_ioaware.disabled, pyg_ioaware.patched):
        with patch():
            out = conv(x(), E)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(conv.parameters()))])
    torch.testing.assert_close(*found)
    assert summed == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        nn.Parameter(torch.ones(C), requires_grad=False),
        nn.Parameter(torch.ones(1, C)),
        nn.Parameter(torch.ones(N, 1)),
        nn.Parameter(torch.ones(1)),
        nn.Parameter(torch.ones(C + 1)),
    ],
    ids=["none", "frozen", "row", "column", "one number", "too long"],
)
@pytest.mark.parametrize("layer", [GCNConv, partial(GATv2Conv, concat=False)])
def test_biases_of_other_shapes(layer: Any, value: Any, summed: list[Any]) -> None:
    conv = layer(F, C)
    conv.bias = value
    if layer is not GCNConv:
        conv.lin_l.bias = conv.lin_r.bias = None
    compare(conv, x(), E)
    assert summed == []


def test_several_features_at_once(summed: list[Any]) -> None:
    compare(GCNConv(F, C), features(2, N, F).requires_grad_(), E)
    compare(GCNConv(F, C), features(5, 1, F).requires_grad_(), torch.zeros(2, 1, dtype=torch.long))
    assert summed == []


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
@pytest.mark.parametrize("name", ["GCN", "SAGE", "GATv2"])
def test_modes(name: str, context: Any, summed: list[Any]) -> None:
    conv = LAYERS[name][0]()
    found = []
    for patch in (pyg_ioaware.disabled, pyg_ioaware.patched):
        with patch(), context():
            found.append(conv(x(), E))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    if found[1].requires_grad:
        found[1].sum().backward()
    assert summed == []


def test_hooks_of_all_modules(summed: list[Any]) -> None:
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        compare(SAGEConv(F, C), x(), E)
    finally:
        handle.remove()
    assert seen.count("Linear") == 6
    assert summed == []
