"""The one place that knows what the engines cannot do."""

import math
from typing import Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric.index import Index

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
    if getattr(conv, "_explain", None):
        found.append("explanation in progress ('explain')")
    if getattr(conv, "_decomposed_layers", 1) > 1:
        found.append("'decomposed_layers' greater than one")
    if any(getattr(conv, name, None) for name in _HOOKS):
        found.append("message or aggregate hooks")
    return found


def mode_reasons(*tensors: Any) -> list[str]:
    """Tells which mode of PyTorch, if any, keeps a call on stock PyG."""
    found = []
    if torch.compiler.is_compiling():
        found.append("torch.compile")
    if torch._C._is_tracing() or torch.onnx.is_in_onnx_export():
        found.append("tracing or ONNX export")
    if torch._C._len_torch_dispatch_stack() > 0:
        found.append("an active TorchDispatchMode")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found.append("a functorch transform (vmap, grad, jvp)")
    if torch.autograd.forward_ad._current_level >= 0 and any(
        isinstance(t, Tensor) and _is_dual(t) for t in tensors
    ):
        found.append("forward-mode differentiation")
    return found


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
    if engines.of(x.device) is None:
        found.append(f"no engine for device '{x.device}'")
    return found


def index_reasons(index: Tensor, src: Tensor) -> list[str]:
    """Tells what about the index of a gather or an aggregation keeps it on stock PyG."""
    if type(index) not in (Tensor, Index):
        return [f"index of type '{type(index).__name__}'"]
    if index.dtype not in (torch.int64, torch.int32):
        return [f"index of dtype '{index.dtype}'"]
    if index.dim() != 1 or index.device != src.device:
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
