"""The one place that knows what the engines cannot do."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric import EdgeIndex
from torch_geometric.index import Index
from torch_geometric.nn import (
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    SumAggregation,
)
from torch_geometric.nn.dense import Linear

from pyg_ioaware import engines
from pyg_ioaware.graph.identity import unwrap

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

PLAIN = (Tensor, torch.nn.Parameter)
# Building rows costs about as much as gathering this many numbers per edge.
_MIN_UNCACHED_WIDTH = 32
_HOOKS = (
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_aggregate_forward_hooks",
)
_OUTER_HOOKS = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
    "_message_and_aggregate_forward_pre_hooks",
    "_message_and_aggregate_forward_hooks",
)
_LINEAR = (Linear, torch.nn.Linear)
REDUCTIONS: dict[type, str] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}
"""What the aggregations do that the operations do."""
_AGGREGATE = {aggr: aggr.forward for aggr in REDUCTIONS}  # type: ignore[attr-defined]


def reasons(conv: Any, src: Tensor, index: Tensor) -> list[str]:
    r"""Tells why messages gathered as :obj:`src[index]` have to be formed; empty if they need not.

    The answer depends on the inputs, the layer and the modes of PyTorch alone, never on what is
    cached, so that a recomputation takes the same path.

    Args:
        conv (MessagePassing): The layer.
        src (torch.Tensor): Node features.
        index (torch.Tensor): The node of each edge.
    """
    found = mode_reasons(src) + tensor_reasons(src)
    found += index_reasons(index, src)
    node_dim = conv.node_dim
    if src.dim() in (2, 3) and node_dim not in (0, -src.dim()):
        found.append(f"messages along dimension {node_dim} of a {src.dim()}-D tensor")
    return found + layer_reasons(conv)


def layer_reasons(conv: Any) -> list[str]:
    """Tells what is set on a layer, if anything, that looks at each of its messages."""
    found = []
    if getattr(conv, "_explain", None):
        found.append("explanation in progress ('explain')")
    if getattr(conv, "_decomposed_layers", 1) > 1:
        found.append("'decomposed_layers' greater than one")
    if any(map(conv.__dict__.get, _HOOKS)):
        found.append("message or aggregate hooks")
    return found


def attention_reasons(
    conv: Any, methods: Mapping[str, Collection[Callable[..., Any]]], generated: Collection[str]
) -> list[str]:
    r"""Tells what about an attention layer, if anything, keeps it on stock PyG.

    It holds whatever the layer is called with, and is known before anything has run.

    Args:
        conv (MessagePassing): The layer.
        methods (dict): The functions that each method may be.
        generated (list): The methods that PyG generates for each class.
    """
    found = passing_reasons(conv, methods, generated, (SumAggregation,))
    if conv.node_dim != 0:
        found.append(f"messages along dimension {conv.node_dim}")
    return found


def passing_reasons(
    conv: Any,
    methods: Mapping[str, Collection[Callable[..., Any]]],
    generated: Collection[str],
    aggregations: Collection[type],
) -> list[str]:
    r"""Tells what about the way in which a layer passes messages, if anything, is not PyG's own.

    Args:
        conv (MessagePassing): The layer.
        methods (dict): The functions that each method may be.
        generated (list): The methods that PyG generates for each class.
        aggregations (list): What its aggregation may be.
    """
    found = mode_reasons() + layer_reasons(conv)
    own, cls = conv.__dict__, type(conv)
    if any(map(own.get, _OUTER_HOOKS)):
        found.append("hooks on the way of the messages")
    for name, known in methods.items():
        if name in own or getattr(cls, name) not in known:
            found.append(f"its own '{name}'")
    for name in generated:
        if not _is_generated(conv, name):
            found.append(f"its own '{name}'")
    aggr = conv.aggr_module
    stock = _AGGREGATE.get(type(aggr)) if type(aggr) in aggregations else None
    if stock is None or type(aggr).forward is not stock or "forward" in aggr.__dict__:
        found.append(f"aggregation by '{type(aggr).__name__}'")
    elif has_hooks(aggr):
        found.append("hooks of the aggregation")
    if _has_any_global_hook():
        found.append("hooks of all modules")
    return found


def operand_reasons(*operands: Tensor) -> list[str]:
    """Tells what about the mapped features of nodes, if anything, keeps attention on stock PyG."""
    found: dict[str, None] = {}
    device = operands[0].device
    for x in operands:
        found.update(dict.fromkeys(tensor_reasons(x)))
    for x in operands:
        if x.device != device:
            found["features on several devices"] = None
    return [*found, *forward_ad_reasons(*operands)]


def parameter_reasons(name: str, value: Any, shape: tuple[int, ...], x: Tensor) -> list[str]:
    r"""Tells what about a parameter of an attention layer, if anything, keeps it on stock PyG.

    Args:
        name (str): Its name.
        value (torch.Tensor): The parameter.
        shape (tuple): The shape that it has to have.
        x (torch.Tensor): The features that it meets.
    """
    if type(value) not in PLAIN or value.dtype not in DTYPES or value.layout != torch.strided:
        return [f"'{name}' of type '{type(value).__name__}'"]
    if value.shape != shape or value.device != x.device:
        return [f"'{name}' and features that do not fit"]
    return forward_ad_reasons(value)


def edges_reasons(edge_index: Tensor, sizes: tuple[int, int]) -> list[str]:
    r"""Tells what about the edges, if anything, keeps attention on stock PyG.

    Args:
        edge_index (torch.Tensor): The edges, in any form that is no sparse matrix.
        sizes (tuple): The numbers of nodes that its two rows name.
    """
    if type(edge_index) not in (Tensor, EdgeIndex):
        return [f"edges of type '{type(edge_index).__name__}'"]
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        return ["edges that are not two rows"]
    if isinstance(edge_index, EdgeIndex):
        claimed = edge_index.sparse_size()
        if any(c is not None and c != n for c, n in zip(claimed, sizes, strict=True)):
            return ["an EdgeIndex and features that do not fit"]
    return []


def linear_reasons(linear: Any, width: int) -> list[str]:
    r"""Tells what about the map of edge features, if anything, keeps it from being factored out.

    Args:
        linear (torch.nn.Module): The map.
        width (int): The numbers that it has to give for each edge.
    """
    if type(linear) not in _LINEAR or "forward" in linear.__dict__:
        return [f"'lin_edge' of type '{type(linear).__name__}' or with its own 'forward'"]
    if has_hooks(linear):
        return ["hooks of 'lin_edge'"]
    weight = linear.weight
    if type(weight) not in PLAIN or weight.layout != torch.strided or linear.bias is not None:
        return ["'lin_edge' that is more than one matrix"]
    if weight.dim() != 2 or weight.size(0) != width:
        return ["'lin_edge' that does not give 'out_channels' numbers per head"]
    return forward_ad_reasons(weight)


def edge_attr_reasons(attr: Any, num_edges: int, weight: Tensor) -> list[str]:
    r"""Tells what about edge features, if anything, keeps attention on stock PyG.

    Args:
        attr (torch.Tensor): The features, as the linear map takes them.
        num_edges (int): The number of edges.
        weight (torch.Tensor): The matrix of the map.
    """
    if type(attr) not in PLAIN or attr.layout != torch.strided:
        return [f"edge features of type '{type(attr).__name__}'"]
    if attr.shape != (num_edges, weight.size(1)):
        return ["edge features that are not one vector of 'edge_dim' numbers per edge"]
    if attr.dtype != weight.dtype or attr.dtype not in DTYPES or attr.device != weight.device:
        return ["edge features and 'lin_edge' that do not fit"]
    return forward_ad_reasons(attr)


def is_sparse(edge_index: Tensor) -> bool:
    """Tells whether an adjacency in the form of a tensor is a sparse matrix."""
    return edge_index.layout != torch.strided


def has_hooks(module: torch.nn.Module) -> bool:
    """Tells whether hooks of its own see a module being called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def mode_reasons(*tensors: Any) -> list[str]:
    """Tells which mode of PyTorch, if any, keeps a call on stock PyG."""
    found = []
    if torch.compiler.is_compiling():
        found.append("torch.compile")
    if torch._C._is_tracing():  # as TorchScript and its ONNX export do
        found.append("tracing or ONNX export")
    if torch._C._len_torch_dispatch_stack() > 0:
        found.append("an active TorchDispatchMode")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found.append("a functorch transform (vmap, grad, jvp)")
    return found + forward_ad_reasons(*tensors)


