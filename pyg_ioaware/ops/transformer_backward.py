"""The gradients of attention by dot products of both ends."""

import torch
from torch import Tensor

from pyg_ioaware.engines import row_width
from pyg_ioaware.graph.csr import CSR
from pyg_ioaware.ops.library import (
    CSR_ARGS,
    SOURCE_ARGS,
    allocate,
    gathers,
    launch,
    nothing,
    partials,
    primitive,
    sum_dtype,
)

EDGE_ARGS = "Tensor? attr, Tensor? edge_query"
OPTIONS = "int heads, float scale, float dropout, Tensor? seed"


def edge_operands(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns features and what is asked of them, as kernels read them."""
    return tuple(None if t is None else t.contiguous() for t in operands)


def _fake(
    grad: Tensor,
    grad_edge: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stats: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    source_rowptr: Tensor,
    source_idx: Tensor,
    source_perm: Tensor | None,
    source_tiles: Tensor,
    source_split: int,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    needs_attr: bool,
    needs_source: bool,
    scores: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    dim = attr.size(1) if attr is not None and needs_attr else None
    return (
        like(query),
        like(key) if needs_source else nothing(grad),
        like(key) if needs_source else nothing(grad),
        nothing(grad) if dim is None else query.new_empty(idx.size(0), dim),
        nothing(grad) if edge_query is None else torch.empty_like(edge_query),
    )


@primitive(
    "transformer_backward(Tensor grad, Tensor? grad_edge, Tensor? grad_weights, Tensor query,"
    f" Tensor key, Tensor value, Tensor stats, {CSR_ARGS}, {SOURCE_ARGS}, {EDGE_ARGS}, {OPTIONS},"
    " bool needs_attr, bool needs_source, Tensor? scores)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def transformer_backward(
    grad: Tensor,
    grad_edge: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stats: Tensor,
    rowptr: Tensor,
    idx: Tensor,
    perm: Tensor | None,
    tiles: Tensor,
    split: int,
    source_rowptr: Tensor,
    source_idx: Tensor,
    source_perm: Tensor | None,
    source_tiles: Tensor,
    source_split: int,
    attr: Tensor | None,
    edge_query: Tensor | None,
    heads: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    needs_attr: bool,
    needs_source: bool,
    scores: Tensor | None,
) -> tuple[Tensor | None, ...]:
    r"""Returns the gradients of queries, keys and values, of the features of edges, and of what is
    asked of them.

    An engine that gathers needs :obj:`scores`; others form them again.
    """
    num_rows, width, sums = query.size(0), row_width(query), sum_dtype(query.dtype)
    by_target = CSR(rowptr, idx, perm, tiles, split)
    by_source = CSR(source_rowptr, source_idx, source_perm, source_tiles, source_split)
    grad, query, key, value = (t.contiguous() for t in (grad, query, key, value))
    grad_edge, grad_weights = edge_operands(grad_edge, grad_weights)
    edges = edge_operands(attr, edge_query)
    grad_query, edge_width = allocate(query, *query.shape), 0
    grad_key = grad_value = grad_edge_query = grad_attr = None
    if edge_query is not None:
        edge_width = edge_query.size(1)
        grad_edge_query = allocate(query, num_rows, edge_width)
    if attr is not None and needs_attr:
        grad_attr = allocate(query, idx.size(0), attr.size(1))
    parts = [partials(query, tiles, w, sums) for w in (width, edge_width, heads)]
    if gathers(query.device):
        assert scores is not None, "scores were not kept"
        terms = allocate(query, idx.size(0), heads, dtype=sums)
        grad_value = allocate(key, *key.shape)
        source_parts = partials(key, source_tiles, width, sums)
        launch(
            "attention_values",
            by_source,
            *(grad_value, terms, source_parts, grad, value, scores, stats),
            *(heads, -1, dropout, seed, False),
        )
        launch(
            "transformer_target",
            by_target,
            *(grad_query, grad_edge_query, terms, grad_attr, *parts, scores),
            *(grad_edge, grad_weights, key, stats, *edges, heads, scale, dropout, seed),
        )
        if needs_source:
            grad_key = allocate(key, *key.shape)
            read = (query, terms, heads, scale)
            launch("transformer_source", by_source, grad_key, source_parts, *read)
    else:
        terms = allocate(query, idx.size(0), 2, heads, dtype=sums)
        launch(
            "transformer_target",
            by_target,
            *(grad_query, grad_edge_query, terms, grad_attr, *parts),
            *(grad, grad_edge, grad_weights, query, key, value, stats, *edges),
            *(heads, scale, dropout, seed),
        )
        if needs_source:
            grad_key, grad_value = allocate(key, *key.shape), allocate(key, *key.shape)
            launch(
                "transformer_source",
                by_source,
                *(grad_value, grad_key, partials(key, source_tiles, 2 * width)),
                *(grad, query, terms, heads, scale),
            )
    if not needs_source:
        grad_value = None
    return grad_query, grad_key, grad_value, grad_attr, grad_edge_query
