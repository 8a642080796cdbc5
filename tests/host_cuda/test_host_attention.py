"""The CUDA kernels of attention on the CPU against plain PyTorch, on small hostile graphs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from runtime import COMPILER, HostRuntime, installed
from test_host_ops import DTYPES, GRAPHS, adjacencies, with_int64
from torch import Tensor

from pyg_ioaware.engines.cuda import CUDAEngine
from pyg_ioaware.graph.csr import Adjacency
from pyg_ioaware.ops import reference
from pyg_ioaware.ops.attention import Attention
from pyg_ioaware.ops.gatv2 import GATv2
from pyg_ioaware.ops.transformer import Transformer

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("poison", "one_thread"),
]


@dataclass(frozen=True)
class Case:
    """How attention is called; a dimension of zero stands for no features of edges."""

    op: str
    heads: int = 2
    channels: int = 3
    dim: int = 0
    loops: bool = False
    dropout: float = 0.0
    weights: bool = False

    def options(self, adj: Adjacency) -> Attention:
        """Returns what is computed."""
        loops = min(adj.num_src, adj.num_dst) if self.loops else -1
        factor = 0.2 if self.op == "gatv2" else max(1, self.channels) ** -0.5
        seed = torch.tensor([-(2**40) - 5]) if self.dropout else None
        return Attention(adj, self.heads, loops, factor, self.dropout, seed, self.weights, True)

    def make(self, adj: Adjacency, dtype: torch.dtype, offset: int = 0) -> list[Tensor | None]:
        """Draws operands; an offset moves each off the alignment of its memory."""
        width, dim = self.heads * self.channels, self.dim
        shapes: list[tuple[int, ...]] = [(adj.num_src, width), (adj.num_dst, width)]
        if self.op == "gatv2":
            loops = max(self.options(adj).num_loops, 0)
            shapes += [(width,), (adj.num_edges, dim), (loops, dim), (width, dim)]
        else:
            shapes = [shapes[1], shapes[0], shapes[0]]
            shapes += [(adj.num_edges, dim), (adj.num_dst, self.heads * dim)]
        generator = torch.Generator().manual_seed(0)
        made: list[Tensor | None] = []
        for place, shape in enumerate(shapes):
            if place > 2 and not (dim and (shape[0] or place != 4 or self.loops)):
                made.append(None)
                continue
            # The second half of features is apart from zero, as behind a ReLU.
            numbers = torch.randn(shape, generator=generator)
            numbers[..., shape[-1] // 2 :] += 2
            if place > 1:
                numbers *= (1 + self.channels) ** -0.5
            memory = torch.empty(numbers.numel() + offset, dtype=dtype)
            made.append(memory[offset:].view(shape).copy_(numbers))
        if not self.loops and self.op == "gatv2":
            made[4] = None
        return made

    def check(self, adj: Adjacency, dtype: torch.dtype = torch.float32, offset: int = 0) -> None:
        """Compares values and gradients with the reference in float64."""
        operands = self.make(adj, dtype, offset)
        exact = self.results(reference, operands, adj, torch.float64)
        plain = self.results(reference, operands, adj, dtype)
        # In float64 nothing is more exact: of equal edges, gradients of scores are zero here, and
        # in the reference what it rounds, times sums over the features of an edge.
        eps = torch.finfo(dtype).eps * (8 * (1 + self.dim) if dtype == torch.float64 else 1)
        for mine, right, stock in zip(
            self.results(None, operands, adj, dtype), exact, plain, strict=True
        ):
            assert mine.shape == right.shape
            if mine.numel() == 0:
                continue
            bound = 3 * (stock.double() - right).abs().max() + 16 * eps * right.abs().max()
            assert (mine.double() - right).abs().max() <= bound + 16 * eps

    def results(
        self, module: Any, operands: list[Tensor | None], adj: Adjacency, dtype: torch.dtype
    ) -> list[Tensor]:
        """Returns the outputs and the gradient of each operand."""
        given = [None if t is None else t.detach().to(dtype).requires_grad_() for t in operands]
        options = self.options(adj)
        if module is None:
            op = GATv2 if self.op == "gatv2" else Transformer
            outputs = op.apply(*given, options)
        else:
            outputs = getattr(module, self.op)(options, *given)
            outputs = outputs if self.weights else outputs[:-1]
        found = [t for t in outputs if t is not None]
        if self.weights:
            found[-1] = found[-1][options.used()]
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in found]
        leaves = [t for t in given if t is not None]
        gradients = torch.autograd.grad(found, leaves, grads, allow_unused=True)
        pairs = zip(gradients, leaves, strict=True)
        return [
            *(t.detach() for t in found),
            *(torch.zeros_like(t) if g is None else g for g, t in pairs),
        ]


CASES = {
    "gatv2": Case("gatv2"),
    "gatv2_loops": Case("gatv2", loops=True),
    "gatv2_words": Case("gatv2", 2, 20),  # lanes that share words of signs
    "gatv2_weights": Case("gatv2", 5, 4, dropout=0.4, weights=True),
    "gatv2_edges": Case("gatv2", 2, 8, dim=3),
    "gatv2_all": Case("gatv2", 3, 12, dim=5, loops=True, dropout=0.3, weights=True),
    "transformer": Case("transformer"),
    "transformer_weights": Case("transformer", 5, 4, dropout=0.4, weights=True),
    "transformer_edges": Case("transformer", 2, 8, dim=3),
    "transformer_all": Case("transformer", 3, 12, dim=21, dropout=0.3, weights=True),
}
OPS = "gatv2", "transformer"
SHAPES = [(1, 1), (8, 8), (4, 32), (1, 47), (1, 128), (3, 21), (2, 75), (7, 2), (1, 300), (9, 40)]


@pytest.fixture
def engine() -> Iterator[CUDAEngine]:
    """The CUDA engine on the CPU, as that of the CPU."""
    with installed(CUDAEngine(HostRuntime())) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs(engine: CUDAEngine, graph: str, name: str) -> None:
    for adj in adjacencies(graph, engine):
        for engine.runtime.seed in (1, 2):
            CASES[name].check(adj)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "channels"), SHAPES)
def test_widths(engine: CUDAEngine, heads: int, channels: int, dtype: torch.dtype, op: str) -> None:
    for adj in adjacencies("hubs", engine):
        Case(op, heads, channels, loops=op == "gatv2").check(adj, dtype)


@pytest.mark.parametrize("num_huge", [6, 12])
def test_tiles_whose_scores_are_all_minus_infinity(engine: CUDAEngine, num_huge: int) -> None:
    engine.split = 3
    adj = Adjacency.from_pair(torch.arange(12), torch.zeros(12, dtype=torch.long), 12, 1)
    assert adj is not None
    key = torch.ones(12, 2)
    key[:num_huge] = 1e30
    value = torch.arange(24.0).view(12, 2)
    operands = torch.full((1, 2), -1e10), key, value, None, None
    options = Case("transformer", 1, 2).options(adj)
    ours, theirs = (
        Transformer.apply(*operands, options)[0],
        reference.transformer(options, *operands)[0],
    )
    assert theirs.isnan().any() == (num_huge == 12)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dim", [0, 3])
def test_no_channels(engine: CUDAEngine, dim: int, op: str) -> None:
    for adj in adjacencies("hubs", engine):
        for weights in (False, True):
            Case(op, 2, 0, dim, op == "gatv2", 0.3, weights).check(adj)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 70, 300])
def test_widths_of_edge_features(engine: CUDAEngine, dim: int, dtype: torch.dtype, op: str) -> None:
    for adj in adjacencies("hubs", engine):
        Case(op, 2, 9, dim, loops=op == "gatv2").check(adj, dtype)


@pytest.mark.parametrize("name", ["gatv2_all", "transformer_all"])
@pytest.mark.parametrize(("dtype", "offset"), list(zip(DTYPES, (1, 1, 2, 1), strict=True)), ids=str)
def test_memory_that_is_not_aligned(
    engine: CUDAEngine, dtype: torch.dtype, offset: int, name: str
) -> None:
    for adj in adjacencies("hubs", engine):
        replace(CASES[name], weights=False).check(adj, dtype, offset)


@pytest.mark.parametrize("name", ["gatv2_all", "transformer_all"])
def test_indices_of_64_bits(engine: CUDAEngine, name: str) -> None:
    for adj in adjacencies("hubs", engine):
        CASES[name].check(with_int64(adj))


@pytest.mark.parametrize("name", ["gatv2_all", "transformer_all"])
def test_every_order_gives_the_same_bits(engine: CUDAEngine, name: str) -> None:
    case, adj = CASES[name], next(adjacencies("hubs", engine))
    run = partial(case.results, None, case.make(adj, torch.float32), adj, torch.float32)
    first = run()
    for engine.runtime.seed in range(1, 8):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_a_row_of_the_largest_scores_alone(engine: CUDAEngine, op: str) -> None:
    """Scores far apart: what is recomputed must be what it was, bit for bit."""
    case = Case(op, 2, 8)
    for adj in adjacencies("hubs", engine):
        given = [None if t is None else 1e4 * t for t in case.make(adj, torch.float32)]
        for mine in case.results(None, given, adj, torch.float32):
            assert mine.isfinite().all()


@pytest.mark.parametrize("num_loops", [0, 1, 5])
def test_fewer_loops_than_nodes(engine: CUDAEngine, num_loops: int) -> None:
    case = Case("gatv2", 3, 12, dropout=0.3, weights=True)
    for adj in adjacencies("hubs", engine):
        options = replace(case.options(adj), num_loops=num_loops)
        given = [t for t in case.make(adj, torch.float64) if t is not None]
        found = []
        for op in (GATv2.apply, lambda *operands: reference.gatv2(operands[-1], *operands[:-1])):
            leaves = [t.clone().requires_grad_() for t in given]
            out, weights = op(*leaves, None, None, None, options)
            weights = weights[options.used()]
            loss = out.square().sum() + weights.square().sum()
            found.append([out, weights, *torch.autograd.grad(loss, leaves)])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["gatv2_all", "transformer_all"])
def test_backward_again_and_for_some_operands(engine: CUDAEngine, name: str) -> None:
    """What a pass writes in place is its own, and no gradient depends on who else needs one."""
    case, adj = CASES[name], next(adjacencies("hubs", engine))
    op, options = (GATv2 if case.op == "gatv2" else Transformer), case.options(adj)

    def loss(given: list[Tensor | None]) -> Tensor:
        found = [t for t in op.apply(*given, options) if t is not None]
        found[-1] = found[-1][options.used()]
        return torch.stack([t.square().sum() for t in found]).sum()

    made = case.make(adj, torch.float32)
    given = [None if t is None else t.requires_grad_() for t in made]
    leaves = [t for t in given if t is not None]
    total = loss(given)
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    again = torch.autograd.grad(total, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for leaf, expected in zip(leaves, first, strict=True):
        alone = [None if t is None else t if t is leaf else t.detach() for t in given]
        assert torch.equal(torch.autograd.grad(loss(alone), leaf)[0], expected)
