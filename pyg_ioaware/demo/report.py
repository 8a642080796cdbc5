"""What the demo shows: a table, whether the losses agree, a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyg_ioaware.demo.worker import Result

if TYPE_CHECKING:
    from rich.table import Table

Pairs = dict[str, tuple[Result, Result]]
"""Model title -> (stock, fused)."""

FIRST_LOSS = 1e-4
"""Relative difference allowed before any update: rounding alone."""
LATER_LOSS = 0.01
"""Difference allowed later, in units of the first loss: Adam amplifies rounding from step to step,
and what is nearly a tie (of a maximum, of a LeakyReLU at zero) may fall to the other side."""

STOCK, FUSED = "#b0b0b0", "#d1495b"


def difference(stock: Result, fused: Result) -> float:
    """The largest difference of the two loss curves."""
    return max(abs(a - b) for a, b in zip(stock.losses, fused.losses, strict=True))


def disagreement(stock: Result, fused: Result) -> str | None:
    """Says where the losses part, or None if they agree."""
    scale = max(abs(stock.losses[0]), 1e-12)
    for epoch, (a, b) in enumerate(zip(stock.losses, fused.losses, strict=True), 1):
        allowed = scale * (FIRST_LOSS if epoch == 1 else LATER_LOSS)
        # Written so that a NaN on either side fails.
        if not (abs(a - b) <= allowed or (math.isnan(a) and math.isnan(b))):
            return f"epoch {epoch}: loss {a:.6f} (stock) and {b:.6f} (fused)"
    return None


def table(pairs: Pairs, score: str) -> Table:
    """One row for each model and variant, and one for what is gained."""
    from rich.table import Table

    out = Table(title=None, show_edge=False, pad_edge=False)
    out.add_column("model")
    out.add_column("")
    for head in ("last loss", score, "epoch", "first epoch", "step memory", "process peak"):
        out.add_column(head, justify="right")
    for model, (stock, fused) in pairs.items():
        for name, result in (("stock", stock), ("fused", fused)):
            out.add_row(
                model if result is stock else "",
                name,
                f"{result.losses[-1]:.4f}",
                f"{result.score:.4f}",
                f"{1e3 * result.epoch:.1f} ms",
                f"{1e3 * result.first_epoch:.0f} ms",
                _mebibytes(result.step_memory),
                _mebibytes(result.process_memory),
            )
        out.add_row(
            "",
            "gain",
            "",
            "",
            _ratio(stock.epoch, fused.epoch, "faster", "slower"),
            "",
            _ratio(stock.step_memory, fused.step_memory, "less", "more"),
            "",
            style="bold",
            end_section=True,
        )
    return out


def picture(pairs: Pairs, title: str, path: str) -> None:
    """Draws the loss curves, which must overlap, and bars of time and memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = len(pairs) + 2
    rows = -(-panels // 2)
    figure = Figure(figsize=(10, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.set_axis_off()
    for axis, (model, (stock, fused)) in zip(axes, pairs.items(), strict=False):
        epochs = range(1, len(stock.losses) + 1)
        axis.plot(epochs, stock.losses, color=STOCK, linewidth=5, label="stock")
        axis.plot(epochs, fused.losses, color=FUSED, linewidth=1.5, label="fused")
        axis.set(title=model, xlabel="epoch", ylabel="training loss", ylim=(0, None))
        axis.legend()
    time, memory = axes[panels - 2], axes[panels - 1]
    _bars(time, pairs, "time per epoch (ms)", lambda r: 1e3 * r.epoch, "faster")
    _bars(memory, pairs, "memory of a step (MiB)", lambda r: (r.step_memory or 0) / 2**20, "less")
    figure.suptitle(f"stock PyG and pyg_ioaware: {title}")
    figure.savefig(path, format="png", dpi=120)


def _bars(axis: Any, pairs: Pairs, what: str, value: Any, gain: str) -> None:
    for offset, (color, name) in enumerate(((STOCK, "stock"), (FUSED, "fused"))):
        heights = [value(pair[offset]) for pair in pairs.values()]
        places = [i + 0.4 * offset - 0.2 for i in range(len(pairs))]
        axis.bar_label(axis.bar(places, heights, 0.38, color=color, label=name), fmt="%.3g")
    ratios = [(value(stock), value(fused)) for stock, fused in pairs.values()]
    names = [
        f"{model}\n{stock / fused:.1f}x {gain}" if fused else model
        for model, (stock, fused) in zip(pairs, ratios, strict=True)
    ]
    axis.set(ylabel=what, xticks=range(len(pairs)), xticklabels=names)
    axis.margins(y=0.12)
    axis.legend()


def _mebibytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:.1f} MiB"


def _ratio(stock: float | None, fused: float | None, gain: str, loss: str) -> str:
    if not stock or not fused:
        return ""
    return f"{stock / fused:.1f}x {gain}" if fused <= stock else f"{fused / stock:.1f}x {loss}"
