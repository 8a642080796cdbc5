import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from graphs import ON_CPU
from torch_geometric.utils import coalesce, is_undirected

from benchmarks import compare, graphs, measure, plot, roofline, rows, run, timing

ROOT = Path(__file__).parents[2]
WARM = "warm"
pytestmark = pytest.mark.skipif(not ON_CPU, reason="tests/gpu has its own")
FAST = measure.Options("cpu", seconds=0, least=2, memory=False)


def row(**columns):
    known = {
        "graph": "g",
        "edges": "100",
        "case": "GCNConv-16",
        "dtype": "float32",
        "mode": measure.STEP,
        "l2": WARM,
        "provider": "ours",
        "status": "ok",
        "median_ms": "10.0",
        "q1_ms": "9.5",
        "q3_ms": "10.5",
        "setup_ms": "1",
        "compile_ms": "0",
        "commit": "c1",
        "machine": "m",
        "threads": "2",
        "device": "cpu",
    }
    return dict.fromkeys(rows.COLUMNS, "") | known | columns


# The file


def test_table_takes_a_key_once_and_known_columns_only(tmp_path):
    table = rows.Table(tmp_path / "t.csv")
    table.add(row())
    assert row(median_ms="11") in table
    with pytest.raises(ValueError, match="exists"):
        table.add(row(median_ms="11"))
    with pytest.raises(ValueError, match="no columns"):
        table.add(row(graph="h") | {"speed": 1})
    for name in rows.KEY:
        table.add(row(**{name: "another"}))
    assert len(rows.read(tmp_path / "t.csv")) == 1 + len(rows.KEY)