def forward_ad_reasons(*tensors: Any) -> list[str]:
    """Tells whether a derivative travels forward with any of the tensors."""
    if torch.autograd.forward_ad._current_level >= 0 and any(
        isinstance(t, Tensor) and _is_dual(t) for t in tensors
    ):
        return ["forward-mode differentiation"]
    return []


def saving_reasons(*operands: Any) -> list[str]:
    """Tells whether a gradient would need an operand that PyTorch does not keep for one."""
    saves = unkept = False
    for operand in operands:
        if isinstance(operand, Tensor):
            saves |= operand.requires_grad
            unkept |= operand.is_inference()
    if saves and unkept and torch.is_grad_enabled():
        return ["features made in inference mode, which no gradient can keep"]
    return []


def tensor_reasons(x: Tensor) -> list[str]:
    """Tells what about a feature tensor, if anything, keeps a call on stock PyG."""
    found = []
    if type(x) not in PLAIN:
        found.append(f"features of type '{type(x).__name__}'")
    if x.layout != torch.strided:
        found.append(f"features of layout '{x.layout}'")
    if x.dtype not in DTYPES:
        found.append(f"features of dtype '{x.dtype}'")
    if x.dim() not in (2, 3):
        found.append(f"features of {x.dim()} dimensions")
    engine = engines.of(x.device)
    if engine is None:
        found.append(engines.why_none(x.device))
    elif x.dtype in engine.broken:
        found.append(engine.broken[x.dtype])
    return found


