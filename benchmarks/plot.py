r"""Draws results, and writes the table of the README.

.. code-block:: bash

    python -m benchmarks.plot FILE.csv ... --out DIR --readme README.md
"""

import argparse
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import roofline, rows
from benchmarks.graphs import ALIASES
from benchmarks.measure import STEP
from benchmarks.rows import Row

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
NOT_PEERS = ("stock", "linears", "machine")
Group = dict[str, Row]


def groups(found: Iterable[Row], *modes: str) -> dict[tuple[str, ...], Group]:
    """Returns, for each thing that was measured, the latest row of each provider."""
    grouped: dict[tuple[str, ...], Group] = {}
    for row in found:
        if not modes or row["mode"] in modes:
            names = ("graph", "case", "dtype", "mode", "l2")
            key = (row["machine"], rows.threads(row), *(row[name] for name in names))
            grouped.setdefault(key, {})[row["provider"]] = row
    return grouped


def ms(row: Row | None) -> float:
    """Returns the median of a row; NaN where there is none."""
    return float(row["median_ms"]) if row is not None and row["status"] == "ok" else math.nan


def best_peer(group: Group) -> Row | None:
    """Returns the fastest other provider, stock PyG and forms of ours aside."""
    right = [row for row in group.values() if row["status"] == "ok"]
    names = [r for r in right if r["provider"] not in NOT_PEERS]
    return min((r for r in names if not r["provider"].startswith("ours")), key=ms, default=None)


def _main(group: Group) -> Row:
    """Returns the row that stands for a group: ours, if it is there."""
    return group.get("ours") or next(iter(group.values()))


def payback(group: Group) -> float:
    """Returns after how many steps the set-up of the fused path, compilers too, is paid back."""
    stock, ours = group.get("stock"), group.get("ours")
    gain = ms(stock) - ms(ours)
    if ours is None or not ours["setup_ms"] or not gain > 0:
        return math.nan
    return math.ceil((float(ours["setup_ms"]) + float(ours["compile_ms"] or 0)) / gain)


def _number(value: float, digits: int = 3) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _ratio(above: float, below: float) -> str:
    value = above / below
    return "-" if math.isnan(value) else f"{value:.1f}x"


def table(found: list[Row], pattern: str = "") -> str:
    r"""Returns steps of layers, and epochs, as a Markdown table.

    Args:
        found (list): Rows.
        pattern (str, optional): A regular expression for graph and case. (default: all)
    """
    steps: dict[tuple[str, str], dict[str, list[Group]]] = {}  # by machine, then by graph
    for (machine, threads, graph, case, *_), group in groups(found, STEP, "epoch").items():
        layer = _main(group)["setup_ms"] and case[:1].isupper()
        if (layer or case.startswith("train_")) and re.search(pattern, f"{graph} {case}"):
            steps.setdefault((machine, threads), {}).setdefault(graph, []).append(group)
    lines: list[str] = []
    for by_graph in steps.values():
        shown = [group for some in by_graph.values() for group in some]
        commits = dict.fromkeys(r["commit"] for group in shown for r in group.values())
        lines += [
            "",
            *_heading(_main(shown[0]), ", ".join(commits)),
            *(_line(group) for group in shown),
        ]
    return "\n".join(lines).strip()


def _line(group: Group) -> str:
    stock, ours, peer = group.get("stock"), group.get("ours"), best_peer(group)
    row = _main(group)
    case = row["case"] if row["dtype"] == "float32" else f"{row['case']} {row['dtype']}"
    memory = [
        "-" if r is None or not r["peak_mib"] else _number(float(r["peak_mib"]))
        for r in (stock, ours)
    ]
    cells = [
        *(row["graph"], f"{int(row['edges']):,}", case, _cell(stock)),
        "-" if peer is None else f"{_number(ms(peer))} ({peer['provider']})",
        _cell(ours),
        *(_ratio(ms(stock), ms(ours)), _ratio(ms(peer), ms(ours))),
        *(" / ".join(memory), _number(payback(group))),
    ]
    return f"| {' | '.join(cells)} |"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return _number(ms(row)) if row["status"] == "ok" else row["status"]


def _heading(row: Row, commits: str) -> Iterator[str]:
    names = {"cuda": "CUDA", "driver": "driver", "cupy": "CuPy", "numba": "Numba"}
    parts = [f"{text} {row[name]}" for name, text in names.items() if row[name]]
    where = row["machine"] + (f", {rows.threads(row)} threads" if rows.threads(row) else "")
    made_by = [f"torch {row['torch']}", f"PyG {row['pyg']}", *parts]
    yield f"{where}; commit {commits}; {', '.join(made_by)}"
    yield ""
    yield (
        "| graph | edges | layer | stock (ms) | best other (ms) | patched (ms) | over stock "
        "| over best other | memory (MiB) | pays back after (steps) |"
    )
    yield "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"


