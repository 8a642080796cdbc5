"""The support table of the README, made from the code."""

from pyg_ioaware.patch import REGISTRY

_MESSAGES = "every aggregation"
_ATTENTION = "attention in one pass: scores, softmax and weighted sum"
_VALUES = "the weighted sum of the values; the scores run on stock PyG"

# What runs fused of each of PyG's layers. The layers that are not named form their messages on
# stock PyG; the maximum or minimum over these is still fused.
LAYERS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("APPNP", "AntiSymmetricConv", "ChebConv", "ClusterGCNConv", "DirGNNConv"),
            *("GCN2Conv", "GCNConv", "GINConv", "GPSConv", "GatedGraphConv", "GraphConv"),
            *("HeteroConv", "HypergraphConv", "LGConv", "MFConv", "MixHopConv", "PANConv"),
            *("PDNConv", "RGCNConv", "SAGEConv", "SGConv", "SSGConv", "SignedConv"),
            *("SimpleConv", "TAGConv", "WLConvContinuous", "EGConv"),
        ),
        _MESSAGES,
    ),
    **dict.fromkeys(("GATv2Conv", "TransformerConv"), _ATTENTION),
    **dict.fromkeys(("AGNNConv", "FAConv", "GATConv", "SuperGATConv"), _VALUES),
}


def support_table() -> str:
    """Returns the support table as Markdown."""
    lines = ["| Layer | Runs fused |", "|---|---|"]
    for what in (_MESSAGES, _ATTENTION, _VALUES):
        names = ", ".join(f"`{name}`" for name, kind in sorted(LAYERS.items()) if kind == what)
        lines.append(f"| {names} | {what} |")
    lines.append(
        "| your own `MessagePassing` | aggregations of `x_j`, of a weight per edge (and head) "
        "times `x_j`, and of functions of `x_j` alone: elementwise ones, views, linear maps |"
    )
    lines.append(
        "| any other layer | maxima and minima of the messages that stock PyG forms "
        "(counted as stock) |"
    )
    lines += ["", "| Function of PyG | While patched it |", "|---|---|"]
    lines += [f"| `{row.name}` | {row.purpose} |" for row in REGISTRY]
    return "\n".join(lines)
