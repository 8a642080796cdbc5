"""Seam A: messages that are gathered only if somebody looks at them.

A :class:`~torch_geometric.nn.MessagePassing` layer gathers :obj:`x_j = x[edge_index[0]]`, lets the
user's :meth:`message` work on it, and aggregates the result. Here the gather returns a
:class:`LazyMessage`. Multiplied by a weight per edge it stays one; aggregated, it becomes one call
of a fused operation; for anything else it turns into the tensor that stock PyG would have made.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves, tree_map

from pyg_ioaware import support
from pyg_ioaware.graph.cache import CACHE, in_range
from pyg_ioaware.graph.identity import same_memory
from pyg_ioaware.graph.streams import is_capturing
from pyg_ioaware.messages.commute import SHAPING, on_nodes
from pyg_ioaware.messages.direct import combine
from pyg_ioaware.messages.uses import EXPOSING, PRODUCTS, getters, may_change, why_formed
from pyg_ioaware.record import RECORD

Stock = Callable[..., Tensor]
Form = Callable[[str], Tensor]  # forms messages, given the reason

# What may be asked of a lazy message without looking at its values.
_METADATA = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.stride,
    Tensor.nelement,
    Tensor.ndimension,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_inference,
    Tensor.get_device,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
} | getters(
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "is_cuda",
    "is_cpu",
    "is_mps",
    "is_xpu",
    "is_meta",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "itemsize",
    "nbytes",
    "names",
    "_version",
)
_NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor}
REDUCE = {"sum": "sum", "add": "sum", "mean": "mean"}
REDUCE |= {"max": "max", "amax": "max", "min": "min", "amin": "min"}


class LazyMessage(Tensor):
    r"""The messages :obj:`weight * src[index]`, not formed.

    Attributes:
        owner (str): The name of the layer that gathered them.
        src (torch.Tensor): Node features of shape :obj:`[N, F]` or :obj:`[N, H, C]`.
        ends (torch.Tensor): The node of each edge, of shape :obj:`[E]`.
        weight (torch.Tensor, optional): Weights of shape :obj:`[E]` or :obj:`[E, H]`.
    """

    owner: str
    src: Tensor
    ends: Tensor
    weight: Tensor | None
    _form: Form
    _formed: Tensor | None
    _exposed: bool
    _recorded: bool  # whether autograd recorded the gather
    _node: Any  # what it recorded
    _versions: list[int]
    _family: "list[weakref.ref[LazyMessage]]"

    @staticmethod
    def wrap(
        owner: str,
        src: Tensor,
        index: Tensor,
        weight: Tensor | None,
        form: Form,
        parent: "LazyMessage | None",
        recorded: bool,
    ) -> "LazyMessage":
        """Makes messages that :obj:`form` forms, from those of the parent if there is one."""
        dtype = src.dtype if weight is None else torch.promote_types(weight.dtype, src.dtype)
        out: LazyMessage = Tensor._make_wrapper_subclass(
            LazyMessage, (index.numel(), *src.shape[1:]), dtype=dtype, device=src.device
        )
        out.owner, out.src, out.ends, out.weight = owner, src, index, weight
        out._form, out._formed, out._exposed, out._recorded = form, None, False, recorded
        out._node, out._versions = None, _versions(src, index, weight)
        out._family = [] if parent is None else parent._family
        out._family.append(weakref.ref(out))
        return out

    @property
    def is_intact(self) -> bool:
        """Whether the messages still are what they were gathered as: nobody changed them."""
        if self.is_foreign:
            return False
        if self._formed is None:
            return True
        if self._exposed or self._formed.is_inference():
            return False
        return self._formed._version == 0

    @property
    def is_foreign(self) -> bool:
        """Whether they are what an autograd function of the user returned: its gradient counts."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is not self._node

    def form(self, reason: str) -> Tensor:
        """Returns the messages as stock PyG makes them, noting why they had to be made."""
        if self._formed is None:
            self.check_operands()
            RECORD.pend(self.owner, reason)
            # In the mode in which they were gathered, not in that of whoever looks first.
            with torch.inference_mode(False), torch.set_grad_enabled(self._recorded):
                self._formed = self._form(reason)
        if self.is_foreign:
            with torch._C.DisableTorchFunctionSubclass():
                return self.clone()
        return self._formed

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Returns features and weight, cut from autograd if it did not record the messages."""
        if self._recorded:
            return self.src, self.weight
        return self.src.detach(), None if self.weight is None else self.weight.detach()

    def form_family(self, reason: str, exposed: bool) -> None:
        """Forms all that was derived from the same messages, before any of it is changed."""
        for ref in self._family:
            member = ref()
            if member is not None:
                member.form(reason)
                member._exposed |= exposed

    def is_shown_by(self, result: Any) -> bool:
        """Tells whether a result shows the memory of the formed messages: it may change them."""
        assert self._formed is not None
        tensors = [t for t in tree_leaves(result) if type(t) is Tensor]
        return any(same_memory(t, self._formed) for t in tensors)

    def check_operands(self) -> None:
        r"""Raises if the operands are not what they were when the messages were gathered.

        Raises:
            RuntimeError: If one of them was changed in place since.
        """
        if self._versions != _versions(self.src, self.ends, self.weight):
            raise RuntimeError(
                f"'{self.owner}' changed node features, edges or weights in place between "
                f"gathering and aggregating messages, which 'pyg_ioaware' cannot follow; run it "
                f"inside of 'pyg_ioaware.disabled()'"
            )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if type(first) is LazyMessage and first.weight is None and first.is_intact:
            nodes = on_nodes(func, args, kwargs)
            if nodes is not None:
                return _commuted(func, nodes, args, kwargs)
        if func in PRODUCTS and len(args) == 2 and not kwargs:
            product = _weighted(func, *args)
            if product is not None:
                return product
        if func in _NEW and type(first) is LazyMessage and first.is_intact:
            return func(first.src, *args[1:], **{"dtype": first.dtype, **kwargs})
        reason, used = why_formed(func, kwargs), []

        def plain(value: Any) -> Any:
            if type(value) is not LazyMessage:
                return value
            used.append(value)
            return value.form(reason)

        args, kwargs = tree_map(plain, args), tree_map(plain, kwargs)
        exposed = func in EXPOSING
        if exposed or may_change(func, kwargs):
            for messages in used:
                messages.form_family(reason, exposed)
        out = func(*args, **kwargs)
        for messages in used:
            if not exposed and messages.is_shown_by(out):
                messages.form_family(reason, True)
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Reached where C++ code bypasses Python. The gradient runs through _Connect then.
        reason = why_formed(func, kwargs or {})

        def plain(value: Any) -> Any:
            if type(value) is not LazyMessage:
                return value
            formed = value.form(reason) if value._formed is None else value._formed
            return formed.detach()

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def gather(conv: Any, src: Tensor, index: Tensor, stock: Stock) -> Tensor:
    r"""Gathers :obj:`src` by :obj:`index`, lazily if the engines can take it from there.

    Args:
        conv (MessagePassing): The layer that gathers.
        src (torch.Tensor): Node features.
        index (torch.Tensor): The node of each edge.
        stock (callable): The layer's own gather.
    """
    owner = type(conv).__name__
    why = support.reasons(conv, src, index)
    if why:
        if src.dim() > 1:  # a vector is no larger than the edges themselves
            RECORD.pend(owner, "; ".join(why))
        return stock(conv, src, index)
    if not in_range(index, src.size(0)):
        if is_capturing(src.device):
            RECORD.pend(owner, "new edges in a CUDA graph: call 'prepare' before it is captured")
        return stock(conv, src, index)  # it raises, and its message says what is wrong
    return _lazy(owner, src, index, None, lambda _: stock(conv, src, index))


def aggregate(
    messages: LazyMessage,
    index: Tensor,
    dim: int,
    dim_size: int | None,
    reduce: str,
    ties: str | None = None,
) -> Tensor | None:
    r"""Aggregates lazy messages by one fused operation.

    Args:
        messages (LazyMessage): Messages of shape :obj:`[E, *]`.
        index (torch.Tensor): The target of each message, of shape :obj:`[E]`.
        dim (int): The dimension of the messages.
        dim_size (int, optional): The number of targets.
        reduce (str): The reduction, by any of the names that PyG has for it.
        ties (str, optional): The rule for ties; stock PyG's if :obj:`None`.

    Returns:
        torch.Tensor, optional: :obj:`None` if stock PyG has to do it: the messages were changed,
        or an index is out of range, which stock reports.
    """
    op = REDUCE.get(reduce)
    if op is None or dim_size is None or dim not in (0, -messages.dim()):
        return None
    if not messages.is_intact or support.index_reasons(index, messages.src):
        return None
    if index.numel() != messages.size(0):
        return None
    messages.check_operands()
    src, weight = messages.operands()
    adj = CACHE.adjacency(messages.ends, index, src.size(0), dim_size)
    if adj is None:
        return None
    return combine(messages.owner, src, weight, adj, op, ties)


class _Connect(Function):
    """Ties lazy messages into the autograd graph, for code that bypasses Python."""

    @staticmethod
    def forward(
        ctx: Any,
        src: Tensor,
        weight: Tensor | None,
        index: Tensor,
        owner: str,
        form: Form,
        parent: LazyMessage | None,
    ) -> Tensor:
        ctx.index, ctx.shape, ctx.dtype = index, src.shape, src.dtype
        needs_src, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(src if needs_weight else None, weight if needs_src else None)
        return LazyMessage.wrap(owner, src, index, weight, form, parent, True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        src, weight = ctx.saved_tensors
        grad_src = grad_weight = None
        if ctx.needs_input_grad[0]:
            values = grad if weight is None else grad * _trailing(weight, grad.dim())
            zeros = grad.new_zeros(ctx.shape, dtype=values.dtype)
            grad_src = zeros.index_add(0, ctx.index, values).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            product = grad * src.index_select(0, ctx.index)
            per_head = weight is not None and weight.dim() == 2
            grad_weight = product.sum(-1) if per_head else product.flatten(1).sum(-1)
        return grad_src, grad_weight, None, None, None, None


def _lazy(
    owner: str,
    src: Tensor,
    index: Tensor,
    weight: Tensor | None,
    form: Form,
    parent: LazyMessage | None = None,
) -> LazyMessage:
    differentiable = src.requires_grad or (weight is not None and weight.requires_grad)
    if differentiable and torch.is_grad_enabled():
        out: LazyMessage = _Connect.apply(  # type: ignore[no-untyped-call]
            src, weight, index, owner, form, parent
        )
        with torch._C.DisableTorchFunctionSubclass():
            out._node = out.grad_fn
        return out
    return LazyMessage.wrap(owner, src, index, weight, form, parent, False)


def _weighted(func: Callable[..., Any], a: Any, b: Any) -> Tensor | None:
    """Returns the lazy product of lazy messages and a weight per edge (and head), if it is one."""
    swapped = type(a) is not LazyMessage or (type(b) is LazyMessage and a.size(-1) == 1)
    messages, weight = (b, a) if swapped else (a, b)
    if not messages.is_intact or messages.weight is not None:
        return None
    if type(weight) is LazyMessage and weight.size(-1) == 1:
        weight = weight.form("weights gathered from nodes are formed, one number per edge")
    if not support.is_weight(weight, messages) or support.saving_reasons(messages.src, weight):
        return None
    vector = weight.squeeze(-1)
    if vector.dim() == 2 and vector.size(1) == 1:
        vector = vector.squeeze(-1)

    def form(reason: str) -> Tensor:
        dense = messages.form(reason)
        out: Tensor = func(weight, dense) if swapped else func(dense, weight)
        return out

    return _lazy(messages.owner, messages.src, messages.ends, vector, form, messages)


def _commuted(
    func: Callable[..., Any], nodes: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LazyMessage:
    """Returns the lazy result of a function that was applied to the nodes already."""
    messages: LazyMessage = args[0]

    def form(reason: str) -> Tensor:
        if func in SHAPING:  # a view shows the memory of what it is a view of
            out: Tensor = func(messages.form(reason), *args[1:], **kwargs)
            return out
        return nodes.index_select(0, messages.ends)

    return _lazy(messages.owner, nodes, messages.ends, None, form, messages)


def _versions(*tensors: Tensor | None) -> list[int]:
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def _trailing(weight: Tensor, dim: int) -> Tensor:
    return weight.view(*weight.shape, *[1] * (dim - weight.dim()))