@pytest.mark.parametrize("cut", [1, 10, 10_000])
def test_table_goes_on_after_a_kill(tmp_path, cut):
    path = tmp_path / "t.csv"
    table = rows.Table(path)
    table.add(row())
    whole = path.read_bytes()
    table.add(row(graph="h"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = rows.Table(path)
    assert (row() in again) == (cut < 10_000)
    assert row(graph="h") not in again
    again.add(row(graph="h"))
    if cut < 10_000:
        assert path.read_bytes().startswith(whole)


def test_what_failed_is_forgotten_by_its_key(tmp_path):
    path = tmp_path / "t.csv"
    table = rows.Table(path)
    table.add(row(status="error"))
    table.add(row(graph="h"))
    table.add(row(graph="i", status="error"))
    assert table.failed(row())
    assert not table.failed(row(graph="h"))
    table.forget([row()])
    assert row() not in table
    assert [r["graph"] for r in rows.read(path)] == ["h", "i"]


def test_a_retry_leaves_rows_alone_that_are_not_asked_for(tmp_path):
    path = tmp_path / "t.csv"
    table = rows.Table(path)
    table.add(row(graph="elsewhere", status="error"))
    before = path.read_bytes()
    given = ["--device", "cpu", "--names", "power_law:20:60", "--cases", "spmm-8", "--retry"]
    assert run.main([*given, "--out", str(path), "--list"]) == 0
    assert run.main([*given, "--out", str(path), "--filter", "no such row"]) == 0
    assert path.read_bytes() == before


def test_threads_of_the_host_matter_on_a_cpu_alone():
    assert rows.threads(row(device="cuda", threads="16")) == ""
    assert rows.threads(row(device="cpu", threads="2")) == "2"
    before, after = ([row(device="cuda", threads=n)] for n in ("16", "32"))
    assert compare.latest(before).keys() == compare.latest(after).keys()


def test_read_refuses_doubles_and_other_columns(tmp_path):
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows.COLUMNS)
        writer.writeheader()
        writer.writerows([row(), row()])
    with pytest.raises(ValueError, match="there twice"):
        rows.read(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        rows.read(path)


# Graphs


def test_generators_give_what_they_say():
    for name in graphs.GENERATORS:
        words = {"bipartite": "30:40:3", "grid": "9:0.7", "mesh": "60", "molecules": "5"}
        words |= {"rmat": "6:8", "hub": "50:400:90", "sampled": "300:3000:9"}
        graph = graphs.read(f"{name}:{words.get(name, '80:600')}")
        src, dst = graph.edge_index
        assert 0 <= int(src.min()) <= int(src.max()) < graph.num_src
        assert 0 <= int(dst.min()) <= int(dst.max()) < graph.num_dst
        if name in ("social", "grid", "mesh", "molecules", "planted"):
            assert is_undirected(graph.edge_index, num_nodes=graph.num_src)
            assert torch.equal(graph.edge_index, coalesce(graph.edge_index))
        elif name != "sampled":  # sorted by source, then target
            key = src * graph.num_dst + dst
            assert (key.diff() >= 0).all()
        if graph.edge_attr is not None:
            assert len(graph.edge_attr) == graph.num_edges
        same = graphs.read(f"{name}:{words.get(name, '80:600')}")
        assert torch.equal(graph.edge_index, same.edge_index)


def degree(name, direction=1):
    graph = graphs.read(name)
    return torch.bincount(graph.edge_index[direction], minlength=graph.num_dst)


def test_degrees_are_as_meant():
    assert degree("power_law:500:5000:2.1").max() > 3 * degree("power_law:500:5000:6.0").max()
    assert degree("hub:100:1000:400")[0] >= 400
    assert degree("rmat:9:8").sum() == 8 * 512
    assert (degree("bipartite:50:30:4") == 4).all()
    assert degree("grid:10").max() == 4
    assert 5 < degree("mesh:300").float().mean() < 6
    assert degree("molecules:50").max() < 12
    assert degree("sampled:400:9000:10:7").max() == 7


def test_edges_of_molecules_stay_inside_and_know_their_bond():
    graph = graphs.read("molecules:6")
    attr = dict(
        zip(map(tuple, graph.edge_index.t().tolist()), graph.edge_attr.tolist(), strict=True)
    )
    assert all(attr[i, j] == attr[j, i] for i, j in attr)
    assert int((graph.edge_index[0] - graph.edge_index[1]).abs().max()) <= 5


def test_displacements_are_opposite_in_both_directions():
    graph = graphs.read("mesh:30")
    attr = dict(zip(map(tuple, graph.edge_index.t().tolist()), graph.edge_attr, strict=True))
    for (i, j), step in attr.items():
        assert torch.allclose(step[:2], -attr[j, i][:2])
        assert torch.allclose(step[2], step[:2].norm())


def test_files_are_read(tmp_path):
    import numpy as np

    ends = {"row": np.array([0, 1]), "col": np.array([1, 2]), "num_nodes": 3, "directed": False}
    np.savez(tmp_path / "path.npz", y=np.array([0, 1, 0]), **ends)
    graph = graphs.read("path", tmp_path)
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert graphs.read("path", tmp_path, task=True).task is not None
    # Four papers name genes: 0 and 1 share two of them, 2 is alone.
    pairs = {"row": np.array([0, 0, 1, 1, 2]), "col": np.array([3, 4, 3, 4, 5])}
    sizes = {"num_nodes": 6, "part_sizes": np.array([3, 3]), "directed": True}
    np.savez(tmp_path / "genes.npz", **pairs, **sizes)
    assert graphs.read("genes@2", tmp_path).edge_index.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="no graph 'nothing'"):
        graphs.read("nothing", tmp_path)


# Times


def test_summary_stays_within_what_was_measured():
    assert timing.summary([3.0])["median_ms"] == "3.0000"
    found = timing.summary([1.0, 9.0])
    assert [found[k] for k in ("q1_ms", "median_ms", "q3_ms")] == ["3.0000", "5.0000", "7.0000"]


def test_device_times_are_those_between_two_events(monkeypatch):
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            seen.append("event")

        def elapsed_time(self, end):
            return 7.0

    class Flushed:
        def zero_(self):
            seen.append("flush")

    cuda = {"Event": Event, "_sleep": lambda _: seen.append("sleep")}
    cuda["synchronize"] = lambda: seen.append("sync")
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: Flushed())
    step = timing.Step(lambda given: seen.append(given), lambda: seen.append("prepare") or "run")
    warm, cold = timing.clocks("cuda", "forward", ("warm", "cold"))
    assert warm.sample(step) == 7.0
    assert seen == ["prepare", "sleep", "event", "run", "event", "sync"]
    seen.clear()
    assert cold.sample(step) == 7.0
    assert seen == ["prepare", "sleep", "flush", "event", "run", "event", "sync"]
    (host,) = timing.clocks("cuda", "host", ("warm", "cold"))
    assert host.sample(step) < 7.0
    monkeypatch.undo()


def test_turns_alternate_and_time_only_the_run(monkeypatch):
    seen, now = [], [0.0]

    def work(seconds, result=None):
        now[0] += seconds
        return result

    def step(name):
        return timing.Step(lambda given: seen.append(given) or work(0.021), lambda: work(1, name))

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    times = timing.turns({"a": step("a"), "b": step("b")}, timing.Clock(), 0, 3)
    assert times == {name: [pytest.approx(21)] * 3 for name in "ab"}
    assert "".join(seen) == "aabb" + "ab" * 3
    short = {"a": timing.Step(lambda _: work(0.004))}
    assert timing.turns(short, timing.Clock(), 0, 8) == {"a": [pytest.approx(4)] * 10}
    assert timing.turns({}, timing.Clock(), 0, 3) == {}


# What is made of them


def test_ceilings_are_those_of_the_nearest_sizes():
    def rate(size, table, gigabytes):
        found = {"case": "gather", "provider": "machine", "mode": f"{size} {table}"}
        found |= {"row_bytes": str(size), "table_bytes": str(table)}
        return row(**found, gathered=str(10**7 * gigabytes), median_ms="10.0")

    found = [rate(64, 2**20, 4), rate(64, 2**24, 1), rate(256, 2**20, 16), rate(256, 2**24, 4)]
    ceiling = roofline.Ceiling(found)
    assert ceiling.at(64, 2**20) == pytest.approx(4)
    assert ceiling.at(64, 2**22) == pytest.approx(2)
    assert ceiling.at(128, 2**20) == pytest.approx(8)
    assert ceiling.at(1, 1) == pytest.approx(4)
    assert ceiling.at(2**20, 2**40) == pytest.approx(4)
    op = row(case="spmm-16", gathered="20000000", row_bytes="64", table_bytes=str(2**20))
    ((_, got, top),) = roofline.reached([*found, op])
    assert (got, top) == (pytest.approx(2), pytest.approx(4))
    assert list(roofline.reached([op])) == []


