"""What makes two tensors the same tensor, without looking at their values."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.index import Index


class Identity(NamedTuple):
    r"""The identity of a tensor: which memory it shows, and in which state.

    Attributes:
        storage (torch.UntypedStorage): The memory, the same object for every view of it and for
            as long as any view lives.
        view (tuple): Which part of the memory the tensor shows, and as what.
        version (Hashable): Moves with every in-place change that PyTorch sees.
    """

    storage: Any
    view: tuple[Any, ...]
    version: Hashable


def identity(tensor: Tensor) -> Identity | None:
    r"""Returns the identity of a strided tensor.

    An :class:`~torch_geometric.EdgeIndex` has two versions, its own and that of the data inside,
    and an in-place change moves only one of them. Its rows share the former alone, and know the
    latter through the tensor that they are views of.

    Returns:
        Identity, optional: :obj:`None` if the tensor counts no versions (it was made in inference
        mode), so that a change of it could not be seen.
    """
    kind = type(tensor)
    data = tensor if kind is Tensor else unwrap(tensor)
    if data.is_inference() or (data is not tensor and tensor.is_inference()):
        return None
    storage = data.untyped_storage()
    version: Hashable = data._version
    if data is not tensor:
        base = tensor if tensor._base is None else tensor._base
        version = (data._version, tensor._version, unwrap(base)._version)
    view = (
        id(storage),
        data.storage_offset(),
        data.shape,
        data.stride(),
        data.dtype,
        data.is_neg(),
        data.is_conj(),
        kind,
    )
    return Identity(storage, view, version)


def rows_of(whole: Identity) -> tuple[Identity, Identity]:
    r"""Returns the identities that the two rows of edges have, without making them.

    Args:
        whole (Identity): That of edges of shape :obj:`[2, E]`, and of no other type.
    """
    storage, (place, offset, shape, stride, *kind), version = whole
    row = (shape[1:], stride[1:], *kind)
    first, second = (place, offset, *row), (place, offset + stride[0], *row)
    return Identity(storage, first, version), Identity(storage, second, version)


def unwrap(tensor: Tensor) -> Tensor:
    """Returns the plain tensor inside an EdgeIndex or Index, and any other tensor as it is."""
    if type(tensor) is not Tensor and isinstance(tensor, (EdgeIndex, Index)):
        data: Tensor = tensor._data
        return data
    return tensor


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Tells whether two strided tensors show the same memory, be it at different places."""
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    return unwrap(a).untyped_storage() is unwrap(b).untyped_storage()