def index_reasons(index: Tensor, src: Tensor, dim: int = 1) -> list[str]:
    """Tells what about the index of a gather or an aggregation keeps it on stock PyG."""
    if type(index) not in (Tensor, Index):
        return [f"index of type '{type(index).__name__}'"]
    if index.dtype not in (torch.int64, torch.int32):
        return [f"index of dtype '{index.dtype}'"]
    if index.dim() != dim or index.device != src.device:
        return ["index that is not one vector on the device of the features"]
    if unwrap(index).is_inference() and math.prod(src.shape[1:]) < _MIN_UNCACHED_WIDTH:
        return ["edges made in inference mode, whose structure cannot be kept"]
    return []


def is_weight(weight: Any, messages: Tensor) -> bool:
    """Tells whether a factor of messages is one weight per edge, or per edge and head."""
    return (
        type(weight) in PLAIN
        and weight.dtype in DTYPES
        and weight.device == messages.device
        and weight.dim() == messages.dim()
        and weight.size(0) == messages.size(0)
        and weight.size(-1) == 1
        and (weight.dim() == 2 or weight.size(1) in (1, messages.size(1)))
        and not mode_reasons(weight)
    )


def scatter_ties(src: Tensor, requires_grad: bool) -> str:
    """Returns the rule for ties of stock PyG's scatter on this installation."""
    if src.is_cuda and requires_grad and torch_geometric.typing.WITH_TORCH_SCATTER:
        return "first"
    return "even"


def _is_dual(x: Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def _is_generated(conv: Any, name: str) -> bool:
    """Tells whether a method is the one that PyG generated for the layer's class."""
    cls, own = type(conv), conv.__dict__.get(name)
    function = getattr(cls, name)
    if function is not getattr(cls, f"_jinja_{name}", None):
        return False
    if own is not None and getattr(own, "__func__", None) is not function:
        return False
    return function is not getattr(cls, f"_orig_{name}", None)
