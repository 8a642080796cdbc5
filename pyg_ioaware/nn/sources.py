"""Which sources of PyG's layers are known: no other is run with its message passing replaced."""

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

# The digests of what each function is in PyG 2.6.1, 2.7.0 and 2.8.
KNOWN: dict[str, tuple[str, ...]] = {
    "GATv2Conv.forward": ("b92b597cd8dcebcf", "b1d29b7f35f6361f"),
    "GATv2Conv.edge_update": ("c23d87624cf9ade4",),
    "GATv2Conv.message": ("bad04a3faa7e7d20",),
    "TransformerConv.forward": ("f4f88b3ab1e805f8",),
    "TransformerConv.message": ("9a2e47d34a7bf3b4",),
    "GCNConv.forward": ("0abb2c80bd284fd4",),
    "GCNConv.message": ("c61c2e4226b0dcb4",),
    "GraphConv.message": ("c61c2e4226b0dcb4",),
    "SAGEConv.message": ("e016d29a71ddb14f",),
    "Linear.forward": ("ecddd32d3a68c7d6",),
    "GINConv.message": ("e016d29a71ddb14f",),
}


@functools.cache
def is_known(*functions: Callable[..., Any]) -> bool:
    """Tells whether the source of all these functions of PyG is known."""
    return all(digest(f) in KNOWN.get(f.__qualname__, ()) for f in functions)


def digest(function: Callable[..., Any]) -> str | None:
    r"""Returns a digest of what a function's source does, whatever its layout and comments.

    Args:
        function (callable): The function.

    Returns:
        str, optional: :obj:`None` if it has no source.
    """
    if not isinstance(function, types.FunctionType):
        return None
    try:
        # Of its code: a wrapper would show the source of what it wraps.
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError):
        return None
    return hashlib.sha256(_canonical(tree).encode()).hexdigest()[:16]


def _canonical(node: Any) -> str:
    """Writes a syntax tree down the same way in each version of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    written = [f"{k}={_canonical(v)}" for k, v in fields.items() if v is not None and v != []]
    return f"{type(node).__name__}({','.join(written)})"
