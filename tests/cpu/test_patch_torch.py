"""PyTorch's own transformations of a model: each works as it does on stock PyG."""

import copy
import warnings

import pytest
import torch
from child import run_python
from graphs import BY_NUMBA, DEVICE, features, random_edges
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    ChebConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    TAGConv,
    TransformerConv,
)

import pyg_ioaware

C = 8
N = 9
E = 30
EDGES = random_edges(N, N, E)
OTHER = random_edges(N, N, E, seed=1)
X = features(N, C)

LAYERS = {
    "GCN": lambda: GCNConv(C, C),
    "SAGE_max": lambda: SAGEConv(C, C, aggr="max"),
    "SAGE_list": lambda: SAGEConv(C, C, aggr=["mean", "max", "sum"]),
    "Graph": lambda: GraphConv(C, C),
    "GIN": lambda: GINConv(nn.Linear(C, C)),
    "TAG": lambda: TAGConv(C, C),
    "Cheb": lambda: ChebConv(C, C, 2).to(DEVICE),  # its bias heeds no default device
    "GAT": lambda: GATConv(C, C, heads=2),
    "GATv2": lambda: GATv2Conv(C, C, heads=2),
    "Transformer": lambda: TransformerConv(C, C, heads=2),
}
VMAPPED = ["GCN", "SAGE_max", "Graph", "GIN", "TAG", "GATv2", "Transformer"]
SCRIPTABLE = ["GCN", "SAGE_max", "Graph", "TAG", "Cheb"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(C, C)
        self.conv2 = SAGEConv(C, C, aggr="max")

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def both(call):
    """Runs a call on stock PyG and patched; returns both results, or the types of both errors."""
    found = []
    for scope in (pyg_ioaware.disabled, pyg_ioaware.patched):
        with scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                found.append(call())
            except Exception as error:
                found.append(type(error).__name__)
    return found


def assert_as_stock(call, works=True):
    """Asserts equal results or, unless the call has to work, errors of one type."""
    stock, ours = both(call)
    if isinstance(stock, str):
        assert not works, f"stock does not do this: {stock}"
        assert ours == stock
    else:
        torch.testing.assert_close(ours, stock)


def training_step(model, x, edge_index):
    x = x.detach().clone().requires_grad_()
    out = model(x, edge_index)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *parameters])]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Compile and export.


