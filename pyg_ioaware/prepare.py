"""Structures ahead of time, the cache's switches, and the counters."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_ioaware import ops
from pyg_ioaware.graph.cache import CACHE, FACTS
from pyg_ioaware.graph.csr import CSR, Adjacency
from pyg_ioaware.graph.tiles import stretched
from pyg_ioaware.messages.sparse import structure
from pyg_ioaware.ops.library import gathers
from pyg_ioaware.record import RECORD

Size = int | tuple[int, int]
Graph = tuple[Tensor, Tensor, int, int]


def prepare(
    edge_index: Any,
    size: Size | None = None,
    *,
    flow: str = "source_to_target",
    compile: bool = True,
    attention: tuple[int, int] | None = None,
    edge_attr: bool = False,
    width: int = 64,
) -> None:
    r"""Builds the structure of a graph, for both directions, and compiles the kernels.

    What a layer would do at its first forward and backward is done now: for serving, for timing,
    or before a fork.

    Args:
        edge_index (torch.Tensor, EdgeIndex or SparseTensor): The graph, the very object that the
            layers will get: an :obj:`edge_index` of shape :obj:`[2, E]`, or a transposed sparse
            adjacency (row = target).
        size (int or tuple, optional): The number of nodes, or of sources and targets. Needed for
            an :obj:`edge_index` that does not say it itself. (default: :obj:`None`)
        flow (str, optional): As for :class:`~torch_geometric.nn.MessagePassing`.
            (default: :obj:`"source_to_target"`)
        compile (bool, optional): If set, compiles the kernels for float32: on a GPU those for
            the lengths of this graph's rows. (default: :obj:`True`)
        attention (tuple, optional): The heads, and channels of each, of layers of attention: also
            compiles the kernels of GATv2Conv and TransformerConv for them, which take some
            seconds each. (default: :obj:`None`)
        edge_attr (bool, optional): If set, those layers take edge features, of any number.
            (default: :obj:`False`)
        width (int, optional): The number of features of a node; kernels on a GPU are compiled
            for it. (default: :obj:`64`)

    Raises:
        ValueError: If the graph is of another form, the size is missing, an index is out of
            range, or an option is not one.
    """
    _check_attention(attention, edge_attr)
    adj = _structure(edge_index, size, flow)
    if adj is None:
        raise ValueError(
            "'prepare' found indices outside of the graph (got a graph of size "
            f"{size}); check 'edge_index' or give the right 'size'"
        )
    device = adj.by_target.rowptr.device
    _ = adj.by_source_in_place, adj.places if gathers(device) else None
    with torch.inference_mode(False), torch.enable_grad():  # whatever the mode of the caller
        if compile:
            compile_kernels(device, width=width, like=adj)
        if attention is not None:
            compile_attention(device, *attention, edge_attr=edge_attr, like=adj)


def _check_attention(attention: Any, edge_attr: Any) -> None:
    if not isinstance(edge_attr, bool):
        raise ValueError(f"'edge_attr' must be True or False (got '{type(edge_attr).__name__}')")
    if attention is None:
        if edge_attr:
            raise ValueError("'edge_attr' needs 'attention', the heads and channels (got None)")
        return
    is_pair = isinstance(attention, tuple | list) and len(attention) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in attention):
        raise ValueError(
            f"'attention' must be the numbers of heads and of channels per head, as in (4, 32) "
            f"(got {attention!r})"
        )


def compile_kernels(
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    width: int = 64,
    like: Adjacency | None = None,
) -> None:
    r"""Compiles every kernel that the fused operations use, by running it on a small graph.

    Args:
        device (torch.device or str): The device.
        dtype (torch.dtype, optional): The dtype of the features. (default: float32)
        width (int, optional): The number of features of a node. (default: :obj:`64`)
        like (Adjacency, optional): The structure whose kernels are wanted: those of a GPU depend
            on the lengths of rows. (default: :obj:`None`)
    """
    src, dst, *sizes = _small(like, device)
    for order in (dst, dst.flip(0)):
        adj = Adjacency.from_pair(src, order, *sizes)
        assert adj is not None
        if like is not None:
            adj.longest = like.longest  # marks of maxima are as wide as it needs
        options: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": True}
        for weight in (None, torch.ones(adj.num_edges, **options)):
            x = torch.ones(adj.num_src, width, **options)
            outs = [ops.spmm(x, adj, weight, mean=mean) for mean in (False, True)]
            outs += [ops.reduce(x, adj, weight, reduce=name) for name in ("max", "min")]
            torch.stack(outs).sum().backward()
            with torch.no_grad():
                ops.reduce(x, adj, weight)


def compile_attention(
    device: torch.device | str,
    heads: int,
    channels: int,
    dtype: torch.dtype = torch.float32,
    edge_attr: bool = False,
    like: Adjacency | None = None,
) -> None:
    r"""Compiles the kernels of attention, by running them on a small graph.

    Args:
        device (torch.device or str): The device.
        heads (int): The number of heads.
        channels (int): The channels per head.
        dtype (torch.dtype, optional): The dtype of the features. (default: float32)
        edge_attr (bool, optional): If set, edges have features. (default: :obj:`False`)
        like (Adjacency, optional): The structure whose kernels are wanted. (default: :obj:`None`)
    """
    adj = Adjacency.from_pair(*_small(like, device))
    assert adj is not None
    x, y = (
        torch.ones(n, heads, channels, device=device, dtype=dtype, requires_grad=True)
        for n in (adj.num_src, adj.num_dst)
    )
    for num_loops in (-1, min(adj.num_src, adj.num_dst)):  # on a GPU these are other kernels
        edges = None
        if edge_attr:
            loops = None if num_loops < 0 else x.new_ones(num_loops, 1)
            features = x.new_ones(adj.num_edges, 1), loops, x.new_ones(heads * channels, 1)
            edges = ops.EdgeFeatures(*features)
        for trains in (True, False):  # what is kept for gradients is written by other kernels
            with torch.set_grad_enabled(trains):
                outs = [ops.gatv2(x, y, x[0], adj, num_loops=num_loops, edges=edges)[0]]
                if num_loops < 0:
                    outs.append(ops.transformer(y, x, x, adj, edges=edges)[0])
                if trains:
                    torch.stack(outs).sum().backward()


_FEW = 768  # edges; a multiple of the mean numbers at which other kernels are chosen


def _small(like: Adjacency | None, device: torch.device | str) -> Graph:
    """Returns sources and targets of a small graph, and how many there are, whose rows are as long
    as those of another on average, and split where any of its are.
    """
    if like is None or not like.num_edges:
        ends = torch.tensor([0, 1, 1], device=device)
        return ends, ends, 2, 2
    longest = stretched(like.by_target.split) + 1
    count = min(like.num_edges, _FEW * -(-4 * longest // _FEW))
    edge = torch.arange(count, device=device)
    dst, num_dst = _spread(like.by_target, edge, like.num_edges)
    src, num_src = _spread(like.by_source_in_place, edge, like.num_edges)
    return src.flip(0), dst, num_src, num_dst


def _spread(csr: CSR, edge: Tensor, num_edges: int) -> tuple[Tensor, int]:
    """Returns in which row each of a few edges is, and the number of rows."""
    count = edge.numel()
    n = -(-count * (csr.rowptr.numel() - 1) // num_edges)
    n = max(1, min(n, 4 * count))
    if csr.tiles.size(0) == 0 or n == 1:
        return edge % n, n
    return torch.where(edge <= stretched(csr.split), 0, 1 + edge % (n - 1)), n


def stats(reset: bool = False) -> dict[str, Any]:
    r"""Returns what ran fused and what ran on stock PyG since the start or the last reset.

    Args:
        reset (bool, optional): If set, starts counting anew. (default: :obj:`False`)

    Returns:
        dict: Under :obj:`"layers"`, for each kind of layer, the number of :obj:`"fused"`
        aggregations and those by :obj:`"stock"` PyG by reason; under :obj:`"cache"` the
        :obj:`"hits"`, :obj:`"misses"`, :obj:`"entries"`, :obj:`"bytes"` and
        :obj:`"uncacheable"` look-ups.
    """
    RECORD.settle()
    info = CACHE.info()
    result = {
        "layers": {
            name: {"fused": calls.fused, "stock": dict(calls.stock)}
            for name, calls in sorted(RECORD.layers.items())
        },
        "cache": {
            "hits": info.hits,
            "misses": info.misses,
            "entries": info.entries,
            "bytes": info.nbytes,
            "uncacheable": info.uncacheable,
        },
    }
    if reset:
        RECORD.clear()
        CACHE.reset_counters()
    return result


def clear_cache() -> None:
    """Frees every structure that is held; the next call of each layer builds its own again."""
    CACHE.clear()
    FACTS.clear()


def invalidate(edge_index: Any) -> int:
    r"""Forgets what was derived from a graph, after a write that PyTorch does not count.

    Writes through :obj:`.data`, a NumPy alias or a raw pointer bump no version, so the cache
    cannot see them.

    Args:
        edge_index (torch.Tensor, EdgeIndex or SparseTensor): The graph.

    Returns:
        int: How many entries were dropped.
    """
    parts = _parts(edge_index)
    for tensor in parts:
        FACTS.invalidate(tensor)
    return sum(CACHE.invalidate(tensor) for tensor in parts)


def cache_limits(
    max_bytes: int | None = None, max_entries: int | None = None, verify: bool | None = None
) -> None:
    r"""Bounds the cache; the least recently used entries go first, the newest always stays.

    Args:
        max_bytes (int, optional): Largest number of bytes held. (default: unchanged, at first
            4 GiB)
        max_entries (int, optional): Largest number of structures held. (default: unchanged, at
            first :obj:`512`)
        verify (bool, optional): If set, every hit compares a checksum of the indices and raises
            :class:`RuntimeError` if they changed behind PyTorch's back: slow, for debugging.
            (default: unchanged, at first :obj:`False`)

    Raises:
        ValueError: If a limit is negative.
    """
    CACHE.limit(max_bytes, max_entries)
    if verify is not None:
        CACHE.clear()
        CACHE.verify = verify


def _structure(edge_index: Any, size: Size | None, flow: str) -> Adjacency | None:
    if flow not in ("source_to_target", "target_to_source"):
        raise ValueError(f"'flow' must be 'source_to_target' or 'target_to_source' (got '{flow}')")
    if isinstance(edge_index, SparseTensor):
        return structure(edge_index)[0]
    if isinstance(edge_index, Tensor) and is_torch_sparse_tensor(edge_index):
        if edge_index.layout != torch.sparse_csr:
            raise ValueError(f"'prepare' expects a CSR matrix (got '{edge_index.layout}')")
        return structure(edge_index)[0]
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.size(0) != 2:
        got = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index)
        raise ValueError(f"'prepare' expects an 'edge_index' of shape [2, E] (got {got})")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"'prepare' expects int64 or int32 indices (got '{edge_index.dtype}')")
    if size is None:
        known: tuple[int | None, int | None] = getattr(edge_index, "_sparse_size", (None, None))
        if known[0] is None or known[1] is None:
            raise ValueError("'prepare' needs 'size', the number of nodes (got None)")
        size = (known[0], known[1])
    num_src, num_dst = (size, size) if isinstance(size, int) else size
    row, col = (0, 1) if flow == "source_to_target" else (1, 0)
    sizes = (num_src, num_dst) if flow == "source_to_target" else (num_dst, num_src)
    return CACHE.adjacency(edge_index[row], edge_index[col], *sizes)


def _parts(edge_index: Any) -> list[Tensor]:
    if isinstance(edge_index, SparseTensor):
        storage = edge_index.storage
        return [t for t in (storage._row, storage._rowptr, storage._col) if t is not None]
    if isinstance(edge_index, Tensor) and is_torch_sparse_tensor(edge_index):
        if edge_index.layout == torch.sparse_csr:
            return [edge_index.crow_indices(), edge_index.col_indices()]
        return [edge_index._indices()] if edge_index.layout == torch.sparse_coo else []
    if isinstance(edge_index, Tensor):
        return [edge_index]
    raise ValueError(f"'invalidate' expects a graph (got '{type(edge_index)}')")