def losses(found: list[Row]) -> list[str]:
    """Returns, as lines, where another provider is faster than the fused path."""
    lost: dict[tuple[str, ...], list[str]] = {}
    for key, group in groups(found).items():
        machine, _, graph, case, dtype, mode, l2 = key
        for name, row in group.items():
            known = "ours" in group and name not in ("linears", "machine")
            if known and not name.startswith("ours") and ms(row) < ms(group["ours"]):
                place = f"{graph} {ms(row) / ms(group['ours']):.2f}"
                lost.setdefault((machine, case, dtype, mode, l2, name), []).append(place)
    return [
        f"- {machine}: {case}, {dtype}, {mode}, {l2} L2, {name} takes, of the patched time: "
        + ", ".join(places)
        for (machine, case, dtype, mode, l2, name), places in lost.items()
    ]


def means(found: list[Row]) -> list[str]:
    """Returns, as lines, geometric means over graphs of what others take of the patched time."""
    ratios: dict[tuple[str, ...], list[float]] = {}
    for (machine, _, _, *rest), group in groups(found).items():
        peer = best_peer(group)
        for name, row in (("stock", group.get("stock")), ("the best other", peer)):
            ratio = ms(row) / ms(group.get("ours"))
            if not math.isnan(ratio):
                ratios.setdefault((machine, *rest, name), []).append(ratio)
    return [
        f"- {machine}: {case}, {dtype}, {mode}, {l2} L2: {name} takes "
        f"{statistics.geometric_mean(values):.2f} times the patched time ({len(values)} graphs)"
        for (machine, case, dtype, mode, l2, name), values in ratios.items()
        if len(values) > 1
    ]


def insert(path: Path, text: str) -> None:
    r"""Puts a text between the markers of a file.

    Raises:
        ValueError: If the markers are not there.
    """
    old = path.read_text()
    if BEGIN not in old or END not in old:
        raise ValueError(f"{path} has no {BEGIN} and {END}")
    before, after = old[: old.index(BEGIN)], old[old.index(END) :]
    path.write_text(f"{before}{BEGIN}\n{text}\n{after}")


# Pictures


def spec(graph: str) -> tuple[str, list[float]]:
    """Returns the generator of a graph and its numbers."""
    name, *words = ALIASES.get(graph, graph).split(":")
    return name, [float(word) for word in words]


def bars(axes: Any, found: list[Row], value: Callable[[Row, Row], float], label: str) -> None:
    """Draws, for the layers that most graphs have, a bar for each graph and provider."""
    layers: dict[str, dict[str, Group]] = {}
    for key, group in groups(found, STEP).items():
        if key[4] == "float32" and "stock" in group and key[3][:1].isupper():
            layers.setdefault(key[3], {})[key[2]] = group
    chosen = sorted(layers, key=lambda name: -len(layers[name]))[: len(axes)]
    names = sorted({n for c in chosen for g in layers[c].values() for n in g} - set(NOT_PEERS))
    for ax, layer in zip(axes, chosen, strict=False):
        graphs = sorted(layers[layer], key=lambda g: int(layers[layer][g]["stock"]["edges"]))
        for i, name in enumerate(names):
            places, lengths = [], []
            for j, graph in enumerate(graphs):
                group = layers[layer][graph]
                if name in group and not math.isnan(length := value(group["stock"], group[name])):
                    places.append(j - (i - (len(names) - 1) / 2) * 0.8 / len(names))
                    lengths.append(length)
            ax.barh(places, lengths, 0.8 / len(names), label=name)
        ax.axvline(1, color="black", linewidth=0.5)
        ax.set_yticks(range(len(graphs)), graphs, fontsize=7)
        ax.set(xscale="log", xlabel=label, title=layer)
    if chosen:
        axes[0].legend(fontsize=7)


def faster(stock: Row, row: Row) -> float:
    return ms(stock) / ms(row)


def smaller(stock: Row, row: Row) -> float:
    if not stock["peak_mib"] or not row["peak_mib"]:
        return math.nan
    return float(stock["peak_mib"]) / max(float(row["peak_mib"]), 0.1)