@pytest.mark.parametrize("layer", LAYERS)
def test_compile_in_one_graph(layer):
    conv = LAYERS[layer]()
    expected = training_step(conv, X, EDGES)
    pyg_ioaware.patch()
    conv(X, EDGES)  # a warm cache must not matter
    compiled = torch.compile(conv, backend="eager", fullgraph=True)
    for edges in (EDGES, EDGES):
        torch.testing.assert_close(training_step(compiled, X, edges), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_before_and_after_the_patch(when, backend):
    model = Net()
    expected = [training_step(model, X, edges) for edges in (EDGES, OTHER)]
    compiled = torch.compile(model, backend=backend)

    def check():
        for edges, known in zip((EDGES, OTHER), expected, strict=True):
            torch.testing.assert_close(training_step(compiled, X, edges), known)

    if when == "before":
        check()
    pyg_ioaware.patch()
    check()
    torch.testing.assert_close(training_step(model, X, EDGES), expected[0])
    pyg_ioaware.unpatch()
    check()


def test_compile_with_dynamic_sizes():
    model = Net()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    pyg_ioaware.patch()
    for n in (5, 9, 14):
        x, edges = features(n, C), random_edges(n, n, 3 * n)
        with pyg_ioaware.disabled():
            expected = training_step(model, x, edges)
        torch.testing.assert_close(training_step(compiled, x, edges), expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_export(layer):
    conv = LAYERS[layer]().eval()
    assert_as_stock(lambda: torch.export.export(conv, (X, EDGES)).module()(X, OTHER))


def test_dynamo_region_inside_an_eager_model():
    """A compiled function that a message passes through."""

    class Compiled(SAGEConv):
        def message(self, x_j):
            return double(x_j)

    double = torch.compile(lambda t: 2 * t + 1, backend="eager")
    conv = Compiled(C, C)
    assert_as_stock(lambda: training_step(conv, X, EDGES))


# TorchScript, tracing, fx.


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script(layer):
    conv = LAYERS[layer]().eval()

    def call():
        return torch.jit.script(copy.deepcopy(conv))(X, EDGES)

    assert_as_stock(call, works=layer in SCRIPTABLE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_on_stock_after_a_first_script_while_patched():
    """TorchScript keeps the overloads of a function with the object that it saw first."""
    run_python(
        """
        import torch, pyg_ioaware
        from torch_geometric.nn import APPNP, ChebConv, GCNConv, SGConv, TAGConv
        x, edge_index = torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])
        convs = [ChebConv(4, 4, 2), GCNConv(4, 4), SGConv(4, 4), TAGConv(4, 4), APPNP(2, 0.1)]
        for i, conv in enumerate(convs):
            expected = conv(x, edge_index)
            with pyg_ioaware.patched() if i % 2 else pyg_ioaware.disabled():
                torch.testing.assert_close(torch.jit.script(conv)(x, edge_index), expected)
        """
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_made_before_and_after():
    model = Net()
    expected = model(X, EDGES)
    before = torch.jit.script(copy.deepcopy(model))
    with pyg_ioaware.patched():
        torch.testing.assert_close(before(X, EDGES), expected)
        after = torch.jit.script(model)
        torch.testing.assert_close(after(X, EDGES), expected)
        torch.testing.assert_close(model(X, EDGES), expected)
    torch.testing.assert_close(after(X, EDGES), expected)
    torch.testing.assert_close(torch.jit.script(Net())(X, EDGES).shape, expected.shape)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_trace(layer):
    """The traced graph must hold no structure of the example: it runs on another graph."""
    conv = LAYERS[layer]().eval()

    def call():
        conv(X, EDGES)
        traced = torch.jit.trace(conv, (X, EDGES), check_trace=False)
        return traced(X, EDGES), traced(2 * X, OTHER)

    assert_as_stock(call)


def test_fx():
    model = Net()

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, *args):
            return "torch_geometric" in type(module).__module__

    def call():
        graph = Tracer().trace(model)
        return torch.fx.GraphModule(model, graph)(X, EDGES)

    assert_as_stock(call)
    assert_as_stock(lambda: torch.fx.symbolic_trace(GCNConv(C, C))(X, EDGES), works=False)


def test_make_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    conv = SAGEConv(C, C)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(conv, tracing_mode=mode)
        assert_as_stock(lambda traced=traced: traced(X, EDGES)(X, OTHER), works=False)


# Functional transforms and forward-mode differentiation.


@pytest.mark.parametrize("layer", LAYERS)
def test_functional_gradient(layer):
    conv = LAYERS[layer]()
    params = dict(conv.named_parameters())

    def loss(params, x):
        return functional_call(conv, params, (x, EDGES)).square().sum()

    assert_as_stock(lambda: grad(loss, argnums=(0, 1))(params, X))
    assert_as_stock(lambda: torch.func.hessian(lambda x: loss(params, x))(X[:, :2].repeat(1, 4)))


@pytest.mark.parametrize("layer", LAYERS)
def test_forward_mode(layer):
    conv = LAYERS[layer]()
    assert_as_stock(lambda: jvp(lambda x: conv(x, EDGES), (X,), (X.cos(),)))

    def dual():
        with torch.autograd.forward_ad.dual_level():
            out = conv(torch.autograd.forward_ad.make_dual(X, X.cos()), EDGES)
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    assert_as_stock(dual)

    def idle():  # a level without a dual number, and plain features inside of it
        with torch.autograd.forward_ad.dual_level():
            return conv(X, EDGES)

    assert_as_stock(idle)


@pytest.mark.parametrize("layer", LAYERS)
def test_vmap(layer):
    conv, batch = LAYERS[layer](), features(3 * N, C).view(3, N, C)
    assert_as_stock(lambda: vmap(lambda x: conv(x, EDGES))(batch), works=layer in VMAPPED)


@pytest.mark.parametrize("layer", LAYERS)
def test_batched_gradients(layer):
    """A Jacobian by vmap over the backward pass of a fused forward pass."""
    conv = LAYERS[layer]()

    def call():
        x = X.clone().requires_grad_()
        out = conv(x, EDGES).flatten()[:5]
        (jacobian,) = torch.autograd.grad(out, x, torch.eye(5), is_grads_batched=True)
        return jacobian

    assert_as_stock(call)
    jacobian = torch.autograd.functional.jacobian
    assert_as_stock(lambda: jacobian(lambda x: conv(x, EDGES), X, vectorize=True))


# Modes, checkpointing, ways of calling.


def test_dispatch_mode():
    model = Net()

    def call():
        with FlopCounterMode(display=False) as counter:
            out = model(X, EDGES)
        return torch.tensor(counter.get_total_flops()), out

    assert_as_stock(call)
    pyg_ioaware.patch()
    model(X, EDGES)
    assert pyg_ioaware.stats()["layers"]["GCNConv"]["fused"] > 0


def test_function_mode():
    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def call():
        with Count():
            return training_step(Net(), X, EDGES)

    assert_as_stock(call)


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_activation_checkpointing(layer, reentrant, cache):
    """The recomputation takes the same path as the first pass, whatever the cache holds."""
    conv, drop = LAYERS[layer](), nn.Dropout(0.5)

    def run(x, edge_index):
        return drop(conv(x, edge_index)).square().sum()

    def call():
        if cache == "warm":
            conv(X, EDGES)
        else:
            pyg_ioaware.clear_cache()
        torch.manual_seed(3)
        x = X.clone().requires_grad_()
        out = checkpoint(run, x, EDGES, use_reentrant=reentrant)
        if cache == "cold":
            pyg_ioaware.clear_cache()
        out.backward()
        found = [out.detach(), x.grad, *(p.grad for p in conv.parameters())]
        conv.zero_grad()
        return found

    assert_as_stock(call)


UNPACKED = {
    "every other column": lambda t: torch.stack([t, t], -1)[..., 0],
    "one element further": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, *([] if BY_NUMBA else [torch.bfloat16])], ids=str)
@pytest.mark.parametrize("unpack", UNPACKED)
@pytest.mark.parametrize("layer", ["GCN", "SAGE_max", "GATv2", "Transformer"])
def test_saved_tensors_that_hooks_lay_out_otherwise(layer, unpack, dtype):
    edges, conv = random_edges(30, 30, 400).to(DEVICE), LAYERS[layer]().to(DEVICE, dtype)
    x = features(30, C, dtype=dtype)

    def gradients(unpack):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
            out = conv(leaf, edges)
        return torch.autograd.grad(out.float().square().sum(), [leaf, *conv.parameters()])

    with pyg_ioaware.patched():
        for found, expected in zip(
            gradients(UNPACKED[unpack]), gradients(lambda t: t), strict=True
        ):
            torch.testing.assert_close(found, expected)  # PyTorch, too, sums otherwise then


def test_checkpoint_over_a_switch():
    """What ran fused is recomputed, even if that is on stock PyG by then."""
    conv, x = SAGEConv(C, C, aggr="max"), X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(conv(x, EDGES).square().sum(), x)
    pyg_ioaware.patch()
    out = checkpoint(lambda t: conv(t, EDGES).square().sum(), x, use_reentrant=True)
    with pyg_ioaware.disabled():
        out.backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("kind", [torch.Tensor, EdgeIndex])
def test_inference_mode(kind):
    model = Net()

    def call():
        edges = EDGES if kind is torch.Tensor else EdgeIndex(EDGES, sparse_size=(N, N))
        with torch.inference_mode():
            return model(X, edges).clone()

    # Stock cannot slice an EdgeIndex that was made in inference mode.
    assert_as_stock(call, works=kind is torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", LAYERS)
def test_autocast(layer, dtype):
    """Memoised weights made outside of autocast serve inside, and the other way round."""
    conv = LAYERS[layer]()

    def call():
        found = []
        for on in (False, True, False, True):
            with torch.autocast(DEVICE.type, dtype=dtype, enabled=on):
                found.append(conv(X, EDGES))
        return found

    stock, ours = both(call)
    assert [t.dtype for t in ours] == [t.dtype for t in stock]
    torch.testing.assert_close(ours, stock, rtol=2e-2, atol=2e-2)