def test_machine_is_measured(monkeypatch):
    monkeypatch.setitem(roofline.READ, "cpu", 2**16)
    for name, mode in (("copy", "copy"), ("gather", "rows of 64 in 16 KiB")):
        (found,) = roofline.measure(name, {(mode, WARM, "machine")}, FAST)
        assert found["status"] == "ok"
        assert float(found["median_ms"]) > 0
    assert (found["gathered"], found["row_bytes"], found["table_bytes"]) == (2**16, 64, 2**14)


def test_compare_finds_what_became_worse(tmp_path, capsys):
    before = [
        row(),
        row(graph="noisy", q3_ms="30.0"),
        row(graph="faster"),
        row(graph="memory", peak_mib="100"),
        row(graph="wrong"),
        row(graph="gone"),
    ]
    slow = {"commit": "c2", "torch": "new", "median_ms": "20.0", "q1_ms": "19.0", "q3_ms": "21.0"}
    after = [
        row(**slow),
        row(graph="noisy", **slow),
        row(graph="faster", commit="c2", median_ms="5.0", q1_ms="4.0", q3_ms="6.0"),
        row(graph="memory", commit="c2", peak_mib="150"),
        row(graph="wrong", commit="c2", status="wrong", note="why"),
    ]
    found = list(compare.changes(before, after))
    assert [(how, line.split()[0]) for how, line in found] == [
        ("worse", "g"),
        ("better", "faster"),
        ("worse", "memory"),
        ("worse", "wrong"),
    ]
    paths = []
    for name, content in (("a", before), ("b", after)):
        paths.append(str(tmp_path / f"{name}.csv"))
        table = rows.Table(Path(paths[-1]))
        for line in content:
            table.add(line)
    assert compare.main(paths) == 1
    assert "5 compared, 3 worse, 1 better, 1 missing" in capsys.readouterr().out
    assert compare.main([paths[0], paths[0]]) == 0
    assert compare.main([*paths, "--provider", "nobody"]) == 1


SMALL = [
    row(provider="stock", median_ms="100.0", peak_mib="900"),
    row(provider="SparseTensor", median_ms="20.0"),
    row(provider="EdgeIndex", status="wrong", median_ms=""),
    row(provider="linears", median_ms="1.0"),
    row(peak_mib="9", setup_ms="100", compile_ms="80"),
    row(graph="tiny", provider="stock", median_ms="5.0"),
    row(graph="tiny"),
    row(case="spmm-16", provider="torch CSR", mode="forward", median_ms="8.0"),
    row(case="spmm-16", mode="forward"),
]


def test_table_shows_wins_losses_and_what_failed():
    lines = plot.table(SMALL).splitlines()
    assert lines[0].startswith("m, 2 threads; commit c1")
    first, second = (line.split(" | ") for line in lines[4:])
    assert first[2:] == [
        *("GCNConv-16", "100", "20 (SparseTensor)", "10", "10.0x", "2.0x"),
        *("900 / 9", "2 |"),
    ]
    assert second[3:] == ["5", "-", "10", "0.5x", "-", "- / -", "- |"]
    assert plot.losses(SMALL) == [
        "- m: GCNConv-16, float32, forward+backward, warm L2, stock takes, of the patched time: "
        "tiny 0.50",
        "- m: spmm-16, float32, forward, warm L2, torch CSR takes, of the patched time: g 0.80",
    ]
    assert plot.means(SMALL) == [
        "- m: GCNConv-16, float32, forward+backward, warm L2: stock takes 2.24 times the patched "
        "time (2 graphs)"
    ]
    assert "tiny" not in plot.table(SMALL, "^g ")
    newer = row(commit="c2", median_ms="50.0")
    assert "| 50 | 2.0x |" in plot.table([*SMALL, newer])


def test_readme_and_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    table = rows.Table(tmp_path / "t.csv")
    for line in SMALL:
        table.add(line)
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{plot.BEGIN}\nold\n{plot.END}\nbelow\n")
    words = [str(tmp_path / "t.csv"), "--readme", str(readme), "--out", str(tmp_path / "out")]
    plot.main(words)
    plot.main(words)
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert text.count("| graph |") == 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        f"m-{name}.png" for name in plot.PICTURES
    }
    assert "Where others are faster" in capsys.readouterr().out
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="has no"):
        plot.insert(readme, "text")


def test_the_readme_has_the_markers():
    text = (ROOT / "README.md").read_text()
    assert text.index(plot.BEGIN) < text.index(plot.END)