def roofs(ax: Any, found: list[Row]) -> None:
    """Draws what operations gather per second over the size of the table, and the ceilings."""
    measured = [r for r in found if r["case"] == "gather" and r["status"] == "ok"]
    for size in sorted({int(r["row_bytes"]) for r in measured}):
        line = sorted(
            (float(r["table_bytes"]), roofline.rate(r))
            for r in measured
            if int(r["row_bytes"]) == size
        )
        ax.plot(*zip(*line, strict=True), linewidth=1, label=f"rows of {size} bytes")
    reached = [r for r in roofline.reached(found) if r[0]["provider"] == "ours"]
    for case in sorted({r[0]["case"] for r in reached}):
        mine = [(float(r["table_bytes"]), got) for r, got, _ in reached if r["case"] == case]
        ax.plot(*zip(*mine, strict=True), "o", markersize=4, label=case)
    ax.set(xscale="log", yscale="log", xlabel="bytes of the table", ylabel="gathered GB/s")
    _legend(ax)


SCALINGS: dict[str, tuple[str, Callable[[str, list[float]], float | None]]] = {
    "edges": (
        "edges",
        lambda n, w: w[1] if n == "power_law" and len(w) == 2 else None,
    ),
    "skew": ("exponent", lambda n, w: w[2] if n == "power_law" and len(w) > 2 else None),
    "hub": ("edges of the hub", lambda n, w: max(w[2], 1.0) if n == "hub" else None),
}


def scalings(axes: Any, found: list[Row]) -> None:
    """Draws time for each edge over edges, skew and the size of a hub, and rates over shapes."""
    shapes(axes[3], found)
    for ax, (label, place) in zip(axes, SCALINGS.values(), strict=False):
        lines: dict[str, list[tuple[float, float]]] = {}
        for key, group in groups(found, STEP, "forward").items():
            x = place(*spec(key[2]))
            if key[5] != (STEP if key[3][:1].isupper() else "forward"):
                continue
            for name in ("stock", "ours"):
                if x is not None and name in group and key[4] == "float32" and key[6] == "warm":
                    point = x, 1e6 * ms(group[name]) / float(group[name]["edges"])
                    lines.setdefault(f"{key[3]} {key[5]} {name}", []).append(point)
        for name, points in lines.items():
            if len({x for x, _ in points}) > 2:
                style = "--" if name.endswith("stock") else "-"
                ax.plot(*zip(*sorted(points), strict=True), style, marker=".", label=name)
        ax.set(xscale="log", yscale="log", xlabel=label, ylabel="ns for each edge")
        _legend(ax)


def shapes(ax: Any, found: list[Row]) -> None:
    """Draws the gathered bytes per second of operations by shape and dtype."""
    values: dict[str, dict[str, list[float]]] = {}
    for key, group in groups(found, "forward").items():
        row = group.get("ours")
        if row is not None and row["status"] == "ok" and row["gathered"] and key[6] == "warm":
            values.setdefault(key[4], {}).setdefault(key[3], []).append(roofline.rate(row))
    for dtype, cases in values.items():
        means = [statistics.geometric_mean(v) for v in cases.values()]
        ax.plot(list(cases), means, "o", label=dtype)
    ax.tick_params(axis="x", rotation=90, labelsize=6)
    ax.set(ylabel="gathered GB/s, forward")
    _legend(ax)


def _legend(ax: Any) -> None:
    """Puts the legend where nothing is drawn."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


PICTURES: dict[str, tuple[int, Callable[[Any, list[Row]], None]]] = {
    "speed": (4, lambda axes, found: bars(axes, found, faster, "times faster than stock")),
    "memory": (4, lambda axes, found: bars(axes, found, smaller, "times less memory")),
    "roofline": (1, lambda axes, found: roofs(axes[0], found)),
    "scaling": (4, scalings),
}


def draw(found: list[Row], out: Path) -> list[Path]:
    """Draws every picture for each machine; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for machine in sorted({row["machine"] for row in found}):
        here = [row for row in found if row["machine"] == machine]
        stem = re.sub(r"\W+", "-", machine).strip("-").lower()
        for name, (panels, paint) in PICTURES.items():
            figure, axes = plt.subplots(1, panels, figsize=(max(10, 5 * panels), 6), squeeze=False)
            paint(axes[0], here)
            figure.suptitle(machine)
            figure.tight_layout()
            written.append(out / f"{stem}-{name}.png")
            figure.savefig(written[-1], dpi=120)
            plt.close(figure)
    return written


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="folder for pictures; default: none are drawn")
    parser.add_argument("--readme", type=Path, help="file whose table is replaced")
    parser.add_argument("--filter", default="", help="regular expression for the table's rows")
    args = parser.parse_args(argv)
    try:
        found = [row for path in args.csv for row in rows.read(path)]
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    text = table(found, args.filter)
    lost = losses(found)
    print(text, "", *means(found), "", "Where others are faster:" if lost else "", *lost, sep="\n")
    if args.readme is not None:
        insert(args.readme, text)
    for path in draw(found, args.out) if args.out is not None else ():
        print(path)


if __name__ == "__main__":
    main()
